"""`rotopath data`: import annotated images, check a dataset, draw some of its images, export or generate a dataset.

`import_data`, `check_data`, `show_data`, `export_data` and `make_data` are the commands `rotopath data import`, `data
check`, `data show`, `data export` and `data make`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rotopath.reports import terminal

if TYPE_CHECKING:
    from rotopath.data import Dataset
    from rotopath.data.formats import Check

PATH_HELP = (
    "Dataset: the folder that `rotopath data import` has written; a manifest (CSV file); the downloaded folder of "
    "AMIDA13, TUPAC16, Kumar, MoNuSeg or PCam; or a folder with a subfolder of patches for each class."
)
SPACING_HELP = "Pixel spacing, in µm/px, of images whose files do not specify a pixel spacing."
IMAGE_SUFFIXES = (".png", ".jpg", ".pdf", ".svg")
MAX_COLUMNS = 5  # largest number of columns with counts that fits a terminal with a width of 80 characters


def import_data(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="Files and folders with images and their annotations: GeoJSON (QuPath), COCO, CSV tables of "
            "positions, Aperio XML, .mat files of HoVer-Net, label maps or masks; a folder of patches with a subfolder "
            "for each class; results of `rotopath predict`; or the folder of an earlier import."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help="Folder for the manifest and the annotations. It must be new or empty, unless --overwrite."),
    ],
    classes: Annotated[
        str | None,
        typer.Option(
            help="New names of classes: OLD=NEW,... An empty name (OLD=) leaves a class out; =NEW is for objects "
            "without a class. The name Ignore* makes the outlines of a class ignored areas."
        ),
    ] = None,
    read_as: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="What the objects are used for: points (their centers), outlines, or regions (areas with a class, "
            "such as tumor and stroma, from which squares with labels are taken).",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="Order of the columns of tables without a header: row,column or x,y,class, for example."),
    ] = None,
    masks: Annotated[
        str | None,
        typer.Option(
            help="What a number in a gray mask is: objects (the number of an object), binary (each connected part is "
            "an object), or classes (the number of a class; each connected part is an object)."
        ),
    ] = None,
    patient: Annotated[
        str | None,
        typer.Option(help="Regular expression that finds the patient in the path of an image, such as '(P[0-9]+)_'."),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            help="CSV file with the name of each image in its first column, and columns such as patient, split, "
            "spacing. Images that it does not list are left out."
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Column of --table with the class of each image. No objects are read then.")
    ] = None,
    spacing_um_px: Annotated[
        float | None,
        typer.Option(
            "--spacing-um-px",
            help="Pixel spacing of the images in µm/px. Required if neither an image, its annotations nor --table "
            "specify it. If one of these files specifies a pixel spacing that differs by more than 1 %, "
            "--override-spacing is required, too.",
        ),
    ] = None,
    override_spacing: Annotated[
        bool,
        typer.Option(
            "--override-spacing",
            help="Use --spacing-um-px also for images whose files specify another pixel spacing.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace --out if `rotopath data import` has written it.")
    ] = False,
) -> None:
    """Import annotated images from the formats of other software, and check them. Images are not copied.

    The command writes a manifest, a GeoJSON file for each image, and a contact sheet. The exit code is 0 if there are
    no problems, and 1 if there are problems. The files are written also then, so that you can look at the problems.
    """
    from rotopath.data import DataError, problems
    from rotopath.data import import_data as import_sources
    from rotopath.data.importing import CONTACT_SHEET
    from rotopath.images import UnreadableFileError

    with terminal.user_errors_in_one_sentence():
        from rotopath.reports.contact_sheet import draw_contact_sheet

        faults: list[str] = []

        def draw(written: "Dataset", folder: Path) -> None:
            try:
                draw_contact_sheet(replace(written, root=out.resolve()), folder / CONTACT_SHEET, 0)
            except (DataError, UnreadableFileError) as error:
                faults.append(f"The contact sheet cannot be drawn: {error}".replace(str(folder), str(out)))

        dataset = import_sources(
            sources,
            out,
            classes=classes,
            read_as=cast(Any, read_as),  # import_sources checks the value
            columns=columns,
            masks=cast(Any, masks),
            patient=patient,
            table=table,
            label=label,
            spacing_um_px=spacing_um_px,
            override_spacing=override_spacing,
            overwrite=overwrite,
            finish=draw,
        )
        result = _check(dataset)
        terminal.console.print(data_table(result), highlight=False, soft_wrap=True)
    for fault in faults:
        terminal.print_error(fault)
    if not faults:
        terminal.print_path("Contact sheet", out / CONTACT_SHEET)
    terminal.print_path("Manifest", out / "manifest.csv")
    if problems(result.findings):
        sentence = f"The dataset in {out} has problems; solve them, and run the same command again with --overwrite."
        terminal.console.print(sentence, highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(1)


def check_data(
    path: Annotated[Path, typer.Argument(help=PATH_HELP)],
    task: Annotated[
        str | None,
        typer.Option(
            help="Also check that the dataset fits a task (mitosis, nuclei, tumor) or a kind of task "
            "(classify, detect, segment)."
        ),
    ] = None,
    spacing_um_px: Annotated[float | None, typer.Option("--spacing-um-px", help=SPACING_HELP)] = None,
) -> None:
    """Read a whole dataset, count its images and annotations, and list all problems.

    The exit code is 0 if there are no problems, and 1 if there are problems.
    """
    from rotopath.data import open_data, problems
    from rotopath.evaluation import open_task_data
    from rotopath.tasks import PAPER, find_kind, make_task

    with terminal.user_errors_in_one_sentence():
        if task is None:
            dataset = open_data(path, None, spacing_um_px)
        elif task in PAPER:
            dataset = open_task_data(make_task(task), path, spacing_um_px)
        else:
            try:
                kind = find_kind(task)
            except ValueError as error:
                terminal.exit_with_error(str(error))
            dataset = open_data(path, kind.annotated, spacing_um_px)
        result = _check(dataset)
    terminal.console.print(data_table(result), highlight=False, soft_wrap=True)
    if problems(result.findings):
        raise typer.Exit(1)


def _check(dataset: "Dataset") -> "Check":
    """Check a dataset, with a progress bar."""
    from rotopath.data import check

    with terminal.transient_progress() as bar:
        reading = bar.add_task("reading", total=len(dataset.samples))
        return check(dataset, on_progress=lambda count: bar.advance(reading, count))


def export_data(
    path: Annotated[Path, typer.Argument(help=PATH_HELP)],
    out: Annotated[
        Path, typer.Option(help="COCO file to write (a name that ends in .json), or new folder for GeoJSON files.")
    ],
    spacing_um_px: Annotated[float | None, typer.Option("--spacing-um-px", help=SPACING_HELP)] = None,
) -> None:
    """Write the annotated objects of a dataset as a COCO file, or as a GeoJSON file for each image."""
    from rotopath.data import export_data as export_dataset
    from rotopath.data import open_data

    with terminal.user_errors_in_one_sentence():
        terminal.print_path("Annotations", export_dataset(open_data(path, None, spacing_um_px), out))


def show_data(
    path: Annotated[Path, typer.Argument(help=PATH_HELP)],
    out: Annotated[Path, typer.Option(help="Image file to write (.png, .jpg, .pdf or .svg).")] = Path(
        "contact-sheet.png"
    ),
    image: Annotated[
        list[str] | None,
        typer.Option(
            "--image",
            help="Name of an image to draw, such as case7.svs: the parts of it that show most objects. Give the option "
            "several times for several images.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Random seed. A different seed selects different images.")
    ] = 0,
    augment: Annotated[
        bool,
        typer.Option("--augment", help="Draw one image with each type of augmentation that a recipe can have instead."),
    ] = False,
    spacing_um_px: Annotated[float | None, typer.Option("--spacing-um-px", help=SPACING_HELP)] = None,
) -> None:
    """Draw some images of each split with their annotations into one image file (a contact sheet)."""
    from rotopath.data import open_data

    if out.suffix.lower() not in IMAGE_SUFFIXES:
        names = f"{', '.join(IMAGE_SUFFIXES[:-1])} or {IMAGE_SUFFIXES[-1]}"
        terminal.exit_with_error(f"--out {out} has no supported image format; choose a file name that ends in {names}.")
    with terminal.user_errors_in_one_sentence():
        from rotopath.reports.contact_sheet import draw_augmentations, draw_contact_sheet

        draw = draw_augmentations if augment else draw_contact_sheet
        terminal.print_path("Contact sheet", draw(open_data(path, None, spacing_um_px), out, seed, image or ()))


def make_data(
    task: Annotated[str, typer.Option(help="Task: mitosis, nuclei or tumor.")],
    out: Annotated[Path, typer.Option(help="Folder for the dataset. It must be new or empty.")],
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Random seed. The same seed generates identical files.")
    ] = 0,
) -> None:
    """Generate annotated synthetic tissue images, stored like AMIDA13 (mitosis), Kumar (nuclei) or PCam (tumor)."""
    from rotopath.synthetic import make_mitosis, make_nuclei, make_tumor

    makers: dict[str, Callable[[Path, int], None]]
    makers = {"mitosis": make_mitosis, "nuclei": make_nuclei, "tumor": make_tumor}
    if task not in makers:
        terminal.exit_with_error(f"There is no synthetic tissue for the task {task!r}; choose {', '.join(makers)}.")
    with terminal.user_errors_in_one_sentence():
        makers[task](out, seed)
    terminal.print_path("Synthetic tissue", out)


def data_table(check: "Check") -> Group:
    """Return the result of a check for the terminal: a table with the counts of each split, then problems and notes.

    If counts of the dataset are published, the table also contains the published counts in parentheses.
    """
    from rotopath.data import problems
    from rotopath.data.dataset import group_findings
    from rotopath.data.formats import ANNOTATION_KINDS

    dataset = check.dataset
    names = list(dict.fromkeys(name for counts in check.counts.values() for name in counts))
    rows = {
        split: [_format_count(counts[name], dataset.published.get(split, {}).get(name)) for name in names]
        for split, counts in check.counts.items()
    }
    rows["all"] = [_format_count(sum(counts[name] for counts in check.counts.values())) for name in names]
    parts: list[Text | Table] = [
        Text(f"{dataset.source}, {ANNOTATION_KINDS[dataset.annotated]}: {dataset.root}", "bold"),
        _count_table(names, rows),
        Text(_describe_spacing(dataset), "dim"),
    ]
    if dataset.published:
        parts.append(Text("In parentheses: published counts.", "dim"))
    parts.append(Text())
    if check.agreement:
        parts.append(Text(_describe_agreement(check.agreement), "dim"))
    wrong = problems(check.findings)
    notes = [finding for finding in check.findings if not finding.is_problem]
    for title, findings in (("problem", wrong), ("note", notes)):
        if lines := group_findings(findings):
            parts.append(Text(f"{len(lines)} {title}{'s' if len(lines) > 1 else ''}", "bold"))
            parts += [Text(f"- {line}") for line in lines]
            parts.append(Text())
    if not wrong:
        parts.append(Text("No problems.", "green"))
    return Group(*parts)


def _count_table(names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    """Return a table with a row for each split, and a last row with the sums over all splits.

    `names` are the names of the counts, such as "images". `rows` maps each split to its formatted counts; the last
    entry contains the sums. With more than `MAX_COLUMNS` counts, the table is transposed: it has a row for each count.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    if len(names) > MAX_COLUMNS:
        table.add_column("")
        for split in rows:
            table.add_column(split, justify="right")
        for name, counts in zip(names, zip(*rows.values(), strict=True), strict=True):
            table.add_row(name, *counts)
        return table
    table.add_column("split")
    for name in names:
        table.add_column(name, justify="right")
    *splits, total = rows
    for split in splits:
        table.add_row(split, *rows[split])
    table.add_section()
    table.add_row(total, *rows[total], style="bold")
    return table


def _format_count(count: int, published: int | None = None) -> str:
    """Format a count, such as "35 (36)" for the published count 36. A count of 0 becomes "–"."""
    text = f"{count}" if count else "–"
    return text if published is None else f"{text} ({published})"


def _describe_spacing(dataset: "Dataset") -> str:
    """Return a text with the range of the pixel spacings in a dataset."""
    spacings = [sample.spacing_um_px for sample in dataset.samples]
    if not spacings:
        return "No images."
    low, high = min(spacings), max(spacings)
    values = f"{low:g} µm/px" if low == high else f"{low:g} to {high:g} µm/px"
    return f"Pixel spacing: {values}. Each model resamples images to its own pixel spacing."


def _describe_agreement(agreement: Mapping[str, float]) -> str:
    """Return a text that states how well label maps and outlines agree in images that have both.

    `agreement` maps image names to the aggregated Jaccard index (AJI) between label map and outlines.
    """
    worst = min(agreement, key=agreement.__getitem__)
    mean = sum(agreement.values()) / len(agreement)
    return (
        f"{len(agreement)} images have both a label map and outlines; the label map is used. The agreement of label "
        f"map and outlines (aggregated Jaccard index, 1 if identical) is {mean:.3f} on average. It is lowest "
        f"({agreement[worst]:.3f}) in {worst}.\n"
    )
