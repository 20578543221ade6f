"""CONTRIBUTING.md: the files of its table exist, and its two walks pass through the files that they list."""

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import pytest
from layouts import kumar, write_image
from test_pretrained import draw_tissue
from typer.testing import CliRunner

import rotopath
from rotopath.cli import app

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGE = Path(rotopath.__file__).parent
TRAIN, PREDICT = (re.findall(r"[a-z_/]+\.py", walk) for walk in re.findall("```mermaid\n(.*?)```", PAGE, re.DOTALL))
RECIPE = """
task = "nuclei"
data = "{data}"
orientations = 1
epochs = 1
steps = 2
batch = 4
validation_steps = 1
accelerator = "cpu"
"""


def call(*words: object) -> None:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output


def list_files_run(action: Callable[[], None]) -> set[str]:
    """Return the files of rotopath with functions that an action calls, in any thread."""
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
    paths = {Path(code.co_filename) for code in called if code.co_name != "<module>"}
    return {path.relative_to(PACKAGE).as_posix() for path in paths if path.is_relative_to(PACKAGE)}


def test_files_of_the_table_exist() -> None:
    table = PAGE.partition("## I want to")[2].partition("\n## ")[0]
    names = re.findall(r"`([a-z_/]+(?:\.py|/))`", table)
    assert len(names) > 20
    missing = [name for name in names if not (PACKAGE / name).exists() and not (PACKAGE.parents[1] / name).exists()]
    assert not missing


def test_walks_are_short_and_name_no_file_twice() -> None:
    assert len(set(TRAIN)) == 15
    assert len(set(PREDICT)) == 13


def test_no_class_and_no_module_has_the_name_of_another() -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    classes = [name for path in paths for name in re.findall(r"^class (\w+)", path.read_text("utf-8"), re.MULTILINE)]
    for names in ([path.name for path in paths], classes):
        assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize("walk", ["train", "predict"])
def test_a_walk_passes_through_its_files(walk: str, tmp_path: Path) -> None:
    if walk == "train":
        data = kumar(tmp_path / "data", ["a", "b", "c"], size=70)
        (tmp_path / "recipe.toml").write_text(RECIPE.format(data=data))
        files = list_files_run(lambda: call("train", tmp_path / "recipe.toml", "--out", tmp_path / "run"))
        assert set(TRAIN) <= files
        assert "inference/slide_pass.py" not in files, "files are those that run, and not all"
    else:
        image = write_image(tmp_path / "tissue.png", draw_tissue())
        command = ("predict", "nuclei-kumar-n8", image, "--out", tmp_path / "results", "--spacing-um-px", 0.25)
        files = list_files_run(lambda: call(*command, "--device", "cpu"))
        assert set(PREDICT) <= files
        assert "training/loop.py" not in files, "files are those that run, and not all"
