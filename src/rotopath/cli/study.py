"""`rotopath study`: run a study (many trainings and evaluations), and write its report."""

from pathlib import Path
from typing import Annotated

import typer

from rotopath.reports import terminal


def run_study(
    study: Annotated[Path, typer.Argument(help="Study file (TOML). The folder studies/ contains examples.")],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Override a key of the study file: key=value, such as tumor.tta=4. To override a key of the recipe of "
            "a part, use PART.set.KEY=value, such as tumor.set.data=FOLDER. Can be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for all runs. Default: runs/NAME for the study file NAME.toml.")
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of runs in parallel. With --cluster local or slurm: number of workers. With --cluster "
            "ADDRESS: number of runs at the same time on each GPU. Default: depends on the GPUs and CPU cores of this "
            "machine.",
        ),
    ] = None,
    parts: Annotated[
        list[str] | None, typer.Option("--part", help="Run only this part of the study. Can be repeated.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Run on a Dask cluster: local, slurm, or the address of a scheduler.")
    ] = None,
) -> None:
    """Run all trainings and evaluations of a study. Finished runs are skipped, and interrupted runs are resumed."""
    with terminal.user_errors_in_one_sentence():
        from rotopath.reports.progress import StudyProgress
        from rotopath.studies.jobs import study as run_jobs
        from rotopath.studies.plan import estimate_gpu_hours, read_study

        plan = read_study(study, changes or [], parts or [])
        folder = out or Path("runs") / study.stem
        time = ""
        if (hours := estimate_gpu_hours(plan)) is not None:
            amount = f"{hours:.1f} h" if hours >= 1 else f"{max(1, round(60 * hours))} min"
            time = f", whose steps take about {amount} on one NVIDIA H200 if twelve share it"
        trainings = "1 training" if len(plan.jobs) == 1 else f"{len(plan.jobs)} trainings"
        rest = "; validation and evaluations come on top, and often take longer" if time else ", and evaluations"
        line = f"{trainings}{time}{rest}. Finished runs are skipped."
        terminal.console.print(line, highlight=False, soft_wrap=True)
        try:
            with StudyProgress(plan, terminal.console) as progress:
                states = run_jobs(plan, folder, at_once=at_once, cluster=cluster, on_progress=progress.show)
        except KeyboardInterrupt as error:
            terminal.exit_interrupted(error, folder)
    failed = {job.name: state.reason for job, state in states.items() if state.state == "failed"}
    for name, reason in failed.items():
        terminal.print_error(f"{name} failed: {reason}")
    terminal.print_path("Runs", folder)
    if failed:
        raise typer.Exit(1)


def report_study(
    study: Annotated[Path, typer.Argument(help="Folder with all runs of the study.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the report. Default: the folder report/ in the study folder."),
    ] = None,
) -> None:
    """Write the report of a study, with the results of all finished runs: an HTML page, CSV tables and figures."""
    with terminal.user_errors_in_one_sentence():
        from rotopath.reports.study_report import report

        html = report(study, out)
    terminal.print_path("Report", html)
