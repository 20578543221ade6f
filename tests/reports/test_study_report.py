"""The page of a study: which scores it compares with the paper, and the cost of networks."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rotopath.images.files import UnreadableFileError
from rotopath.model_file import RunError
from rotopath.recipe import NetworkOptions, Recipe
from rotopath.reports.study_figures import DARKEST, _read_validation_losses, blend_maps, choose_windows
from rotopath.reports.study_report import PartReport, cost_section, why_not_comparable
from rotopath.studies.results import StudyResult

pytestmark = pytest.mark.slow


def test_networks_with_other_options_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    options = NetworkOptions(width=4)
    narrow = Recipe(
        "classify", "d", ("a", "b"), network="resnet18", orientations=1, window_px=32, network_options=options
    )
    wide = replace(narrow, network_options=NetworkOptions(width=8))
    provenance = {"begun": "2020-01-01T00:00:00", "finished": "2020-01-01T00:01:00", "hardware": {"device": "x"}}
    monkeypatch.setattr(StudyResult, "provenance", provenance)
    results = [StudyResult(part, Path("nowhere"), recipe, 1, {}) for part, recipe in (("a", narrow), ("b", wide))]
    _, first, second = cost_section(results).table
    assert (first[1], second[1]) == ("resnet18, N=1, width 4", "resnet18, N=1, width 8")
    assert int(first[2].replace(",", "")) < int(second[2].replace(",", ""))


@pytest.mark.parametrize(
    ("task", "source", "scores", "reason"),
    [
        ("tumor", "PCam", {"images": 32768}, None),
        ("tumor", "PCam", {"images": 1500}, "this test set has 1,500"),
        ("tumor", "PCam (synthetic)", {"images": 32768}, "synthetic"),
        ("mitosis", "AMIDA13", {"hits": 500, "missed": 33}, None),
        ("mitosis", "AMIDA13", {"hits": 5, "missed": 33}, "this test set has 38"),
        ("nuclei", "Kumar", {"images": dict.fromkeys("abcdefgh")}, None),
        ("nuclei", "Kumar", {"images": dict.fromkeys("ab")}, "this test set has 2"),
    ],
)
def test_only_scores_on_the_papers_test_sets_are_compared_with_it(
    task: str, source: str, scores: dict[str, object], reason: str | None, tmp_path: Path
) -> None:
    (tmp_path / "provenance.json").write_text(json.dumps({"data": {"source": source}}))
    explanation = why_not_comparable(StudyResult("part", tmp_path, Recipe(task, "d"), 1, scores))
    if reason is None:
        assert explanation is None
    else:
        assert explanation is not None
        assert reason in explanation


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"step\n1\n", b"step,validation_loss\nx,0.5\n", b"step,validation_loss\n5,nan\n", b"[" * 99],
)
def test_a_damaged_log_is_refused_in_one_sentence(content: bytes, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("step,loss,validation_loss\n1,0.7,\n2,0.6,0.5\n")
    assert _read_validation_losses(log) == ([2], [0.5])
    log.write_bytes(content)
    with pytest.raises((RunError, UnreadableFileError)) as refused:
        _read_validation_losses(log)
    assert str(refused.value).startswith(str(log))
    assert str(refused.value).endswith(".")


def test_figures_show_the_seed_with_the_best_validation_score(tmp_path: Path) -> None:
    results = []
    for n, seed, valid, test in ((1, 0, 0.7, 0.9), (1, 1, 0.8, 0.1), (8, 0, 0.6, 0.2), (8, 1, 0.5, 0.9)):
        folder = tmp_path / f"N{n}-seed{seed}"
        folder.mkdir()
        (folder / "metrics.json").write_text(json.dumps({"valid": {"accuracy": valid}, "test": {"accuracy": test}}))
        recipe = Recipe("tumor", "d", orientations=n, seed=seed)
        results.append(StudyResult("tumor", folder, recipe, 1, {"accuracy": test}))
    shown = PartReport("tumor", results, [], [], tmp_path).best_seeds
    assert [(result.recipe.orientations, result.recipe.seed) for result in shown] == [(1, 1), (8, 0)]
    (results[0].folder / "metrics.json").write_text('{"valid": {"accuracy": 2}}')
    with pytest.raises(RunError, match="'accuracy' must be a number from 0 to 1; got 2"):
        StudyResult("tumor", results[0].folder, results[0].recipe, 1, {}).validation_score  # noqa: B018


def test_windows_are_chosen_by_their_labels_alone() -> None:
    assert choose_windows(np.array([0, 0, 1, 0, 1, 1, 1, 1, 0])) == [2, 0, 4, 1, 5, 3]
    assert choose_windows(np.array([0, 0, 0, 1])) == [3, 0, 1, 2]
    assert choose_windows(np.array([], int)) == []


def test_a_map_is_gray_where_predictions_agree_and_red_where_they_differ() -> None:
    mean, deviation = np.array([[0.0, 1.0, 1.0, 0.0]]), np.array([[0.0, 0.0, 0.3, 0.15]])
    ((white, gray, dark_red, red),) = blend_maps(mean, deviation)
    assert white == pytest.approx([1, 1, 1])
    assert gray == pytest.approx([1 - DARKEST] * 3)
    for color in (dark_red, red):
        assert color[0] > 2 * max(color[1:])
