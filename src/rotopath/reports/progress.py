"""Progress in the terminal: of a training, a bar with loss, pace and time left, and a line for each epoch; of slides, a
bar for the one that is looked at, one for all of them, and a line for each that is over.

A study in the terminal: one table of all its runs, and how long they will still take.

In: the state of every job, again and again. Out: a live table, or where there is no terminal a line for each run that
ends.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rotopath.predicting import SlideOutcome, read_summary
from rotopath.recipe import Recipe
from rotopath.studies.plan import Job, Study
from rotopath.studies.schedule import JobState


class _Shown:
    """A bar on a console, while the block runs that it is opened for."""

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self._console = console
        timed = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bar = Progress(*columns, *timed, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class TrainingProgress(_Shown):
    """Shows the rows of a training's log as they come."""

    def __init__(self, recipe: Recipe, console: Console) -> None:
        loss = TextColumn("{task.fields[loss]}{task.fields[score]}  {task.fields[pace]}")
        super().__init__(console, TextColumn("{task.description}"), BarColumn(), loss)
        self._recipe = recipe
        self._task = self._bar.add_task("starting", total=recipe.epochs * recipe.steps, loss="", score="", pace="")

    def show(self, stage: str, row: dict[str, float]) -> None:
        """One row of a stage's log, or how many samples are scored; a row with a validation loss ends an epoch."""
        if "samples" in row:
            scored = f"{stage}, {row['done']:g} of {row['samples']:g} images"
            self._bar.update(self._task, description=scored, completed=row["done"], total=row["samples"])
            return
        epochs = self._recipe.epochs
        if stage == "baseline" and self._recipe.mining is not None:
            epochs = self._recipe.mining.epochs
        epoch = f"{stage}, epoch {row['epoch'] + 1:g} of at most {epochs}"
        self._bar.update(
            self._task,
            total=epochs * self._recipe.steps,
            completed=row["step"],
            description=epoch,
            loss=f"loss {row['loss']:.4f}",
            pace=f"{row['images_per_second']:,.0f} images/s",
        )
        if "validation_loss" in row:
            accuracy = f"{row['validation_accuracy']:.3f}"
            self._bar.update(self._task, score=f"  validation accuracy {accuracy}")
            line = f"{epoch}: loss {row['loss']:.4f}, validation loss {row['validation_loss']:.4f}, accuracy {accuracy}"
            self._console.print(f"{line}, {row['images_per_second']:,.0f} images/s", highlight=False, soft_wrap=True)


class SlideProgress(_Shown):
    """Shows how far a batch of slides is."""

    def __init__(self, slides: int, console: Console) -> None:
        count = TextColumn("{task.completed:g} of {task.total:g} {task.fields[what]}")
        super().__init__(console, TextColumn("{task.description}"), BarColumn(), count)
        self._all = self._bar.add_task("all", total=slides, what="slides")
        self._one = self._bar.add_task("", total=1, what="tiles", visible=False)
        self._at: Path | None = None

    def show(self, slide: Path, done: int, tiles: int) -> None:
        """How many tiles of a slide are done."""
        if slide != self._at:
            self._at = slide
            self._bar.reset(self._one, total=tiles, visible=True, description=slide.name)
        self._bar.update(self._one, completed=done)

    def tell(self, outcome: SlideOutcome) -> None:
        """A slide that is over."""
        self._bar.advance(self._all)
        self._bar.update(self._one, visible=False)
        if outcome.state == "failed":
            line = f"{outcome.path.name} failed: {outcome.reason}"
        elif outcome.state == "skipped":
            line = f"{outcome.path.name}: done before, skipped"
        else:
            line = f"{outcome.path.name}: {read_summary(outcome.folder)}"
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


MARKS = {"waiting": ("·", "dim"), "done": ("✓", "green"), "failed": ("✗", "bold red")}


class StudyProgress:
    """Shows the states of jobs as they change."""

    def __init__(self, study: Study, console: Console) -> None:
        self._study, self._console = study, console
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        self._started: dict[Job, float] = {}
        self._seconds: dict[Job, float] = {}  # that runs took, of those that ended while we watched
        self._told: set[Job] = set()

    def __enter__(self) -> "StudyProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, states: Mapping[Job, JobState]) -> None:
        now = time.monotonic()
        for job, progress in states.items():
            if progress.state == "running":
                self._started.setdefault(job, now)
            elif progress.state == "done" and job in self._started:
                self._seconds.setdefault(job, now - self._started[job])
        if self._live is not None:
            self._live.update(Group(Text(self._summary(states), "bold"), self._table(states)))
        else:
            self._print_ended(states)

    def _print_ended(self, states: Mapping[Job, JobState]) -> None:
        ended = [job for job, one in states.items() if one.state in ("done", "failed") and job not in self._told]
        for job in ended:
            reason = f": {states[job].reason}" if states[job].reason else ""
            line = f"{job.name} {states[job].state}{reason}"
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)
        if ended:
            self._told.update(ended)
            self._console.print(self._summary(states), highlight=False, soft_wrap=True)

    def _table(self, states: Mapping[Job, JobState]) -> Table:
        """A row for each network and training set of a part, a column for each seed; if too long, those at work."""
        seeds = sorted({job.recipe.seed for job in states})
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for name in ("part", "N", "regime"):
            table.add_column(name)
        for seed in seeds:
            table.add_column(f"seed {seed}", min_width=12)
        rows: list[tuple[bool, tuple[str | Text, ...]]] = []
        for part in self._study.parts:
            for n in sorted(part.orientations):
                for regime in part.regimes:
                    jobs = [part.job(n, regime, seed) for seed in seeds]
                    marks = [_mark(states[job]) if job in states else Text() for job in jobs]
                    busy = any(job in states and states[job].state in ("running", "failed") for job in jobs)
                    rows.append((busy, (part.name, str(n), "all" if regime is None else f"{regime:g}", *marks)))
        room = self._console.height - 4
        for busy, row in rows:
            if busy or len(rows) <= room:
                table.add_row(*row)
        return table

    def _summary(self, states: Mapping[Job, JobState]) -> str:
        counts = {state: sum(one.state == state for one in states.values()) for state in ("done", "running", "failed")}
        line = f"{counts['done']} of {len(states)} done, {counts['running']} running, {counts['failed']} failed"
        left = self._seconds_left(states)
        return line if left is None else f"{line}, about {_duration(left)} left"

    def _seconds_left(self, states: Mapping[Job, JobState]) -> float | None:
        """By what runs of the same network took, or else of any; and as many at once as there are."""
        if not self._seconds or all(one.state in ("done", "failed") for one in states.values()):
            return None
        total, at_once = 0.0, 0
        for job, progress in states.items():
            if progress.state in ("waiting", "running"):
                total += self._expected(job) * (1 - progress.share)
                at_once += progress.state == "running"
        return total / max(1, at_once)

    def _expected(self, job: Job) -> float:
        alike = (job.part, job.recipe.orientations)
        same = [s for other, s in self._seconds.items() if (other.part, other.recipe.orientations) == alike]
        known = same or list(self._seconds.values())
        return sum(known) / len(known)


def _mark(progress: JobState) -> Text:
    if progress.state == "running":
        return Text(f"{progress.share:.0%} {progress.stage.split()[0]}"[:12], "cyan")
    return Text(*MARKS[progress.state])


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return "a minute"
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"
