"""The pages in the folder results: every number on them comes from a CSV file, and from the right one."""

import csv
import re
import shutil
from pathlib import Path

import pages
import pytest
from pages import TemplateError, render

from rotopath.reports.study_report import PUBLISHED
from rotopath.studies.results import Estimate, decide

RESULTS = Path(__file__).parent.parent / "results"
TEMPLATES = sorted((RESULTS / "templates").glob("*.md"))
# Numbers in the text of templates: sizes, settings and mathematics, but no results
NO_RESULTS = {"95 %", "50 %", "75 %", "4 %", "0.25", "0.03", "0.01", "2.11", "4.0"}


def render_all(results: Path) -> dict[str, str]:
    pages._read.cache_clear()
    return {path.name: render(path.read_text(), results) for path in TEMPLATES}


def test_pages_are_those_of_their_templates_and_tables() -> None:
    """`.venv/bin/python tools/pages.py` writes them."""
    for name, text in render_all(RESULTS).items():
        assert (RESULTS / name).read_text() == text, f"{name} is not what tools/pages.py writes"


def test_a_changed_digit_in_a_table_changes_a_page(tmp_path: Path) -> None:
    """Negative control: the last digit of every score, interval and difference that is not an integer is raised."""
    before = render_all(RESULTS)
    for source in sorted({path for text in before.values() for path in re.findall(r"<!-- from (.+?) -->", text)}):
        results = tmp_path / source.replace("/", "-")
        shutil.copytree(RESULTS, results, ignore=shutil.ignore_patterns("*.png", "*.pdf", "*.md"))
        text = (results / source).read_text()
        changed = re.sub(r"(\.\d*)(\d)\b", lambda number: f"{number[1]}{(int(number[2]) + 1) % 10}", text)
        if changed != text:
            (results / source).write_text(changed)
            assert render_all(results) != before, f"no page has the numbers of {source}"


def test_no_result_is_written_by_hand() -> None:
    for path in TEMPLATES:
        text = re.sub(r"\{\{.+?\}\}|```.+?```|\]\(.+?\)|`.+?`", "", path.read_text(), flags=re.DOTALL)
        numbers = set(re.findall(r"\d+\.\d+|[\d.]+ %", text))
        assert numbers <= NO_RESULTS, f"{path.name} has results in its text"


def test_answers_agree_with_their_intervals() -> None:
    with (RESULTS / "samples" / "claims.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = [float(number) for number in re.findall(r"[-+][\d.]+", row["difference"])]
            if all(numbers) and len(numbers) == 3 and int(row["seeds"]) > 1:  # an end of 0.000 may be rounded
                assert decide(Estimate(*numbers)) == row["holds here"], row["claim"]


@pytest.mark.parametrize("page", ["README.md", "docs/fidelity.md"])
def test_other_pages_have_the_same_numbers(page: str) -> None:
    """They are written by hand there; in this form, they are in the tables."""
    text = " ".join((RESULTS.parent / page).read_text().split())
    cells = [
        f"{{{{samples/designs | part={part}-faithful | changed, %, {design} | mean}}}} %"
        for part in ("tumor", "mitosis")
        for design in ("first", "second")
    ]
    cells += [f"{{{{samples/designs | part={part}-faithful | score, difference}}}}" for part in ("tumor", "mitosis")]
    for cell in cells:
        assert render(cell, RESULTS).strip() in text, f"{page} lacks the number of {cell}"


def test_the_papers_scores_are_those_of_reports() -> None:
    with (RESULTS / "paper.csv").open(newline="") as file:
        rows = {(row["task"], int(row["N"])): row["score"] for row in csv.DictReader(file)}
    assert rows == {(task, n): score for task, scores in PUBLISHED.items() for n, score in scores.items()}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "t.csv").write_text(
        'N,rotations,data,score\n1,1,all,0.5 ± 0.1\n1,16,all,0.6\n4,1,all,"0.7 [0, 1]"\n4,1,half,0.125\n'
    )
    pages._read.cache_clear()
    return tmp_path


def test_fields_are_replaced(table: Path) -> None:
    template = """{{let one = t | N=1; rotations=1}}
- {{one | score}} is {{one | score | mean}} on average,
  and {{t | data=half | score | percent}}

{{table | t | N=1 | rotations; score = F1}}

{{pivot | t | | data = amount | N + rotations | score}}
"""
    assert render(template, table).splitlines() == [
        "- 0.5 ± 0.1 is 0.5 on average, and 12.5 %",
        "",
        "<!-- from t.csv -->",
        "| rotations | F1 |",
        "|---|---|",
        "| 1 | 0.5 ± 0.1 |",
        "| 16 | 0.6 |",
        "",
        "<!-- from t.csv -->",
        "| amount | N=1 | N=1, 16 rotations | N=4 |",
        "|---|---|---|---|",
        "| all | 0.5 ± 0.1 | 0.6 | 0.7 [0, 1] |",
        "| half | – | – | 0.125 |",
    ]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("t | N=1 | score", "2 rows of t.csv have N=1; expected one"),
        ("t | N=9 | score", "0 rows of t.csv have N=9; expected one"),
        ("t | n=1 | score", "t.csv has no column 'n'; choose from N, rotations"),
        ("t | N=1; rotations=16 | f1", "There is no column 'f1'"),
        ("t | data=half | score | roman", "The format"),
        ("t | data=half", "has 2 parts; expected 3"),
    ],
)
def test_fields_without_exactly_one_cell_are_refused(field: str, message: str, table: Path) -> None:
    with pytest.raises(TemplateError, match=re.escape(message)):
        render(f"{{{{{field}}}}}", table)


def test_a_pivot_of_rows_that_share_a_cell_is_refused(table: Path) -> None:
    with pytest.raises(TemplateError, match="Several rows of t have '4' and 'N=4'"):
        render("{{pivot | t | N=4 | N = n | N + rotations | score}}", table)
