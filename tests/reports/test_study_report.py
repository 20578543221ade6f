"""The page of a study: which scores it compares with the paper, and the cost of networks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rotopath.images.files import UnreadableFileError
from rotopath.model_file import RunError
from rotopath.recipe import NetworkOptions, Recipe
from rotopath.reports.study_figures import _read_validation_losses
from rotopath.reports.study_report import cost_section, why_not_comparable
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
