"""`rotopath demo`: train two networks on synthetic tissue images, and write an HTML report that compares them."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from rotopath.reports import terminal


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for all output. Existing results in this folder are reused.")
    ] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps per epoch. There are three epochs.")] = 220,
    size: Annotated[int, typer.Option(min=160, help="Height and width of the synthetic images, in pixels.")] = 512,
) -> None:
    """Train an ordinary and a rotation-equivariant network on synthetic tissue, and compare them in an HTML report.

    The report shows the scores and detections of both networks, and their predictions for rotated images. The demo
    takes a few minutes.
    """
    if out.exists() and not out.is_dir():
        terminal.exit_with_error(f"{out} is a file, but the demo needs a folder; choose another --out.")
    with terminal.user_errors_in_one_sentence():
        from rotopath.reports.demo_report import run_demo

        report = run_demo(out, terminal.console, steps, size)
    terminal.print_path("Report", report)
    if terminal.console.is_terminal:
        webbrowser.open(report.resolve().as_uri())
