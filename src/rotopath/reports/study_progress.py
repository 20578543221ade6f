"""A study in the terminal: one table of all its runs, and how long they will still take.

In: the state of every job, again and again. Out: a live table, or where there is no terminal a line for each run that
ends.
"""

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rotopath.studies.plan import Job, Study
from rotopath.studies.running import Progress

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

    def show(self, states: Mapping[Job, Progress]) -> None:
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

    def _print_ended(self, states: Mapping[Job, Progress]) -> None:
        ended = [job for job, one in states.items() if one.state in ("done", "failed") and job not in self._told]
        for job in ended:
            reason = f": {states[job].reason}" if states[job].reason else ""
            line = f"{job.name} {states[job].state}{reason}"
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)
        if ended:
            self._told.update(ended)
            self._console.print(self._summary(states), highlight=False, soft_wrap=True)

    def _table(self, states: Mapping[Job, Progress]) -> Table:
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

    def _summary(self, states: Mapping[Job, Progress]) -> str:
        counts = {state: sum(one.state == state for one in states.values()) for state in ("done", "running", "failed")}
        line = f"{counts['done']} of {len(states)} done, {counts['running']} running, {counts['failed']} failed"
        left = self._seconds_left(states)
        return line if left is None else f"{line}, about {_duration(left)} left"

    def _seconds_left(self, states: Mapping[Job, Progress]) -> float | None:
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


def _mark(progress: Progress) -> Text:
    if progress.state == "running":
        return Text(f"{progress.share:.0%} {progress.stage.split()[0]}"[:12], "cyan")
    return Text(*MARKS[progress.state])


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return "a minute"
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"
