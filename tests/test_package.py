"""The package as an import: lazy, complete, and honest about what it lacks."""

import inspect
import pydoc
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import rotopath as rp

SOURCE = Path(rp.__file__).parent
VERBS = ("evaluate", "export", "predict", "study", "train")  # what the command does, in Python
NAMED_TASK = re.compile(r'== *"(tumor|mitosis|nuclei)"')
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys, types
from importlib.util import find_spec

for module in pkgutil.walk_packages(sys.modules["rotopath"].__path__, "rotopath."):
    needs_triton = module.name.startswith("rotopath.nn.triton.")
    if not module.name.endswith("__main__") and (find_spec("triton") or not needs_triton):
        importlib.import_module(module.name)
"""


def test_import_is_light() -> None:
    script = "import rotopath, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    for name in rp.__all__:
        assert getattr(rp, name) is not None
        assert name in dir(rp)
    for room in (rp.nn, rp.models, rp.metrics):
        for name in room.__all__:
            assert getattr(room, name) is not None


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rotate_the_slide'"):
        _ = rp.rotate_the_slide


@pytest.mark.parametrize("name", VERBS)
def test_what_the_command_does_is_a_function_with_help(name: str) -> None:
    function = getattr(rp, name)
    assert inspect.isfunction(function)
    assert name in rp.__all__
    first = (inspect.getdoc(function) or "").partition("\n")[0]
    assert first.endswith((".", ":")), "the first line says what it does"
    assert len(first) > 20
    shown = pydoc.plain(pydoc.render_doc(function))
    assert first in shown
    for parameter in inspect.signature(function).parameters:
        assert parameter in shown
    assert find_spec(f"rotopath.{name}") is None, "a module of that name would hide it"


def test_help_on_the_package_works() -> None:
    shown = pydoc.plain(pydoc.render_doc(rp))
    for name in VERBS:
        assert name in shown


@pytest.mark.parametrize("before", ["import rotopath", "import rotopath; rotopath.evaluate; rotopath.train"])
def test_functions_stay_functions_after_every_module_is_imported(before: str) -> None:
    """A module of a function's name would take its place as soon as it is imported."""
    script = f"""
{before}
{IMPORT_EVERYTHING}
for name in {VERBS!r}:
    assert callable(getattr(rotopath, name)), f"rotopath.{{name}} is {{getattr(rotopath, name)!r}}"
for name in ("Recipe", "equivariance_error", "equivariant", "freeze", "load"):
    assert callable(getattr(rotopath, name)), f"rotopath.{{name}} is {{getattr(rotopath, name)!r}}"
rooms = [getattr(rotopath, name) for name in rotopath.__all__ if isinstance(getattr(rotopath, name), types.ModuleType)]
assert len(rooms) > 10
for room in rooms:
    for name in getattr(room, "__all__", ()):
        assert not isinstance(getattr(room, name), types.ModuleType), f"{{room.__name__}}.{{name}} is a module"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_evaluate_is_a_function_beside_the_module_of_evaluation() -> None:
    script = "import rotopath as rp; import rotopath.evaluation; assert rp.evaluate is rotopath.evaluation.evaluate"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def lines_that_name_a_task(source: Path) -> list[str]:
    """Lines that compare with the name of a task, but for where tasks and the paper's networks are written down."""
    return [
        f"{path.relative_to(source)}:{number}: {line.strip()}"
        for path in sorted(source.rglob("*.py"))
        if path.relative_to(source).parts[0] != "tasks" and path != source / "models" / "tables.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if NAMED_TASK.search(line)
    ]


def test_no_code_outside_of_tasks_asks_which_task_it_is() -> None:
    assert lines_that_name_a_task(SOURCE) == []


def test_code_that_asks_which_task_it_is_would_be_found(tmp_path: Path) -> None:
    for place in ("data/batches.py", "tasks/segment.py", "models/tables.py", "models/network.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text('if task == "nuclei":\n    pass\n')
    (tmp_path / "runs.py").write_text('if kind == "segment" and name !=  "nuclei":\n    a = task =="tumor"\n')
    assert lines_that_name_a_task(tmp_path) == [
        'data/batches.py:1: if task == "nuclei":',
        'models/network.py:1: if task == "nuclei":',
        'runs.py:2: a = task =="tumor"',
    ]
