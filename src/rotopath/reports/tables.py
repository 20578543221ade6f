"""Tables for the terminal: architectures, and how far networks are from turning with their input."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rotopath.models import Architecture


def architecture_table(architecture: Architecture, orientations: Sequence[int]) -> Group:
    """Every layer with its output size, and its channels and weights for each number of orientations."""
    a = architecture
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("\nlayer", no_wrap=True)
    table.add_column("\npx", justify="right")
    for n in orientations:
        table.add_column("\nc", justify="right")
        table.add_column(f"N={n}\nw", justify="right")
    channels = [a.channels(n) for n in orientations]
    weights = [a.weights(n) for n in orientations]
    sizes = a.sizes(a.input_px)
    for i, size in enumerate(sizes):
        counts = [str(count) for c, w in zip(channels, weights, strict=True) for count in (c[i], w[i])]
        table.add_row(_stage_name(a, i), str(size), *counts)
    table.add_row(f"{a.projection} over orientations", str(sizes[-1]), *[x for c in channels for x in (str(c[-1]), "")])
    head = "Conv 1×1, BN" if a.head_norm else "Conv 1×1"
    table.add_row(head, str(sizes[-1]), *[x for w in weights for x in (str(a.outputs), str(w[-1]))], end_section=True)
    table.add_row("total", "", *[x for w in weights for x in ("", str(sum(w)))], style="bold")
    legend = (
        f"px: side of the output for an image of {a.input_px} px; c: channels; w: weights.\n"
        f"Lift and GConv have batch norm and ReLU. "
        f"Receptive field {a.receptive_field} px, stride {a.stride} px.\n"
        f"Takes images with sides of {a.receptive_field} + {a.size_step}·k px.\n"
    )
    if any(stage.skip is not None for stage in a.stages):
        legend = f"Up 2, join k: enlarged twofold, and joined with the output of layer k before its pool.\n{legend}"
    return Group(Text(f"{a.name}: {a.task}", style="bold"), table, Text(legend, style="dim"))


def rotation_error_table(title: str, errors: Mapping[str, Mapping[float, float]]) -> Group:
    """Equivariance errors by row name and angle."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for angle in next(iter(errors.values())):
        table.add_column(f"{angle:g}°", justify="right")
    for name, row in errors.items():
        table.add_row(name, *[f"{error:.1e}" if error < 1e-3 else f"{error:.2f}" for error in row.values()])
    legend = (
        "‖f(turned x) - turned f(x)‖ / ‖turned f(x)‖: 0 is perfect, 1e-06 is rounding.\n"
        "Between the quarter turns kernels and pools are interpolated; random weights on\n"
        "noise are the hardest case for that: docs/exactness.md.\n"
    )
    return Group(Text(title, style="bold"), table, Text(legend, style="dim"))


def _stage_name(architecture: Architecture, i: int) -> str:
    stage = architecture.stages[i]
    before = "" if stage.skip is None else f"Up 2, join {stage.skip + 1}, "
    kind = "GConv" if i else "Lift"
    behind = f", Pool {stage.pool}" if stage.pool > 1 else ""
    return f"{i + 1}  {before}{kind} {stage.kernel}×{stage.kernel}{behind}"
