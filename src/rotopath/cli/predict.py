"""`rotopath predict`: apply a model to images and whole slides. `rotopath slides`: print what slide files contain."""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rotopath.environment import has_gpu_driver, start_fork_server
from rotopath.reports import terminal

if TYPE_CHECKING:
    from rotopath.images.slides import SlideDescription
    from rotopath.inference.dense import Backend
    from rotopath.runs import Precision


def predict(
    run: Annotated[Path, typer.Argument(help="Run folder from `rotopath train`, or name of a pretrained model.")],
    images: Annotated[list[Path], typer.Argument(help="Slides, images, or folders that contain them.")],
    out: Annotated[Path, typer.Option(help="Folder for the results, with a subfolder for each slide.")],
    spacing_um_px: Annotated[
        float | None,
        typer.Option(
            "--spacing-um-px",
            help="Pixel spacing, in µm/px, of all files. Required if a file does not specify a pixel spacing. If a "
            "file specifies a pixel spacing that differs by more than 1 %, --override-spacing is required, too.",
        ),
    ] = None,
    override_spacing: Annotated[
        bool,
        typer.Option(
            "--override-spacing",
            help="Use --spacing-um-px in place of a different pixel spacing that a file specifies.",
        ),
    ] = False,
    rotations: Annotated[
        int,
        typer.Option(
            min=1,
            max=360,
            help="Test-time augmentation: average predictions over this many rotations, and also write their standard "
            "deviation.",
        ),
    ] = 1,
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="Predict the whole slide. Default: only tissue is predicted.")
    ] = False,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Probability, from 0 to 1, from which objects are accepted. For models that outline objects, it is "
            "the probability that a pixel belongs to an object: the higher, the smaller are the outlines. Default: "
            "that of the model."
        ),
    ] = None,
    min_area_um2: Annotated[
        float | None,
        typer.Option(
            "--min-area-um2",
            help="Area, in µm², below which outlined objects are left out. Default: that of the model.",
        ),
    ] = None,
    roi: Annotated[
        Path | None,
        typer.Option(
            help="GeoJSON file of QuPath annotations: only the area inside of them is predicted. For several slides, a "
            "folder with a file for each slide, such as slide.svs.geojson or slide.geojson."
        ),
    ] = None,
    exclude: Annotated[
        Path | None,
        typer.Option(help="GeoJSON file, or folder of files, of QuPath annotations: the area inside is left out."),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(help="Names of classes, separated by commas: only objects of these classes are written."),
    ] = None,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Also write objects.parquet, with the rows and columns of objects.csv.")
    ] = False,
    embedding: Annotated[
        bool,
        typer.Option(
            "--embedding",
            help="Also write embedding.npy: features of the network for each object, in the order of objects.csv. The "
            "network runs once more where there are objects.",
        ),
    ] = False,
    keep_map: Annotated[
        bool,
        typer.Option(
            "--keep-map", help="Also store the outputs of the network, in a file map.zip beside the results of a slide."
        ),
    ] = False,
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse",
            help="Replace the results in --out without running the network, for other thresholds, regions or classes: "
            "its outputs are read from the map that --keep-map has stored there.",
        ),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Device: cpu or cuda. Default: the GPU if there is one, else the CPU.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Floating-point precision in bits: 16 or 32. Default: 16 on a GPU, 32 on a CPU.")
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="Library that computes the network: torch, or onnxruntime, which is faster on the CPU and needs the "
            "extra onnx."
        ),
    ] = "torch",
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=64,
            help="Processes that normalize stains, and find and outline objects, while the network computes. By "
            "default 0 on the CPU; on a GPU two fewer than CPU cores, at most 16, if the objects are outlined.",
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print the seconds and the megapixels per second of each stage.")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(help="Predict slides on a Dask cluster: local, slurm, or the address of a scheduler."),
    ] = None,
    at_once: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --cluster local or slurm: number of workers. With --cluster ADDRESS: number of slides that are "
            "predicted at the same time on each GPU.",
        ),
    ] = 2,
) -> None:
    """Apply a model to images and whole slides, and write a folder of results for each image or slide.

    A slide is skipped if --out already contains its results for the same model and the same options.

    To resume an interrupted prediction, run the same command again.

    Several processes may write to the same --out.

    A slide that fails does not stop the others. The exit code is 1 if some slides failed, and 2 if all slides failed.
    """
    started = time.perf_counter()
    with terminal.user_errors_in_one_sentence():
        if cluster is None and (workers or (workers is None and device != "cpu" and has_gpu_driver())):
            start_fork_server()  # before torch is imported, because this takes as long in the server

        from rotopath.images.files import is_plausible
        from rotopath.inference.cluster import predict_on_cluster
        from rotopath.inference.predict_files import FileOptions, list_slides, predict_files
        from rotopath.inference.slide_pass import PassOptions
        from rotopath.reports.progress import SlideProgress
        from rotopath.runs import load, prepare_model

        if spacing_um_px is not None and not is_plausible(spacing_um_px):
            terminal.exit_with_error(f"--spacing-um-px is {spacing_um_px:g}; choose a value from 0.05 to 5 µm/px.")
        if workers and cluster is not None:
            terminal.exit_with_error("--workers is for predictions without --cluster, which has its own workers.")
        if override_spacing and spacing_um_px is None:
            terminal.exit_with_error("--override-spacing needs the spacing to use; add --spacing-um-px.")
        states: list[str] = []
        try:
            model, slides = load(run), list_slides(images)
            names = [] if classes is None else classes.split(",")
            chosen = model.task.resolve_classes(names)
            pass_options = PassOptions(
                rotations, everywhere=everywhere, classes=chosen, workers=workers, embedding=embedding
            )
            options = FileOptions(
                pass_options,
                spacing_um_px,
                override_spacing,
                same_precision=precision is not None,
                roi=roi,
                exclude=exclude,
                parquet=parquet,
                keep_map=keep_map,
                reuse=reuse,
            )
            # `prepare` checks these values, here or in the workers. This call reports a wrong threshold at once.
            model.task.adjust_operating_point(model.point, threshold, min_area_um2)
            bits, library = cast("Precision | None", precision), cast("Backend", backend)
            settings = (device, bits, library, threshold, min_area_um2)
            with SlideProgress(len(slides), terminal.console, profile) as progress:
                if cluster is None:
                    ready = model.prepare(*settings)
                    if profile:
                        progress.show_start(time.perf_counter() - started)
                    outcomes = predict_files(ready, slides, out, options, progress.show)
                else:
                    # The path is absolute, because workers run in another folder.
                    reference = model.name if model.is_pretrained else model.folder.resolve()
                    make_model = partial(prepare_model, reference, *settings)
                    outcomes = predict_on_cluster(make_model, slides, out, options, cluster, at_once)
                for outcome in outcomes:
                    progress.show_outcome(outcome)
                    if outcome.state != "waiting":
                        states.append(outcome.state)
        except KeyboardInterrupt as error:
            terminal.exit_interrupted(error, out, ": finished slides are skipped")
    if states.count("failed") < len(states):
        terminal.print_path("Results", out)
    if "failed" in states:
        raise typer.Exit(2 if len(states) == states.count("failed") else 1)


def slides(
    files: Annotated[list[Path], typer.Argument(help="Slides, images, or folders that contain them.")],
) -> None:
    """Print what slide files contain: format, levels, pixel spacing, size, label and macro images, and what is missing.

    The exit code is 2 if a file cannot be read.
    """
    refused = False
    with terminal.user_errors_in_one_sentence():
        from rotopath.images import UnreadableFileError
        from rotopath.images.slides import describe_slide
        from rotopath.inference.predict_files import list_slides

        for path in list_slides(files):
            try:
                description = describe_slide(path)
            except UnreadableFileError as error:
                terminal.print_error(str(error))
                refused = True
            else:
                terminal.console.print(slide_table(description), highlight=False, soft_wrap=True)
    if refused:
        raise typer.Exit(terminal.EXIT_ERROR)


def slide_table(slide: "SlideDescription") -> Group:
    """Return the lines that describe a slide: a title, a line for each fact, and a line for each level."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    height_px, width_px = slide.levels[0].size_px
    size = f"{width_px} × {height_px} px (width × height)"
    spacing = "not stated"
    if slide.pixel_size_um is not None:
        height_um, width_um = slide.pixel_size_um
        spacing = f"{width_um:.4g} µm/px"
        if f"{height_um:.4g}" != f"{width_um:.4g}":
            spacing = f"{width_um:.4g} µm/px across, {height_um:.4g} µm/px down"
        size += f", {width_px * width_um / 1000:.3g} × {height_px * height_um / 1000:.3g} mm"
    contents = slide.contents
    rows = [("format", contents.format), ("read by", contents.reader), ("size", size), ("pixel spacing", spacing)]
    for number, level in enumerate(slide.levels):
        across = f", {slide.pixel_size_um[1] * level.downsample:.4g} µm/px" if slide.pixel_size_um else ""
        rows.append((f"level {number}", f"{_format_size(level.size_px)}, downsample {level.downsample:.6g}{across}"))
    for title, images in (("associated images", contents.associated), ("other images", contents.others)):
        names = ", ".join(f"{image.name} {_format_size(image.size_px)}".strip() for image in images)
        rows.append((title, names or "none"))
    rows += [("note", note) for note in contents.notes]
    rows += [("missing", sentence) for sentence in slide.missing or ("nothing",)]
    for title, text in rows:
        table.add_row(Text(title, "dim"), Text(text))
    return Group(Text(str(slide.path), "bold"), table, Text())


def _format_size(size_px: tuple[int, int]) -> str:
    return f"{size_px[1]} × {size_px[0]} px"
