"""`rotopath demo`: train two networks on synthetic tissue images, and write an HTML report that compares both."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from rotopath.reports import terminal


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for images, runs and report. Existing images and runs are reused.")
    ] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps per epoch. Each training has three epochs.")] = 220,
    size: Annotated[int, typer.Option(min=160, help="Height and width of the synthetic images, in pixels.")] = 512,
) -> None:
    """Train an ordinary and a rotation-equivariant network on synthetic tissue, and compare both in an HTML report.

    The report shows the scores and detections of both networks, and their predictions for rotated images.

    The demo takes a few minutes.
    """
    if out.exists() and not out.is_dir():
        terminal.exit_with_error(f"--out {out} is a file, but the demo needs a folder; choose another path with --out.")
    with terminal.user_errors_in_one_sentence():
        from rotopath.reports.demo_report import run_demo

        report = run_demo(out, terminal.console, steps, size)
    terminal.print_path("Report", report)
    if terminal.console.is_terminal:
        webbrowser.open(report.resolve().as_uri())
