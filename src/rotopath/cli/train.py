"""`rotopath train`: train a network from a recipe. `rotopath recipes` and `rotopath init`: list and write recipes.

`rotopath demo`: train two networks on synthetic tissue.
"""

import json
import webbrowser
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rotopath.reports import terminal


def train(
    recipe: Annotated[
        Path,
        typer.Argument(help="Recipe: a TOML file, or the name of a recipe of the package (see `rotopath recipes`)."),
    ],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the recipe: key=value. Can be repeated.")
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Start from the weights of this model (fine-tuning): the name of a pretrained model, or a run folder. "
            "Short for --set from=MODEL.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder, for the trained model, the log and the scores. Default for a recipe NAME.toml with 8 "
            "orientations and seed 0: runs/NAME-N8-seed0."
        ),
    ] = None,
) -> None:
    """Train a network as a recipe specifies, and print its scores.

    To resume an interrupted training, run the same command again.
    """
    with terminal.user_errors_in_one_sentence():
        from rotopath.recipe import read_recipe
        from rotopath.reports.progress import TrainingProgress
        from rotopath.runs import METRICS
        from rotopath.training import is_first_process, name_folder
        from rotopath.training import train as train_run

        checked = read_recipe(recipe, [*(changes or []), *([f"from={json.dumps(from_)}"] if from_ else [])])
        folder = out or name_folder(recipe.stem, checked)
        console = terminal.console if is_first_process() else Console(quiet=True)
        print_line = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        try:
            with TrainingProgress(checked, console) as progress:
                run = train_run(checked, folder, on_progress=progress.show, on_message=print_line)
        except KeyboardInterrupt:
            terminal.exit_interrupted(folder)
        if not is_first_process():
            raise typer.Exit  # only the first of several processes prints
        if checked.mining is not None:
            from rotopath.data import open_data
            from rotopath.reports.contact_sheet import draw_hard_examples
            from rotopath.training import MINED, read_hard_examples

            dataset = open_data(checked.data, None, checked.data_spacing_um_px)
            examples, spacing_um_px = read_hard_examples(folder / MINED), run.task.spacing_um_px
            sheet = draw_hard_examples(dataset, examples, spacing_um_px, folder / "mined.png")
            terminal.print_path("Hard examples", sheet)
    terminal.print_scores(str(folder), folder / METRICS)


def recipes() -> None:
    """List the recipes of the package. `rotopath train NAME --set data=PATH` trains with one of them.

    They have the settings of the paper. For your own data, write a recipe with `rotopath init`.
    """
    from rotopath.recipe import RECIPES, list_recipes

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("recipe")
    for name, line in list_recipes().items():
        table.add_row(Text(name, "bold"), line)
    terminal.console.print(table)
    terminal.print_path("Files", RECIPES)


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for images, runs and report. Existing images and runs are reused.")
    ] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps per epoch. Each training has three epochs.")] = 220,
    size: Annotated[int, typer.Option(min=160, help="Height and width of the synthetic images, in pixels.")] = 512,
) -> None:
    """Train an ordinary and a rotation-equivariant network on synthetic tissue, and compare both in an HTML report.

    The report shows the scores and detections of both networks, and their predictions for rotated images.

    The demo takes a few minutes.
    """
    if out.exists() and not out.is_dir():
        terminal.exit_with_error(f"--out {out} is a file, but the demo needs a folder; choose another path with --out.")
    with terminal.user_errors_in_one_sentence():
        from rotopath.reports.demo_report import run_demo

        report = run_demo(out, terminal.console, steps, size)
    terminal.print_path("Report", report)
    if terminal.console.is_terminal:
        webbrowser.open(report.resolve().as_uri())
