"""README and docs: examples run, links are valid, and tables agree with the result files."""

import csv
import re
from pathlib import Path

import pytest

import rotopath as rp

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
FOLDERS = (ROOT / "docs", ROOT / "results")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for folder in FOLDERS for path in sorted(folder.glob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some examples write files
    for example in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(compile(example, page.name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_are_valid(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_are_valid(page: Path) -> None:
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
        linked = page.parent / target if target else page
        assert heading in anchors(linked), f"{page.name} links to {target}#{heading}"


def anchors(page: Path) -> set[str]:
    """The anchors of all headings: their letters, digits and hyphens, with hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_lists_all_layers() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in rp.nn.__all__ if f"`{name}" not in text] == []


def test_result_files_named_in_the_docs_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"results/([\w./-]+\.csv)", page.read_text()):
            assert (ROOT / "results" / name).exists(), f"{page.name} names {name}"


def test_result_files_are_named_in_the_docs_and_tables_agree_with_them() -> None:
    docs = "\n".join(page.read_text() for page in PAGES)
    for path in (ROOT / "results").glob("*.csv"):
        assert path.name in docs, f"{path.name} is not named in any page"
        if f"<!-- {path.name} -->" in docs:
            with path.open(newline="") as file:
                for row in csv.reader(file):
                    assert "| " + " | ".join(row) + " |" in docs, f"{path.name}: {row} is not in the docs"
