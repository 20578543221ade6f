"""`rotopath predict`: apply a model to images and whole slides."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rotopath.reports import terminal

if TYPE_CHECKING:
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
            help="Pixel spacing, in µm/px, of all files. Replaces the pixel spacing that a file specifies. Required "
            "if a file does not specify a pixel spacing.",
        ),
    ] = None,
    rotations: Annotated[
        int,
        typer.Option(
            min=1,
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
            help="Probability, from 0 to 1, from which objects are accepted: the higher, the fewer objects. For models "
            "that outline objects, it is the probability that a pixel belongs to an object. Default: that of the model."
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

    The exit code is 1 if some slides failed, and 2 if all slides failed.
    """
    with terminal.user_errors_in_one_sentence():
        from rotopath.images.files import is_plausible
        from rotopath.inference.cluster import predict_on_cluster
        from rotopath.inference.predict_files import FileOptions, list_slides, predict_files
        from rotopath.inference.slide_pass import PassOptions
        from rotopath.reports.progress import SlideProgress
        from rotopath.runs import load, prepare_model

        model, slides = load(run), list_slides(images)
        if spacing_um_px is not None and not is_plausible(spacing_um_px):
            terminal.exit_with_error(f"--spacing-um-px is {spacing_um_px:g}; choose a value from 0.05 to 5 µm/px.")
        names = [] if classes is None else classes.split(",")
        pass_options = PassOptions(rotations, everywhere=everywhere, classes=model.task.resolve_classes(names))
        same_precision = precision is not None
        options = FileOptions(pass_options, spacing_um_px, same_precision=same_precision, roi=roi, exclude=exclude)
        model.task.adjust_operating_point(model.point, threshold, min_area_um2)  # raises an error for a wrong value
        # `prepare` checks the values
        settings = (device, cast("Precision | None", precision), cast("Backend", backend), threshold, min_area_um2)
        states: list[str] = []
        with SlideProgress(len(slides), terminal.console) as progress:
            try:
                if cluster is None:
                    outcomes = predict_files(model.prepare(*settings), slides, out, options, progress.show)
                else:
                    # The path is absolute, because workers run in another folder.
                    reference = model.name if model.is_pretrained else model.folder.resolve()
                    make_model = partial(prepare_model, reference, *settings)
                    outcomes = predict_on_cluster(make_model, slides, out, options, cluster, at_once)
                for outcome in outcomes:
                    progress.show_outcome(outcome)
                    states.append(outcome.state)
            except KeyboardInterrupt:
                terminal.exit_interrupted(out)
    terminal.print_path("Results", out)
    if "failed" in states:
        raise typer.Exit(2 if len(states) == states.count("failed") else 1)
