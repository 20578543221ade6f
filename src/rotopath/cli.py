"""The command line: parses, calls, prints. Modules are imported only when a command needs them."""

from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import rotopath

app = typer.Typer(
    help="Networks for pathology that give the same answer however the slide lies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

PUBLISHED = [1, 4, 8, 16]


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"rotopath {rotopath.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="mitosis, nuclei or tumor; all of them when left out.")] = None,
    orientations: Annotated[
        list[int], typer.Option("--orientations", "-n", help="A number of orientations; may be given several times.")
    ] = PUBLISHED,
) -> None:
    """Print the networks: layers, sizes, channels and weights."""
    from rotopath.models import ARCHITECTURES

    if name is not None and name not in ARCHITECTURES:
        _refuse(f"There is no model {name!r}; choose from {', '.join(ARCHITECTURES)}.")
    try:
        for each in [name] if name else ARCHITECTURES:
            _print_architecture(each, orientations)
    except ValueError as error:
        _refuse(str(error))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture; made if need be.")] = Path("demo"),
) -> None:
    """Print the networks, measure how exactly they turn with their input, and draw how the layers work."""
    from rotopath.evaluation import smooth_images, untrained_errors
    from rotopath.models import ARCHITECTURES, mitosis
    from rotopath.reports.tables import rotation_error_table

    try:
        from rotopath.reports.layers import draw_layers
    except ModuleNotFoundError as missing:
        _refuse(f"The picture needs {str(missing.name).partition('.')[0]}: pip install 'rotopath[train]'.")
    if out.exists() and not out.is_dir():
        _refuse(f"{out} is a file, but the picture needs a folder; choose another one with --out.")
    try:
        picture = draw_layers(out / "layers.png")
    except OSError as error:
        _refuse(f"The picture could not be written to {out} ({error.strerror}); choose another folder with --out.")
    for name in ARCHITECTURES:
        _print_architecture(name, PUBLISHED)
    images = smooth_images(count=16, size=mitosis().receptive_field)
    errors = {
        f"N={n}": {angle: median(untrained_errors(partial(mitosis, n), images, angle)) for angle in (90, 45, 22.5)}
        for n in PUBLISHED
    }
    console.print(rotation_error_table("rotation error: mitosis network, untrained (median of nine), float32", errors))
    console.print(f"How the layers work: [bold]{picture}[/bold]")


def _print_architecture(name: str, orientations: list[int]) -> None:
    """As many numbers of orientations side by side as the terminal is wide, the others below."""
    from rotopath.models import ARCHITECTURES
    from rotopath.reports.tables import architecture_table

    across = max(1, (console.width - 32) // 11)
    for start in range(0, len(orientations), across):
        console.print(architecture_table(ARCHITECTURES[name], orientations[start : start + across]))


def _refuse(sentence: str) -> NoReturn:
    """A user's mistake: one sentence, exit code 2, no traceback."""
    Console(stderr=True).print(f"rotopath: {sentence}", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(2)
