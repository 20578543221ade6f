"""Measure how fast slides are predicted, stage by stage, and compare it with the speed of the network alone.

    .venv/bin/python benchmarks/pipeline.py [cuda] [--model NAME]... [--side 3000 ...] [--workers 0 2] [--image FILE]...

The slide is synthetic tissue, or the given images of tissue, again and again. It is predicted with `rp.predict` in
this process, after a small slide as a warm-up. "network alone" is the time that the network needs for all tiles if
their pixels are already in memory. The objects must be the same for each number of workers.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from record import record

import rotopath as rp
from rotopath.images import open_slide
from rotopath.inference.slide_pass import PassOptions, SlidePass
from rotopath.inference.tiling import compute_probabilities
from rotopath.runs import Run
from rotopath.synthetic.organs import render_organ_field

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from drawn_slides import write_levels  # type: ignore[import-not-found]

TILE_PX, FIELD_PX, FACTOR, LEVELS = 256, 768, 4, 3
SPACING_UM_PX = 0.25
ORGANS = ("breast", "kidney", "liver", "prostate")


def read_block(images: list[Path]) -> NDArray[np.uint8]:
    """Return a square image of four fields: synthetic tissue or, if there are any, the first four images."""
    fields = [np.asarray(Image.open(path).convert("RGB"))[:FIELD_PX, :FIELD_PX] for path in images[:4]]
    fields = fields or [render_organ_field(0, organ, 1, FIELD_PX)[0] for organ in ORGANS]
    return np.concatenate([np.concatenate(fields[:2], axis=1), np.concatenate(fields[2:], axis=1)])


def write_slide(path: Path, block: NDArray[np.uint8], side: int) -> None:
    """Write a pyramidal, compressed TIFF of side × side px that repeats the square `block`."""

    def make_tiles(step: int) -> Iterator[bytes]:
        return compress_tiles(block[step // 2 :: step, step // 2 :: step], side // step)

    write_levels(path, make_tiles, (side, side), SPACING_UM_PX, FACTOR, LEVELS, TILE_PX)


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


def measure_network(model: Run, slide: Path, device: str, rounds: int = 3) -> tuple[int, float]:
    """Return the number of tiles of a slide, and the seconds that the network needs for all of them."""
    prepared = model.prepare(device)
    with open_slide(slide) as opened, SlidePass(prepared, opened, PassOptions()) as slide_pass:
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
                compute_probabilities(grid.network, images[shape], prepared.task.to_probabilities)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return len(shapes), median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", action="append")
    parser.add_argument("--side", type=int, nargs="+", default=[3000], help="sides of slides, in pixels of the model")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--image", type=Path, nargs="+", default=[], help="four images of at least 768 × 768 px")
    parser.add_argument("--fast", action="store_true", help="write no file")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        block = read_block(options.image)
        for name in options.model or ["nuclei-kumar-n8", "mitosis-amida13-n8", "tumor-pcam-n8"]:
            model = rp.load(name)
            small = folder / f"small-{name}.tif"
            write_slide(small, block, 1536)
            for side in options.side:
                large = folder / f"{side}-{name}.tif"
                write_slide(large, block, round(side * model.task.spacing_um_px / SPACING_UM_PX))
                tiles, alone = measure_network(model, large, options.device)
                objects: set[str] = set()
                for workers in options.workers:
                    seconds = {}
                    for slide in (small, large):
                        out = folder / f"{name}-{side}-{workers}"
                        start = time.perf_counter()
                        outcome = rp.predict(model, slide, out, device=options.device, workers=workers)[0]
                        seconds[slide] = time.perf_counter() - start
                        if outcome.state != "done":
                            raise SystemExit(f"{name}, {workers} workers: {outcome}")
                    results = out / large.name
                    summary = json.loads((results / "summary.json").read_text())
                    objects.add(hashlib.sha256((results / "objects.geojson").read_bytes()).hexdigest())
                    mpx = summary["predicted_mpx"]
                    rows.append(
                        {
                            "model": name,
                            "workers": workers,
                            "Mpx": round(mpx, 1),
                            "tiles": tiles,
                            "objects": sum(1 for _ in (results / "objects.csv").open()) - 1,
                            "seconds": round(seconds[large], 2),
                            "Mpx/s": round(mpx / seconds[large], 2),
                            "network alone, s": round(alone, 2),
                            "seconds / network alone": round(seconds[large] / alone, 2),
                            **{f"{stage}, s": value for stage, value in summary["seconds_of_stages"].items()},
                        }
                    )
                    print(rows[-1], flush=True)
                large.unlink()
                if len(objects) > 1:
                    raise SystemExit(f"{name}: the objects depend on the number of workers.")
    record("pipeline", rows, options.device, write=not options.fast)


if __name__ == "__main__":
    main()
