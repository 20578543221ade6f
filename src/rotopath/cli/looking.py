"""Commands that show what there is: models, the demonstration, the doctor."""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import rotopath
from rotopath.cli import door
from rotopath.cli.door import app, mistakes_in_one_sentence, print_place, refuse

if TYPE_CHECKING:
    from rich.console import Group

PUBLISHED = [1, 4, 8, 16]
CARD_WIDTH = 100  # longer lines are hard to read


def _print_version(asked: bool) -> None:
    if asked:
        door.console.print(f"rotopath {rotopath.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def models(
    name: Annotated[
        str | None, typer.Argument(help="A pretrained model, or mitosis, nuclei or tumor; all of them when left out.")
    ] = None,
    orientations: Annotated[
        list[int], typer.Option("--orientations", "-n", help="A number of orientations; may be given several times.")
    ] = PUBLISHED,
) -> None:
    """List pretrained models, and the networks with all layers, sizes and weights; or show the card of a model."""
    from rotopath import pretrained
    from rotopath.models import ARCHITECTURES

    names = pretrained.list_pretrained()
    if name in names:
        _print_card(pretrained.HOME / name / pretrained.CARD)
        raise typer.Exit
    if name is not None and name not in ARCHITECTURES:
        refuse(f"There is no model {name!r}; choose from {', '.join([*names, *ARCHITECTURES])}.")
    try:
        tables = [table for each in ([name] if name else ARCHITECTURES) for table in _draw_network(each, orientations)]
    except ValueError as error:
        refuse(str(error))
    if name is None:
        from rotopath.reports.terminal import pretrained_table

        door.console.print(pretrained_table([pretrained.HOME / each for each in names]))
    for table in tables:
        door.console.print(table)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for all that is made; what is there is kept.")] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps in each of three epochs.")] = 220,
    size: Annotated[int, typer.Option(min=160, help="Side of the synthetic fields, in pixels.")] = 512,
) -> None:
    """Train N=1 and N=8 on synthetic tissue, and write a report: scores, detections, predictions as images turn."""
    if out.exists() and not out.is_dir():
        refuse(f"{out} is a file, but the demonstration needs a folder; choose another one with --out.")
    with mistakes_in_one_sentence():
        from rotopath.reports.demo_report import run_demo

        report = run_demo(out, door.console, steps, size)
    print_place("Report", report)
    if door.console.is_terminal:
        webbrowser.open(report.resolve().as_uri())


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, to go with a bug report.")] = False,
) -> None:
    """Show what is installed and what is missing, and test that it works. Exit code 1 if something does not."""
    from rotopath.reports import terminal as health
    from rotopath.selftest import examine, run_self_tests

    found = examine()
    if not as_json:
        door.console.print(health.findings(found), health.self_test_title(), highlight=False)
    outcomes = []
    for outcome in run_self_tests():
        outcomes.append(outcome)
        if not as_json:
            door.console.print(health.outcome(outcome))
    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps(found | {"self_tests": [asdict(one) for one in outcomes]}, indent=1, ensure_ascii=False))
    else:
        door.console.print(health.verdict(outcomes))
    if any(one.state == "fails" for one in outcomes):
        raise typer.Exit(1)


def _print_card(path: Path) -> None:
    from rich.markdown import Markdown

    door.console.print(Markdown(path.read_text(encoding="utf-8")), width=min(door.console.width, CARD_WIDTH))


def _draw_network(name: str, orientations: list[int]) -> "list[Group]":
    """As many numbers of orientations side by side as the terminal is wide, the others below."""
    from rotopath.models import ARCHITECTURES
    from rotopath.reports.terminal import architecture_table

    across = max(1, (door.console.width - 32) // 11)
    starts = range(0, len(orientations), across)
    return [architecture_table(ARCHITECTURES[name], orientations[start : start + across]) for start in starts]
