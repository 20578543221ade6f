"""Tiles: their outputs equal those of the whole image, a tile is predicted as a whole, and only the network rounds."""

import gc
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_slides import draw_slide
from stub_networks import BrightnessNetwork
from torch import Tensor

import rotopath as rp
from rotopath.data import DataError
from rotopath.images.slides import as_slide, open_slide
from rotopath.images.tissue import SPACING_UM_PX, Tissue, find_tissue
from rotopath.inference import predict, tiling
from rotopath.inference.dense import MixedNetwork
from rotopath.inference.predict_files import is_out_of_memory
from rotopath.inference.slide_pass import SlideView
from rotopath.inference.tiling import Grid, Tile, compute_ahead, pick, predict_tiles, start_workers
from rotopath.metrics import smooth_images
from rotopath.models import DenseNetwork, Network
from rotopath.models.architecture import MITOSIS, NUCLEI, Architecture

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # a sweep of numbers: tracing it would take minutes

CPU = torch.device("cpu")
HALF = torch.bfloat16  # which CPUs compute fast
BUILD: dict[str, Callable[..., Network]] = {
    "mitosis": rp.models.mitosis,
    "nuclei": rp.models.nuclei,
    "tumor": rp.models.tumor,
}


def textured(height: int, width: int) -> np.ndarray:
    smooth = smooth_images(1, max(height, width), blur_px=3)[0, :, :height, :width]
    return (smooth * 40 + 128).clamp(0, 255).byte().permute(1, 2, 0).numpy()


def untrained(name: str, **options: str) -> Network:
    torch.manual_seed(1)
    network = BUILD[name](2, **options).eval()
    with torch.no_grad():  # logits that vary, so that a mistake shows
        network.head[0].weight.mul_(5)
    return network


def predict_slide_tiles(
    network: DenseNetwork, image: np.ndarray, tile_px: int, halo: int = 0, rotations: int = 1
) -> list[Tile]:
    """Predict all tiles of an image at 0.25 µm/px."""
    with as_slide(image, 0.25) as slide:
        everywhere = Tissue(np.ones(slide.size_at(SPACING_UM_PX), bool), SPACING_UM_PX)
        grid = Grid(network, SlideView(slide, 0.25, "none", everywhere), tile_px, halo)
        return list(predict_tiles(grid, grid.tiles, CPU, rotations))


@pytest.mark.parametrize("rotations", [1, 8])
@pytest.mark.parametrize(("name", "tile_px", "halo"), [("nuclei", 60, 0), ("nuclei", 500, 0), ("mitosis", 84, 3)])
def test_tiles_have_the_pixels_at_the_positions_of_their_outputs(
    name: str, tile_px: int, halo: int, rotations: int
) -> None:
    network, image = untrained(name), textured(70, 83)
    with as_slide(image, 0.25) as slide:
        grid = Grid(network, SlideView(slide, 0.25, "none", find_tissue(slide)), tile_px, halo)
        tiles = list(predict_tiles(grid, grid.tiles, CPU, rotations, with_pixels=True))
        assert next(predict_tiles(grid, grid.tiles, CPU, rotations)).pixels is None
    assert (len(tiles) > 1) == (tile_px < 100)
    for tile in tiles:
        # The position of an output is inside its pixel, or on the upper left edge of it.
        down, across = (
            np.minimum(np.floor(grid.positions_um(span, axis) / 0.25 + 1e-9).astype(int), image.shape[axis] - 1)
            for axis, span in enumerate(tile.with_halo)
        )
        assert tile.pixels is not None
        np.testing.assert_array_equal(tile.pixels, image[np.ix_(down, across)])


@pytest.mark.parametrize(
    ("name", "tile_px", "rotations"),
    [
        ("mitosis", 84, 1),
        ("mitosis", 150, 1),
        ("nuclei", 60, 1),
        ("nuclei", 101, 1),
        ("mitosis", 84, 8),
        ("nuclei", 101, 8),
    ],
)
def test_tiles_of_an_image_equal_the_whole_image(name: str, tile_px: int, rotations: int) -> None:
    network, image = untrained(name), textured(90, 123)
    whole = predict(network, image, CPU, rotations)
    tiled = predict(network, image, CPU, rotations, tile_px)
    assert whole.probabilities.shape == tiled.probabilities.shape
    assert whole.first_px == tiled.first_px
    assert whole.probabilities.std() > 1e-3, "or there would be nothing to compare"
    assert np.abs(whole.probabilities - tiled.probabilities).max() < 1e-5


@pytest.mark.parametrize(("name", "tile_px"), [("mitosis", 84), ("nuclei", 60), ("nuclei", 101), ("tumor", 100)])
def test_tiles_equal_the_whole_image_where_filters_read_beyond_the_tile(name: str, tile_px: int) -> None:
    network = BUILD[name](2, preset="faithful").eval()
    image = np.random.default_rng(0).integers(0, 256, (100, 80, 3), dtype=np.uint8)
    whole, tiled = (predict(network, image, CPU, tile_px=side) for side in (None, tile_px))
    assert np.abs(whole.probabilities - tiled.probabilities).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "preset", "halo"),
    [
        ("mitosis", "paper", 0),
        ("mitosis", "paper", 3),
        ("nuclei", "paper", 0),
        ("nuclei", "paper", 3),
        ("mitosis", "faithful", 3),
    ],
)
def test_tiles_of_a_slide_equal_the_whole_image(name: str, preset: str, halo: int) -> None:
    network, image = untrained(name, preset=preset), textured(116, 132)
    for rotations in (1, 4):
        whole = predict(network, image, CPU, rotations).probabilities
        tiles = predict_slide_tiles(network, image, 120 if preset == "faithful" else 100, halo, rotations)
        assert len(tiles) > 1
        covered = np.zeros(whole.shape[1:], int)
        for tile in tiles:
            rows, columns = tile.with_halo
            np.testing.assert_allclose(tile.probabilities, whole[:, slice(*rows), slice(*columns)], atol=1e-5)
            covered[slice(*tile.rows), slice(*tile.columns)] += 1
        assert (covered == 1).all(), "tiles cover all outputs once"


def test_no_tile_is_larger_than_requested() -> None:
    network = BrightnessNetwork(NUCLEI)
    predict(network, textured(300, 200), CPU, tile_px=101)
    assert max(max(size) for size in network.input_sizes) <= 101
    assert len(network.input_sizes) == 5 * 4, "60 outputs of a tile, 300 × 200 in all"


@pytest.mark.parametrize("architecture", [MITOSIS, NUCLEI], ids=lambda a: a.name)
@pytest.mark.parametrize("halo", [0, 5])
def test_a_tile_of_a_slide_is_predicted_as_a_whole(architecture: Architecture, halo: int) -> None:
    """Also with its halo, by which it is larger than a tile. Only rotated frames, which are larger still, are cut."""
    network, image = BrightnessNetwork(architecture), textured(130, 170)
    tiles = predict_slide_tiles(network, image, 120, halo)
    assert len(network.input_sizes) == len(tiles) > 1
    largest_px = max(max(size) for size in network.input_sizes)
    network.input_sizes.clear()
    predict_slide_tiles(network, image, 120, halo, rotations=4)
    assert len(network.input_sizes) == 4 * len(tiles)
    network.input_sizes.clear()
    predict_slide_tiles(network, image, 120, halo, rotations=8)
    assert len(network.input_sizes) > 8 * len(tiles)
    assert max(max(size) for size in network.input_sizes) <= largest_px, "or rotated frames would need more memory"


@pytest.mark.parametrize("architecture", [MITOSIS, NUCLEI], ids=lambda a: a.name)
def test_only_the_network_computes_in_half_precision(architecture: Architecture) -> None:
    """The network has no convolution, so any difference would come from rotating tiles, or from averaging them."""
    image, network = textured(40, 110), BrightnessNetwork(architecture)
    full, half = (
        predict_slide_tiles(model, image, 90, rotations=8) for model in (network, MixedNetwork(network, HALF))
    )
    assert len(full) == len(half) > 1
    for tile, rounded in zip(full, half, strict=True):
        assert tile.deviations is not None
        assert rounded.deviations is not None
        assert rounded.probabilities.dtype == rounded.deviations.dtype == np.float32
        np.testing.assert_array_equal(tile.probabilities, rounded.probabilities)
        np.testing.assert_array_equal(tile.deviations, rounded.deviations)


def test_predictions_that_are_not_finite_end_in_one_sentence() -> None:
    """Products of numbers that float32 can hold may be too large for half precision."""
    torch.manual_seed(3)
    network = Network(MITOSIS, 4).eval()
    with torch.no_grad():
        network.stages[1].conv.weight *= 1e6
    image = textured(150, 150)
    with pytest.raises(DataError, match=r"not finite numbers.*--precision 32"):
        predict_slide_tiles(MixedNetwork(network, torch.float16), image, 1024)
    assert all(np.isfinite(tile.probabilities).all() for tile in predict_slide_tiles(network, image, 1024))


def test_a_network_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"network\.eval\(\)"):
        predict_slide_tiles(untrained("mitosis").train(), textured(90, 90), 100)


def test_tiles_smaller_than_the_receptive_field_are_refused() -> None:
    class NeverCalled(BrightnessNetwork):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError(x.shape)

    with pytest.raises(ValueError, match="at least 68 px"):
        predict(NeverCalled(MITOSIS), textured(80, 80), CPU, tile_px=50)


# Other processes


def test_workers_return_results_in_order_and_read_few_items_ahead() -> None:
    taken, count = [], 2

    def items() -> Iterator[int]:
        for i in range(40):
            taken.append(i)
            yield i

    with start_workers(count) as run:
        assert run is not None
        for i, result in enumerate(run(math.factorial, items())):
            assert result == math.factorial(i)
            assert len(taken) - i <= count + 5
    assert len(taken) == 40
    with start_workers(0) as run:
        assert run is None


def test_windows_waits_for_61_processes_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """ProcessPoolExecutor refuses more, but `--workers` and machines may have them."""
    counts: list[int] = []

    class Pool:
        def __init__(self, count: int, *_: object, **__: object) -> None:
            counts.append(count)

        def shutdown(self, **_: object) -> None: ...

    monkeypatch.setattr("rotopath.inference.tiling.ProcessPoolExecutor", Pool)
    for platform in ("win32", "linux"):
        monkeypatch.setattr("sys.platform", platform)
        with start_workers(64):
            pass
    assert counts == [61, 64]


def test_errors_of_workers_are_raised_and_a_killed_worker_is_too_little_memory() -> None:
    with start_workers(1) as run:
        assert run is not None
        with pytest.raises(ValueError, match="factorial"):
            list(run(math.factorial, [3, -1]))
        with pytest.raises(BrokenProcessPool) as killed:
            list(run(os._exit, [1]))
    assert is_out_of_memory(killed.value)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the state of a process from /proc")
def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = """
        import os, signal
        from multiprocessing import active_children
        from rotopath.inference.tiling import start_workers
        if __name__ == "__main__":
            with start_workers(1) as run:
                print(*run(os.getpgid, [0]), *(process.pid for process in active_children()), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    with (tmp_path / "output").open("w") as output:  # not a pipe, which would stay open until the worker ends
        command = [sys.executable, tmp_path / "script.py"]
        subprocess.run(command, stdout=output, stderr=subprocess.DEVNULL, timeout=120, check=False)
    worker = int((tmp_path / "output").read_text().split()[-1])
    for _ in range(100):
        if not is_running(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker waits for a process that was killed")


def is_running(process_id: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("in_memory", [True, False])
def test_large_arrays_go_to_workers_and_back_in_blocks_that_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    rng = np.random.default_rng(0)
    large, small = rng.random((200, 301)).astype(np.float32), rng.random(5)
    item = {"large": large, "turned": large.T, "small": small, "text": "µ"}
    with closing(tiling._Blocks(tmp_path)) as blocks:
        block, other = blocks.take(), blocks.take()
        assert block != other
        assert len(list(tmp_path.iterdir())) == (0 if in_memory and hasattr(os, "memfd_create") else 2)
        parcel = tiling._pack(item, block)
        assert Path(block).stat().st_size < parcel.end + 64 < 2 * large.nbytes + 256
        assert len(parcel.content) < 1000
        answer = tiling._call_in_worker(_double_large, parcel)
        for received, factor in ((tiling._unpack(parcel), 1), (tiling._unpack(answer), 2)):
            np.testing.assert_array_equal(received["large"], factor * large)
            np.testing.assert_array_equal(received["turned"], large.T)
            np.testing.assert_array_equal(received["small"], small)
            assert received["text"] == "µ"
            received["large"][:] = 0  # arrays can be written
        blocks.give_back(block)
        assert blocks.take() == block
        again = tiling._call_in_worker(_double_large, tiling._pack({"large": large[:150]}, block))
        np.testing.assert_array_equal(tiling._unpack(again)["large"], 2 * large[:150])
        larger = tiling._pack({"large": rng.random((900, 301))}, block)
        np.testing.assert_array_equal(tiling._unpack(larger, is_mapped=True)["large"], tiling._unpack(larger)["large"])
        assert not tiling._pack(small, block).sizes, "small arrays need no block"
        blocks.clear()
        assert Path(block).stat().st_size == 0


def _double_large(item: dict[str, Any]) -> dict[str, Any]:
    assert item["large"].flags.aligned
    return {**item, "large": 2 * item["large"]}


def test_workers_use_few_blocks_for_many_items(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = set()
    take = tiling._Blocks.take
    monkeypatch.setattr(tiling._Blocks, "take", lambda blocks: taken.add(path := take(blocks)) or path)
    images = [np.full((200, 400), i) for i in range(30)]
    with start_workers(2) as run:
        assert run is not None
        for i, sums in enumerate(run(np.negative, images)):
            assert (sums == -i).all()
    assert len(taken) <= 2 + 5


def test_workers_read_the_same_pixels_as_threads(tmp_path: Path) -> None:
    slide_path = draw_slide(tmp_path / "a.tif", (700, 900), ((100, 100, 512),), levels=2).path
    network = BrightnessNetwork(MITOSIS)
    with open_slide(slide_path) as slide:
        grid = Grid(network, SlideView(slide, 0.3, "macenko", find_tissue(slide)), 256)
        assert grid.view.stains is not None  # type: ignore[attr-defined]
        expected = list(predict_tiles(grid, grid.tiles, CPU, with_pixels=True))
        assert grid.view.stopwatch.seconds.keys() == {"reading", "stains"}
        before = dict(grid.view.stopwatch.seconds)
        with start_workers(1) as run:
            tiles = list(predict_tiles(grid, grid.tiles, CPU, with_pixels=True, run=run))
    for tile, of_threads in zip(tiles, expected, strict=True):
        assert tile[:3] == of_threads[:3]
        np.testing.assert_array_equal(tile.probabilities, of_threads.probabilities)
        assert tile.pixels is not None
        assert of_threads.pixels is not None
        np.testing.assert_array_equal(tile.pixels, of_threads.pixels)
    for stage, seconds in grid.view.stopwatch.seconds.items():
        assert seconds > before[stage], "the seconds of the worker are added"


# Other threads


def test_settings_of_python_are_restored_after_a_slide() -> None:
    gc.unfreeze()
    before = sys.getswitchinterval()
    with suppress(KeyError), tiling.switch_threads_often, tiling.spare_old_objects:
        assert sys.getswitchinterval() == pytest.approx(5e-4)
        assert gc.get_freeze_count() > 10_000
        raise KeyError
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == (before, 0)
    tiling.switch_threads_often.__enter__()  # of a thread that begins first, and ends first
    with tiling.switch_threads_often:
        tiling.switch_threads_often.__exit__()
        assert sys.getswitchinterval() == pytest.approx(5e-4)
    assert sys.getswitchinterval() == before
    gc.freeze()
    with tiling.spare_old_objects:
        pass
    assert gc.get_freeze_count() > 10_000, "a program that has frozen its objects finds them frozen"
    gc.unfreeze()


def test_items_are_computed_one_ahead_in_another_thread() -> None:
    threads, made, closed = set(), [], []

    def make_items() -> Generator[int]:
        try:
            for number in range(10):
                threads.add(threading.current_thread())
                made.append(number)
                yield number
        finally:
            closed.append(len(made))

    assert list(compute_ahead(make_items())) == list(range(10))
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    ahead = compute_ahead(make_items())
    made.clear()
    assert [next(ahead), next(ahead)] == [0, 1]
    ahead.close()  # type: ignore[attr-defined]
    assert made == [0, 1, 2], "one item ahead, and no more"
    assert closed == [10, 3], "the iterator was closed"


def test_the_other_thread_uses_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: chosen.append((gpu, threading.current_thread())))
    (thread,) = compute_ahead(threading.current_thread() for _ in range(1))
    assert chosen == [(3, thread)]
    assert thread is not threading.current_thread()


def test_an_error_of_the_other_thread_is_raised_in_its_place() -> None:
    def fail() -> Generator[int]:
        yield 1
        raise ValueError("of the item after the first")

    ahead = compute_ahead(fail())
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="after the first"):
        next(ahead)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [([2, 3, 4], [0, 1]), ([1, 4, 7], [5]), ([3], [3]), ([5, 4, 3], [1, 2]), ([0, 1, 1], [1, 2]), ([0, 1, 3], [0, 4])],
    ids=["adjacent", "evenly spaced", "one pixel", "reversed", "repeated", "uneven"],
)
def test_pixels_are_picked_at_all_combinations_of_rows_and_columns(rows: list[int], columns: list[int]) -> None:
    image = np.random.default_rng(0).integers(256, size=(9, 6, 3), dtype=np.uint8)
    picked = pick(image, np.array(rows), np.array(columns))
    np.testing.assert_array_equal(picked, image[np.ix_(rows, columns)])
    assert picked.flags["C_CONTIGUOUS"]
