"""Scores in the terminal: a row for each score of each class, and an explanation of the intervals."""

import io
import os
import re
import signal
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import typer
from rich.console import Console
from rich.text import Text

import rotopath
from rotopath.inference import Prediction
from rotopath.metrics.classification import MIN_CASES
from rotopath.recipe import Recipe
from rotopath.reports.terminal import SafeConsole, print_error, score_table, user_errors_in_one_sentence
from rotopath.tasks import TUMOR, Classify, Detect, Segment
from rotopath.tasks.classify import PatchEvidence
from rotopath.tasks.detect import Detections, FieldEvidence
from rotopath.tasks.segment import ObjectEvidence

CELLS = ("epithelial", "lymphocyte")
TEXTURES = ("dots", "plain", "stripes")
POINT = {"inside": 0.5, "background": 0.5, "least_px": 4}


def test_control_characters_of_names_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b]0;owned\x07\x1b[2Jé\u202egnp.µ"
    console = SafeConsole(width=200)
    console.print(f"{name}: 3 objects", markup=False, highlight=False)
    console.print(Text(name, "bold"))
    with pytest.raises(typer.Exit), user_errors_in_one_sentence():
        raise OSError(2, "No such file", name)
    printed = "".join(capsys.readouterr())
    assert printed.count("a\\x1b]0;owned\\x1b[2Jé\\u202egnp.µ") == 3  # rich removes the bell
    assert not re.search("[\x1b\x07\u202e]", printed)


def test_the_middle_of_very_long_words_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a number of thousands of digits in a recipe."""
    print_error(f"'seed' must be a whole number; got {'1' * 2500}{'2' * 2500}, and /{'a' * 900} is a path.")
    printed = capsys.readouterr().err
    assert (
        printed == f"rotopath: 'seed' must be a whole number; got {'1' * 100}…{'2' * 99}, and /{'a' * 900} is a path.\n"
    )


def hide(cause: OSError) -> Exception:
    """Return an error of a library that hides its cause."""
    error = RuntimeError("cannot write the tile")
    error.__context__ = cause
    return error


def test_warnings_of_rotopath_are_one_sentence_without_source_code() -> None:
    before = warnings.formatwarning
    with user_errors_in_one_sentence():
        ours, others = rotopath.__file__, __file__
        assert warnings.formatwarning("too dark.", UserWarning, ours, 1) == "rotopath: too dark.\n"
        assert warnings.formatwarning("too dark.", UserWarning, ours, 1) == "", "it is printed once"
        assert "test_terminal.py:1: UserWarning: too dark." in warnings.formatwarning(
            "too dark.", UserWarning, others, 1
        )
    assert warnings.formatwarning is before


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(28, "No space left on device"), "The disk is full; free some space, and run the same command again."),
        (OSError(28, "No space left on device", "a.png"), "The disk is full; free some space"),
        (hide(OSError(28, "No space left on device")), "The disk is full; free some space"),
        (OSError(5, "Input/output error"), "A file cannot be read or written (Input/output error); check the disk"),
        (OSError(13, "Permission denied", "a.png"), "a.png cannot be read or written (Permission denied); choose"),
        (OSError("The stream has ended."), "The stream has ended."),
    ],
)
def test_errors_of_the_operating_system_are_one_sentence(
    error: Exception, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, user_errors_in_one_sentence():
        raise error
    assert ended.value.exit_code == 2
    assert sentence in capsys.readouterr().err.replace("\n", " ")


def test_other_errors_are_raised_with_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="the index is wrong"), user_errors_in_one_sentence():
        raise RuntimeError("the index is wrong")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize(("name", "code", "how"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_signals_are_one_sentence_in_any_command(
    name: str, code: int, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, number = signal.getsignal(signal.SIGTERM), getattr(signal, name)
    with pytest.raises(typer.Exit) as ended, user_errors_in_one_sentence():
        signal.raise_signal(number)
    assert ended.value.exit_code == code
    assert capsys.readouterr().err == f"rotopath: The command was {how}; run the same command again.\n"
    assert signal.getsignal(signal.SIGTERM) == before


def show(metrics: Mapping[str, Mapping[str, object]]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(score_table("a run", metrics))
    return console.export_text()


def read_rows(shown: str) -> dict[str, list[str]]:
    """The cells after the name of each row; columns are separated by at least two spaces."""
    lines = [re.split(r" {2,}", line.strip()) for line in shown.splitlines() if line.strip()]
    return {name: cells for name, *cells in lines if cells}


def score_nuclei(predicted: Sequence[str]) -> dict[str, object]:
    """Fields with an epithelial nucleus and a lymphocyte, both detected; the lymphocyte has this predicted class."""
    task = Recipe("nuclei", "d", classes=CELLS).make_task()
    assert isinstance(task, Segment)
    evidence = []
    for case, name in enumerate(predicted):
        truth = np.zeros((24, 24), np.int32)
        truth[3:9, 3:9], truth[12:18, 12:18] = 1, 2
        inside = (truth > 0).astype(np.float32)
        lymphocytes = (truth == 2).astype(np.float32) * (name == "lymphocyte")
        maps = np.stack([inside, np.zeros_like(inside), 1 - inside, 1 - lymphocytes, lymphocytes])
        prediction = Prediction(maps, 1, (0.0, 0.0))
        evidence.append(ObjectEvidence(f"{case}.png", f"case {case}", truth, np.array([0, 0, 1]), prediction))
    return task.score(evidence, POINT)


def score_points(cases: int) -> dict[str, object]:
    """Fields with an object of each class; there are two detections, both of the first class."""
    task = Recipe("detect", "d", classes=CELLS).make_task()
    assert isinstance(task, Detect)
    detections = Detections(np.array([[10.0, 10.0], [90.0, 90.0]]), np.array([0.9, 0.8]), np.array([0, 0]))
    truth, classes = np.array([[10.0, 10.0], [50.0, 50.0]]), np.array([0, 1])
    evidence = [FieldEvidence(f"{case}.png", f"case {case}", truth, classes, detections, 30) for case in range(cases)]
    return task.score(evidence, {"threshold epithelial": 0.5, "threshold lymphocyte": 0.5})


def score_patches(slides: Sequence[str], classes: tuple[str, ...] = TEXTURES) -> dict[str, object]:
    """A patch of each slide; every other patch is classified correctly."""
    task = TUMOR if len(classes) == 1 else Recipe("classify", "d", classes=classes).make_task()
    assert isinstance(task, Classify)
    evidence = []
    for i, slide in enumerate(slides):
        label, outputs = i % max(2, len(classes)), len(classes)
        winner = (label + i % 2) % outputs
        probabilities = tuple(0.8 if k == winner else 0.1 for k in range(outputs))
        evidence.append(PatchEvidence(f"{i}.png", slide, label, probabilities))
    return task.score(evidence, {"threshold": 0.5} if task.is_single else {})


def test_nuclei_with_classes_have_a_row_for_each_score_of_each_class() -> None:
    scores = score_nuclei(["lymphocyte"] * 5 + ["epithelial"])
    rows = read_rows(show({"test": scores}))
    for name in CELLS:
        shown = {row.partition(": ")[2] for row in rows if row.startswith(f"{name}: ")}
        assert shown == {"f1", "pq", "hits", "false", "missed"}
    assert rows["hits"] == ["12"], "all objects are detected, whatever their class"
    assert [rows[f"epithelial: {key}"] for key in ("hits", "false", "missed")] == [["6"], ["1"], ["0"]]
    assert [rows[f"lymphocyte: {key}"] for key in ("hits", "false", "missed")] == [["5"], ["0"], ["1"]]
    assert rows["lymphocyte: f1"] == [f"{10 / 11:.3f}"]
    assert rows["macro f1"] == [f"{(10 / 11 + 12 / 13) / 2:.3f}"]


def test_points_with_classes_have_a_row_for_each_score_of_each_class() -> None:
    rows = read_rows(show({"test": score_points(6)}))
    for name in CELLS:
        shown = {row.partition(": ")[2] for row in rows if row.startswith(f"{name}: ")}
        assert shown == {"f1", "precision", "recall", "hits", "false", "missed"}, "curves are left out"
    assert [rows[f"epithelial: {key}"] for key in ("hits", "false", "missed")] == [["6"], ["6"], ["0"]]
    assert [rows[f"lymphocyte: {key}"] for key in ("hits", "false", "missed")] == [["0"], ["0"], ["6"]]


def test_patches_with_classes_have_a_row_for_each_score_of_each_class() -> None:
    valid, test = score_patches([""] * 12), score_patches([""] * 24)
    rows = read_rows(show({"valid": valid, "test": test}))
    for name in TEXTURES:
        described: Any = [scores["classes"][name] for scores in (valid, test)]  # type: ignore[index]
        assert rows[f"{name}: images"] == ["4", "8"]
        for key in ("precision", "recall", "f1", "auc"):
            assert rows[f"{name}: {key}"] == [f"{scores[key]:.3f}" for scores in described]


def test_single_class_has_no_rows_for_classes() -> None:
    assert ": " not in "".join(read_rows(show({"test": score_patches(["a", "b"] * 6, ("Tumor",))})))


def test_intervals_over_patches_are_explained_where_slides_are_unknown() -> None:
    shown = show({"test": score_patches([""] * 12)})
    assert "95 % confidence intervals, by bootstrap over patches." in shown
    assert "The slides are unknown. Intervals over slides are usually wider." in shown
    assert re.fullmatch(r"0\.500 \[0\.\d{3}, 0\.\d{3}\]", read_rows(shown)["accuracy"][0])


def test_intervals_over_slides_are_explained() -> None:
    shown = show({"test": score_patches([f"slide {i % 6}" for i in range(12)])})
    assert "95 % confidence intervals, by bootstrap over slides." in shown
    assert "wider" not in shown


@pytest.mark.parametrize("score", [lambda n: score_nuclei(["lymphocyte"] * n), score_points], ids=["nuclei", "points"])
def test_intervals_over_patients_are_explained(score: Any) -> None:
    assert "95 % confidence intervals, by bootstrap over patients." in show({"test": score(MIN_CASES)})


@pytest.mark.parametrize(
    "score",
    [
        lambda n: score_nuclei(["lymphocyte"] * n),
        score_points,
        lambda n: score_patches([f"slide {i % n}" for i in range(12)]),
        lambda n: score_patches([""] * n),
    ],
    ids=["nuclei", "points", "slides", "patches"],
)
def test_too_few_cases_have_no_intervals(score: Any) -> None:
    few, enough = (show({"test": score(count)}) for count in (MIN_CASES - 1, MIN_CASES))
    assert "No confidence intervals: there are too few patients, slides or patches." in few
    assert "[" not in few
    assert "interval over" not in few
    assert "interval over" in enough
    assert "No confidence intervals" not in enough
    assert "[" in enough
