"""Progress in the terminal: a live table of a study, or lines if the output is a file."""

import pytest
from rich.console import Console

from rotopath.recipe import Recipe
from rotopath.reports.progress import StudyProgress
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
