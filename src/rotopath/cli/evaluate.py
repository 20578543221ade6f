"""`rotopath evaluate`: compute the scores of a trained model on a dataset, print them, and write them to a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rotopath.reports import terminal

if TYPE_CHECKING:
    from rotopath.data.splits import Split


def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder from `rotopath train`, or name of a pretrained model.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Dataset: a folder or a manifest (CSV file), as for `rotopath data check`. Default: the dataset that "
            "the run was trained on. Required for a pretrained model."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the dataset: train, valid or test.")] = "test",
    tta: Annotated[
        int, typer.Option(min=1, max=360, help="Test-time augmentation: average predictions over this many rotations.")
    ] = 1,
    rule: Annotated[
        str | None,
        typer.Option(
            help="Rule for counting true positives. Detection: amida13 (default) counts several detections of one "
            "annotated point as one true positive; one-to-one counts the additional detections as false positives. "
            "Segmentation: the overlap must be at least half of the union of both objects (iou, default), of the "
            "annotated object (area), or of the predicted object (own-area)."
        ),
    ] = None,
    robustness: Annotated[
        bool, typer.Option(help="Also measure how much predictions change when the input images are rotated.")
    ] = False,
    spacing_um_px: Annotated[
        float | None,
        typer.Option(
            "--spacing-um-px", help="Pixel spacing, in µm/px, of images whose files do not specify a pixel spacing."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="JSON file for all scores. Default: a file in the run folder, or in runs/NAME for a pretrained model."
        ),
    ] = None,
) -> None:
    """Score a trained model on the dataset that it was trained on, or on another dataset. Print and save the scores."""
    with terminal.user_errors_in_one_sentence():
        from rotopath.evaluation import evaluate as evaluate_run

        with terminal.transient_progress() as bar:
            task = bar.add_task("reading")
            evaluation = evaluate_run(
                run,
                data,
                split=cast("Split", split),  # evaluate_run checks the value
                rotations=tta,
                robustness=robustness,
                out=out,
                rule=rule,
                spacing_um_px=spacing_um_px,
                on_progress=lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total),
            )
    terminal.print_scores(str(run), evaluation.path)
