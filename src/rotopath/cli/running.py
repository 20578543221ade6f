"""Commands about one run: train it, evaluate it, use it, hand it on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from rotopath.cli import door
from rotopath.cli.door import app, mistakes_in_one_sentence, print_place, refuse, stop

if TYPE_CHECKING:
    from rotopath.evaluation import Split
    from rotopath.exporting import Format
    from rotopath.runs import Precision


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML file, such as those in recipes/.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="key=value to change in the recipe; may be given several times.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; named after the recipe when left out.")] = None,
) -> None:
    """Train a network by a recipe. The same command goes on with a training that was interrupted."""
    with mistakes_in_one_sentence():
        from rotopath.recipe import read_recipe
        from rotopath.reports.progress import TrainingProgress
        from rotopath.training import is_first, name_folder
        from rotopath.training import train as train_run

        chosen = read_recipe(recipe, changes or [])
        folder = out or name_folder(recipe.stem, chosen)
        try:
            with TrainingProgress(chosen, door.console if is_first() else Console(quiet=True)) as progress:
                trained = train_run(chosen, folder, on_progress=progress.show)
        except KeyboardInterrupt:
            stop(folder)
        if not is_first():
            raise typer.Exit  # the first of several processes prints
        if chosen.mining is not None:
            from rotopath.data import open_data
            from rotopath.reports.contact_sheet import draw_examples
            from rotopath.training import MINED, read_examples

            examples, spacing = read_examples(folder / MINED), trained.task.spacing_um_px
            dataset = open_data(chosen.data, None, chosen.data_spacing_um_px)
            sheet = draw_examples(dataset, examples, spacing, folder / "mined.png")
            print_place("Hard examples", sheet)
    _print_scores(folder)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, or a pretrained model.")],
    data: Annotated[Path | None, typer.Option(help="Other data than the run was trained on.")] = None,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    tta: Annotated[int, typer.Option(min=1, help="Mean prediction over so many turns of each image.")] = 1,
    rule: Annotated[
        str | None,
        typer.Option(help="How hits are counted: amida13 or one-to-one (detect), iou, area or own-area (segment)."),
    ] = None,
    robustness: Annotated[bool, typer.Option(help="Measure how answers change when inputs turn, too.")] = False,
    spacing_um_px: Annotated[
        float | None, typer.Option("--spacing-um-px", help="The side of a pixel, for images that do not say it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A JSON file for all scores; in the run folder when left out.")
    ] = None,
) -> None:
    """Compute every score of a run again, on its own data or on other."""
    from rich.progress import Progress

    with mistakes_in_one_sentence():
        from rotopath.evaluation import evaluate as evaluate_run

        shown = Console(stderr=True)
        with Progress(console=shown, transient=True, disable=not shown.is_terminal) as bar:
            reading = bar.add_task("reading")
            evaluated = evaluate_run(
                *(run, data, cast("Split", split), tta, robustness, out, rule, spacing_um_px),
                on_progress=lambda what, done, total: bar.update(
                    reading, description=what, completed=done, total=total
                ),
            )
    _print_scores(run, evaluated.path)


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run folder, or the name of a pretrained model.")],
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
    precision: Annotated[
        str | None, typer.Option(help="16 or 32 bits; 16 on a GPU and 32 elsewhere when left out.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Spread slides over a Dask cluster: its scheduler's address, local, or slurm.")
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Workers of a local or a SLURM cluster.")] = 2,
) -> None:
    """Find what a model was trained for in images and whole slides. What is done already is skipped."""
    with mistakes_in_one_sentence():
        from rotopath.images.files import is_plausible
        from rotopath.inference.slide_pass import PassOptions
        from rotopath.predicting import list_slides, predict_slides
        from rotopath.reports.progress import SlideProgress
        from rotopath.runs import load

        model, slides, options = load(run), list_slides(images), PassOptions(rotations, everywhere=everywhere)
        if spacing_um_px is not None and not is_plausible(spacing_um_px):
            refuse(f"--spacing-um-px is {spacing_um_px:g}, but microscopes have 0.05 to 5 µm/px.")
        states: list[str] = []
        with SlideProgress(len(slides), door.console) as progress:
            try:
                if cluster is None:
                    bits = cast("Precision | None", precision)  # which is checked there
                    outcomes = predict_slides(model, slides, out, options, spacing_um_px, device, bits, progress.show)
                else:
                    from rotopath.studies.slides import predict_on_cluster

                    outcomes = predict_on_cluster(
                        str(run), slides, out, options, spacing_um_px, device, precision, cluster, at_once
                    )
                for outcome in outcomes:
                    progress.tell(outcome)
                    states.append(outcome.state)
            except KeyboardInterrupt:
                stop(out)
    print_place("Results", out)
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
    with mistakes_in_one_sentence():
        from rotopath.exporting import export as export_run

        place = export_run(run, cast("Format", to), out)
    print_place("Exported", place)


def _print_scores(folder: Path, written: Path | None = None) -> None:
    """The scores of a run, as they stand in its files."""
    import json

    from rotopath.reports.terminal import score_table
    from rotopath.runs import METRICS

    place = written or folder / METRICS
    door.console.print(score_table(str(folder), json.loads(place.read_text(encoding="utf-8"))))
    print_place("All scores", place)
