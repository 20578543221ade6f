"""The command line: parses, calls, prints. Modules are imported only when a command needs them."""

import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import typer
from rich.console import Console
from rich.markup import escape

import rotopath

if TYPE_CHECKING:
    from rich.console import Group

    from rotopath.data import Task

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

PUBLISHED = [1, 4, 8, 16]
CARD_WIDTH = 100  # longer lines are hard to read


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
    name: Annotated[
        str | None, typer.Argument(help="A pretrained model, or mitosis, nuclei or tumor; all of them when left out.")
    ] = None,
    orientations: Annotated[
        list[int], typer.Option("--orientations", "-n", help="A number of orientations; may be given several times.")
    ] = PUBLISHED,
) -> None:
    """List pretrained models, and the networks with all layers, sizes and weights; or show the card of a model."""
    from rotopath import pretrained
    from rotopath.models import ARCHITECTURES

    names = pretrained.list_names()
    if name in names:
        _print_card(pretrained.HOME / name / pretrained.CARD)
        raise typer.Exit
    if name is not None and name not in ARCHITECTURES:
        _refuse(f"There is no model {name!r}; choose from {', '.join([*names, *ARCHITECTURES])}.")
    try:
        tables = [table for each in ([name] if name else ARCHITECTURES) for table in _draw_network(each, orientations)]
    except ValueError as error:
        _refuse(str(error))
    if name is None:
        from rotopath.reports.tables import pretrained_table

        console.print(pretrained_table([pretrained.HOME / each for each in names]))
    for table in tables:
        console.print(table)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for all that is made; what is there is kept.")] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps in each of three epochs.")] = 130,
    size: Annotated[int, typer.Option(min=160, help="Side of the synthetic fields, in pixels.")] = 512,
) -> None:
    """Train N=1 and N=8 on synthetic tissue, and write a report: scores, detections, predictions as images turn."""
    if out.exists() and not out.is_dir():
        _refuse(f"{out} is a file, but the demonstration needs a folder; choose another one with --out.")
    with _mistakes_in_one_sentence():
        from rotopath.demo import run_demo

        report = run_demo(out, console, steps, size)
    _print_place("Report", report)
    if console.is_terminal:
        webbrowser.open(report.resolve().as_uri())


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML file, such as those in recipes/.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="key=value to change in the recipe; may be given several times.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; named after the recipe when left out.")] = None,
) -> None:
    """Train a network by a recipe. The same command goes on with a training that was interrupted."""
    with _mistakes_in_one_sentence():
        from rotopath.recipe import read_recipe
        from rotopath.reports.progress import TrainingProgress
        from rotopath.training import is_first
        from rotopath.training import train as train_run

        chosen = read_recipe(recipe, changes or [])
        folder = out or Path("runs") / f"{recipe.stem}-N{chosen.orientations}-seed{chosen.seed}"
        try:
            with TrainingProgress(chosen, console if is_first() else Console(quiet=True)) as progress:
                train_run(chosen, folder, progress.show)
        except KeyboardInterrupt:
            _stop(folder)
        if not is_first():
            raise typer.Exit  # the first of several processes prints
        if chosen.mining is not None:
            from rotopath.data import open_data
            from rotopath.reports.contact_sheet import draw_examples
            from rotopath.training.mining import MINED, read_examples

            examples = read_examples(folder / MINED)
            _print_place("Hard examples", draw_examples(open_data(chosen.data), examples, folder / "mined.png"))
    _print_scores(folder)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, or a pretrained model.")],
    data: Annotated[Path | None, typer.Option(help="Other data than the run was trained on.")] = None,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    tta: Annotated[int, typer.Option(min=1, help="Mean prediction over so many turns of each image.")] = 1,
    rule: Annotated[
        str | None, typer.Option(help="How hits are counted: amida13 or one-to-one (mitosis), iou or area (nuclei).")
    ] = None,
    robustness: Annotated[bool, typer.Option(help="Measure how answers change when inputs turn, too.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="A JSON file for all scores; in the run folder when left out.")
    ] = None,
) -> None:
    """Compute every score of a run again, on its own data or on other."""
    from rich.progress import Progress

    with _mistakes_in_one_sentence():
        from rotopath.assessment import evaluate as evaluate_run

        shown = Console(stderr=True)
        with Progress(console=shown, transient=True, disable=not shown.is_terminal) as bar:
            reading = bar.add_task("reading")
            written = evaluate_run(
                *(run, data, split, tta, robustness, out, rule),
                seen=lambda what, done, count: bar.update(reading, description=what, completed=done, total=count),
            )
    _print_scores(run, written)


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    images: Annotated[list[Path], typer.Argument(help="Slides, images, or folders of them.")],
    out: Annotated[Path, typer.Option(help="A folder for the results, with one in it for each slide.")],
    spacing_um_px: Annotated[
        float | None, typer.Option("--spacing-um-px", help="The side of a pixel, for files that do not tell it.")
    ] = None,
    rotations: Annotated[
        int, typer.Option(min=1, help="Turns of every tile: the mean is used, and their deviation is written too.")
    ] = 1,
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="Look also where there seems to be no tissue.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU when left out, if there is one.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Spread slides over a Dask cluster: its scheduler's address, local, or slurm.")
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Workers of a local or a SLURM cluster.")] = 2,
) -> None:
    """Find what a model was trained for in images and whole slides. What is done already is skipped."""
    with _mistakes_in_one_sentence():
        from rotopath.inference.slides import Options
        from rotopath.predicting import list_slides, predict_slides
        from rotopath.reports.progress import SlideProgress
        from rotopath.runs import load

        model, slides, options = load(run), list_slides(images), Options(rotations, everywhere=everywhere)
        if spacing_um_px is not None and not 0.05 <= spacing_um_px <= 5:
            _refuse(f"--spacing-um-px is {spacing_um_px:g}, but microscopes have 0.05 to 5 µm/px.")
        states: list[str] = []
        with SlideProgress(len(slides), console) as progress:
            try:
                if cluster is None:
                    outcomes = predict_slides(model, slides, out, options, spacing_um_px, device, progress.show)
                else:
                    from rotopath.study.slides import predict_on_cluster

                    outcomes = predict_on_cluster(run, slides, out, options, spacing_um_px, device, cluster, at_once)
                for outcome in outcomes:
                    progress.tell(outcome)
                    states.append(outcome.state)
            except KeyboardInterrupt:
                _stop(out)
    _print_place("Results", out)
    if "failed" in states:
        raise typer.Exit(2 if len(states) == states.count("failed") else 1)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or a pretrained model.")],
    to: Annotated[
        str, typer.Option(help="torchscript, which WSInfer and QuPath read; onnx; or torch, a program of torch.export.")
    ] = "torchscript",
    out: Annotated[Path | None, typer.Option(help="A folder for the model; in the run folder when left out.")] = None,
) -> None:
    """Write the network of a run for other software: as a plain CNN, with what it expects and where it comes from."""
    with _mistakes_in_one_sentence():
        from rotopath.exporting import export as export_run

        place = export_run(run, to, out)
    _print_place("Exported", place)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, to go with a bug report.")] = False,
) -> None:
    """Show what is installed and what is missing, and test that it works. Exit code 1 if something does not."""
    from rotopath.doctor import examine, run_self_tests
    from rotopath.reports import health

    found = examine()
    if not as_json:
        console.print(health.findings(found), health.self_test_title(), highlight=False)
    outcomes = []
    for outcome in run_self_tests():
        outcomes.append(outcome)
        if not as_json:
            console.print(health.outcome(outcome))
    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps(found | {"self_tests": [asdict(one) for one in outcomes]}, indent=1, ensure_ascii=False))
    else:
        console.print(health.verdict(outcomes))
    if any(one.state == "fails" for one in outcomes):
        raise typer.Exit(1)


@data_app.command("check")
def data_check(
    path: Annotated[Path, typer.Argument(help="A folder of AMIDA13, Kumar/MoNuSeg or PCam, or a manifest.")],
    task: Annotated[str | None, typer.Option(help="Refuse data of another task: mitosis, nuclei, tumor.")] = None,
) -> None:
    """Find out what a folder holds, read all of it, count, and list every problem. Exit code 1 if there are any."""
    from rich.progress import Progress

    from rotopath.data import check, open_data, problems
    from rotopath.reports.tables import data_table

    with _mistakes_in_one_sentence():
        collection = open_data(path, None if task is None else _task(task))
        shown = Console(stderr=True)
        with Progress(console=shown, transient=True, disable=not shown.is_terminal) as bar:
            reading = bar.add_task("reading", total=len(collection.pictures))
            found = check(collection, progress=lambda count: bar.advance(reading, count))
    console.print(data_table(found), highlight=False, soft_wrap=True)
    if problems(found.findings):
        raise typer.Exit(1)


@data_app.command("show")
def data_show(
    path: Annotated[Path, typer.Argument(help="A folder of AMIDA13, Kumar/MoNuSeg or PCam, or a manifest.")],
    out: Annotated[Path, typer.Option(help="The picture to write: PNG, JPEG, PDF or SVG.")] = Path("contact-sheet.png"),
    seed: Annotated[int, typer.Option(min=0, help="Another number shows other images.")] = 0,
) -> None:
    """Draw a contact sheet: some images of each split, with their annotations."""
    from rotopath.data import open_data

    if out.suffix.lower() not in (".png", ".jpg", ".pdf", ".svg"):
        _refuse(f"{out} is no name for a picture; choose one that ends in .png, .jpg, .pdf or .svg.")
    with _mistakes_in_one_sentence():
        from rotopath.reports.contact_sheet import draw_contact_sheet

        collection = open_data(path)
        _print_place("Contact sheet", draw_contact_sheet(collection, out, seed))


@data_app.command("make")
def data_make(
    task: Annotated[str, typer.Option(help="mitosis, nuclei or tumor.")],
    out: Annotated[Path, typer.Option(help="A folder that is new or empty.")],
    seed: Annotated[int, typer.Option(min=0, help="The same number makes the same bytes.")] = 0,
) -> None:
    """Make synthetic tissue with annotations, in the layout of the task's benchmark."""
    from rotopath.data.synthetic import make_mitosis, make_nuclei, make_tumor

    makers: dict[Task, Callable[[Path, int], None]]
    makers = {"mitosis": make_mitosis, "nuclei": make_nuclei, "tumor": make_tumor}
    with _mistakes_in_one_sentence():
        makers[_task(task)](out, seed)
    _print_place("Synthetic tissue", out)


@study_app.command("run")
def study_run(
    study: Annotated[Path, typer.Argument(help="A TOML file, such as those in studies/.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="key=value to change in it, such as tumor.set.data=FOLDER.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for all runs; named after the study when left out.")
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side; chosen for this machine when left out.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="A Dask cluster: the address of its scheduler, local, or slurm.")
    ] = None,
) -> None:
    """Run a grid of trainings and evaluations. The same command skips what is done, and goes on with the rest."""
    with _mistakes_in_one_sentence():
        from rotopath.reports.study_progress import StudyProgress
        from rotopath.study import read_study, run_study
        from rotopath.study.engines import count_at_once, here, on_cluster

        chosen = read_study(study, changes or [])
        folder = out or Path("runs") / study.stem
        count = at_once or count_at_once()
        try:
            with (
                here(count) if cluster is None else on_cluster(cluster, count) as submit,
                StudyProgress(chosen, console) as progress,
            ):
                states = run_study(chosen, folder, submit, progress.show)
        except KeyboardInterrupt:
            _stop(folder)
    failed = {job.name: one.reason for job, one in states.items() if one.state == "failed"}
    for name, reason in failed.items():
        Console(stderr=True).print(f"rotopath: {name} failed: {reason}", highlight=False, soft_wrap=True, markup=False)
    _print_place("Runs", folder)
    if failed:
        raise typer.Exit(1)


@study_app.command("report")
def study_report(
    study: Annotated[Path, typer.Argument(help="The folder of a study.")],
    out: Annotated[
        Path | None, typer.Option(help="A folder for the page, tables and figures; in the study's when left out.")
    ] = None,
) -> None:
    """Write the tables, the figures and a page about a study, from the files of its runs alone."""
    with _mistakes_in_one_sentence():
        from rotopath.reports.study_page import write_report

        report = write_report(study, out or study / "report")
    _print_place("Report", report)


def _task(name: str) -> "Task":
    from rotopath.data import MODEL_SPACING_UM_PX

    if name not in MODEL_SPACING_UM_PX:
        _refuse(f"There is no task {name!r}; choose from {', '.join(MODEL_SPACING_UM_PX)}.")
    return cast("Task", name)


@contextmanager
def _mistakes_in_one_sentence() -> Iterator[None]:
    """What a user can mend ends in a sentence, not in a traceback."""
    from rotopath.data import DataError
    from rotopath.extras import extra_of, install
    from rotopath.images import UnreadableFileError
    from rotopath.recipe import RecipeError
    from rotopath.runs import RunError

    try:
        yield
    except ModuleNotFoundError as missing:
        package = str(missing.name).partition(".")[0]
        _refuse(f"This needs {package}: {install(extra_of(package))}.")
    except (DataError, UnreadableFileError, RecipeError, RunError) as error:
        _refuse(str(error))
    except OSError as error:
        system = f"{error.filename} cannot be read or written ({error.strerror}); choose another place."
        _refuse(str(error) if error.errno is None else system)


def _print_card(path: Path) -> None:
    from rich.markdown import Markdown

    console.print(Markdown(path.read_text(encoding="utf-8")), width=min(console.width, CARD_WIDTH))


def _draw_network(name: str, orientations: list[int]) -> "list[Group]":
    """As many numbers of orientations side by side as the terminal is wide, the others below."""
    from rotopath.models import ARCHITECTURES
    from rotopath.reports.tables import architecture_table

    across = max(1, (console.width - 32) // 11)
    starts = range(0, len(orientations), across)
    return [architecture_table(ARCHITECTURES[name], orientations[start : start + across]) for start in starts]


def _print_scores(folder: Path, written: Path | None = None) -> None:
    """The scores of a run, as they stand in its files."""
    import json

    from rotopath.reports.tables import score_table
    from rotopath.runs import METRICS

    place = written or folder / METRICS
    console.print(score_table(str(folder), json.loads(place.read_text(encoding="utf-8"))))
    _print_place("All scores", place)


def _print_place(what: str, path: Path) -> None:
    console.print(f"{what}: [bold]{escape(str(path))}[/bold]", highlight=False, soft_wrap=True)


def _stop(folder: Path) -> NoReturn:
    """Ctrl-C: nothing is lost."""
    Console(stderr=True).print(f"rotopath: stopped; the same command goes on with {folder}.", highlight=False)
    raise typer.Exit(130)


def _refuse(sentence: str) -> NoReturn:
    """A user's mistake: one sentence, exit code 2, no traceback."""
    Console(stderr=True).print(f"rotopath: {sentence}", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(2)
