"""`rotopath export`: convert a trained network to a file format of other software."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rotopath.reports import terminal

if TYPE_CHECKING:
    from rotopath.exporting import Format


def export(
    run: Annotated[Path, typer.Argument(help="Run folder from `rotopath train`, or name of a pretrained model.")],
    to: Annotated[
        str, typer.Option(help="Format: torchscript (for WSInfer and QuPath), onnx, or torch (a torch.export program).")
    ] = "torchscript",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the exported model. Default: export-FORMAT in the run folder, or in runs/NAME for a "
            "pretrained model."
        ),
    ] = None,
) -> None:
    """Convert a trained network to an ordinary CNN with the same outputs, which other software can run.

    The folder of the exported model also describes its inputs, outputs and origin.
    """
    with terminal.user_errors_in_one_sentence():
        from rotopath.exporting import export as export_run

        folder = export_run(run, cast("Format", to), out)  # export_run checks the value
    terminal.print_path("Exported", folder)
