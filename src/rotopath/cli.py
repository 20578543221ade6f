"""The door: parses the command line, calls one function, prints. Rooms open only when a command needs them."""

from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

app = typer.Typer(
    help="Networks for pathology that give the same answer however the slide lies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Orientations = Annotated[list[int], typer.Option("--orientations", "-n", help="Numbers of orientations to show.")]


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="mitosis, nuclei or tumor; all of them when left out.")] = None,
    orientations: Orientations = [1, 4, 8, 16],  # noqa: B006
) -> None:
    """Print the networks: layers, sizes, channels and weights."""
    from rotopath.models import ARCHITECTURES
    from rotopath.reports.tables import architecture_table

    if name is not None and name not in ARCHITECTURES:
        _refuse(f"There is no model {name!r}; choose from {', '.join(ARCHITECTURES)}.")
    for architecture in [ARCHITECTURES[name]] if name else ARCHITECTURES.values():
        try:
            console.print(architecture_table(architecture, orientations))
        except ValueError as error:
            _refuse(str(error))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture; made if need be.")] = Path("demo"),
) -> None:
    """Print the networks, measure how exactly they turn with their input, and draw how the layers work."""
    from rotopath.evaluation import smooth_images, untrained_error
    from rotopath.models import ARCHITECTURES, mitosis
    from rotopath.reports.tables import architecture_table, rotation_error_table

    try:
        from rotopath.reports.layers import draw_layers
    except ModuleNotFoundError as missing:
        _refuse(f"The picture needs {missing.name}: pip install 'rotopath[train]'.")

    try:
        picture = draw_layers(out / "layers.png")
    except OSError as error:
        _refuse(f"The picture could not be written to {out}: {error.strerror}. Choose another folder with --out.")
    orientations = [1, 4, 8, 16]
    for architecture in ARCHITECTURES.values():
        console.print(architecture_table(architecture, orientations))
    images = smooth_images(count=4, size=132)
    errors = {
        f"N={n}": {angle: untrained_error(partial(mitosis, n), images, angle) for angle in (90, 45, 22.5)}
        for n in orientations
    }
    console.print(rotation_error_table("rotation error: mitosis network, untrained (median of nine), float32", errors))
    console.print(f"How the layers work: [bold]{picture}[/bold]")


def _refuse(sentence: str) -> NoReturn:
    """A user's mistake: one sentence, exit code 2, no traceback."""
    Console(stderr=True).print(f"rotopath: {sentence}", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(2)
