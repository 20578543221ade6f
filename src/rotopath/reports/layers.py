"""The picture that explains the layers, drawn from the layers themselves: lift, shift-twist, project.

In: a file name. Out: a figure in which every kernel and every map was computed by `rotopath.nn`.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from rotopath import group
from rotopath.nn import GroupConv2d, LiftConv2d, Project

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
AGREEMENT = [1.0, 0.55, 0.15, -0.35, -0.6, -0.35, 0.15, 0.55]  # how a group kernel weighs its neighbour orientations
STAINS = ([0.30, 0.72, 0.42], [0.65, 0.70, 0.29])  # eosin and hematoxylin, optical density of red, green, blue
TINT = "#c2410c"


def draw_layers(path: Path) -> Path:
    """Draw the figure into a new file, whose folder is made if need be; gives the path back."""
    lift, conv = _layers()
    tissue = _tissue(size=68)
    turned = group.rotate(tissue, 90)
    lifted, convolved, projected = _respond(lift, conv, tissue)
    *_, projected_turned = _respond(lift, conv, turned)
    deviation = float((group.rotate(projected, 90) - projected_turned).abs().max() / projected.abs().max())

    figure = Figure(figsize=(11, 11), dpi=150, facecolor="white")
    parts = figure.subfigures(3, 1, height_ratios=(1.0, 1.2, 0.95), squeeze=False)
    lifting, convolution, projection = parts[:, 0]
    _draw_lifting(lifting, tissue, lift, lifted)
    _draw_convolution(convolution, conv, convolved)
    _draw_projection(projection, tissue, turned, projected, projected_turned, deviation)

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    try:
        figure.savefig(unfinished, format=path.suffix.removeprefix("."))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _layers() -> tuple[LiftConv2d, GroupConv2d]:
    stroke = torch.tensor(STROKE)[group.disc(SIZE)]  # (37,)
    lift = LiftConv2d(1, 1, SIZE, N, bias=False)
    conv = GroupConv2d(1, 1, SIZE, N, bias=False)
    with torch.no_grad():
        lift.weight.copy_(stroke)
        conv.weight.copy_(torch.tensor(AGREEMENT)[:, None] * stroke)
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
    random = torch.Generator().manual_seed(3)
    hematoxylin = torch.zeros(size + 40, size + 40)
    places = [(14, 16, 10), (20, 47, 60), (46, 20, 120), (55, 52, 160), (34, 36, 95), (6, 60, 35), (63, 6, 80)]
    for row, column, angle in places:
        window = hematoxylin[row : row + 41, column : column + 41]
        window.copy_(torch.maximum(window, group.rotate(canvas[None, None], angle)[0, 0].clamp(0)))
    hematoxylin = hematoxylin[20:-20, 20:-20] * (0.9 + 0.2 * torch.rand(size, size, generator=random))
    eosin = 0.28 + 0.08 * torch.rand(size, size, generator=random)
    density = torch.einsum("shw,sc->chw", torch.stack([eosin, hematoxylin]), torch.tensor(STAINS))
    return torch.exp(-density)[None]


def _draw_lifting(figure: SubFigure, tissue: Tensor, lift: LiftConv2d, lifted: Tensor) -> None:
    _caption(
        figure,
        "1  Lift",
        "The kernel is turned to every orientation, and each copy looks for its pattern in the image:\n"
        "one map an orientation.  (B, C, H, W) → (B, C, N, H, W)",
    )
    image, copies, maps = _columns(figure, widths=(1, 1.55, 2.1))
    _show_image(image.subplots(), tissue, "image")
    kernels = lift.kernels().detach()[:, 0]  # (N, 7, 7)
    titles = [f"{angle:g}°" for angle in group.angles(N)]
    _show_kernels(_grid(copies, 2, 4), kernels, titles)
    copies.suptitle(f"{lift.weight.shape[-1]} base weights, turned to {N} orientations", fontsize=9, y=0.99)
    _show_maps(_grid(maps, 2, 4), lifted[0, 0], titles)
    maps.suptitle("lifted image, one map an orientation", fontsize=9, y=0.99)


def _draw_convolution(figure: SubFigure, conv: GroupConv2d, convolved: Tensor) -> None:
    _caption(
        figure,
        "2  Group convolution",
        "A kernel on positions and orientations. To turn it, turn each slice, and shift all along θ (shift-twist):\n"
        "the framed slice moves one column to the right with every 45°.  (B, C, N, H, W) → (B, C', N, H', W')",
    )
    table, maps = _columns(figure, widths=(2.6, 2.05))
    kernels = conv.kernels().detach().view(N, N, SIZE, SIZE)  # output orientation, input orientation
    turns = range(4)
    axes = table.subplots(len(turns), N, gridspec_kw={"wspace": 0.12, "hspace": 0.12, "left": 0.09, "top": 0.86})
    limit = float(kernels.abs().max())
    for i in turns:
        for j in range(N):
            _show_kernel(axes[i][j], kernels[i, j], limit, frame=i == j)
        axes[i][0].set_ylabel(f"{group.angles(N)[i]:g}°", fontsize=9, rotation=0, ha="right", va="center")
    for j, angle in enumerate(group.angles(N)):
        axes[0][j].set_title(f"{angle:g}°", fontsize=7.5, pad=3)
    table.suptitle("kernel turned to 0°, 45°, 90°, 135° (rows), by input orientation (columns)", fontsize=9, y=0.99)
    _show_maps(_grid(maps, 2, 4), convolved[0, 0], [f"{angle:g}°" for angle in group.angles(N)])
    maps.suptitle("its output, one map an orientation", fontsize=9, y=0.99)


def _draw_projection(
    figure: SubFigure, tissue: Tensor, turned: Tensor, projected: Tensor, projected_turned: Tensor, deviation: float
) -> None:
    _caption(
        figure,
        "3  Project",
        "The maximum over orientations forgets the angle and keeps the place. Turn the image, and the answer turns\n"
        f"with it, the same to rounding: the largest difference is {deviation:.0e} of the maximum."
        "  (B, C, N, H, W) → (B, C, H, W)",
    )
    axes = figure.subplots(1, 4, gridspec_kw={"wspace": 0.12, "left": 0.05, "right": 0.95, "top": 0.72, "bottom": 0.06})
    _show_image(axes[0], tissue, "image")
    _show_map(axes[1], projected[0, 0], float(projected.max()), "its projection")
    _show_image(axes[2], turned, "image turned by 90°")
    _show_map(axes[3], projected_turned[0, 0], float(projected.max()), "its projection")


def _caption(figure: SubFigure, head: str, text: str) -> None:
    figure.text(0.03, 0.985, head, fontsize=13, fontweight="bold", va="top", color="#111827")
    figure.text(0.03, 0.915, text, fontsize=9, va="top", color="#374151", linespacing=1.4)


def _columns(figure: SubFigure, widths: Sequence[float]) -> list[SubFigure]:
    """Columns below a caption."""
    below = figure.subfigures(2, 1, height_ratios=(0.22, 0.78), squeeze=False)[1, 0]
    return list(below.subfigures(1, len(widths), width_ratios=widths, squeeze=False)[0])


def _grid(figure: SubFigure, rows: int, columns: int) -> list[Axes]:
    spacing = {"wspace": 0.08, "hspace": 0.2, "left": 0.03, "right": 0.97, "top": 0.86, "bottom": 0.03}
    return list(figure.subplots(rows, columns, gridspec_kw=spacing).flat)


def _show_kernels(axes: Sequence[Axes], kernels: Tensor, titles: Sequence[str]) -> None:
    for ax, kernel, title in zip(axes, kernels, titles, strict=True):
        _show_kernel(ax, kernel, float(kernels.abs().max()))
        ax.set_title(title, fontsize=7.5, pad=3)


def _show_kernel(ax: Axes, kernel: Tensor, limit: float, frame: bool = False) -> None:
    on_disc = kernel.masked_fill(~group.disc(kernel.shape[-1]), torch.nan)
    ax.imshow(on_disc.numpy(), cmap="PuOr_r", vmin=-limit, vmax=limit)
    _bare(ax, TINT if frame else "#d1d5db", 2.0 if frame else 0.6)


def _show_maps(axes: Sequence[Axes], maps: Tensor, titles: Sequence[str]) -> None:
    for ax, values, title in zip(axes, maps, titles, strict=True):
        _show_map(ax, values, float(maps.max()), title)


def _show_map(ax: Axes, values: Tensor, limit: float, title: str) -> None:
    ax.imshow(values.numpy(), cmap="magma", vmin=0, vmax=limit)
    ax.set_title(title, fontsize=7.5, pad=3)
    _bare(ax)


def _show_image(ax: Axes, image: Tensor, title: str) -> None:
    ax.imshow(image[0].permute(1, 2, 0).numpy())
    ax.set_title(title, fontsize=7.5, pad=3)
    _bare(ax)


def _bare(ax: Axes, color: str = "#d1d5db", width: float = 0.6) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_color(color)
        spine.set_linewidth(width)
