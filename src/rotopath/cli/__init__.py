"""The command-line program `rotopath`. This file registers each command in `app`; other files define the commands.

Packages that take long to import, such as torch, are imported only when a command runs, so that `rotopath --help` is
fast.
"""

from typing import Annotated

import typer

import rotopath
from rotopath.cli import audit, datasets, doctor, evaluate, export, list_models, predict, study, train
from rotopath.reports import terminal

__all__ = ["app"]

app = typer.Typer(
    help="Train rotation-equivariant networks for pathology images, and apply them to slides.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(
    help="Import, check, preview and export datasets, or generate synthetic tissue images.", no_args_is_help=True
)
study_app = typer.Typer(help="Run a study (many trainings and evaluations), or write its report.", no_args_is_help=True)


def _print_version(requested: bool) -> None:
    """Print the version and exit if the option --version is given."""
    if requested:
        terminal.console.print(f"rotopath {rotopath.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _add_version_option(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


# The help lists the commands in this order.
app.command("models")(list_models.list_models)
app.command("demo")(train.demo)
app.command("doctor")(doctor.doctor)
app.command("recipes")(train.recipes)
app.command("init")(train.init)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("audit")(audit.audit)
app.command("slides")(predict.slides)
app.command("predict")(predict.predict)
app.command("export")(export.export)
app.add_typer(data_app, name="data")
data_app.command("import")(datasets.import_data)
data_app.command("check")(datasets.check_data)
data_app.command("show")(datasets.show_data)
data_app.command("export")(datasets.export_data)
data_app.command("make")(datasets.make_data)
app.add_typer(study_app, name="study")
study_app.command("run")(study.run_study)
study_app.command("report")(study.report_study)
