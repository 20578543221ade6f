"""The picture that explains the layers, drawn from the layers themselves: lift, shift-twist, project.

In: a file name. Out: a figure in which every kernel and every map was computed by `rotopath.nn`.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from rotopath import group
from rotopath.nn import GroupConv2d, LiftConv2d, Project
from rotopath.reports.figures import GREY, INK, save_figure

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
