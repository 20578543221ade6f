"""Show the progress of a training, of the prediction of many slides, or of a study.

In a terminal, progress bars or a table are updated while the program runs. If the output is redirected to a file, there
are no bars or tables, but a line of progress about once a minute. In both cases, a line is printed when an epoch or a
slide has finished. When a job (run) of a study has ended, a line is printed only if there is no table. N is the number
of orientations of a network.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rotopath.inference.predict_files import SlideOutcome, read_sentence, read_stages
from rotopath.recipe import Recipe
from rotopath.studies.jobs import JobState
from rotopath.studies.plan import Job, Study

JOB_MARKS = {"waiting": ("·", "dim"), "done": ("✓", "green"), "failed": ("✗", "bold red")}
JOB_CELL_WIDTH = 12
FIRST_LINE_S, LINE_EVERY_S = 10.0, 60.0  # without a terminal: time until the first line of progress, and between others


class ProgressBar:
    """A progress bar with elapsed and remaining time. It is visible only inside a `with` block and in a terminal.

    `columns` are the columns to the left of the times. Elsewhere, such as in a log file, lines are printed instead.
    """

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self._console = console
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bar = Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal)
        self._next_line = 0.0  # time from which the next line of progress may be printed

    def __enter__(self) -> Self:
        self._bar.start()
        self._next_line = time.monotonic() + FIRST_LINE_S
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _print_sometimes(self, line: str) -> None:
        """Print a line of progress, unless there is a terminal, or the last line was printed a short time ago."""
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)
        self._next_line = time.monotonic() + LINE_EVERY_S


class TrainingProgress(ProgressBar):
    """Progress bar of a training: stage, epoch, loss, validation accuracy and speed."""

    def __init__(self, recipe: Recipe, console: Console) -> None:
        numbers = TextColumn("{task.fields[loss]}{task.fields[score]}  {task.fields[speed]}")
        super().__init__(console, TextColumn("{task.description}"), BarColumn(), numbers)
        self._recipe = recipe
        self._task = self._bar.add_task("starting", total=None, loss="", score="", speed="")

    def show(self, stage: str, row: dict[str, float]) -> None:
        """Show the stage ("baseline", "training" or "scoring") and the current numbers in `row`.

        In the stages "baseline" (training of the network that finds hard examples) and "training", `row` is a row of
        the training log. If the row contains a validation loss, an epoch has finished, and a line is printed. In the
        stage "scoring", `row` has two numbers: "done", the number of scored images, and "samples", the number of
        images to score.
        """
        if "samples" in row:
            description = f"{stage}, {row['done']:g} of {row['samples']:g} images"
            self._bar.update(self._task, description=description, completed=row["done"], total=row["samples"])
            self._print_sometimes(description)
            return
        epochs = self._recipe.epochs
        if stage == "baseline" and self._recipe.mining is not None:
            epochs = self._recipe.mining.epochs
        epoch = f"{stage}, epoch {row['epoch'] + 1:g} of at most {epochs}"
        decimals = 0 if row["images_per_second"] >= 10 else 1
        speed = f"{row['images_per_second']:,.{decimals}f} images/s"
        self._bar.update(
            self._task,
            total=row["steps"],
            completed=row["step"],
            description=epoch,
            loss=f"loss {row['loss']:.4f}",
            speed=speed,
        )
        if "validation_loss" in row:
            accuracy = f"{row['validation_accuracy']:.3f}"
            self._bar.update(self._task, score=f"  validation accuracy {accuracy}")
            validation = f"validation loss {row['validation_loss']:.4f}, validation accuracy {accuracy}"
            self._print(f"{epoch}: loss {row['loss']:.4f}, {validation}, {speed}")
        elif row["images_per_second"] and row["step"] * epochs % row["steps"]:  # else, the line of the epoch follows
            left = (row["steps"] - row["step"]) * self._recipe.batch_size / row["images_per_second"]
            steps = f"step {row['step']:g} of {row['steps']:g}"
            line = f"{epoch}, {steps}: loss {row['loss']:.4f}, {speed}, about {_format_duration(left)} left"
            self._print_sometimes(line)


class SlideProgress(ProgressBar):
    """Two progress bars: one for all slides, and one for the tiles of the current slide.

    `slides` is the number of all slides. A line is printed for each slide that was predicted, was skipped or failed.
    With `profile`, it is followed by the time of each stage of a slide that was predicted.
    """

    def __init__(self, slides: int, console: Console, profile: bool = False) -> None:
        count = TextColumn("{task.completed:g} of {task.total:g} {task.fields[unit]}")
        super().__init__(console, TextColumn("{task.description}"), BarColumn(), count)
        self._slides = self._bar.add_task("all", total=slides, unit="slides")
        self._tiles = self._bar.add_task("", total=1, unit="tiles", visible=False)
        self._current: Path | None = None
        self._profile, self._count = profile, slides
        self._begun = 0.0  # time at which the current slide was begun

    def __enter__(self) -> Self:
        self._begun = time.monotonic()
        return super().__enter__()

    def show_start(self, seconds: float) -> None:
        """Print the seconds that it took to import packages and to load the model."""
        self._console.print(f"Packages and model loaded in {seconds:.1f} s.", highlight=False)

    def show(self, slide: Path, done: int, tiles: int) -> None:
        """Show the progress of the current slide: `done` of `tiles` tiles are predicted. `slide` is its path."""
        if self._current is None and not self._console.is_terminal:  # not before, because options may be refused
            slides = f"{self._count} slides" if self._count != 1 else "1 slide"
            self._print(f"{slides} to predict. If it is interrupted, the same command skips those that are finished.")
        if slide != self._current:
            self._current = slide
            self._bar.reset(self._tiles, total=tiles, visible=True, description=slide.name)
        self._bar.update(self._tiles, completed=done)
        left = (time.monotonic() - self._begun) / done * (tiles - done)
        self._print_sometimes(f"{slide.name}: {done} of {tiles} tiles, about {_format_duration(left)} left")

    def show_outcome(self, outcome: SlideOutcome) -> None:
        """Print a line about a slide: its result, or that it was skipped, waits or failed. Print its warnings too."""
        if outcome.state != "waiting":
            self._bar.advance(self._slides)
        self._bar.update(self._tiles, visible=False)
        self._begun = time.monotonic()
        if outcome.state == "failed":
            line = f"{outcome.path.name} failed: {outcome.reason}"
        elif outcome.state == "waiting":
            line = f"{outcome.path.name}: {outcome.reason}"
        elif outcome.state == "skipped":
            line = f"{outcome.path.name}: skipped, {outcome.reason or 'already done'}"
        else:
            line = f"{outcome.path.name}: {read_sentence(outcome.folder)}"
        self._print(line)
        if outcome.state == "done" and outcome.reason:
            line = f"{outcome.path.name}: {outcome.reason}"
            self._console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)
        for warning in outcome.warnings:
            line = f"{outcome.path.name}: Warning: {warning}"
            self._console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)
        if self._profile and outcome.state == "done":
            self._print_stages(*read_stages(outcome.folder))

    def _print_stages(self, mpx: float, seconds: Mapping[str, float]) -> None:
        """Print the seconds of each stage, and the megapixels per second if `mpx` megapixels were predicted."""
        table = Table(box=None, pad_edge=False)
        for name in ("stage", "seconds", "Mpx/s"):
            table.add_column(name, justify="left" if name == "stage" else "right")
        for stage, value in seconds.items():
            table.add_row(stage, f"{value:.2f}", f"{mpx / value:.1f}" if value > 0 else "")
        self._console.print(
            table, Text(f"{mpx:.1f} Mpx. Focus, reading and stains run in threads, beside the other stages.")
        )


class StudyProgress:
    """A table of all jobs (runs) of a study, with the estimated remaining time. It is updated while the study runs.

    If the output is not a terminal, there is no table. Instead, lines are printed when jobs end: a line for each of
    these jobs, and then a line with the numbers of done, running and failed jobs.
    """

    def __init__(self, study: Study, console: Console) -> None:
        self._study, self._console = study, console
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        self._started: dict[Job, float] = {}
        self._seconds: dict[Job, float] = {}  # durations of jobs that started and finished in this process
        self._printed: set[Job] = set()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, states: Mapping[Job, JobState]) -> None:
        """Show the current state of all jobs."""
        now = time.monotonic()
        for job, state in states.items():
            if state.state == "running":
                self._started.setdefault(job, now)
            elif state.state == "done" and job in self._started:
                self._seconds.setdefault(job, now - self._started[job])
        if self._live is not None:
            self._live.update(Group(Text(self._summary(states), "bold"), self._table(states)))
        else:
            self._print_ended(states)

    def _print_ended(self, states: Mapping[Job, JobState]) -> None:
        """Print a line for each job that has ended since the last call, then one summary line for all jobs."""
        ended = [job for job, state in states.items() if state.state in ("done", "failed") and job not in self._printed]
        for job in ended:
            reason = f": {states[job].reason}" if states[job].reason else ""
            line = f"{job.name} {states[job].state}{reason}"
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)
        if ended:
            self._printed.update(ended)
            self._console.print(self._summary(states), highlight=False, soft_wrap=True)

    def _table(self, states: Mapping[Job, JobState]) -> Table:
        """Return the table of jobs. Each cell shows a job.

        Each row is for one part of the study, one N and one regime (amount of training data); the first three columns
        name them. Each other column is for one seed. If the terminal has too few lines for all rows, only rows with
        running or failed jobs are shown.
        """
        seeds = sorted({job.recipe.seed for job in states})
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for name in ("part", "N", "regime"):
            table.add_column(name)
        for seed in seeds:
            table.add_column(f"seed {seed}", min_width=JOB_CELL_WIDTH)
        rows: list[tuple[bool, tuple[str | Text, ...]]] = []
        for part in self._study.parts:
            for n in sorted(part.orientations):
                for regime in part.regimes:
                    jobs = [part.job(n, regime, seed) for seed in seeds]
                    cells = [_job_cell(states[job]) if job in states else Text() for job in jobs]
                    is_active = any(job in states and states[job].state in ("running", "failed") for job in jobs)
                    rows.append((is_active, (part.name, str(n), "all" if regime is None else f"{regime:g}", *cells)))
        lines = self._console.height - 4
        for is_active, row in rows:
            if is_active or len(rows) <= lines:
                table.add_row(*row)
        return table

    def _summary(self, states: Mapping[Job, JobState]) -> str:
        """Return a text with the numbers of done, running and failed jobs, and the estimated remaining time.

        The time is left out if it cannot be estimated.
        """
        done, running, failed = (
            sum(state.state == name for state in states.values()) for name in ("done", "running", "failed")
        )
        line = f"{done} of {len(states)} done, {running} running, {failed} failed"
        seconds = self._seconds_left(states)
        return line if seconds is None else f"{line}, about {_format_duration(seconds)} left"

    def _seconds_left(self, states: Mapping[Job, JobState]) -> float | None:
        """Estimate the remaining time of the study in s.

        The estimate is the sum of the expected remaining times of all waiting and running jobs, divided by the number
        of running jobs. Returns None before the first job of this process has finished, and when all jobs have ended.
        """
        if not self._seconds or all(state.state in ("done", "failed") for state in states.values()):
            return None
        total, running = 0.0, 0
        for job, state in states.items():
            if state.state in ("waiting", "running"):
                total += self._expected_seconds(job) * (1 - state.fraction)
                running += state.state == "running"
        return total / max(1, running)

    def _expected_seconds(self, job: Job) -> float:
        """Return the expected duration of a job in s: the mean over finished jobs of the same part with the same N.

        If there are no such jobs, return the mean duration of all finished jobs. Only jobs that started and finished in
        this process are used; there must be at least one.
        """
        key = (job.part, job.recipe.orientations)
        same = [s for other, s in self._seconds.items() if (other.part, other.recipe.orientations) == key]
        durations = same or list(self._seconds.values())
        return sum(durations) / len(durations)


def _job_cell(state: JobState) -> Text:
    """Return the table cell of a job: a symbol, or for a running job the percentage of finished steps and the stage."""
    if state.state == "running":
        return Text(f"{state.fraction:.0%} {state.stage.split()[0]}"[:JOB_CELL_WIDTH], "cyan")
    return Text(*JOB_MARKS[state.state])


def _format_duration(seconds: float) -> str:
    """Return a duration as text in minutes or hours, such as "5 min" or "2.5 h"."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return "a minute"
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"
