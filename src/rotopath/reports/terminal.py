"""Terminal output that all commands share: paths, scores, progress bars and error messages.

At import, this module imports no packages that take long to import, such as torch.
"""

import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.markup import escape
from rich.progress import Progress
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

import rotopath

EXIT_ERROR, EXIT_INTERRUPTED, EXIT_TERMINATED = 2, 130, 143  # exit codes; 128 + SIGINT or SIGTERM, as in shells
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # also reverses the direction of text

LONG_WORD = re.compile(r"\S{1000,}")  # such as a number of thousands of digits in a damaged recipe


class SafeConsole(Console):
    """A console that prints control characters of texts, such as names of files, as codes such as \\x1b.

    A terminal would execute them, for example to change colors, its title, or lines that were already printed.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or not CONTROL.search(segment.text):
                yield segment
            else:
                text = CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), segment.text)
                yield Segment(text, segment.style)


console = SafeConsole()
DISK_FULL = "The disk is full; free some space, and run the same command again."


@contextmanager
def user_errors_in_one_sentence() -> Iterator[None]:
    """Context manager: if the user can correct an error, print it as one sentence and exit with code 2.

    These errors are problems with data, recipes, runs, clusters or files, and missing optional packages. All other
    errors are raised as usual, with a traceback. Warnings of rotopath are printed as one sentence too, once each. After
    Ctrl-C or SIGTERM, print what to do, and exit with code 130 or 143.
    """
    from rotopath.data import DataError
    from rotopath.environment import find_extra, install_command
    from rotopath.images import UnreadableFileError
    from rotopath.inference.cluster import ClusterError
    from rotopath.model_file import RunError
    from rotopath.recipe import RecipeError
    from rotopath.writing import BusyError, is_disk_full

    format_warning = warnings.formatwarning
    warnings.formatwarning = _make_warning_format()
    try:
        with terminate_like_interrupt():
            yield
    except KeyboardInterrupt as error:
        exit_interrupted(error)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if (extra := find_extra(package)) is None:
            raise  # no extra (group of optional packages) installs this package, so a user cannot correct the error
        exit_with_error(f"This command needs the package {package}; install it with: {install_command(extra)}.")
    except (DataError, UnreadableFileError, RecipeError, RunError, ClusterError, BusyError) as error:
        exit_with_error(str(error))
    except OSError as error:
        exit_with_error(_describe_os_error(error))
    except Exception as error:
        if not is_disk_full(error):  # libraries raise errors of their own because of a full disk
            raise
        exit_with_error(DISK_FULL)
    finally:
        warnings.formatwarning = format_warning


def _make_warning_format() -> Callable[..., str]:
    """Return a function that formats a warning like an error message, if it comes from rotopath."""
    format_others, printed = warnings.formatwarning, set[str]()
    package = Path(rotopath.__file__).parent

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if not Path(filename).is_relative_to(package):
            return format_others(message, category, filename, lineno, line)
        text = f"rotopath: {message}\n"
        is_new = text not in printed
        printed.add(text)
        return text if is_new else ""

    return format_warning


def _describe_os_error(error: OSError) -> str:
    """Return an error of the operating system as one sentence. Errors such as a full disk may not name a file."""
    from rotopath.inference.predict_files import DiskFullError
    from rotopath.writing import is_disk_full

    if is_disk_full(error) and not isinstance(error, DiskFullError):
        return DISK_FULL
    if error.errno is None:
        return str(error)
    if error.filename is None:
        return f"A file cannot be read or written ({error.strerror}); check the disk, and run the command again."
    return f"{error.filename} cannot be read or written ({error.strerror}); choose another path."


def exit_with_error(message: str) -> NoReturn:
    """Print an error message to stderr and exit with code 2."""
    print_error(message)
    raise typer.Exit(EXIT_ERROR)


class Terminated(KeyboardInterrupt):
    """Raised by the signal SIGTERM inside `terminate_like_interrupt`."""


@contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """Context manager: SIGTERM raises `Terminated`, a KeyboardInterrupt, so that files are cleaned up as after Ctrl-C.

    Schedulers of clusters send SIGTERM. In threads other than the main thread, which receive no signals, nothing
    changes.
    """

    def stop(_signal: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the cleaning up
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_interrupted(error: KeyboardInterrupt, folder: Path | None = None, note: str = "") -> NoReturn:
    """After Ctrl-C or SIGTERM: print how to resume the work, and exit with code 130 or 143.

    `error` is the interrupt. `folder` contains the work; None if there is nothing to resume. `note` is a clause that
    follows the sentence.
    """
    was_terminated = isinstance(error, Terminated)
    how = "terminated" if was_terminated else "interrupted"
    resume = f" to resume the work in {folder}" if folder else ""
    print_error(f"The command was {how}; run the same command again{resume}{note}.")
    raise typer.Exit(EXIT_TERMINATED if was_terminated else EXIT_INTERRUPTED)


def print_error(message: str) -> None:
    """Print an error message to stderr on one line, without wrapping it. The middle of very long words is left out."""
    message = LONG_WORD.sub(lambda word: f"{word[0][:100]}…{word[0][-100:]}", message)
    SafeConsole(stderr=True).print(f"rotopath: {message}", highlight=False, soft_wrap=True, markup=False)


def print_path(title: str, path: Path) -> None:
    """Print a title and the path of a file or folder that a command has written."""
    console.print(f"{title}: [bold]{escape(str(path))}[/bold]", highlight=False, soft_wrap=True)


def print_scores(title: str, path: Path) -> None:
    """Print the scores in the JSON file `path` as a table with a title, and print the path."""
    from rotopath.writing import parse_json

    console.print(score_table(title, parse_json(path.read_bytes())))
    print_path("All scores", path)


def transient_progress() -> Progress:
    """Return a progress bar on stderr. It is visible only in a terminal, and disappears when it is finished."""
    stderr = SafeConsole(stderr=True)
    return Progress(console=stderr, transient=True, disable=not stderr.is_terminal)


def score_table(title: str, metrics: Mapping[str, Mapping[str, Any]]) -> Group:
    """Return a table with a row for each score and a column for each split, and a note about confidence intervals.

    `metrics` maps the names of splits to their scores. A cell contains a score and its 95 % confidence interval, if
    there is one. The scores of each class also get rows, and so does the robustness to rotation, but only that of the
    first split. Other scores that are neither numbers nor texts, such as curves, are left out.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for split in metrics:
        table.add_column(split, justify="right")
    first = next(iter(metrics.values()))
    for name in dict.fromkeys(name for scores in metrics.values() for name in scores):
        values = [_format_score(scores.get(name), scores.get(f"{name}_interval")) for scores in metrics.values()]
        is_shown = not name.endswith("_interval") and (name != "interval_over" or _list_intervals(metrics))
        if any(values) and is_shown:
            table.add_row(name.replace("_", " "), *values)
        if name == "rotation" and isinstance(first.get(name), dict):
            for measure, value in first[name]["fair"].items():
                table.add_row(f"rotation, {measure}", f"{value:.4f}")
        if name == "classes" and isinstance(first.get(name), dict):
            _add_class_rows(table, [scores.get("classes", {}) for scores in metrics.values()])
    return Group(Text(title, "bold"), table, Text(_explain_intervals(metrics), "dim"))


def _add_class_rows(table: Table, splits: list[dict[str, Any]]) -> None:
    """Add a row for each score of each class to the table.

    `splits` contains a dictionary for each split, which maps class names to the scores of the class.
    """
    for name, scores in splits[0].items():
        for key in scores:
            values = [_format_score(split.get(name, {}).get(key)) for split in splits]
            if any(values):
                table.add_row(f"{name}: {key}", *values)


def _format_score(value: object, interval: object = None) -> str:
    """Return the text of a table cell for a score: a text, or a number with its confidence interval.

    `interval` is a list [low, high], or None if there is no interval. If `value` is neither a number nor a text, the
    cell is empty.
    """
    if isinstance(value, str | int):
        return str(value)
    if not isinstance(value, float):
        return ""
    if isinstance(interval, list):
        return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"{value:.3f}"


def _list_intervals(metrics: Mapping[str, Mapping[str, object]]) -> list[object]:
    """Return all confidence intervals in the scores of all splits."""
    return [
        value for scores in metrics.values() for key, value in scores.items() if key.endswith("_interval") and value
    ]


def _explain_intervals(metrics: Mapping[str, Mapping[str, object]]) -> str:
    """Return the note below the table of scores: how the intervals were computed, or why there are no intervals."""
    if not _list_intervals(metrics):
        return "No confidence intervals: there are too few patients, slides or patches.\n"
    unit = next(iter(metrics.values())).get("interval_over", "patients")
    missing = {"patches": "slides", "images": "patients"}.get(str(unit))
    unknown = f"The {missing} are unknown. Intervals over {missing} are usually wider.\n" if missing else ""
    return f"In brackets: 95 % confidence intervals, by bootstrap over {unit}.\n{unknown}"
