"""The command line as a newcomer meets it."""

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import rotopath
from rotopath.cli import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})


def test_models_prints_every_total_within_80_columns() -> None:
    result = run("models")
    assert result.exit_code == 0
    totals = [34561, 32035, 33897, 33751, 66886, 62332, 66206, 66056, 89425, 88600, 86727, 82411]
    for total in map(str, totals):
        assert total in result.stdout
    assert "…" not in result.stdout
    assert "Receptive field 68 px, stride 8 px." in result.stdout


def test_models_shows_one_network_for_other_orientations() -> None:
    result = run("models", "tumor", "-n", "6")
    assert result.exit_code == 0
    assert "N=6" in result.stdout
    assert "88919" in result.stdout
    assert "mitosis" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("models", "kidney"), "There is no model 'kidney'; choose from mitosis, nuclei, tumor."),
        (("models", "-n", "0"), "orientations must be a whole number, 1 or more"),
        (("models", "-n", "4000"), "use fewer orientations"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(arguments: tuple[str, ...], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stdout == ""


def test_demo_measures_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    result = run("demo", "--out", str(out))
    assert result.exit_code == 0
    assert "rotation error" in result.stdout
    assert (out / "layers.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in out.iterdir()] == ["layers.png"]


def test_demo_refuses_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    result = run("demo", "--out", str(tmp_path / "taken"))
    assert result.exit_code == 2
    assert "is a file, but the picture needs a folder" in result.stderr
    assert (tmp_path / "taken").read_text() == "a file"


def test_demo_refuses_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    result = run("demo", "--out", str(tmp_path / "taken" / "below"))
    assert result.exit_code == 2
    assert "could not be written" in result.stderr


@pytest.mark.parametrize("columns", ["46", "60", "80", "200"])
def test_tables_fit_the_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotopath.cli.console", Console(width=int(columns)))
    result = run("models", "nuclei", *[word for n in range(1, 13) for word in ("-n", str(n))])
    assert result.exit_code == 0
    assert "…" not in result.stdout
    for n in range(1, 13):
        assert f"N={n}" in result.stdout


def test_version() -> None:
    assert run("--version").stdout == f"rotopath {rotopath.__version__}\n"


def test_help_does_not_wait_for_torch() -> None:
    script = (
        "import sys, runpy; sys.argv = ['rotopath', '--help']\n"
        "try: from rotopath.cli import app; app()\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "models" in done.stdout


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rotopath", "models", "tumor"], capture_output=True, text=True, check=True
    )
    assert "86727" in done.stdout
