"""Functions that several reports use: write figures and HTML pages, and draw a figure that explains SE(2) layers.

All kernels and feature maps in the figure of the layers are computed with `rotopath.nn`.
"""

import base64
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from rotopath import group
from rotopath.nn import GroupConv2d, LiftConv2d, Project
from rotopath.writing import atomic_file, write_text

INK, GRAY, LIGHT_GRAY = "#111827", "#4b5563", "#d1d5db"
CSS_PX_PER_INCH = 96
STYLE = """
:root { color-scheme: light dark; --ink: #111827; --gray: #4b5563; --line: #9ca3af; --soft: #f3f4f6; --page: #ffffff;
  --main: #0072b2; --warm: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --gray: #9ca3af; --line: #6b7280; --soft: #1f2937;
  --page: #111827; --main: #56b4e9; --warm: #f0953f; } }
@media print { :root { --ink: #111827; --gray: #4b5563; --line: #9ca3af; --soft: #f3f4f6; --page: #ffffff;
  --main: #0072b2; --warm: #d55e00; } body { margin: 0; max-width: none; } figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1120px;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } p { max-width: 46rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; }
tbody tr:nth-child(even) { background: var(--soft); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { border-bottom: 1px solid var(--line); }
img { max-width: 100%; height: auto; } footer { color: var(--gray); font-size: .85rem; margin-top: 3rem; }
details { margin: 1rem 0; } summary { cursor: pointer; }
pre { background: var(--soft); padding: 1rem; overflow-x: auto; }
"""

# The figure of the layers
ORIENTATIONS = 8
KERNEL_PX = 7
# Kernel: a line with a hook at one end, without rotational symmetry. Only the 37 numbers on a disc are used as weights;
# the numbers in the corners are not used.
STROKE = [
    [0.0, 0.0, -0.3, 0.5, 1.0, 0.0, 0.0],
    [0.0, -0.3, -0.4, 1.0, 1.0, 0.4, 0.0],
    [-0.3, -0.4, -0.4, 1.0, -0.1, 0.4, -0.2],
    [-0.4, -0.5, -0.5, 1.0, -0.5, -0.5, -0.4],
    [-0.3, -0.5, -0.5, 1.0, -0.5, -0.5, -0.3],
    [0.0, -0.3, -0.5, 1.0, -0.5, -0.3, 0.0],
    [0.0, 0.0, -0.4, 0.8, -0.4, 0.0, 0.0],
]
# A group kernel has a slice for each input orientation: STROKE multiplied by one of these factors.
ORIENTATION_WEIGHTS = [1.0, 0.55, 0.25, -0.35, -0.6, -0.35, 0.25, 0.55]
STAINS = ([0.30, 0.72, 0.42], [0.65, 0.70, 0.29])  # eosin and hematoxylin: optical densities in red, green and blue
# Nuclei in the synthetic tissue. Each is drawn in a square of 41 × 41 px: row and column of the upper left corner of
# this square (before the image is cropped), and rotation of the nucleus in degrees, counter-clockwise.
NUCLEI = [(14, 16, 10), (20, 47, 60), (46, 20, 120), (55, 52, 160), (34, 36, 95), (6, 60, 35), (63, 6, 80)]
FRAME = "#c2410c"  # color of the frame around a slice of each rotated group kernel; it is always the same slice
LEFT, RIGHT = 0.02, 0.985  # edges of the panels, as fractions of the figure's width
ROTATIONS_SHOWN = 4  # rows of group kernels in the figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure to the file `path` atomically, and return `path`.

    The suffix of the path, such as ".png", selects the format. The folder is created if necessary.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as unfinished, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # missing letters are drawn as boxes
        figure.savefig(unfinished, format=path.suffix.removeprefix("."))
    return path


# HTML pages


@dataclass(frozen=True)
class Section:
    """A section of an HTML report. A section without a title continues the previous section."""

    title: str
    text: str
    table: Sequence[Sequence[str]] = ()  # rows of cells; the first row is the header
    figure: Path | None = None  # PNG file
    details: str = ""  # a recipe, which is hidden until the reader expands it
    html: str = ""  # more content, as HTML in which all texts are escaped


def write_page(
    path: Path, title: str, introduction: str, sections: Sequence[Section], footer: str, style: str = ""
) -> Path:
    """Write an HTML page with the given texts and sections to `path`, and return `path`.

    Figures are embedded in the page, so that it is a single file. Its colors follow the settings of the browser, light
    or dark. `style` is CSS for the sections of this page only.
    """
    body = "\n".join(_render_section(section) for section in sections)
    text = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}{style}</style></head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(introduction)}</p>
{body}
<footer>{escape(footer)}</footer>
</body>
</html>
"""
    write_text(path, text)
    return path


def _render_section(section: Section) -> str:
    """Return the HTML text of a section. Its figure is embedded as base64."""
    parts = [f"<h2>{escape(section.title)}</h2>"] if section.title else []
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    if section.table:
        header, *rows = section.table
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        table = f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"
        parts.append(f'<div class="scroll">{table}</div>')
    if section.figure is not None:
        data = base64.b64encode(section.figure.read_bytes()).decode()
        with Image.open(section.figure) as image:
            width = round(image.width * CSS_PX_PER_INCH / image.info.get("dpi", (CSS_PX_PER_INCH,))[0])
        parts.append(f'<img alt="{escape(section.title)}" width="{width}" src="data:image/png;base64,{data}">')
    parts.append(section.html)
    if section.details:
        parts.append(f"<details><summary>The recipe</summary><pre>{escape(section.details)}</pre></details>")
    return "\n".join(parts)


# The figure of the layers: lift, group convolution (shift-twist), project


class PanelArea(NamedTuple):
    """A rectangle in a figure. Its edges are fractions of the figure's width or height; (0, 0) is the lower left."""

    left: float
    right: float
    bottom: float
    top: float


def draw_layers(path: Path) -> Path:
    """Draw a figure that explains lifting, group convolution and projection. Write it to `path`, and return `path`."""
    tissue = _make_tissue(size=60)
    rotated = group.rotate(tissue, 90)
    layers, ordinary = _make_layers(ORIENTATIONS), _make_layers(1)
    lifted, convolved, projected = _apply(*layers, tissue)
    outputs = [projected, _apply(*ordinary, tissue)[2]]
    rotated_outputs = [_apply(*layers, rotated)[2], _apply(*ordinary, rotated)[2]]

    figure = Figure(figsize=(11, 10.6), dpi=150, facecolor="white")
    _draw_lifting(figure, tissue, layers[0], lifted)
    _draw_group_convolution(figure, layers[1], convolved)
    _draw_projection(figure, [tissue, *outputs], [rotated, *rotated_outputs])
    return save_figure(figure, path)


def _make_layers(orientations: int) -> tuple[LiftConv2d, GroupConv2d]:
    """Return a lifting convolution and a group convolution. Their kernels are made from STROKE.

    With `orientations` = 1, both layers are ordinary convolutions.
    """
    stroke = torch.tensor(STROKE)[group.disc_mask(KERNEL_PX)]  # (37,)
    lift = LiftConv2d(1, 1, KERNEL_PX, orientations, padding="same", padding_mode="replicate", bias=False)
    conv = GroupConv2d(1, 1, KERNEL_PX, orientations, padding="same", padding_mode="replicate", bias=False)
    with torch.no_grad():
        lift.weight.copy_(stroke)
        conv.weight.copy_(torch.tensor(ORIENTATION_WEIGHTS[:orientations])[:, None] * stroke)
    return lift, conv


@torch.no_grad()
def _apply(lift: LiftConv2d, conv: GroupConv2d, tissue: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three outputs for an image (1, 3, H, W): after lifting, after group convolution, and after projection.

    A ReLU follows the lifting and the group convolution.
    """
    darkness = 1 - tissue.mean(dim=1, keepdim=True)
    lifted = lift(darkness).relu()
    convolved = conv(lifted).relu()
    return lifted, convolved, Project("max")(convolved)


def _make_tissue(size: int) -> Tensor:
    """Return a synthetic H&E image (1, 3, size, size) of a few elongated nuclei on stroma, with values from 0 to 1."""
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
    """Draw part 1 of the figure: the image, the rotated kernels, and the maps after lifting."""
    _write_heading(
        figure,
        0.985,
        "1  Lift",
        "The kernel is rotated to all orientations, and the image is convolved with each rotated kernel: one map per "
        "orientation.   (B, C, H, W) → (B, C', N, H, W)",
    )
    top, bottom = 0.893, 0.685
    titles = _orientation_titles()
    _show_image(_add_panels(figure, 1, 1, PanelArea(LEFT, 0.21, bottom, top))[0], tissue, "image")
    kernels = lift.kernels().detach()[:, 0]  # (N, 7, 7)
    panels = _add_panels(figure, 2, 4, PanelArea(0.275, 0.605, bottom, top))
    for panel, kernel, title in zip(panels, kernels, titles, strict=True):
        _show_kernel(panel, kernel, float(kernels.abs().max()), title)
    weights = lift.weight.shape[-1]
    _write_subtitle(figure, 0.44, top, f"{weights} weights on a disc, rotated (orange: positive, violet: negative)")
    _show_maps(_add_panels(figure, 2, 4, PanelArea(0.655, RIGHT, bottom, top)), lifted[0, 0], titles)
    _write_subtitle(figure, 0.82, top, "output")


def _draw_group_convolution(figure: Figure, conv: GroupConv2d, convolved: Tensor) -> None:
    """Draw part 2 of the figure: the first ROTATIONS_SHOWN rotated kernels, and the output of the group convolution.

    Each row of panels is a rotated kernel, and each panel in the row is a slice: the weights for one input orientation.
    """
    _write_heading(
        figure,
        0.655,
        "2  Group convolution",
        "A kernel has one slice per input orientation. To rotate the kernel, each slice is rotated, and the slices are "
        "shifted along the orientation axis (shift-twist).\n"
        "Frames: the same slice in each row, which moves one column per 45°; 180° to 315° are not shown."
        "   (B, C, N, H, W) → (B, C', N, H, W)",
    )
    top, bottom = 0.55, 0.29
    titles = _orientation_titles()
    # (output orientation, input orientation, 7, 7)
    kernels = conv.kernels().detach().view(ORIENTATIONS, ORIENTATIONS, KERNEL_PX, KERNEL_PX)
    panels = _add_panels(figure, ROTATIONS_SHOWN, ORIENTATIONS, PanelArea(LEFT + 0.055, 0.605, bottom, top), gap=0.12)
    for i in range(ROTATIONS_SHOWN):
        for j in range(ORIENTATIONS):
            panel = panels[i * ORIENTATIONS + j]
            _show_kernel(panel, kernels[i, j], float(kernels.abs().max()), titles[j] if i == 0 else "", frame=i == j)
        label = panels[i * ORIENTATIONS]
        label.set_ylabel(titles[i], fontsize=9.5, rotation=0, ha="right", va="center", color=INK)
    _write_subtitle(figure, 0.34, top, "input orientation →")
    figure.text(LEFT, (top + bottom) / 2, "kernel rotated by", rotation=90, fontsize=9.5, va="center", color=GRAY)
    _show_maps(_add_panels(figure, 2, 4, PanelArea(0.655, RIGHT, bottom + 0.02, top)), convolved[0, 0], titles)
    _write_subtitle(figure, 0.82, top, "output")


def _draw_projection(figure: Figure, upright: Sequence[Tensor], rotated: Sequence[Tensor]) -> None:
    """Draw part 3 of the figure: the outputs for an image and for the same image rotated by 90°.

    `upright` contains three items: the image, the output of the SE(2) layers, and the output of an ordinary CNN.
    `rotated` contains the same items for the rotated image.
    """
    errors = []
    for before, after in zip(upright[1:], rotated[1:], strict=True):
        expected = group.rotate(before, 90)
        errors.append(float((expected - after).norm() / expected.norm()))
    _write_heading(
        figure,
        0.255,
        "3  Project",
        "At each position, the maximum over all orientations is taken. If the image is rotated, the output rotates "
        f"with it: the relative error is {errors[0]:.0e}.\n"
        f"For an ordinary CNN with the same kernel, the relative error is {errors[1]:.1f}."
        "   (B, C, N, H, W) → (B, C, H, W)",
    )
    names = ("image", "lift, convolve, project", "ordinary CNN")
    rotated_names = ("image rotated by 90°", names[1], names[2])
    panels = _add_panels(figure, 1, 6, PanelArea(LEFT, RIGHT, 0.012, 0.165))
    limits = [float(output.max()) for output in upright[1:]]
    for offset, images, titles in ((0, upright, names), (3, rotated, rotated_names)):
        _show_image(panels[offset], images[0], titles[0])
        for k in (1, 2):
            _show_map(panels[offset + k], images[k][0, 0], limits[k - 1], titles[k])


def _orientation_titles() -> list[str]:
    """Return the angle of each orientation as text, such as "45°"."""
    return [f"{angle:g}°" for angle in group.angles(ORIENTATIONS)]


def _write_heading(figure: Figure, top: float, heading: str, text: str) -> None:
    figure.text(LEFT, top, heading, fontsize=14, fontweight="bold", va="top", color=INK)
    figure.text(LEFT, top - 0.026, text, fontsize=9.5, va="top", color=GRAY, linespacing=1.35)


def _write_subtitle(figure: Figure, center: float, top: float, text: str) -> None:
    figure.text(center, top + 0.02, text, fontsize=9.5, ha="center", va="bottom", color=GRAY)


def _add_panels(figure: Figure, rows: int, columns: int, box: PanelArea, gap: float = 0.2) -> list[Axes]:
    """Add a grid of panels to a figure, inside `box`, and return the panels row by row.

    `gap` is the space between two rows, as a fraction of the height of a panel.
    """
    gap = gap if rows > 1 else 0
    spec = figure.add_gridspec(rows, columns, **box._asdict(), wspace=0.08, hspace=gap)
    return [figure.add_subplot(spec[i, j], anchor="N") for i in range(rows) for j in range(columns)]


def _show_kernel(axes: Axes, kernel: Tensor, limit: float, title: str, frame: bool = False) -> None:
    """Show the weights (k, k) of a kernel on their disc, in colors from -`limit` to `limit`."""
    on_disc = kernel.masked_fill(~group.disc_mask(kernel.shape[-1]), torch.nan)
    axes.imshow(on_disc.numpy(), cmap="PuOr_r", vmin=-limit, vmax=limit)
    _finish_panel(axes, title, FRAME if frame else LIGHT_GRAY, 2.2 if frame else 0.6)


def _show_maps(panels: Sequence[Axes], maps: Tensor, titles: Sequence[str]) -> None:
    """Show one map (h, w) of `maps` (N, h, w) in each panel, with a common color scale."""
    for panel, values, title in zip(panels, maps, titles, strict=True):
        _show_map(panel, values, float(maps.max()), title)


def _show_map(axes: Axes, values: Tensor, limit: float, title: str) -> None:
    """Show a feature map (h, w), in colors from 0 to `limit`."""
    axes.imshow(values.numpy(), cmap="magma", vmin=0, vmax=limit)
    _finish_panel(axes, title)


def _show_image(axes: Axes, image: Tensor, title: str) -> None:
    axes.imshow(image[0].permute(1, 2, 0).numpy())
    _finish_panel(axes, title)


def _finish_panel(axes: Axes, title: str, color: str = LIGHT_GRAY, width: float = 0.6) -> None:
    axes.set_title(title, fontsize=8.5, pad=3, color=INK)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(color)
        spine.set_linewidth(width)
