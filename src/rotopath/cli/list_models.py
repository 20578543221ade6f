"""`rotopath models`: list pretrained models and network architectures, or describe one model or architecture."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Group
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from rotopath.reports import terminal

if TYPE_CHECKING:
    from rotopath.models import Architecture

PAPER_ORIENTATIONS = [1, 4, 8, 16]
CARD_WIDTH = 100  # longer lines are hard to read
FIRST_COLUMNS_WIDTH, PAIR_WIDTH = 32, 11  # in characters: "layer" and "px" together; "c" and "w" of one N


def list_models(
    name: Annotated[
        str | None,
        typer.Argument(help="Pretrained model, or architecture (mitosis, nuclei or tumor). Default: list all."),
    ] = None,
    orientations: Annotated[
        list[int],
        typer.Option("--orientations", "-n", help="Number of orientations N in the tables. Can be repeated."),
    ] = PAPER_ORIENTATIONS,
) -> None:
    """List pretrained models and network architectures, or describe one model or architecture.

    With the name of a pretrained model, show its model card: training data, license, scores and limits, and the
    default thresholds.

    With the name of an architecture, show a table of its layers: size of the output, channels and number of weights.
    """
    from rotopath import pretrained
    from rotopath.models import ARCHITECTURES
    from rotopath.runs import read_model_info

    names = pretrained.list_pretrained()
    if name in names:
        card = (pretrained.HOME / name / pretrained.CARD).read_text(encoding="utf-8")
        terminal.console.print(Markdown(card), width=min(terminal.console.width, CARD_WIDTH))
        info = read_model_info(pretrained.HOME / name)
        thresholds = info.task.describe_operating_point(info.point)
        terminal.console.print(f"\nDefaults of `rotopath predict`: {thresholds}.", highlight=False, soft_wrap=True)
        raise typer.Exit
    if name is not None and name not in ARCHITECTURES:
        terminal.exit_with_error(f"There is no model {name!r}; choose from {', '.join([*names, *ARCHITECTURES])}.")
    chosen = [ARCHITECTURES[name]] if name else list(ARCHITECTURES.values())
    try:
        tables = [table for architecture in chosen for table in _architecture_tables(architecture, orientations)]
    except ValueError as error:
        terminal.exit_with_error(str(error))
    if name is None:
        terminal.console.print(pretrained_table([pretrained.HOME / model for model in names]))
    for table in tables:
        terminal.console.print(table)


def pretrained_table(folders: Sequence[Path]) -> Group:
    """Return a table of pretrained models: task, pixel spacing, test score, file size, and permitted use."""
    from rotopath.model_file import WEIGHTS
    from rotopath.runs import METRICS, PROVENANCE, read_model_info

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("name", "task", "µm/px", "test score", "size", "use"):
        table.add_column(title, justify="right" if title in ("µm/px", "size") else "left", no_wrap=True)
    for folder in folders:
        task, scores = read_model_info(folder).task, _read_json(folder / METRICS)["test"]
        table.add_row(
            Text(folder.name, "bold"),
            task.name,
            f"{task.spacing_um_px:g}",
            f"{task.score_name.replace('f1', 'F1')} {scores[task.score_name]:.3f}",
            f"{(folder / WEIGHTS).stat().st_size // 1000} kB",
            "any" if _read_json(folder / PROVENANCE)["data"]["commercial"] else "not commercial",
        )
    legend = (
        "These models are part of the package. They were trained on small samples of\n"
        "real data and are not for clinical use. Not commercial: the license of the\n"
        "training data forbids commercial use, which includes use of the weights.\n"
        'In Python: rp.load("NAME"). In a shell: rotopath predict NAME, evaluate NAME,\n'
        "export NAME. Data, license, scores and limits: rotopath models NAME.\n"
    )
    return Group(Text("Pretrained models", style="bold"), table, Text(legend, style="dim"))


def architecture_table(architecture: "Architecture", orientations: Sequence[int]) -> Group:
    """Return a table with a row for each layer: the side of its output in pixels, its channels and its weights.

    For each number of orientations N in `orientations`, the table has a column with the number of channels and a column
    with the number of weights.
    """
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
        f"Lift, GConv: lifting and group convolution, with batch norm and ReLU.\n"
        f"Receptive field {a.receptive_field} px, stride {a.stride} px.\n"
        f"The sides of an image must be {a.receptive_field} + {a.size_step}·k px, with k = 0, 1, 2, ...\n"
    )
    if any(stage.skip is not None for stage in a.stages):
        legend = f"Up 2, join i: upsample by 2, and concatenate with layer i before its pooling.\n{legend}"
    return Group(Text(f"{a.name}: {a.task}", style="bold"), table, Text(legend, style="dim"))


def _architecture_tables(architecture: "Architecture", orientations: Sequence[int]) -> list[Group]:
    """Return tables for all numbers of orientations, divided so that each table fits the width of the terminal."""
    count = max(1, (terminal.console.width - FIRST_COLUMNS_WIDTH) // PAIR_WIDTH)
    return [
        architecture_table(architecture, orientations[start : start + count])
        for start in range(0, len(orientations), count)
    ]


def _stage_name(architecture: "Architecture", i: int) -> str:
    """Return the title of the row for stage `i` (from 0) of an architecture, such as "2  GConv 5×5, Pool 2"."""
    stage = architecture.stages[i]
    skip = "" if stage.skip is None else f"Up 2, join {stage.skip + 1}, "
    conv = "GConv" if i else "Lift"
    pool = f", Pool {stage.pool}" if stage.pool > 1 else ""
    return f"{i + 1}  {skip}{conv} {stage.kernel}×{stage.kernel}{pool}"


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
