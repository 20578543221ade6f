"""What all commands share: the app, its terminal, and how a user's mistakes are told."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(
    help="Networks for pathology that give the same answer however the slide lies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Make synthetic tissue; check and show data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
study_app = typer.Typer(help="Run a study of many trainings, and report on it.", no_args_is_help=True)
app.add_typer(study_app, name="study")
console = Console()


@contextmanager
def mistakes_in_one_sentence() -> Iterator[None]:
    """What a user can mend ends in a sentence, not in a traceback."""
    from rotopath.data import DataError
    from rotopath.extras import extra_of, install
    from rotopath.images import UnreadableFileError
    from rotopath.model_file import RunError
    from rotopath.recipe import RecipeError

    try:
        yield
    except ModuleNotFoundError as missing:
        package = str(missing.name).partition(".")[0]
        if (extra := extra_of(package)) is None:
            raise  # no extra brings it, so to name one would mislead
        refuse(f"This needs {package}: {install(extra)}.")
    except (DataError, UnreadableFileError, RecipeError, RunError) as error:
        refuse(str(error))
    except OSError as error:
        system = f"{error.filename} cannot be read or written ({error.strerror}); choose another place."
        refuse(str(error) if error.errno is None else system)


def print_place(what: str, path: Path) -> None:
    console.print(f"{what}: [bold]{escape(str(path))}[/bold]", highlight=False, soft_wrap=True)


def stop(folder: Path) -> NoReturn:
    """Ctrl-C: nothing is lost."""
    Console(stderr=True).print(f"rotopath: stopped; the same command goes on with {folder}.", highlight=False)
    raise typer.Exit(130)


def refuse(sentence: str) -> NoReturn:
    """A user's mistake: one sentence, exit code 2, no traceback."""
    Console(stderr=True).print(f"rotopath: {sentence}", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(2)
