"""A report as one HTML file, with its figures inside, that opens anywhere.

In: headings, paragraphs, tables and pictures. Out: the page.

What all figures share: their colours, and how they reach the disk.

Figures that set networks side by side: detections on a field, and predictions as the input turns.

In: an image with its mitoses, detections, answers at several angles. Out: PNG files.

The picture that explains the layers, drawn from the layers themselves: lift, shift-twist, project.

In: a file name. Out: a figure in which every kernel and every map was computed by `rotopath.nn`.
"""

import base64
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from rotopath import group
from rotopath.evaluation import RotatedAnswers
from rotopath.nn import GroupConv2d, LiftConv2d, Project
from rotopath.writing import write_text

CSS_PX_PER_INCH = 96
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111827; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } p { max-width: 46rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; }
tbody tr:nth-child(even) { background: #f9fafb; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } thead th { border-bottom: 1px solid #9ca3af; }
img { max-width: 100%; height: auto; } footer { color: #4b5563; font-size: .85rem; margin-top: 3rem; }
details { margin: 1rem 0; } summary { cursor: pointer; } pre { background: #f9fafb; padding: 1rem; overflow-x: auto; }
"""


@dataclass(frozen=True)
class Section:
    """A part of the page: text, and perhaps a table (its first row is the head), a picture, or text to unfold.

    Without a title it goes on with the one before.
    """

    title: str
    text: str
    table: Sequence[Sequence[str]] = ()
    picture: Path | None = None
    details: str = ""


def write_page(path: Path, title: str, lead: str, sections: Sequence[Section], footer: str) -> Path:
    """Write the page, whole or not at all; gives the path back."""
    body = "\n".join(_section(section) for section in sections)
    text = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>
<style>{STYLE}</style></head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(lead)}</p>
{body}
<footer>{escape(footer)}</footer>
</body>
</html>
"""
    write_text(path, text)
    return path


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"] if section.title else []
    parts.append(f"<p>{escape(section.text)}</p>")
    if section.table:
        head, *rows = section.table
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        table = f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"
        parts.append(f'<div class="scroll">{table}</div>')
    if section.picture is not None:
        data = base64.b64encode(section.picture.read_bytes()).decode()
        with Image.open(section.picture) as image:
            width = round(image.width * CSS_PX_PER_INCH / image.info.get("dpi", (CSS_PX_PER_INCH,))[0])
        parts.append(f'<img alt="{escape(section.title)}" width="{width}" src="data:image/png;base64,{data}">')
    if section.details:
        parts.append(f"<details><summary>The recipe</summary><pre>{escape(section.details)}</pre></details>")
    return "\n".join(parts)


INK, GREY = "#111827", "#4b5563"


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure, whole or not at all, into a folder that is made if need be; gives the path back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in another script: boxes will do
            figure.savefig(unfinished, format=path.suffix.removeprefix("."))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


HIT, FALSE, TRUTH = "#16a34a", "#dc2626", "#facc15"
COLOURS = ("#dc2626", "#2563eb")  # of networks, in their order


def draw_detections(
    image: NDArray[np.uint8],
    truth: NDArray[np.float64],
    found: Mapping[str, NDArray[np.float64]],
    radius_px: float,
    path: Path,
) -> Path:
    """A field beside itself, once for each network: mitoses, and what the network took for one."""
    figure = Figure(figsize=(5.2 * len(found), 5.6), dpi=110, facecolor="white")
    for k, (name, places) in enumerate(found.items()):
        axes = figure.add_axes((k / len(found) + 0.005, 0.01, 0.99 / len(found), 0.91))
        axes.imshow(image)
        for row, column in truth:
            axes.add_patch(Circle((column, row), radius_px, fill=False, color=TRUTH, linewidth=1.6))
        near = (
            np.hypot(*(places[:, None] - truth[None]).transpose(2, 0, 1)).reshape(len(places), len(truth)) <= radius_px
        )
        for (row, column), hit in zip(places, near.any(axis=1), strict=True):
            axes.plot(column, row, "+", color=HIT if hit else FALSE, markersize=13, markeredgewidth=2.4)
        # Marks would move the limits, and the same field would be drawn at two scales.
        axes.set(xlim=(-0.5, image.shape[1] - 0.5), ylim=(image.shape[0] - 0.5, -0.5))
        axes.set_axis_off()
        axes.set_title(f"{name}: {int(near.any(axis=0).sum())} of {len(truth)} found", size=12, color=INK)
    return save_figure(figure, path)


def draw_polar(turned: Mapping[str, RotatedAnswers], inputs: Sequence[int], path: Path) -> Path:
    """Predictions (radius, 0 to 1) of the same windows at all angles: a network that does not care draws a circle."""
    across = len(inputs)
    figure = Figure(figsize=(2.1 * across, 2.9), dpi=110, facecolor="white")
    for c, number in enumerate(inputs):
        axes = figure.add_axes((c / across + 0.015, 0.2, 0.97 / across - 0.02, 0.62), projection="polar")
        for (name, one), colour in zip(turned.items(), COLOURS, strict=False):
            angles = np.deg2rad([*one.fair_degrees, one.fair_degrees[0]])
            values = [*one.fair[:, number], one.fair[0, number]]
            axes.plot(angles, values, color=colour, linewidth=1.6, label=name if c == 0 else None)
        axes.set(ylim=(0, 1), yticks=[0.5, 1.0], xticks=[])
        axes.set_yticklabels([])
        label = next(iter(turned.values())).labels[number]
        axes.set_title("mitosis" if label else "no mitosis", size=9, color=GREY, pad=4)
    figure.legend(loc="lower center", ncols=len(turned), frameon=False, fontsize=9)
    return save_figure(figure, path)


N = 8
SIZE = 7
# A stroke with a hook at its end: no rotation but the full turn maps it onto itself. Corners lie off the disc.
STROKE = [
    [0.0, 0.0, -0.3, 0.5, 1.0, 0.0, 0.0],
    [0.0, -0.3, -0.4, 1.0, 1.0, 0.4, 0.0],
    [-0.3, -0.4, -0.4, 1.0, -0.1, 0.4, -0.2],
    [-0.4, -0.5, -0.5, 1.0, -0.5, -0.5, -0.4],
    [-0.3, -0.5, -0.5, 1.0, -0.5, -0.5, -0.3],
    [0.0, -0.3, -0.5, 1.0, -0.5, -0.3, 0.0],
    [0.0, 0.0, -0.4, 0.8, -0.4, 0.0, 0.0],
]
AGREEMENT = [1.0, 0.55, 0.25, -0.35, -0.6, -0.35, 0.25, 0.55]  # how a group kernel weighs its neighbour orientations
STAINS = ([0.30, 0.72, 0.42], [0.65, 0.70, 0.29])  # eosin and hematoxylin, optical density of red, green, blue
NUCLEI = [(14, 16, 10), (20, 47, 60), (46, 20, 120), (55, 52, 160), (34, 36, 95), (6, 60, 35), (63, 6, 80)]
FRAME = "#c2410c"
LEFT, RIGHT = 0.02, 0.985  # where panels begin and end, in parts of the figure's width


def draw_layers(path: Path) -> Path:
    """Draw the figure into a new file, whose folder is made if need be; gives the path back."""
    tissue = _tissue(size=60)
    turned = group.rotate(tissue, 90)
    layers = _layers(N)
    ordinary = _layers(1)
    lifted, convolved, projected = _respond(*layers, tissue)
    answers = [projected, _respond(*ordinary, tissue)[2]]
    answers_turned = [_respond(*layers, turned)[2], _respond(*ordinary, turned)[2]]

    figure = Figure(figsize=(11, 10.6), dpi=150, facecolor="white")
    _draw_lifting(figure, tissue, layers[0], lifted)
    _draw_convolution(figure, layers[1], convolved)
    _draw_projection(figure, [tissue, *answers], [turned, *answers_turned])

    return save_figure(figure, path)


def _layers(orientations: int) -> tuple[LiftConv2d, GroupConv2d]:
    """A lifting and a group convolution with the stroke for a kernel; with one orientation, an ordinary CNN."""
    stroke = torch.tensor(STROKE)[group.disc(SIZE)]  # (37,)
    lift = LiftConv2d(1, 1, SIZE, orientations, padding="same", padding_mode="replicate", bias=False)
    conv = GroupConv2d(1, 1, SIZE, orientations, padding="same", padding_mode="replicate", bias=False)
    with torch.no_grad():
        lift.weight.copy_(stroke)
        conv.weight.copy_(torch.tensor(AGREEMENT[:orientations])[:, None] * stroke)
    return lift, conv


@torch.no_grad()
def _respond(lift: LiftConv2d, conv: GroupConv2d, tissue: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    darkness = 1 - tissue.mean(dim=1, keepdim=True)
    lifted = lift(darkness).relu()
    convolved = conv(lifted).relu()
    return lifted, convolved, Project("max")(convolved)


def _tissue(size: int) -> Tensor:
    """A few elongated nuclei on stroma, (1, 3, size, size): enough to see orientations respond."""
    stamp = group.inscribed_disc(11, 11, inner=0.6).float()
    nucleus = torch.nn.functional.interpolate(stamp[None, None], size=(25, 9), mode="bilinear")[0, 0]
    canvas = torch.zeros(41, 41)
    canvas[8:33, 16:25] = nucleus
    hematoxylin = torch.zeros(size + 48, size + 48)
    for row, column, angle in NUCLEI:
        window = hematoxylin[row : row + 41, column : column + 41]
        window.copy_(torch.maximum(window, group.rotate(canvas[None, None], angle)[0, 0].clamp(0)))
    random = torch.Generator().manual_seed(3)
    hematoxylin = hematoxylin[24:-24, 24:-24] * (0.9 + 0.2 * torch.rand(size, size, generator=random))
    eosin = 0.28 + 0.08 * torch.rand(size, size, generator=random)
    density = torch.einsum("shw,sc->chw", torch.stack([eosin, hematoxylin]), torch.tensor(STAINS))
    return torch.exp(-density)[None]


def _draw_lifting(figure: Figure, tissue: Tensor, lift: LiftConv2d, lifted: Tensor) -> None:
    _head(
        figure,
        0.985,
        "1  Lift",
        "The kernel is turned to every orientation, and each copy looks for its pattern in the image: one map per "
        "orientation.   (B, C, H, W) → (B, C', N, H, W)",
    )
    top, bottom = 0.893, 0.685
    titles = [f"{angle:g}°" for angle in group.angles(N)]
    _show_image(_grid(figure, 1, 1, LEFT, 0.21, bottom, top)[0], tissue, "image")
    kernels = lift.kernels().detach()[:, 0]  # (N, 7, 7)
    panels = _grid(figure, 2, 4, 0.275, 0.605, bottom, top)
    for panel, kernel, title in zip(panels, kernels, titles, strict=True):
        _show_kernel(panel, kernel, float(kernels.abs().max()), title)
    _subtitle(figure, 0.44, top, f"{lift.weight.shape[-1]} weights on a disc, turned (orange +, violet -)")
    _show_maps(_grid(figure, 2, 4, 0.655, RIGHT, bottom, top), lifted[0, 0], titles)
    _subtitle(figure, 0.82, top, "lifted image")


def _draw_convolution(figure: Figure, conv: GroupConv2d, convolved: Tensor) -> None:
    _head(
        figure,
        0.655,
        "2  Group convolution",
        "The kernel has orientations of its own. To turn it, turn each slice, and shift all slices along θ: the "
        "shift-twist. The framed slice\nmoves one column to the right with every 45°, and so on to 315°."
        "   (B, C, N, H, W) → (B, C', N, H, W)",
    )
    top, bottom = 0.55, 0.29
    titles = [f"{angle:g}°" for angle in group.angles(N)]
    kernels = conv.kernels().detach().view(N, N, SIZE, SIZE)  # output orientation, input orientation
    turns = 4
    panels = _grid(figure, turns, N, LEFT + 0.055, 0.605, bottom, top, gap=0.12)
    for i in range(turns):
        for j in range(N):
            panel = panels[i * N + j]
            _show_kernel(panel, kernels[i, j], float(kernels.abs().max()), titles[j] if i == 0 else "", frame=i == j)
        panels[i * N].set_ylabel(titles[i], fontsize=9.5, rotation=0, ha="right", va="center", color=INK)
    _subtitle(figure, 0.34, top, "input orientation →")
    figure.text(LEFT, (top + bottom) / 2, "kernel turned by", rotation=90, fontsize=9.5, va="center", color=GREY)
    _show_maps(_grid(figure, 2, 4, 0.655, RIGHT, bottom + 0.02, top), convolved[0, 0], titles)
    _subtitle(figure, 0.82, top, "its output")


def _draw_projection(figure: Figure, upright: Sequence[Tensor], turned: Sequence[Tensor]) -> None:
    errors = []
    for before, after in zip(upright[1:], turned[1:], strict=True):
        expected = group.rotate(before, 90)
        errors.append(float((expected - after).norm() / expected.norm()))
    _head(
        figure,
        0.255,
        "3  Project",
        "The maximum over orientations forgets the angle and keeps the place. Turn the image, and the answer turns "
        f"with it: relative error {errors[0]:.0e}.\n"
        f"An ordinary CNN with the same kernels answers differently: {errors[1]:.1f}."
        "   (B, C, N, H, W) → (B, C, H, W)",
    )
    names = ("image", "lift, convolve, project", "ordinary CNN")
    turned_names = ("image turned by 90°", names[1], names[2])
    panels = _grid(figure, 1, 6, LEFT, RIGHT, 0.012, 0.165)
    limits = [float(answer.max()) for answer in upright[1:]]
    for offset, images, titles in ((0, upright, names), (3, turned, turned_names)):
        _show_image(panels[offset], images[0], titles[0])
        for k in (1, 2):
            _show_map(panels[offset + k], images[k][0, 0], limits[k - 1], titles[k])


def _head(figure: Figure, top: float, head: str, text: str) -> None:
    figure.text(LEFT, top, head, fontsize=14, fontweight="bold", va="top", color=INK)
    figure.text(LEFT, top - 0.026, text, fontsize=9.5, va="top", color=GREY, linespacing=1.35)


def _subtitle(figure: Figure, center: float, top: float, text: str) -> None:
    figure.text(center, top + 0.02, text, fontsize=9.5, ha="center", va="bottom", color=GREY)


def _grid(
    figure: Figure, rows: int, columns: int, left: float, right: float, bottom: float, top: float, gap: float = 0.2
) -> list[Axes]:
    spec = figure.add_gridspec(
        rows, columns, left=left, right=right, bottom=bottom, top=top, wspace=0.08, hspace=gap if rows > 1 else 0
    )
    return [figure.add_subplot(spec[i, j], anchor="N") for i in range(rows) for j in range(columns)]


def _show_kernel(ax: Axes, kernel: Tensor, limit: float, title: str, frame: bool = False) -> None:
    on_disc = kernel.masked_fill(~group.disc(kernel.shape[-1]), torch.nan)
    ax.imshow(on_disc.numpy(), cmap="PuOr_r", vmin=-limit, vmax=limit)
    _finish(ax, title, FRAME if frame else "#d1d5db", 2.2 if frame else 0.6)


def _show_maps(axes: Sequence[Axes], maps: Tensor, titles: Sequence[str]) -> None:
    for ax, values, title in zip(axes, maps, titles, strict=True):
        _show_map(ax, values, float(maps.max()), title)


def _show_map(ax: Axes, values: Tensor, limit: float, title: str) -> None:
    ax.imshow(values.numpy(), cmap="magma", vmin=0, vmax=limit)
    _finish(ax, title)


def _show_image(ax: Axes, image: Tensor, title: str) -> None:
    ax.imshow(image[0].permute(1, 2, 0).numpy())
    _finish(ax, title)


def _finish(ax: Axes, title: str, color: str = "#d1d5db", width: float = 0.6) -> None:
    ax.set_title(title, fontsize=8.5, pad=3, color=INK)
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_color(color)
        spine.set_linewidth(width)
