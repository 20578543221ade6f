"""Commands about data sets."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rotopath.cli import door
from rotopath.cli.door import data_app, mistakes_in_one_sentence, print_place, refuse

PATH_HELP = "A folder of AMIDA13/TUPAC16, Kumar/MoNuSeg or PCam, one of patches sorted by class, or a manifest."
SPACING_HELP = "The side of a pixel, for images of yours that do not say it."


@data_app.command("check")
def data_check(
    path: Annotated[Path, typer.Argument(help=PATH_HELP)],
    task: Annotated[
        str | None, typer.Option(help="Refuse data that does not fit a task: mitosis, classify, segment, ...")
    ] = None,
    spacing_um_px: Annotated[float | None, typer.Option("--spacing-um-px", help=SPACING_HELP)] = None,
) -> None:
    """Find out what a folder holds, read all of it, count, and list every problem. Exit code 1 if there are any."""
    from rich.progress import Progress

    from rotopath.data import check, open_data, problems
    from rotopath.evaluation import open_task_data
    from rotopath.reports.terminal import data_table
    from rotopath.tasks import PAPER, find_kind, make_task

    with mistakes_in_one_sentence():
        if task is None:
            dataset = open_data(path, None, spacing_um_px)
        elif task in PAPER:
            dataset = open_task_data(make_task(task), path, spacing_um_px)
        else:
            try:
                kind = find_kind(task)
            except ValueError as error:
                refuse(str(error))
            dataset = open_data(path, kind.annotated, spacing_um_px)
        shown = Console(stderr=True)
        with Progress(console=shown, transient=True, disable=not shown.is_terminal) as bar:
            reading = bar.add_task("reading", total=len(dataset.samples))
            found = check(dataset, progress=lambda count: bar.advance(reading, count))
    door.console.print(data_table(found), highlight=False, soft_wrap=True)
    if problems(found.findings):
        raise typer.Exit(1)


@data_app.command("show")
def data_show(
    path: Annotated[Path, typer.Argument(help=PATH_HELP)],
    out: Annotated[Path, typer.Option(help="The sample to write: PNG, JPEG, PDF or SVG.")] = Path("contact-sheet.png"),
    seed: Annotated[int, typer.Option(min=0, help="Another number shows other images.")] = 0,
    spacing_um_px: Annotated[float | None, typer.Option("--spacing-um-px", help=SPACING_HELP)] = None,
) -> None:
    """Draw a contact sheet: some images of each split, with their annotations."""
    from rotopath.data import open_data

    if out.suffix.lower() not in (".png", ".jpg", ".pdf", ".svg"):
        refuse(f"{out} is no name for a sample; choose one that ends in .png, .jpg, .pdf or .svg.")
    with mistakes_in_one_sentence():
        from rotopath.reports.contact_sheet import draw_contact_sheet

        dataset = open_data(path, None, spacing_um_px)
        print_place("Contact sheet", draw_contact_sheet(dataset, out, seed))


@data_app.command("make")
def data_make(
    task: Annotated[str, typer.Option(help="mitosis, nuclei or tumor.")],
    out: Annotated[Path, typer.Option(help="A folder that is new or empty.")],
    seed: Annotated[int, typer.Option(min=0, help="The same number makes the same bytes.")] = 0,
) -> None:
    """Make synthetic tissue with annotations, in the layout of the task's benchmark."""
    from rotopath.synthetic import make_mitosis, make_nuclei, make_tumor

    makers: dict[str, Callable[[Path, int], None]]
    makers = {"mitosis": make_mitosis, "nuclei": make_nuclei, "tumor": make_tumor}
    if task not in makers:
        refuse(f"There is no synthetic tissue for a task {task!r}; choose from {', '.join(makers)}.")
    with mistakes_in_one_sentence():
        makers[task](out, seed)
    print_place("Synthetic tissue", out)
