"""`rotopath audit`: measure how the predictions of any model change if images are only rotated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from rotopath.reports import terminal

ROWS = (
    ("quarter rotations, exact", "grid"),
    ("16 other angles", "fair"),
    ("16 pairs of close angles", "resampling"),
    ("beyond interpolation", "beyond"),
)
EXIT_ABOVE = 1  # exit code if more decisions change than --fail-above allows


def audit(
    model: Annotated[
        str,
        typer.Argument(
            help="Run folder, or name of a pretrained model; a folder of WSInfer's model zoo, an ONNX file (.onnx) or "
            "TorchScript (.pt); package.module:name of a torch module or a function; or timm:NAME with --checkpoint."
        ),
    ],
    images: Annotated[
        list[Path],
        typer.Argument(
            help="Dataset (folder or manifest), folder of patches, slides or other images, or files. Of slides and "
            "large images, windows on tissue are used."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for audit.html, audit.csv and audit.json. Default: audit-NAME in the current folder."
        ),
    ] = None,
    fail_above: Annotated[
        float | None,
        typer.Option(
            help="Exit with code 1 if a larger fraction of the decisions changes, such as 0.05. Of embeddings: if they "
            "lose more cosine similarity."
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a dataset, or all. Default: test, if the dataset has it.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Largest number of windows.")] = 512,
    spacing_um_px: Annotated[
        float | None,
        typer.Option(
            "--spacing-um-px", help="Pixel spacing, in µm/px, of images whose files do not specify a pixel spacing."
        ),
    ] = None,
    window_px: Annotated[
        int | None, typer.Option(help="Side of the images that the model takes, in pixels, if its files do not say.")
    ] = None,
    model_spacing_um_px: Annotated[
        float | None,
        typer.Option(
            "--model-spacing-um-px", help="Pixel spacing that the model expects. Default: that of the images."
        ),
    ] = None,
    classes: Annotated[str | None, typer.Option(help="Names of the outputs of the model: A,B,...")] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="For one or two outputs: probability from which the last class is chosen. Default: 0.5."),
    ] = None,
    activation: Annotated[
        str, typer.Option(help="Function from outputs to probabilities: auto, softmax, sigmoid or none.")
    ] = "auto",
    mean: Annotated[
        str | None, typer.Option(help="Mean by which images from 0 to 1 are normalized: one number, or red,green,blue.")
    ] = None,
    std: Annotated[str | None, typer.Option(help="Standard deviation for this normalization, like --mean.")] = None,
    embedding: Annotated[bool, typer.Option("--embedding", help="The outputs are features, and not classes.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Weights (safetensors) of package.module:name or timm:NAME.")
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Load TorchScript, which can execute code: use it only if you trust the file."),
    ] = False,
) -> None:
    """Measure how often any model changes its decision if an image is only rotated, and write a report.

    The exit code is 0, or 1 with --fail-above if more decisions change.
    """
    if fail_above is not None and not 0 <= fail_above <= 1:
        terminal.exit_with_error(f"--fail-above is {fail_above:g}, but it is a fraction; choose a number from 0 to 1.")
    means, deviations = (_parse_numbers(name, text) for name, text in (("--mean", mean), ("--std", std)))
    with terminal.user_errors_in_one_sentence():
        from rotopath.auditing import audit as audit_model

        folder = out or Path(f"audit-{_short_name(model)}")
        with terminal.transient_progress() as bar:
            task = bar.add_task("loading", total=None)
            result = audit_model(
                model,
                list(images) if len(images) > 1 else images[0],
                folder,
                split=split,
                count=count,
                spacing_um_px=spacing_um_px,
                on_progress=lambda stage: bar.update(task, description=stage),
                window_px=window_px,
                model_spacing_um_px=model_spacing_um_px,
                classes=() if classes is None else tuple(name.strip() for name in classes.split(",")),
                threshold=threshold,
                activation=activation,
                mean=means,
                std=deviations,
                embedding=embedding,
                checkpoint=checkpoint,
                trust=trust,
            )
    terminal.console.print(result.figures["sentence"], highlight=False, markup=False, soft_wrap=True)
    terminal.console.print(result_table(result.figures))
    terminal.print_path("Report", folder / "audit.html")
    if fail_above is not None and result.changed > fail_above:
        terminal.print_error(f"{result.changed:.4f} is above --fail-above {fail_above:g}.")
        raise typer.Exit(EXIT_ABOVE)


def result_table(figures: Mapping[str, Any]) -> Table:
    """Return a table with a row for each set of rotations, and a column for each figure of an audit."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    decisions, embedding = figures["decisions"], figures["embedding"]
    table.add_column("rotations")
    for title in ("changed", "deviation") if decisions else ():
        table.add_column(title, justify="right")
    for title in ("cosine", "neighbors") if embedding else ():
        table.add_column(title, justify="right")
    for title, key in ROWS:
        row = [title]
        if decisions:
            row += [f"{decisions[key]['changed']:.2%}", f"{decisions[key]['deviation']:.4f}"]
        if embedding:
            neighbors = embedding[key]["neighbors"]
            row += [f"{embedding[key]['cosine']:.4f}", "" if neighbors is None else f"{neighbors:.1%}"]
        table.add_row(*row)
    return table


def _parse_numbers(option: str, text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        terminal.exit_with_error(f"{option} is {text!r}; expected one number, or three: red,green,blue.")


def _short_name(model: str) -> str:
    """Return a name for a folder: the last part of a path or of an import path."""
    path = Path(model)
    last = path.resolve().name if path.is_dir() else path.stem if path.is_file() else model
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in last).strip("-.") or "model"
