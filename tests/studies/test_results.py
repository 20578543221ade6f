"""Summaries of studies, compared with known scores."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from untrained_runs import with_value

from rotopath.model_file import RunError
from rotopath.recipe import Recipe, format_recipe, make_recipe
from rotopath.studies.results import (
    Estimate,
    StudyResult,
    check_claims,
    check_provenance,
    decide,
    estimate,
    find_designs,
    margin,
    read_results,
    summarize,
)

pytestmark = pytest.mark.slow


def result(wrong: list[int], images: int = 10, n: int = 1, seed: int = 0, rotations: int = 1) -> StudyResult:
    scores = {"accuracy": 1 - len(wrong) / images, "slides": None, "wrong": wrong, "images": images}
    scores["rotation"] = {"fair": {"deviation": 0.1 * n, "changed": 0.5}}
    return StudyResult("tumor", Path("nowhere"), Recipe("tumor", "d", orientations=n, seed=seed), rotations, scores)


def test_the_mean_over_seeds() -> None:
    mean = estimate([result([0, 1]), result([0, 1, 2, 3], seed=1)])
    assert mean.value == pytest.approx(0.7)
    assert (mean.low, mean.high) == (0, 1), "two seeds that far apart say nothing about others"


def test_an_interval_is_narrower_with_more_patients() -> None:
    few, many = (estimate([result(list(range(0, images, 4)), images)]) for images in (20, 2000))
    assert many.high - many.low < 0.2 * (few.high - few.low)
    assert many.high - many.low == pytest.approx(2 * 1.96 * np.sqrt(0.25 * 0.75 / 2000), rel=0.15), (
        "the interval of a binomial distribution"
    )


def test_intervals_contain_the_true_score() -> None:
    """Three seeds with a standard deviation of 0.02 around 0.8, 500 patients: most intervals have to contain 0.8."""
    generator = np.random.default_rng(0)
    contained = 0
    for _ in range(30):
        chances = 0.8 + 0.02 * generator.standard_normal(3)
        runs = [np.flatnonzero(generator.random(500) > chance).tolist() for chance in chances]
        interval = estimate([result(wrong, 500, seed=seed) for seed, wrong in enumerate(runs)])
        contained += interval.low <= 0.8 <= interval.high
    assert contained >= 26


def test_the_margin_over_seeds_is_that_of_students_t() -> None:
    assert margin(np.array([0.1, 0.2, 0.3])) == pytest.approx(4.302653 * 0.1 / np.sqrt(3), rel=1e-6)
    assert margin(np.array([0.7])) == 0, "one seed says nothing about others"


def test_other_cases_are_refused() -> None:
    with pytest.raises(RunError, match="was tested on different cases"):
        estimate([result([0])], [result([0], images=11)])


def test_differences_are_paired() -> None:
    """Both are wrong on the same patches: scores vary between samples of patients, their difference does not."""
    hard = list(range(0, 40, 2))
    plain, better = result(hard, 40), result(hard[1:], 40, n=8)
    difference = estimate([better], [plain])
    assert difference.value == pytest.approx(1 / 40)
    assert 0 <= difference.low <= difference.high < 0.11
    same = estimate([plain], [result(hard, 40, n=8)])
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_a_claim_is_decided_by_its_interval() -> None:
    assert decide(Estimate(0.1, 0.001, 0.2)) == "yes"
    assert decide(Estimate(-0.1, -0.2, -0.001)) == "no"
    for low, high in ((-0.001, 0.2), (-0.2, 0.001), (0.0, 0.2), (-0.2, 0.0), (0.0, 0.0), (np.nan, np.nan)):
        assert decide(Estimate((low + high) / 2, low, high)) == "not decided"


def test_the_papers_claims_are_answered() -> None:
    """Each network classifies some of 1,000 patches wrong: seeds differ by one patch, networks by many or few."""

    def group(wrong: int, n: int, regime: float = 1.0, rotations: int = 1, deviation: float = 0.1) -> list[StudyResult]:
        results = []
        for seed in range(3):
            one = result(list(range(wrong + seed)), 1000, n, seed, rotations)
            one = replace(one, recipe=replace(one.recipe, regime=regime))
            cases = {str(i): [deviation * (1 + 0.01 * i), 1] for i in range(50)}
            results.append(replace(one, scores={**one.scores, "rotation": {"fair": {}, "cases": cases}}))
        return results

    claims = check_claims(
        [
            *group(300, 1, deviation=0.2),
            *group(200, 1, rotations=16),
            *group(199, 4),
            *group(100, 8),
            *group(60, 16),
            *group(100, 4, 0.25),
            *group(400, 8, 0.25),
            *group(150, 8, 0.1),
        ]
    )
    assert [(claim.text, claim.is_stated, claim.answer) for claim in claims] == [
        ("N=8 scores above N=1", True, "yes"),
        ("N=8 scores above N=1 with rotated inputs", True, "yes"),
        ("N=4 scores above N=1 with rotated inputs", True, "not decided"),
        ("N=16 scores below N=8", True, "no"),
        ("N=4 with 25% scores above N=1 with 100% and rotated inputs", True, "yes"),
        ("N=8 with 25% scores above N=1 with 100% and rotated inputs", True, "no"),
        ("N=8 with 10% scores above N=1 with 100% and rotated inputs", False, "yes"),
        ("predictions of N=8 scatter less under rotation than those of N=1", True, "yes"),
    ]
    assert claims[0].difference.value == pytest.approx(0.2)
    assert claims[-1].difference.value == pytest.approx(0.1 * (1 + 0.01 * 24.5))
    assert check_claims(group(300, 1)) == []
    one_seed = check_claims([group(300, 1)[0], group(100, 8)[0]])
    assert [(claim.seeds, claim.answer, decide(claim.difference)) for claim in one_seed[:1]] == [
        (1, "not decided", "yes")
    ]


def test_designs_are_compared_if_nothing_but_the_network_differs() -> None:
    def run(part: str, wrong: int, seed: int, **keys: object) -> StudyResult:
        recipe = make_recipe({"task": "tumor", "data": "d", "seed": seed, **keys})
        return replace(result(list(range(wrong)), 100, 8, seed), part=part, recipe=recipe)

    results = [
        *(run("paper", 20, seed) for seed in (0, 1, 2)),
        *(run("faithful", 10, seed, preset="faithful") for seed in (0, 2)),
        run("longer", 10, 0, preset="faithful", epochs=30),
        run("smaller", 10, 0, preset="faithful", orientations=4),
    ]
    (design,) = find_designs(results)
    assert [one.part for one in design.base + design.changed] == ["paper", "paper", "faithful", "faithful"]
    assert [one.recipe.seed for one in design.changed] == [0, 2]
    assert design.options["kernel"] == "harmonic"
    assert "reflections" not in design.options, "it is the same in both"
    difference = design.compare()
    assert difference is not None
    assert difference.value == pytest.approx(0.1)


def test_scatter_by_case_is_read_from_older_evaluations(tmp_path: Path) -> None:
    """They have it in the arrays for figures only: for each window, or for each field."""
    old = replace(result([0]), folder=tmp_path)
    assert old.scatter_terms == {"0": (pytest.approx(0.1), 1.0)}, "one case: the mean of all"
    assert replace(old, scores={}).scatter_terms == {}
    probabilities = np.array([[0.0, 0.5], [1.0, 0.5]], np.float32)  # (angles, windows)
    np.savez(tmp_path / "evaluation-test.npz", fair=probabilities)
    assert replace(old).scatter_terms == {"0": (0.5, 1.0), "1": (0.0, 1.0)}
    maps = np.stack([np.full((4, 4), 0.25), np.zeros((4, 4))]).astype(np.float16)  # (fields, height, width)
    np.savez(tmp_path / "evaluation-test.npz", objects_deviation=maps)
    assert replace(old).scatter_terms == {"0": (0.25, 1.0), "1": (0.0, 1.0)}
    new = replace(old, scores={"rotation": {"fair": {}, "cases": {"a": [3, 4], "b": [1, 2]}}})
    assert new.scatter_terms == {"a": (3.0, 4.0), "b": (1.0, 2.0)}
    (tmp_path / "evaluation-test.npz").write_bytes(b"PK")
    with pytest.raises(RunError, match=r"is damaged .*--robustness"):
        replace(old).scatter_terms  # noqa: B018


def test_summaries_compare_runs_of_the_same_seed_and_data() -> None:
    results = [
        *(result([0, 1, 2, 3], seed=seed) for seed in (0, 1)),
        *(result([0, 1, 2], seed=seed, rotations=8) for seed in (0, 1)),
        *(result([0], seed=seed, n=8) for seed in (0, 1)),
        result([0], seed=5, n=4),  # the only run with this seed
    ]
    plain, rotated, eight, four = summarize(results)
    assert [summary.condition.label for summary in (plain, rotated, eight, four)] == [
        "N=1",
        "N=1 + 8 rotations",
        "N=8",
        "N=4",
    ]
    assert plain.over_plain is None
    assert rotated.over_rotated is None
    assert rotated.over_plain is not None
    assert rotated.over_plain.value == pytest.approx(0.1)
    assert eight.over_plain is not None
    assert eight.over_plain.value == pytest.approx(0.3)
    assert eight.over_rotated is not None
    assert eight.over_rotated.value == pytest.approx(0.2)
    assert (eight.deviation, eight.scatter, eight.changed) == (0, pytest.approx(0.8), 0.5)
    assert four.over_plain is None
    assert np.isnan(four.deviation)


def test_results_are_read_from_files(tmp_path: Path) -> None:
    for n, regime in ((8, 0.5), (1, 1.0), (1, 0.5)):
        folder = tmp_path / "tumor" / f"N{n}-regime{regime:g}-seed0"
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text(format_recipe(Recipe("tumor", "d", orientations=n, regime=regime)))
        for name, rotations in (("", 1), ("-tta8", 8)):
            content = {"test": {"accuracy": n / 10, "rotations": rotations, "slides": {"a": [n, 10]}}}
            (folder / f"evaluation-test{name}.json").write_text(json.dumps(content))
        (folder / "evaluation-test-mine.json").write_text(
            json.dumps({"test": {"accuracy": 0, "rotations": 1, "slides": {}}})
        )
    results = read_results(tmp_path)
    found = [(result.recipe.regime, result.recipe.orientations, result.rotations, result.score) for result in results]
    assert found == [
        *((1.0, 1, 1, 0.1), (1.0, 1, 8, 0.1)),
        *((0.5, 1, 1, 0.1), (0.5, 1, 8, 0.1), (0.5, 8, 1, 0.8), (0.5, 8, 8, 0.8)),
    ], "all training data first, then less"


@pytest.mark.parametrize(
    ("scores", "fault"),
    [
        ("3", "'test' must be a JSON object; got 3"),
        ("{}", "'rotations' must be a whole number from 1 to 360; got None"),
        ('{"rotations": true}', "'rotations' must be a whole number from 1 to 360; got True"),
        ('{"rotations": 1}', "'accuracy' must be a number from 0 to 1; got None"),
        ('{"rotations": 1, "accuracy": NaN}', "JSON does not allow the number NaN"),
        ('{"rotations": 1, "accuracy": 1e999}', "the number 1e999 is too large"),
        ('{"rotations": 1, "accuracy": 1.5}', "'accuracy' must be a number from 0 to 1; got 1.5"),
        ('{"rotations": 1, "accuracy": true}', "'accuracy' must be a number from 0 to 1; got True"),
        ('{"rotations": 1, "accuracy": 0.5}', "the scores of the cases cannot be read (KeyError: 'slides')"),
        ('{"rotations": 1, "accuracy": 0.5, "slides": {"a": 3}}', "the scores of the cases cannot be read"),
        ('{"rotations": 1, "accuracy": 0.5, "slides": {"a": [-1, 3]}}', "a case is negative or not finite"),
        ('{"rotations": 1, "accuracy": 0.5, "slides": null, "wrong": [], "images": 1000000000000}', "are more than"),
        ('{"rotations": 1, "rotation": {"fair": [1]}}', "'deviation' of 'rotation' must be a number from 0 to 1"),
        *(
            (
                f'{{"rotations": 1, "rotation": {{"fair": {{"deviation": 0, "changed": 0}}, "cases": {cases}}}}}',
                "'cases' of 'rotation' must have two numbers for each case",
            )
            for cases in ("3", '{"a": 3}', '{"a": [1, 0]}', '{"a": [-1, 1]}', '{"a": [1, "b"]}', '{"a": [1, 2, 3]}')
        ),
        ("[" * 100_000, "it is nested too deeply"),
        ("1" * 5_000, "a number has 5000 digits, but may have 20"),
    ],
)
def test_damaged_scores_are_refused_in_one_sentence(scores: str, fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "tumor" / "N1-seed0"
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(format_recipe(Recipe("tumor", "d", orientations=1)))
    (folder / "evaluation-test.json").write_text(f'{{"test": {scores}}}')
    with pytest.raises(RunError) as refused:
        read_results(tmp_path)
    assert fault in str(refused.value)
    assert str(refused.value).startswith(f"{folder / 'evaluation-test.json'} is damaged")


@pytest.mark.parametrize("key", ["begun", "packages", "data.images", "hardware.device"])
def test_a_damaged_provenance_is_refused_in_one_sentence(key: str, tmp_path: Path) -> None:
    times = {"begun": "2020-01-01T00:00:00", "finished": "2020-01-01T00:01:00"}
    data = {"source": "PCam", "fingerprint": "a", "images": 3}
    content = {**times, "rotopath": "1", "packages": {"torch": "2"}, "data": data, "hardware": {"device": "cpu"}}
    given = StudyResult("tumor", tmp_path, Recipe("tumor", "d"), 1, {})
    (tmp_path / "provenance.json").write_text(json.dumps(content))
    check_provenance(given)
    for wrong in (None, "yesterday", True, [], {"torch": 1}, 3.5):
        (tmp_path / "provenance.json").write_text(json.dumps(with_value(content, key, wrong)))
        if wrong == "yesterday" and key == "hardware.device":
            continue
        with pytest.raises(RunError, match=r"provenance\.json is damaged: .*\. Restore the file"):
            check_provenance(replace(given))
