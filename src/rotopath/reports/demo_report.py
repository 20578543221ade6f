"""Run the demo: train an ordinary and an equivariant network on synthetic tissue, and write an HTML report.

The output folder contains the synthetic dataset, a run folder for each network, and `report.html`. An existing dataset
and finished runs are reused.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from numpy.typing import NDArray
from rich.console import Console

import rotopath
from rotopath import runs
from rotopath.data import Dataset, Sample, open_data, read_image
from rotopath.data.annotations import read_points
from rotopath.evaluation import RotatedPredictions, gather_evidence, predict_rotated_inputs
from rotopath.metrics.equivariance import measure_robustness
from rotopath.model_file import WEIGHTS
from rotopath.recipe import Recipe
from rotopath.reports.figures import GRAY, INK, Section, draw_layers, save_figure, write_page
from rotopath.reports.progress import TrainingProgress
from rotopath.synthetic import make_mitosis
from rotopath.tasks import MITOSIS
from rotopath.training import train

SPACING_UM_PX = MITOSIS.spacing_um_px
ORIENTATIONS = {"N=1": 1, "N=8": 8}  # by name of the network
WINDOWS = 64  # number of test windows that are rotated and predicted
WINDOWS_SHOWN = 6  # number of rotated windows in the report
CPU = torch.device("cpu")
NETWORK_COLORS = ("#dc2626", "#2563eb")
HIT, FALSE, TRUTH = "#16a34a", "#dc2626", "#facc15"  # colors of true detections, false detections and annotations
INTRODUCTION = (
    "A tissue section has no natural orientation. Here, an ordinary network (N=1) and a network with eight "
    "orientations (N=8) were trained to detect mitotic figures in synthetic tissue, for a few minutes on this "
    "computer. This is an illustration and not a benchmark: each network was trained only once and for a short time, "
    "and the tissue is synthetic."
)
LAYERS_TEXT = "All kernels and feature maps in this figure were computed with the layers of rotopath."


def run_demo(out: Path, console: Console, steps: int, size_px: int) -> Path:
    """Generate synthetic tissue, train networks with 1 and 8 orientations, and return the path of the HTML report.

    `steps` is the number of training steps per epoch; there are three epochs. `size_px` is the height and width of the
    synthetic images in pixels. If the folder `out` contains synthetic tissue or finished runs, they are reused.
    """
    tissue = out / "tissue"
    if not tissue.exists():
        console.print("Generating synthetic tissue: images of 23 cases with mitotic figures and look-alikes.")
        make_mitosis(tissue, size_px=size_px)
    dataset = open_data(tissue, MITOSIS.annotated)
    networks: dict[str, runs.Run] = {}
    predictions: dict[str, RotatedPredictions] = {}
    for name, orientations in ORIENTATIONS.items():
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
        networks[name] = runs.load(out / name)
        console.print(f"Predicting rotated test images with {name}.")
        predictions[name] = predict_rotated_inputs(networks[name], dataset.split("test"), CPU, max_windows=WINDOWS)
    sections = [
        _score_section(out, predictions),
        _detection_section(out, dataset, networks),
        _rotation_section(out, predictions),
        Section("How the layers work", LAYERS_TEXT, figure=draw_layers(out / "layers.png")),
    ]
    title = "rotopath: predictions that do not depend on the orientation of the slide"
    folders = " and ".join(networks)
    footer = f"rotopath {rotopath.__version__}. Recipes, logs and weights are in the folders {folders}."
    return write_page(out / "report.html", title, INTRODUCTION, sections, footer)


def _score_section(out: Path, predictions: Mapping[str, RotatedPredictions]) -> Section:
    """Return a section with a table: for each network, the test scores and the robustness to rotation.

    `out` contains a run folder for each network. `predictions` maps the names of the networks to their predictions for
    rotated windows.
    """
    header = ["", "F1", "95 % interval", "precision", "recall", "deviation over angles", "changed decisions"]
    rows = []
    for name, rotated in predictions.items():
        scores = json.loads((out / name / runs.METRICS).read_text(encoding="utf-8"))["test"]
        robustness = measure_robustness(rotated.fair, rotated.fair_decisions)
        rows.append([name, *_format_scores(scores), f"{robustness.deviation:.4f}", f"{robustness.changed:.1%}"])
    return Section(
        "Scores on the test cases",
        "Both networks have about 34,000 weights and were trained on the same windows. 95 % interval: confidence "
        "interval of F1. For the last two columns, test windows were rotated by 16 angles. Deviation over angles: the "
        "standard deviation of the predicted probability over the angles, averaged over windows. Changed decisions: "
        "the percentage of windows whose decision (mitosis or no mitosis) differs between angles.",
        [header, *rows],
    )


def _detection_section(out: Path, dataset: Dataset, networks: Mapping[str, runs.Run]) -> Section:
    """Return a section with the detections of each network in the test image with the most mitotic figures.

    `out` is the folder for the figure. `networks` maps the names of the networks to their runs.
    """
    field = max(dataset.split("test"), key=lambda sample: len(read_points(sample, SPACING_UM_PX)))
    image, truth = read_image(field, SPACING_UM_PX), read_points(field, SPACING_UM_PX).positions
    detections = {name: _detect(run, field) for name, run in networks.items()}
    return Section(
        "Detections",
        f"Test image {field.name}. Yellow circles: annotated mitotic figures. Green crosses: true detections (inside "
        "a circle). Red crosses: false detections (outside all circles).",
        figure=draw_detections(image, truth, detections, MITOSIS.match_radius_px, out / "detections.png"),
    )


def _rotation_section(out: Path, predictions: Mapping[str, RotatedPredictions]) -> Section:
    """Return a section with polar plots of the windows whose predictions differ most between rotation angles.

    `out` is the folder for the figure. `predictions` maps the names of the networks to their predictions for rotated
    windows.
    """
    deviation = np.asarray(sum(rotated.fair.std(axis=0) for rotated in predictions.values()))
    windows = np.argsort(-deviation, kind="stable")[:WINDOWS_SHOWN].tolist()
    return Section(
        "Predictions for rotated windows",
        "Radius: the predicted probability of a mitotic figure, from 0 at the center to 1 at the edge. Angle: the "
        "rotation of the window. If the prediction does not depend on the rotation, the curve is a circle. The figure "
        f"shows {WINDOWS_SHOWN} of {WINDOWS} windows: those with the largest standard deviation of the probability "
        "over angles, summed over both networks.",
        figure=draw_window_curves(predictions, windows, out / "polar.png"),
    )


def _format_scores(scores: Mapping[str, Any]) -> list[str]:
    """Return four table cells: F1, its 95 % confidence interval, precision and recall."""
    interval = scores["f1_interval"]
    limits = f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "–"
    return [f"{scores['f1']:.3f}", limits, f"{scores['precision']:.2f}", f"{scores['recall']:.2f}"]


def _detect(run: runs.Run, field: Sample) -> NDArray[np.float64]:
    """Return the positions (k, 2) of the k detections in an image: row and column in pixels.

    Only detections whose score reaches the decision threshold of the run are returned.
    """
    (evidence,) = gather_evidence(run.task, run.network, [field], CPU)
    detections = evidence.detections
    positions: NDArray[np.float64] = detections.positions[detections.scores >= run.point["threshold"]]
    return positions


def draw_detections(
    image: NDArray[np.uint8],
    truth: NDArray[np.float64],
    detections: Mapping[str, NDArray[np.float64]],
    radius_px: float,
    path: Path,
) -> Path:
    """Draw the image (H, W, 3) once for each network, with the detections of this network. Return `path`.

    The copies of the image are side by side in one figure, which is written to `path`. `truth` contains the positions
    of annotated objects. `detections` maps the names of networks to the positions of their detections. Positions are
    arrays (k, 2) of row and column in pixels. A detection is green if an annotated object is at most `radius_px` pixels
    away; other detections are red.
    """
    count = len(detections)
    figure = Figure(figsize=(5.2 * count, 5.6), dpi=110, facecolor="white")
    for k, (name, positions) in enumerate(detections.items()):
        axes = figure.add_axes((k / count + 0.005, 0.01, 0.99 / count, 0.91))
        axes.imshow(image)
        for row, column in truth:
            axes.add_patch(Circle((column, row), radius_px, fill=False, color=TRUTH, linewidth=1.6))
        distances = np.linalg.norm(positions[:, None] - truth[None], axis=-1)  # (detections, true positions)
        is_near = distances <= radius_px
        for (row, column), is_hit in zip(positions, is_near.any(axis=1), strict=True):
            axes.plot(column, row, "+", color=HIT if is_hit else FALSE, markersize=13, markeredgewidth=2.4)
        # Set the limits explicitly: markers at the edges would change them, and the scales of the images would differ.
        axes.set(xlim=(-0.5, image.shape[1] - 0.5), ylim=(image.shape[0] - 0.5, -0.5))
        axes.set_axis_off()
        axes.set_title(f"{name}: {int(is_near.any(axis=0).sum())} of {len(truth)} detected", size=12, color=INK)
    return save_figure(figure, path)


def draw_window_curves(predictions: Mapping[str, RotatedPredictions], windows: Sequence[int], path: Path) -> Path:
    """Draw a polar plot for each window: the radius is the probability, the angle is the rotation. Return `path`.

    All plots are in one figure, which is written to `path`. `predictions` maps the names of networks to their
    predictions for rotated windows. Each plot has a curve for each network. `windows` are the indices of the windows to
    draw.
    """
    count = len(windows)
    figure = Figure(figsize=(2.1 * count, 2.9), dpi=110, facecolor="white")
    for c, window in enumerate(windows):
        axes = figure.add_axes((c / count + 0.015, 0.2, 0.97 / count - 0.02, 0.62), projection="polar")
        for (name, rotated), color in zip(predictions.items(), NETWORK_COLORS, strict=False):
            angles = np.deg2rad([*rotated.fair_degrees, rotated.fair_degrees[0]])
            probabilities = [*rotated.fair[:, window], rotated.fair[0, window]]
            axes.plot(angles, probabilities, color=color, linewidth=1.6, label=name if c == 0 else None)
        axes.set(ylim=(0, 1), yticks=[0.5, 1.0], xticks=[])
        axes.set_yticklabels([])
        label = next(iter(predictions.values())).labels[window]
        axes.set_title("mitosis" if label else "no mitosis", size=9, color=GRAY, pad=4)
    figure.legend(loc="lower center", ncols=len(predictions), frameon=False, fontsize=9)
    return save_figure(figure, path)
