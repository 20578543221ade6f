"""Slides spread over the workers of a Dask cluster, each in a process of its own.

In: a run, slides and a cluster. Out: an outcome for every slide, as they come; results lie in the same places.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rotopath.inference.slide_pass import PassOptions
from rotopath.predicting import SUMMARY, SlideOutcome, place_results
from rotopath.studies.schedule import TRIES, connected


def predict_on_cluster(
    run: str,
    slides: Sequence[Path],
    out: Path,
    options: PassOptions,
    spacing_um_px: float | None,
    device: str | None,
    precision: str | None,
    cluster: str,
    at_once: int,
) -> Iterator[SlideOutcome]:
    """As `predict_slides`; workers see the same folders, and a slide whose worker dies is given to another one."""
    from distributed import as_completed

    with connected(cluster, at_once) as (client, resources):
        futures = {}
        for path, folder in place_results(slides, out).items():
            words = _command(run, path, folder.parent, options, spacing_um_px, device, precision)
            future = client.submit(_predict, words, path.name, pure=False, retries=TRIES, resources=resources)
            futures[future] = (path, folder)
        for future in as_completed(futures):
            path, folder = futures[future]
            try:
                reason = future.result()
            except Exception as error:  # such as a cluster's, which has lost its workers
                reason = f"{error}"
            done = not reason and (folder / SUMMARY).exists()
            yield SlideOutcome(path, folder, "done" if done else "failed", "" if done else reason or "it ended early.")


def _command(
    run: str,
    path: Path,
    out: Path,
    options: PassOptions,
    spacing_um_px: float | None,
    device: str | None,
    precision: str | None,
) -> list[str]:
    """The words of `rotopath predict` for a slide; they mean the same in whatever folder a worker runs."""
    words = ["predict", str(Path(run).resolve()) if Path(run).is_dir() else run]  # else it is a pretrained model's name
    words += [str(path.absolute())]  # a link keeps its name, after which the results are named
    words += ["--out", str(out.resolve()), "--rotations", str(options.rotations)]
    words += ["--everywhere"] if options.everywhere else []
    words += ["--spacing-um-px", str(spacing_um_px)] if spacing_um_px is not None else []
    words += ["--device", device] if device is not None else []
    words += ["--precision", precision] if precision is not None else []
    return words


def _predict(words: list[str], name: str) -> str:
    """In a worker: nothing if all went well, else the reason, without the name that it is told with."""
    command = [sys.executable, "-m", "rotopath", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode < 0:
        raise RuntimeError(f"killed by signal {-ended.returncode}; perhaps there was too little memory.")
    if ended.returncode == 0:
        return ""
    begin = f"{name} failed: "
    failures = [line.removeprefix(begin) for line in ended.stdout.splitlines() if line.startswith(begin)]
    said = failures or (ended.stderr.strip() or ended.stdout.strip()).splitlines()
    return said[0] if said else f"it ended with exit code {ended.returncode}."
