"""Summaries of studies, against scores that are known."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rotopath.model_file import RunError
from rotopath.recipe import Recipe, write_recipe
from rotopath.reports.progress import StudyProgress
from rotopath.reports.study_report import incomparable
from rotopath.studies.plan import Part, Study
from rotopath.studies.results import StudyResult, estimate, margin, read_results, summarise
from rotopath.studies.schedule import JobState


def result(wrong: list[int], images: int = 10, n: int = 1, seed: int = 0, rotations: int = 1) -> StudyResult:
    scores = {"accuracy": 1 - len(wrong) / images, "slides": None, "wrong": wrong, "images": images}
    scores["rotation"] = {"fair": {"deviation": 0.1 * n, "changed": 0.5}}
    return StudyResult("tumor", Path("nowhere"), Recipe("tumor", "d", orientations=n, seed=seed), rotations, scores)


def test_the_mean_over_seeds() -> None:
    found = estimate([result([0, 1]), result([0, 1, 2, 3], seed=1)])
    assert found.value == pytest.approx(0.7)
    assert (found.low, found.high) == (0, 1), "of two seeds that are that far apart, nothing is known"


def test_an_interval_is_narrower_with_more_patients() -> None:
    few, many = (estimate([result(list(range(0, images, 4)), images)]) for images in (20, 2000))
    assert many.high - many.low < 0.2 * (few.high - few.low)
    assert many.high - many.low == pytest.approx(2 * 1.96 * np.sqrt(0.25 * 0.75 / 2000), rel=0.15), "as the binomial's"


def test_intervals_hold_for_other_patients_and_seeds() -> None:
    """Seeds that scatter by 0.02 about 0.8, and 2000 patients: the interval of three has to hold 0.8, mostly."""
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(30):
        chances = 0.8 + 0.02 * generator.standard_normal(3)
        runs = [np.flatnonzero(generator.random(2000) > chance).tolist() for chance in chances]
        found = estimate([result(wrong, 2000, seed=seed) for seed, wrong in enumerate(runs)])
        held += found.low <= 0.8 <= found.high
    assert held >= 26


def test_the_margin_of_seeds_is_students() -> None:
    assert margin(np.array([0.1, 0.2, 0.3])) == pytest.approx(4.302653 * 0.1 / np.sqrt(3), rel=1e-6)
    assert margin(np.array([0.7])) == 0, "one seed says nothing about others"


def test_other_cases_are_refused() -> None:
    with pytest.raises(RunError, match="was tested on other cases"):
        estimate([result([0])], [result([0], images=11)])


def test_differences_are_paired() -> None:
    """Both are wrong about the same patches, which varies a lot, and the difference does not."""
    hard = list(range(0, 40, 2))
    plain, better = result(hard, 40), result(hard[1:], 40, n=8)
    found = estimate([better], [plain])
    assert found.value == pytest.approx(1 / 40)
    assert 0 <= found.low <= found.high < 0.11
    same = estimate([plain], [result(hard, 40, n=8)])
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_summaries_compare_runs_of_the_same_seed_and_data() -> None:
    results = [
        *(result([0, 1, 2, 3], seed=seed) for seed in (0, 1)),
        *(result([0, 1, 2], seed=seed, rotations=8) for seed in (0, 1)),
        *(result([0], seed=seed, n=8) for seed in (0, 1)),
        result([0], seed=5, n=4),  # no other run has its seed
    ]
    plain, turned, eight, four = summarise(results)
    assert [one.group.label for one in (plain, turned, eight, four)] == ["N=1", "N=1 + 8 rotations", "N=8", "N=4"]
    assert plain.over_plain is None
    assert turned.over_turned is None
    assert turned.over_plain is not None
    assert turned.over_plain.value == pytest.approx(0.1)
    assert eight.over_plain is not None
    assert eight.over_plain.value == pytest.approx(0.3)
    assert eight.over_turned is not None
    assert eight.over_turned.value == pytest.approx(0.2)
    assert (eight.deviation, eight.scatter, eight.changed) == (0, pytest.approx(0.8), 0.5)
    assert four.over_plain is None
    assert np.isnan(four.deviation)


def test_results_are_read_from_files(tmp_path: Path) -> None:
    for n, regime in ((8, 0.5), (1, 1.0), (1, 0.5)):
        folder = tmp_path / "tumor" / f"N{n}-regime{regime:g}-seed0"
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text(write_recipe(Recipe("tumor", "d", orientations=n, regime=regime)))
        for name, rotations in (("", 1), ("-tta8", 8)):
            content = {"test": {"accuracy": n / 10, "rotations": rotations}}
            (folder / f"evaluation-test{name}.json").write_text(json.dumps(content))
        (folder / "evaluation-test-mine.json").write_text(json.dumps({"test": {"accuracy": 0, "rotations": 1}}))
    found = [(one.recipe.regime, one.recipe.orientations, one.rotations, one.score) for one in read_results(tmp_path)]
    assert found == [
        *((1.0, 1, 1, 0.1), (1.0, 1, 8, 0.1)),
        *((0.5, 1, 1, 0.1), (0.5, 1, 8, 0.1), (0.5, 8, 1, 0.8), (0.5, 8, 8, 0.8)),
    ], "all training data first, then less"


@pytest.mark.parametrize(
    ("task", "source", "scores", "reason"),
    [
        ("tumor", "PCam", {"images": 32768}, None),
        ("tumor", "PCam", {"images": 1500}, "here there are 1,500"),
        ("tumor", "PCam (synthetic)", {"images": 32768}, "synthetic"),
        ("mitosis", "AMIDA13", {"hits": 500, "missed": 33}, None),
        ("mitosis", "AMIDA13", {"hits": 5, "missed": 33}, "here there are 38"),
        ("nuclei", "Kumar", {"images": dict.fromkeys("abcdefgh")}, None),
        ("nuclei", "Kumar", {"images": dict.fromkeys("ab")}, "here there are 2"),
    ],
)
def test_what_the_paper_can_be_compared_with(
    task: str, source: str, scores: dict[str, object], reason: str | None, tmp_path: Path
) -> None:
    (tmp_path / "provenance.json").write_text(json.dumps({"data": {"source": source}}))
    said = incomparable(StudyResult("part", tmp_path, Recipe(task, "d"), 1, scores))
    assert said is None if reason is None else said is not None and reason in said


def test_progress_in_a_terminal_and_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study((Part("tumor", Recipe("tumor", "d"), (1, 8), (None,), (0, 1), 1),))
    a, b, c, d = study.jobs  # N = 8 and 1 of the first seed, then of the second
    clock = iter(range(0, 1000, 60))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    for terminal in (True, False):
        console = Console(force_terminal=terminal, width=100, color_system=None, record=True)
        with StudyProgress(study, console) as progress:
            progress.show(
                {job: JobState("running", "training", 0.2) for job in (a, b)}
                | {c: JobState("waiting"), d: JobState("waiting")}
            )
            progress.show(
                {
                    a: JobState("done"),
                    b: JobState("failed", reason="[/gloo/pair.cc:534] no disk"),
                    c: JobState("running", "training", 0.5),
                    d: JobState("waiting"),
                }
            )
        shown = console.export_text()
        assert "1 of 4 done, 1 running, 1 failed, about" in shown
        if terminal:
            assert "seed 0" in shown
            assert "50% training" in shown
            assert "✓" in shown
            assert "✗" in shown
        else:
            assert "tumor/N1-seed0 failed: [/gloo/pair.cc:534] no disk" in shown
