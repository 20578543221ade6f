"""Measure how fast slides are predicted, stage by stage, and compare it with the speed of the network alone.

    .venv/bin/python benchmarks/pipeline.py [cuda] [--model NAME]... [--side 3000 ...] [--workers 0 2] [--image FILE]...

The slide is synthetic tissue, or the given images of tissue, again and again. Each row is a process of its own, which
loads the model ("start"), predicts a slide of 1536 × 1536 px, which also compiles kernels and starts workers for the
first time ("small slide"), and then the large slide. "memory of the model" is that of the process before the first
slide, "peak above it" that of the process at its highest, without workers, and "CPU" its CPU time while it predicts the
large slide. "network alone" is the time that the network needs for all tiles if their pixels are already in memory. The
objects must be the same for each number of workers. With `--seconds`, no row is begun after this time, and those that
were measured are recorded.
"""

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from record import record

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from drawn_slides import write_levels  # type: ignore[import-not-found]

TILE_PX, FIELD_PX, FACTOR, LEVELS = 256, 768, 4, 3
SPACING_UM_PX = 0.25  # of the tissue
SMALL_PX = 1536
ORGANS = ("breast", "kidney", "liver", "prostate")


def read_block(images: list[Path]) -> NDArray[np.uint8]:
    """Return a square image of four fields: synthetic tissue or, if there are any, the first four images."""
    fields = [np.asarray(Image.open(path).convert("RGB"))[:FIELD_PX, :FIELD_PX] for path in images[:4]]
    if not fields:
        from rotopath.synthetic.organs import render_organ_field

        fields = [render_organ_field(0, organ, 1, FIELD_PX)[0] for organ in ORGANS]
    return np.concatenate([np.concatenate(fields[:2], axis=1), np.concatenate(fields[2:], axis=1)])


def write_slide(path: Path, block: NDArray[np.uint8], side: int, spacing_um_px: float) -> None:
    """Write a pyramidal, compressed TIFF of side × side px that repeats the square `block` at this pixel spacing."""
    reduced = round(spacing_um_px / SPACING_UM_PX)

    def make_tiles(step: int) -> Iterator[bytes]:
        skipped = step * reduced
        return compress_tiles(block[skipped // 2 :: skipped, skipped // 2 :: skipped], side // step)

    write_levels(path, make_tiles, (side, side), spacing_um_px, FACTOR, LEVELS, TILE_PX)


def compress_tiles(block: NDArray[np.uint8], side: int) -> Iterator[bytes]:
    """Yield the compressed tiles of a level, row by row. The level repeats the square `block`."""
    compressed: dict[tuple[int, int], bytes] = {}
    for top in range(0, side, TILE_PX):
        for left in range(0, side, TILE_PX):
            corner = top % len(block), left % len(block)
            if corner not in compressed:
                rows, columns = (np.arange(start, start + TILE_PX) % len(block) for start in corner)
                compressed[corner] = zlib.compress(block[np.ix_(rows, columns)].tobytes(), level=1)
            yield compressed[corner]


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Load a model, and predict two slides or, without an output folder, run the network on the tiles of the second."""
    start = time.perf_counter()
    import rotopath as rp
    from rotopath.environment import start_fork_server
    from rotopath.inference.predict_files import FileOptions, predict_files
    from rotopath.inference.slide_pass import PassOptions

    if task["workers"]:
        start_fork_server()
    model = rp.load(task["model"])
    ready = model.prepare(task["device"])
    measured: dict[str, Any] = {"start": time.perf_counter() - start, "memory": read_memory("VmRSS")}
    if not task["out"]:
        return measure_network(ready, Path(task["slides"][1]), task["device"])
    for name, path in zip(("small", "large"), map(Path, task["slides"]), strict=True):
        start, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        options = FileOptions(PassOptions(workers=task["workers"]))
        (outcome,) = predict_files(ready, [path], Path(task["out"]), options)
        if outcome.state != "done":
            raise SystemExit(f"{task}: {outcome}")
        now = resource.getrusage(resource.RUSAGE_SELF)
        measured[name] = time.perf_counter() - start
        measured["cpu"] = now.ru_utime + now.ru_stime - cpu.ru_utime - cpu.ru_stime
    measured["peak"] = read_memory("VmHWM") - measured["memory"]
    measured["summary"] = json.loads((outcome.folder / "summary.json").read_text())
    measured["hash"] = hashlib.sha256((outcome.folder / "objects.geojson").read_bytes()).hexdigest()
    return measured


def read_memory(name: str) -> float:
    """Return the memory of this process now (VmRSS) or at its highest (VmHWM), in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def measure_network(ready: Any, slide: Path, device: str, rounds: int = 3) -> dict[str, Any]:
    """Return the number of tiles of a slide, and the seconds that the network needs for all of them."""
    import torch

    from rotopath.images import open_slide
    from rotopath.inference.slide_pass import PassOptions, SlidePass
    from rotopath.inference.tiling import compute_probabilities

    with open_slide(slide) as opened, SlidePass(ready, opened, PassOptions()) as slide_pass:
        grid = slide_pass.grid
        shapes = [
            tuple(span.size for span in grid.frame_of(*tile).pixels)
            for tile in grid.tiles
            if slide_pass._is_near_tissue(*tile)
        ]
        images = {shape: torch.zeros(1, 3, *shape, dtype=torch.uint8, device=device) for shape in set(shapes)}
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            for shape in shapes:
                compute_probabilities(grid.network, images[shape], ready.task.to_probabilities)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return {"tiles": len(shapes), "alone": median(times[1:])}


def run_in_process(**task: object) -> dict[str, Any]:
    """Return what `measure` returns in a process of its own."""
    command = [sys.executable, __file__, "--task", json.dumps(task)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    measured: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", action="append")
    parser.add_argument("--side", type=int, nargs="+", default=[3000], help="sides of slides, in pixels of the model")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--image", type=Path, nargs="+", default=[], help="four images of at least 768 × 768 px")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which no row is begun")
    parser.add_argument("--fast", action="store_true", help="write no file")
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task is not None:
        print(json.dumps(measure(options.task)))
        return
    began = time.monotonic()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        block = read_block(options.image)
        for name in options.model or ["nuclei-kumar-n8", "mitosis-amida13-n8", "tumor-pcam-n8"]:
            spacing = {"tumor-pcam-n8": 1.0}.get(name, SPACING_UM_PX)
            small = folder / f"small-{name}.tif"
            write_slide(small, block, SMALL_PX, spacing)
            for side in options.side:
                if time.monotonic() - began > options.seconds:
                    continue
                large = folder / f"{side}-{name}.tif"
                write_slide(large, block, side, spacing)
                common = {"model": name, "device": options.device, "slides": [str(small), str(large)]}
                alone = run_in_process(**common, workers=0, out="")
                objects: set[str] = set()
                for workers in options.workers:
                    if time.monotonic() - began > options.seconds:
                        continue
                    out = folder / f"{name}-{side}-{workers}"
                    measured = run_in_process(**common, workers=workers, out=str(out))
                    summary = measured["summary"]
                    mpx = summary["predicted_mpx"]
                    objects.add(measured["hash"])
                    rows.append(
                        {
                            "model": name,
                            "workers": workers,
                            "Mpx": round(mpx, 1),
                            "tiles": alone["tiles"],
                            "objects": summary["objects"],
                            "seconds": round(measured["large"], 2),
                            "Mpx/s": round(mpx / measured["large"], 2),
                            "network alone, s": round(alone["alone"], 2),
                            "seconds / network alone": round(measured["large"] / alone["alone"], 2),
                            **{f"{stage}, s": value for stage, value in summary["seconds_of_stages"].items()},
                            "CPU, s": round(measured["cpu"], 2),
                            "start, s": round(measured["start"], 1),
                            "small slide, s": round(measured["small"], 1),
                            "memory of the model, MiB": round(measured["memory"]),
                            "peak above it, MiB": round(measured["peak"]),
                        }
                    )
                    print(rows[-1], flush=True)
                large.unlink()
                if len(objects) > 1:
                    raise SystemExit(f"{name}: the objects depend on the number of workers.")
    record("pipeline", rows, options.device, write=not options.fast)


if __name__ == "__main__":
    main()
