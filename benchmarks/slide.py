"""Measure memory and time of predicting whole slides of 20,000 × 20,000 px and of four times that area.

.venv/bin/python benchmarks/slide.py [cuda] [--model NAME]... [--side 20000]

The slides are mostly glass, with islands of tissue. Each prediction is a `rotopath predict` in its own process. Its
peak memory is compared with that of a process that only loads the model. The detected tissue area is compared with the
area that was drawn.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from record import record

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from drawn_slides import draw_slide  # type: ignore[import-not-found]

ISLAND_PX = 3000


def measure_process(*command: str) -> tuple[float, float]:
    """Run a command in its own process. Return its peak memory in MiB and its time in seconds."""
    watch = (
        "import resource, subprocess, sys, time; begun = time.monotonic(); code = subprocess.call(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, time.monotonic() - begun); sys.exit(code)"
    )
    printed = subprocess.run([sys.executable, "-c", watch, *command], check=True, capture_output=True, text=True).stdout
    peak, seconds = printed.splitlines()[-1].split()
    return float(peak), float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", action="append")
    parser.add_argument("--side", type=int, default=20_000)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.model or ["tumor-pcam-n8", "mitosis-amida13-n8"]:
            load = f"import rotopath as rp; rp.load({name!r}).prepare({options.device!r})"
            alone, _ = measure_process(sys.executable, "-c", load)
            for side in (options.side, 2 * options.side):
                # The number of islands is proportional to the area.
                islands = tuple(
                    (top + 1000, left + 1000, ISLAND_PX)
                    for top in range(0, side, options.side)
                    for left in range(0, side, options.side)
                )
                slide = Path(folder) / f"{side}.tif"
                drawn = draw_slide(slide, (side, side), islands, levels=4)
                out = Path(folder) / f"{name}-{side}"
                words = ["predict", name, str(slide), "--out", str(out), "--device", options.device]
                peak, seconds = measure_process(sys.executable, "-m", "rotopath", *words)
                summary = json.loads((out / slide.name / "summary.json").read_text())
                true_mm2 = len(drawn.islands) * (ISLAND_PX * 0.25e-3) ** 2
                rows.append(
                    {
                        "model": name,
                        "slide": f"{side} × {side} px",
                        "memory of the model, MiB": round(alone),
                        "peak above it, MiB": round(peak - alone),
                        "tissue found / drawn": round(summary["tissue_mm2"] / true_mm2, 3),
                        "seconds": round(seconds),
                    }
                )
                slide.unlink()
    record("slide", rows, options.device)


if __name__ == "__main__":
    main()
