"""Commands about studies."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rotopath.cli import door
from rotopath.cli.door import mistakes_in_one_sentence, print_place, stop, study_app


@study_app.command("run")
def study_run(
    study: Annotated[Path, typer.Argument(help="A TOML file, such as those in studies/.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="key=value to change in it, such as tumor.set.data=FOLDER.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for all runs; named after the study when left out.")
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side; chosen for this machine when left out.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="A Dask cluster: the address of its scheduler, local, or slurm.")
    ] = None,
) -> None:
    """Run a grid of trainings and evaluations. The same command skips what is done, and goes on with the rest."""
    with mistakes_in_one_sentence():
        from rotopath.reports.progress import StudyProgress
        from rotopath.studies import read_study
        from rotopath.studies import study as run

        chosen = read_study(study, changes or [])
        folder = out or Path("runs") / study.stem
        try:
            with StudyProgress(chosen, door.console) as progress:
                states = run(chosen, folder, at_once=at_once, cluster=cluster, watch=progress.show)
        except KeyboardInterrupt:
            stop(folder)
    failed = {job.name: one.reason for job, one in states.items() if one.state == "failed"}
    for name, reason in failed.items():
        Console(stderr=True).print(f"rotopath: {name} failed: {reason}", highlight=False, soft_wrap=True, markup=False)
    print_place("Runs", folder)
    if failed:
        raise typer.Exit(1)


@study_app.command("report")
def study_report(
    study: Annotated[Path, typer.Argument(help="The folder of a study.")],
    out: Annotated[
        Path | None, typer.Option(help="A folder for the page, tables and figures; in the study's when left out.")
    ] = None,
) -> None:
    """Write the tables, the figures and a page about a study, from the files of its runs alone."""
    with mistakes_in_one_sentence():
        from rotopath.reports.study_report import report

        page = report(study, out)
    print_place("Report", page)
