"""The package as an import: light, complete, and without code that depends on the name of a task."""

import csv
import inspect
import pydoc
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import dependencies
import pytest

import rotopath as rp

pytestmark = pytest.mark.slow

SOURCE = Path(rp.__file__).parent
VERBS = ("evaluate", "export", "predict", "study", "train")  # commands that are also functions
NAMED_TASK = re.compile(r'== *"(tumor|mitosis|nuclei)"')
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys, types
from importlib.util import find_spec

for module in pkgutil.walk_packages(sys.modules["rotopath"].__path__, "rotopath."):
    needs_triton = module.name.startswith("rotopath.nn.triton.")
    if not module.name.endswith("__main__") and (find_spec("triton") or not needs_triton):
        importlib.import_module(module.name)
"""


def run_python(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_does_not_import_torch() -> None:
    run_python("import rotopath, sys; sys.exit('torch' in sys.modules)")


def test_public_names_exist() -> None:
    for name in rp.__all__:
        assert getattr(rp, name) is not None
        assert name in dir(rp)
    for package in (rp.nn, rp.models, rp.metrics):
        for name in package.__all__:
            assert getattr(package, name) is not None


def test_no_pinned_package_has_a_known_vulnerability() -> None:
    """As `tools/dependencies.py` has recorded; it must run again after a version has changed."""
    with (Path(dependencies.__file__).parents[1] / "results/dependencies.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["package"]: row["version"] for row in rows} == dependencies.read_pins()
    assert {row["yanked"] for row in rows} == {"no"}
    assert {row["vulnerabilities"] for row in rows} <= {"none", "unknown"}


@pytest.mark.parametrize(
    ("version", "pages", "yanked", "vulnerabilities"),
    [
        ("2.0", {}, "no", "CVE-1;GHSA-2"),  # the latest
        ("1.0", {}, "yes", "unknown"),
        ("1.0", {"lightning/1.0": {"vulnerabilities": []}}, "yes", "none"),
        ("2.6.2", {}, "no", "malicious"),
    ],
)
def test_the_table_of_packages_states_what_the_index_knows(
    version: str, pages: dict[str, dict[str, object]], yanked: str, vulnerabilities: str
) -> None:
    files = {"1.0": [{"upload_time": "2026-01-02T03", "yanked": True}]}
    found = [{"id": "GHSA-2"}, {"id": "CVE-1"}]
    project = {"info": {"version": "2.0"}, "vulnerabilities": found, "releases": files}
    row = dependencies.describe("lightning", version, ({"lightning": project} | pages).get)
    assert row["yanked"] == yanked
    assert row["vulnerabilities"] == vulnerabilities
    assert row["released"] == ("2026-01-02" if version == "1.0" else "unknown")


def test_each_pinned_package_has_hashes() -> None:
    hashes = dependencies.read_hashes(dependencies.HASHES), dependencies.read_hashes(dependencies.TORCH_HASHES)
    pins = [f"{name}=={version}" for name, version in dependencies.read_pins().items()]
    assert sorted([*hashes[0], *hashes[1]]) == sorted(pins)
    assert "torch==2.13.0" in hashes[1]
    for digests in [*hashes[0].values(), *hashes[1].values()]:
        assert digests
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)


@pytest.mark.parametrize(
    ("version", "url", "sha256", "own", "others"),
    [
        ("2.13.0", "https://files.pythonhosted.org/torch.whl", "aa", 0, 0),
        ("2.13.0", "https://files.pythonhosted.org/torch.whl", "bb", 0, 1),
        ("2.13.0", "https://files.pythonhosted.org/torch.whl", None, 0, 1),
        ("2.13.0+cpu", "https://download.pytorch.org/torch.whl", "bb", 1, 0),
        ("2.13.0", "file:///wheels/torch.whl", "bb", 1, 0),
    ],
)
def test_installed_files_without_a_known_hash_are_found(
    version: str, url: str, sha256: str | None, own: int, others: int
) -> None:
    archive = {"hashes": {} if sha256 is None else {"sha256": sha256}}
    package = {
        "metadata": {"name": "torch", "version": version},
        "download_info": {"url": url, "archive_info": archive},
    }
    found = dependencies.check({"install": [package]}, {"aa"})
    assert [len(sentences) for sentences in found] == [own, others]


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rotate_the_slide'"):
        _ = rp.rotate_the_slide


@pytest.mark.parametrize("name", VERBS)
def test_command_is_also_a_function_with_a_docstring(name: str) -> None:
    function = getattr(rp, name)
    assert inspect.isfunction(function)
    assert name in rp.__all__
    first = (inspect.getdoc(function) or "").partition("\n")[0]
    assert first.endswith((".", ":")), "the first line is a sentence"
    assert len(first) > 20
    text = pydoc.plain(pydoc.render_doc(function))
    assert first in text
    for parameter in inspect.signature(function).parameters:
        assert parameter in text
    assert find_spec(f"rotopath.{name}") is None, "a module of that name would hide the function"


def test_help_on_the_package_lists_the_functions() -> None:
    text = pydoc.plain(pydoc.render_doc(rp))
    for name in VERBS:
        assert name in text


def test_functions_stay_functions_after_every_module_is_imported() -> None:
    """When a module is imported, it hides a function of the same name. Two of the functions were used before."""
    run_python(f"""
import rotopath; rotopath.evaluate; rotopath.train
{IMPORT_EVERYTHING}
for name in {VERBS!r}:
    assert callable(getattr(rotopath, name)), f"rotopath.{{name}} is {{getattr(rotopath, name)!r}}"
for name in ("Recipe", "equivariance_error", "equivariant", "freeze", "load"):
    assert callable(getattr(rotopath, name)), f"rotopath.{{name}} is {{getattr(rotopath, name)!r}}"
public = [getattr(rotopath, name) for name in rotopath.__all__]
packages = [value for value in public if isinstance(value, types.ModuleType)]
assert len(packages) > 10
for package in packages:
    for name in getattr(package, "__all__", ()):
        assert not isinstance(getattr(package, name), types.ModuleType), f"{{package.__name__}}.{{name}} is a module"
assert rotopath.evaluate is rotopath.evaluation.evaluate
""")


def lines_that_compare_task_names(source: Path) -> list[str]:
    """Lines outside of `tasks` that compare something with the name of one of the paper's tasks."""
    return [
        f"{path.relative_to(source)}:{number}: {line.strip()}"
        for path in sorted(source.rglob("*.py"))
        if path.relative_to(source).parts[0] != "tasks"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if NAMED_TASK.search(line)
    ]


def test_no_code_outside_of_tasks_depends_on_the_name_of_a_task() -> None:
    assert lines_that_compare_task_names(SOURCE) == []


def test_code_that_depends_on_the_name_of_a_task_is_detected(tmp_path: Path) -> None:
    for name in ("data/batches.py", "tasks/segment.py", "models/network.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('if task == "nuclei":\n    pass\n')
    (tmp_path / "runs.py").write_text('if kind == "segment" and name !=  "nuclei":\n    a = task =="tumor"\n')
    assert lines_that_compare_task_names(tmp_path) == [
        'data/batches.py:1: if task == "nuclei":',
        'models/network.py:1: if task == "nuclei":',
        'runs.py:2: a = task =="tumor"',
    ]
