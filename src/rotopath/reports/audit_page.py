"""Write the HTML page of an audit: how a model's predictions change if images are only rotated.

The page is a single file without scripts. Its plots are SVG in the colors of the page, so that they are readable in
light and dark mode and in print.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rotopath import group
from rotopath.evaluation import RotatedPredictions
from rotopath.reports.figures import Section, write_page

WORST = 8  # images that are shown
THUMBNAIL_PX = 192
PLOT = 200  # side of a plot, in units of its SVG
RADIUS = 72  # of a plot, in the same units
STYLE = """
.lead { font-size: 1.3rem; line-height: 1.4; max-width: 50rem; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem; margin: 1.2rem 0; }
.numbers div { background: var(--soft); border-radius: .5rem; padding: .8rem 1rem; }
.numbers b { display: block; font-size: 1.7rem; line-height: 1.2; } .numbers span { color: var(--gray);
  font-size: .88rem; }
th, td { white-space: normal; vertical-align: top; } th { font-weight: 600; }
figure { margin: 0; } figcaption { font-size: .85rem; color: var(--gray); }
.cases { display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: 1.2rem; margin: 1rem 0; }
.cases figure { background: var(--soft); border-radius: .5rem; padding: .7rem; display: grid;
  grid-template-columns: 1fr 1fr; gap: .4rem; align-items: center; }
.cases figcaption { grid-column: 1 / -1; } .cases img { width: 100%; border-radius: .25rem; }
.cases svg { width: 100%; height: auto; }
.overview { max-width: 330px; } .overview svg { width: 100%; height: auto; }
.ring { fill: none; stroke: var(--line); stroke-width: .6; } .limit { fill: none; stroke: var(--gray);
  stroke-width: 1; stroke-dasharray: 3 3; }
.curve { fill: var(--main); fill-opacity: .15; stroke: var(--main); stroke-width: 1.8; stroke-linejoin: round; }
.dot { fill: var(--warm); } svg text { fill: var(--gray); font-size: 10px; font-family: inherit; }
@media (max-width: 500px) { th, td { padding: .25rem .3rem; font-size: .8rem; } }
@media print { .cases figure, .numbers div { border: 1px solid var(--line); }
  .cases { grid-template-columns: 1fr 1fr; } }
"""


def write_audit_page(path: Path, figures: Mapping[str, Any], rotated: RotatedPredictions, names: Sequence[str]) -> Path:
    """Write the page of an audit to `path`, and return `path`.

    `figures` is the content of audit.json. `names` are the names of the images, in the order of the predictions.
    """
    model, images = figures["model"], figures["images"]
    values, what = _find_curves(figures, rotated)
    sections = [
        Section("", "", html=_render_numbers(figures)),
        Section("The figures", _explain_figures(figures), _figures_table(figures)),
        Section("By angle", _explain_overview(figures), html=_render_overview(figures, rotated)),
        Section("The images that change most", what, html=_render_cases(figures, rotated, values, names)),
        Section("What could be done", "", _remedies_table(figures), html=_render_remedies(figures)),
        Section("How it was measured", _explain_method(figures)),
    ]
    packages = ", ".join(f"{name} {number}" for name, number in figures["packages"].items() if name == "torch")
    footer = (
        f"rotopath {figures['rotopath']} ({figures['commit'] or 'no commit'}), {packages}, "
        f"{figures['hardware']['device']}, {figures['written']}. All figures: audit.json; each image: audit.csv."
    )
    introduction = (
        f"{model['name']} ({model['source']}), {images['count']:,} images ({images['source']}), rotated by 32 angles. "
        f"Research software; not a medical device."
    )
    return write_page(path, f"Rotation audit: {model['name']}", introduction, sections, footer, STYLE)


# Texts and tables


def _render_numbers(figures: Mapping[str, Any]) -> str:
    """Return the main sentence, and the main numbers in boxes."""
    decisions, embedding = figures["decisions"], figures["embedding"]
    boxes: list[tuple[str, str]] = []
    if decisions is not None:
        boxes = [
            (_percent(decisions["grid"]["changed"]), "of decisions change under quarter rotations, which are exact"),
            (_percent(decisions["fair"]["changed"]), "change under rotations by any angle, as measured"),
            (_percent(decisions["beyond"]["changed"]), "change beyond the effect of interpolating pixels"),
            (f"{decisions['fair']['deviation']:.3f}", "standard deviation of the probability over angles"),
        ]
    elif embedding is not None:
        boxes = [
            (f"{embedding['grid']['cosine']:.3f}", "cosine similarity under quarter rotations"),
            (f"{embedding['fair']['cosine']:.3f}", "cosine similarity under rotations by any angle"),
        ]
        if embedding["fair"]["neighbors"] is not None:
            boxes.append((_percent(embedding["fair"]["neighbors"]), "of the nearest neighbors stay the same"))
    rendered = "".join(f"<div><b>{escape(number)}</b><span>{escape(text)}</span></div>" for number, text in boxes)
    return f'<p class="lead">{escape(figures["sentence"])}</p><div class="numbers">{rendered}</div>'


def _figures_table(figures: Mapping[str, Any]) -> list[list[str]]:
    """Return the table with a row for each set of rotations, and a column for each figure."""
    decisions, embedding = figures["decisions"], figures["embedding"]
    header, rows = (
        ["Rotations"],
        [
            ["By 90°, 180° and 270° (exact)"],
            ["By 16 other angles, as measured"],
            ["16 pairs of close angles (mostly interpolation)"],
            ["By 16 other angles, interpolation subtracted"],
        ],
    )
    if decisions is not None:
        header += ["Decisions that change", "Deviation of the probability"]
        beyond = decisions["beyond"]
        for row, part in zip(
            rows, (decisions["grid"], decisions["fair"], decisions["resampling"], beyond), strict=True
        ):
            row += [_percent(part["changed"]), f"{part['deviation']:.4f}"]
    if embedding is not None:
        header += ["Cosine similarity of the embedding", "Shared nearest neighbors"]
        for row, key in zip(rows, ("grid", "fair", "resampling", "beyond"), strict=True):
            part = embedding[key]
            shared = part["neighbors"]
            row += [f"{part['cosine']:.4f}", "–" if shared is None else _percent(shared)]
    return [header, *rows]


def _explain_figures(figures: Mapping[str, Any]) -> str:
    text = (
        "A rotation by a multiple of 90° only moves pixels. Any other rotation computes new pixels between the old "
        "ones, and this alone can change a prediction. Its effect is measured between pairs of angles that are so "
        "close that hardly anything but the interpolation differs. "
    )
    if (decisions := figures["decisions"]) is not None:
        part = decisions["resampling"]
        rest = max(0.0, 1 - part["same_pixels"] - part["fraction"])
        text += (
            f"Of the variance over the 16 angles, {part['same_pixels']:.0%} is between images with the very same "
            f"pixels, rotated by 90°, 180° and 270°, and {part['fraction']:.0%} is explained by interpolation, which "
            f"is subtracted in the last row. The other {rest:.0%} comes from the corners of the square window, which "
            f"show other tissue at other angles, and from a dependence on the angle that repeats every 90°. "
        )
    if (embedding := figures["embedding"]) is not None:
        different, chance = embedding["different_images"], embedding["chance"]
        if different is not None:
            text += f"For comparison, different images have a cosine similarity of {different:.3f} on average"
            text += (
                f", and would share {chance:.1%} of {embedding['neighbors']} nearest neighbors by chance. "
                if (embedding["neighbors"])
                else ". "
            )
    return text.strip()


def _explain_overview(figures: Mapping[str, Any]) -> str:
    if figures["decisions"] is None:
        return (
            "Cosine similarity of the embedding at each angle with the mean of the image's embeddings over all angles."
        )
    what = "images" if figures["decisions"]["inputs"] == "windows" else "pixels"
    return (
        f"Fraction of {what} whose decision at an angle is the one that the model makes at most angles. If the model "
        f"did not depend on the rotation, the curve would be the outermost circle. Orange: 0°, 90°, 180° and 270°."
    )


def _explain_method(figures: Mapping[str, Any]) -> str:
    images, decisions = figures["images"], figures["decisions"]
    real = images["real_surroundings"]
    surroundings = (
        "All images are larger than the window of the model: the corners of rotated windows contain real tissue."
        if real == 1
        else "The images are not larger than the window of the model: the corners of rotated windows are filled by "
        "reflection at the edges of the image, which rotates with it."
        if real == 0
        else f"{real:.0%} of the images are larger than the window of the model; in the others, the corners of rotated "
        f"windows are filled by reflection at the edges of the image, which rotates with it."
    )
    if images["smaller_than_window"]:
        surroundings += (
            f" {images['smaller_than_window']:.0%} of the images are even smaller than the window, and are mostly "
            f"reflections: larger images, or another size of the window, would be closer to the use of the model."
        )
    inputs = "" if decisions is None else f" Predictions compared at each angle: {decisions['count']:,}."
    return (
        f"Each image is rotated by 0°, 22.5°, 45°, … and by 11.25°, 33.75°, …, by interpolation with cubic splines, "
        f"and predicted. Maps are rotated back before they are compared. {surroundings}{inputs} The figures at the 16 "
        f"angles are those of rotopath evaluate --robustness. Definitions: docs/audit.md."
    )


def _remedies_table(figures: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of what averaging over rotations would gain and cost, from the same predictions."""
    decisions = figures["decisions"]
    if decisions is None:
        return []
    rows = [["As it is", "1", _percent(decisions["fair"]["changed"]), f"{decisions['fair']['deviation']:.4f}"]]
    for n, part in decisions["averaged"].items():
        rows.append([f"Average over {n} rotations", n, _percent(part["changed"]), f"{part['deviation']:.4f}"])
    return [["Model", "Time of a prediction", "Decisions that change", "Deviation of the probability"], *rows]


def _render_remedies(figures: Mapping[str, Any]) -> str:
    """Return a paragraph about averaging, and one about conversion."""
    texts = []
    if figures["decisions"] is not None:
        texts.append(
            "Averaging the probabilities over rotations (rp.symmetrize, or --tta of rotopath evaluate) needs no "
            "training. With 4, 8 or 16 rotations, the model does not depend on quarter rotations any more, and takes "
            "as many times as long. The table shows what is left at the 16 other angles, from the predictions of this "
            "audit; with 16, nothing is left at these angles, but it is between them."
        )
    conversion = figures["conversion"]
    if conversion["possible"]:
        ratio = conversion["converted_weights"] / max(1, conversion["weights"])
        texts.append(
            f"The network can be converted to one with 8 orientations (rp.equivariant), which is exact under quarter "
            f"rotations in a single pass. It has {ratio:.2g} times as many weights, and must be trained."
        )
    else:
        texts.append(f"Conversion to a network that is exact by design (rp.equivariant) {conversion['reason']}.")
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def _percent(fraction: float) -> str:
    """Return a fraction as a percentage, with more digits if it is small."""
    digits = 0 if fraction == 0 else 1 if fraction >= 0.01 else 2
    return f"{100 * fraction:.{digits}f} %"


# Plots


def _sort_by_angle(
    rotated: RotatedPredictions, fair: NDArray[Any], plain: NDArray[Any]
) -> tuple[list[float], NDArray[Any]]:
    """Return all 32 angles in increasing order, and the values at these (32, ...)."""
    degrees = [*rotated.fair_degrees, *rotated.plain_degrees]
    order = np.argsort(degrees)
    return [degrees[i] for i in order], np.concatenate([fair, plain])[order]


def _find_curves(figures: Mapping[str, Any], rotated: RotatedPredictions) -> tuple[NDArray[np.float64], str]:
    """Return a value for each of the 32 angles and each image, from 0 to 1, and a text that explains the values."""
    if figures["decisions"] is None:
        return _cosines_with_mean(rotated), (
            "Radius: cosine similarity of the embedding at this angle with the image's mean embedding."
        )
    if rotated.fair.ndim > 2:
        return _agreement(rotated), (
            "Radius: fraction of the pixels whose decision at this angle is that of most angles, after the map is "
            "rotated back."
        )
    names = figures["model"]["outputs"]
    followed = names[0] if len(names) == 1 else "the output that is most probable on average over all angles"
    probability = f"the probability of {followed}"
    _, values = _sort_by_angle(rotated, rotated.fair, rotated.plain)
    return values.astype(np.float64), (
        f"Radius: {probability}, from 0 at the center to 1 at the edge. Angle: the rotation of the image. If the "
        f"prediction does not depend on the rotation, the curve is a circle. Orange: 0°, 90°, 180° and 270°."
        f"{' Dashed: the threshold of the decision.' if len(names) == 1 else ''}"
    )


def _agreement(rotated: RotatedPredictions) -> NDArray[np.float64]:
    """Return the fraction of an image's decisions at each angle that are those of most angles (32, images)."""
    _, decisions = _sort_by_angle(rotated, rotated.fair_decisions, rotated.plain_decisions)
    flat = decisions.reshape(len(decisions), -1).astype(np.int64)
    counts = np.stack([(flat == value).sum(axis=0) for value in range(int(flat.max(initial=0)) + 1)])
    agreeing = (decisions == counts.argmax(axis=0).reshape(decisions.shape[1:])).reshape(*decisions.shape[:2], -1)
    result: NDArray[np.float64] = agreeing.mean(axis=2)
    return result


def _cosines_with_mean(rotated: RotatedPredictions) -> NDArray[np.float64]:
    found = rotated.audited
    assert found is not None
    assert found.fair_embeddings is not None
    assert found.plain_embeddings is not None
    _, vectors = _sort_by_angle(rotated, found.fair_embeddings, found.plain_embeddings)
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    mean = units.mean(axis=0)
    mean /= np.maximum(np.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
    result: NDArray[np.float64] = np.einsum("ane,ne->an", units, mean).clip(0, 1).astype(np.float64)
    return result


def _render_overview(figures: Mapping[str, Any], rotated: RotatedPredictions) -> str:
    degrees, _ = _sort_by_angle(rotated, rotated.fair, rotated.plain)
    values = (_cosines_with_mean(rotated) if figures["decisions"] is None else _agreement(rotated)).mean(axis=1)
    low = (
        math.floor(float(values.min()) * 20 - 1e-9) / 20 - 0.05
    )  # rings are labelled, so that they need not start at 0
    plot = draw_polar(degrees, values, max(0.0, low), labels=True, title="All images, by angle")
    return f'<figure class="overview">{plot}</figure>'


def _render_cases(
    figures: Mapping[str, Any], rotated: RotatedPredictions, values: NDArray[np.float64], names: Sequence[str]
) -> str:
    """Return the images that change most, each with a plot of its values at all angles."""
    degrees, _ = _sort_by_angle(rotated, rotated.fair, rotated.plain)
    is_probability = figures["decisions"] is not None and rotated.fair.ndim == 2
    spread = values.std(axis=0) if is_probability else 1 - values.mean(axis=0)
    worst = [int(i) for i in np.argsort(-spread, kind="stable")[:WORST] if spread[i] > 0]
    if not worst:
        return "<p>No image changes.</p>"
    limit = figures["model"]["operating_point"].get("threshold") if is_probability else None
    limit = limit if len(figures["model"]["outputs"]) == 1 else None
    parts = []
    for i in worst:
        curve = values[:, i]
        low = 0.0 if is_probability else max(0.0, math.floor(float(curve.min()) * 10 - 1e-9) / 10)
        plot = draw_polar(degrees, curve, low, limit=limit, title=f"{names[i]}: by angle")
        image = _embed(rotated.images[i])
        alternative = f'<img alt="{escape(names[i], quote=True)}" src="{image}">'
        caption = escape(f"{names[i]}: {curve.min():.2f} to {curve.max():.2f}")
        parts.append(f"<figure>{alternative}{plot}<figcaption>{caption}</figcaption></figure>")
    return f'<div class="cases">{"".join(parts)}</div>'


def _embed(image: NDArray[np.uint8]) -> str:
    """Return an image (H, W, 3) as a data URL, reduced to a thumbnail."""
    picture = Image.fromarray(image)
    picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    picture.save(content, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def draw_polar(
    degrees: Sequence[float],
    values: NDArray[np.float64],
    low: float = 0.0,
    limit: float | None = None,
    labels: bool = False,
    title: str = "",
) -> str:
    """Return a polar plot as SVG: values by angle, counter-clockwise from the right, on a radius from `low` to 1.

    Values at multiples of 90° are marked by dots. `limit` draws a dashed circle, for a threshold. With `labels`, rings
    and directions have labels.
    """
    center = PLOT / 2 if labels else RADIUS + 4
    side = 2 * center

    def place(angle: float, value: float) -> tuple[float, float]:
        radius = RADIUS * (min(1.0, max(low, value)) - low) / (1 - low) if low < 1 else RADIUS
        x, y = group.unit_vector(angle)
        return center + radius * x, center - radius * y  # SVG counts y downwards

    rings = "".join(
        f'<circle class="ring" cx="{center:g}" cy="{center:g}" r="{RADIUS * part:g}"/>' for part in (0.25, 0.5, 0.75, 1)
    )
    marks = (
        ""
        if not labels
        else "".join(
            f'<text x="{center + (RADIUS + 15) * x:.1f}" y="{center - (RADIUS + 11) * y + 3.5:.1f}" '
            f'text-anchor="middle">{angle}°</text>'
            for angle in (0, 90, 180, 270)
            for x, y in (group.unit_vector(angle),)
        )
    )
    if labels:
        for part in (0.5, 1):
            x, y = center + RADIUS * part * 0.71, center - RADIUS * part * 0.71
            marks += f'<text x="{x + 2:.1f}" y="{y - 2:.1f}">{(low + part * (1 - low)):.0%}</text>'
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(a, v) for a, v in zip(degrees, values, strict=True)))
    dots = "".join(
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>'
        for x, y in (place(a, v) for a, v in zip(degrees, values, strict=True) if a % 90 == 0)
    )
    dashed = ""
    if limit is not None and low < limit < 1:
        dashed = f'<circle class="limit" cx="{center:g}" cy="{center:g}" r="{RADIUS * (limit - low) / (1 - low):.1f}"/>'
    return (
        f'<svg viewBox="0 0 {side:g} {side:g}" role="img" aria-label="{escape(title, quote=True)}">'
        f'{rings}{dashed}{marks}<polygon class="curve" points="{points}"/>{dots}</svg>'
    )
