"""The demonstration: synthetic tissue, an ordinary network and an equivariant one, and a report on both.

In: a folder. Out: the tissue, two run folders and `report.html` in it; what is there already is not made again.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

import rotopath
from rotopath import runs
from rotopath.data import Dataset, Sample, open_data, read_image
from rotopath.data.annotations import read_points
from rotopath.evaluation import RotatedAnswers, answer_rotated_inputs, gather_evidence
from rotopath.metrics.equivariance import measure_robustness
from rotopath.model_file import WEIGHTS
from rotopath.recipe import Recipe
from rotopath.reports.figures import Section, draw_detections, draw_layers, draw_polar, write_page
from rotopath.reports.progress import TrainingProgress
from rotopath.synthetic import make_mitosis
from rotopath.tasks import MITOSIS
from rotopath.training import train

SPACING_UM_PX = MITOSIS.spacing_um_px
NETWORKS = {"N=1": 1, "N=8": 8}
WINDOWS, SHOWN_WINDOWS = 64, 6  # that are turned, and of which the answers are drawn
CPU = torch.device("cpu")


def run_demo(out: Path, console: Console, steps: int, size_px: int) -> Path:
    """Make tissue, train N=1 and N=8 on it, and write the report; gives its path. `steps` are those of an epoch."""
    tissue = out / "tissue"
    if not tissue.exists():
        console.print("Making synthetic tissue: fields of 23 cases, with mitoses among look-alikes.")
        make_mitosis(tissue, size_px=size_px)
    dataset = open_data(tissue, MITOSIS.annotated)
    trained: dict[str, runs.Run] = {}
    turned: dict[str, RotatedAnswers] = {}
    for name, orientations in NETWORKS.items():
        recipe = Recipe(
            "mitosis",
            str(tissue),
            orientations=orientations,
            steps=steps,
            epochs=3,
            batch=32,
            schedule="cosine",
            validation_steps=8,
            accelerator="cpu",
        )
        if not (out / name / WEIGHTS).exists():
            console.print(f"Training {name}.")
            with TrainingProgress(recipe, console) as progress:
                train(recipe, out / name, on_progress=progress.show)
        trained[name] = runs.load(out / name)
        console.print(f"Turning test images for {name}.")
        turned[name] = answer_rotated_inputs(trained[name], dataset.split("test"), CPU, most=WINDOWS)
    return _write_report(out, dataset, trained, turned)


def _write_report(out: Path, dataset: Dataset, trained: dict[str, runs.Run], turned: dict[str, RotatedAnswers]) -> Path:
    scores = {name: json.loads((out / name / runs.METRICS).read_text(encoding="utf-8"))["test"] for name in trained}
    varied = {name: measure_robustness(each.fair, each.fair_decisions) for name, each in turned.items()}
    table = [
        ["", "F1", "95 % interval", "precision", "recall", "scatter over angles", "decisions that change"],
        *([name, *_numbers(scores[name]), f"{r.deviation:.4f}", f"{r.changed:.1%}"] for name, r in varied.items()),
    ]
    field = max(dataset.split("test"), key=lambda picture: len(read_points(picture, SPACING_UM_PX)))
    found = {name: _detected(run, field) for name, run in trained.items()}
    truth = read_points(field, SPACING_UM_PX).positions
    picture = draw_detections(read_image(field, SPACING_UM_PX), truth, found, MITOSIS.hit_px, out / "detections.png")
    scatter = sum(one.fair.std(axis=0) for one in turned.values())
    shown = np.argsort(-np.asarray(scatter), kind="stable")[:SHOWN_WINDOWS].tolist()
    sections = [
        Section(
            "Scores on the test cases",
            "Both networks have about 34,000 weights and saw the same windows. Scatter is the standard deviation of "
            "the prediction when a window is turned, on average; a decision changes if it is not the same at every "
            "angle.",
            table,
        ),
        Section(
            "Detections",
            f"{field.name}. Yellow circles: mitoses. Green crosses: detections that hit one. Red crosses: false ones.",
            picture=picture,
        ),
        Section(
            "Predictions as a window turns",
            "Radius: the predicted probability of a mitosis, from 0 in the middle to 1 at the rim. A network that does "
            f"not care how the slide lies draws a circle. Of {WINDOWS} windows, these are the ones on which the two "
            "networks scatter most.",
            picture=draw_polar(turned, shown, out / "polar.png"),
        ),
        Section("How the layers work", "", picture=draw_layers(out / "layers.png")),
    ]
    lead = (
        "A tissue section has no up. Here an ordinary network (N=1) and one that looks in eight orientations at once "
        "(N=8) learnt to find mitoses in synthetic tissue, for a few minutes on this computer. One seed, a short "
        "training and tissue that is not real: an illustration, no benchmark."
    )
    footer = f"rotopath {rotopath.__version__}; recipes, logs and weights are in the folders {' and '.join(trained)}."
    return write_page(out / "report.html", "rotopath: the same answer however the slide lies", lead, sections, footer)


def _numbers(scores: dict[str, Any]) -> list[str]:
    interval = scores["f1_interval"]
    spread = f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "–"
    return [f"{scores['f1']:.3f}", spread, f"{scores['precision']:.2f}", f"{scores['recall']:.2f}"]


def _detected(run: runs.Run, field: Sample) -> NDArray[np.float64]:
    """Where a network sees mitoses, at its operating point."""
    (evidence,) = gather_evidence(run.task, run.network, [field], CPU)
    found: NDArray[np.float64] = evidence.detections.positions[evidence.detections.scores >= run.point["threshold"]]
    return found
