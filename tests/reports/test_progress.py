"""Progress in the terminal: a live table of a study, or lines if the output is a file."""

from pathlib import Path

import pytest
from rich.console import Console

from rotopath.inference.predict_files import SlideOutcome
from rotopath.recipe import Recipe
from rotopath.reports.progress import SlideProgress, StudyProgress, TrainingProgress
from rotopath.studies.jobs import JobState
from rotopath.studies.plan import Part, Study


@pytest.mark.parametrize("is_terminal", [True, False])
def test_study_progress_in_a_terminal_and_in_a_file(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study((Part("tumor", Recipe("tumor", "d"), (1, 8), (None,), (0, 1), 1),))
    a, b, c, d = study.jobs  # N = 8 and 1 of the first seed, then of the second
    clock = iter(range(0, 1000, 60))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    console = Console(force_terminal=is_terminal, width=100, color_system=None, record=True)
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
    text = console.export_text()
    assert "1 of 4 done, 1 running, 1 failed, about" in text
    if is_terminal:
        for cell in ("seed 0", "50% training", "✓", "✗"):
            assert cell in text
    else:
        assert "tumor/N1-seed0 failed: [/gloo/pair.cc:534] no disk" in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_without_a_terminal_a_line_is_printed_about_once_a_minute(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a training: from 10 s on, and not right after the line of an epoch."""
    seconds = 0.0
    monkeypatch.setattr("time.monotonic", lambda: seconds)
    console = Console(force_terminal=is_terminal, width=200, color_system=None, record=True)
    row = {"epoch": 0, "steps": 1000, "loss": 0.5, "images_per_second": 16.0}
    with TrainingProgress(Recipe("tumor", "d", epochs=4, batch=32), console) as progress:
        for step in range(1, 101):  # one in 2 s
            seconds = 2.0 * step
            validation = {"validation_loss": 0.4, "validation_accuracy": 0.9} if step == 50 else {}
            progress.show("training", {**row, "step": step, **validation})
    text = console.export_text()
    end = "training, epoch 1 of at most 4: loss 0.5000, validation loss 0.4000, validation accuracy 0.900, 16 images/s"
    sometimes = [
        f"training, epoch 1 of at most 4, step {step} of 1000: loss 0.5000, 16 images/s, about {minutes} min left"
        for step, minutes in ((5, 33), (35, 32), (80, 31))
    ]
    if is_terminal:
        assert end in text
        assert "min left" not in text
    else:
        assert text.splitlines() == [*sometimes[:2], end, sometimes[2]]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_without_a_terminal_slides_are_counted_and_tiles_sometimes(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    monkeypatch.setattr("time.monotonic", lambda: seconds)
    console = Console(force_terminal=is_terminal, width=200, color_system=None, record=True)
    with SlideProgress(2, console) as progress:
        for tile in range(1, 41):  # one in 5 s
            seconds = 5.0 * tile
            progress.show(Path("in/a.svs"), tile, 120)
        progress.show_outcome(SlideOutcome(Path("in/a.svs"), Path("out/a.svs"), "failed", "It is [bold]."))
    text = console.export_text()
    if is_terminal:
        assert "a.svs failed: It is [bold]." in text
        assert "min left" not in text
    else:
        assert text.splitlines() == [
            "2 slides to predict. If it is interrupted, the same command skips those that are finished.",
            "a.svs: 13 of 120 tiles, about 9 min left",
            "a.svs: 25 of 120 tiles, about 8 min left",
            "a.svs: 37 of 120 tiles, about 7 min left",
            "a.svs failed: It is [bold].",
        ]
