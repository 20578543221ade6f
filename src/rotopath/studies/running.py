"""A study run to its end: jobs side by side in processes of their own, here or on the workers of a cluster.

In: a study and a folder. Out: a run folder for each job, and the state of all of them, told while it goes on. What is
done is skipped, what was cut off goes on, and a job that fails does not stop the others.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rotopath import runs
from rotopath.model_file import RunError
from rotopath.recipe import changed_key, read_recipe, write_recipe
from rotopath.studies.job import BUSY, needed, place
from rotopath.studies.plan import Job, Study
from rotopath.writing import write_text

LOOK_EVERY_S = 0.5
TRIES = 3  # of a job whose process, or worker, was killed
State = Literal["waiting", "running", "done", "failed"]


@dataclass(frozen=True)
class Progress:
    """How far a job is."""

    state: State
    stage: str = ""
    share: float = 0.0  # of its steps
    reason: str = ""  # why it failed


class Future(Protocol):
    def done(self) -> bool: ...
    def cancel(self) -> object: ...
    def result(self) -> object: ...


Submit = Callable[[str, int, str], Future]  # told a job's recipe, its rotations, and where relative paths begin
Watch = Callable[[Mapping[Job, Progress]], None]


def run_study(study: Study, out: Path, submit: Submit, watch: Watch = lambda _: None) -> dict[Job, Progress]:
    """Run what is left of a study, and give the state of all its jobs; `watch` is told it twice a second."""
    jobs = study.jobs
    _prepare(jobs, out)
    states = {job: look_at(job, out) for job in jobs}
    futures: dict[Job, Future] = {}
    try:
        for job in jobs:
            if states[job].state != "done":
                place(out, job.name, "failed").unlink(missing_ok=True)
                futures[job] = submit(str(place(out, job.name, "toml").resolve()), job.rotations, str(Path.cwd()))
        while futures:
            for job, future in list(futures.items()):
                if future.done():
                    states[job] = _end(job, futures.pop(job), out)
                else:
                    states[job] = look_at(job, out)
            watch(states)
            time.sleep(LOOK_EVERY_S if futures else 0)
    finally:
        for job, future in futures.items():
            if not future.cancel():
                place(out, job.name, "stop").touch()
    watch(states)
    return states


def look_at(job: Job, out: Path) -> Progress:
    """The state of a job, as its files tell it."""
    if all(file.exists() for file in needed(out / job.name, job.recipe.orientations, job.rotations)):
        return Progress("done", share=1.0)
    if (failed := place(out, job.name, "failed")).exists():
        return Progress("failed", reason=failed.read_text(encoding="utf-8").strip())
    try:
        told = json.loads(place(out, job.name, "progress").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return Progress("waiting")
    share = 1.0 if "step" not in told else told["step"] / told["steps"]
    return Progress("running", told["stage"], share)


def _end(job: Job, future: Future, out: Path) -> Progress:
    """The state of a job whose process has ended."""
    place(out, job.name, "progress").unlink(missing_ok=True)
    try:
        reason = str(future.result() or "it ended without a word.")
    except Exception as error:  # such as a cluster's, which has lost its workers
        reason = f"{error}"
    found = look_at(job, out)
    return found if found.state in ("done", "failed") else Progress("failed", reason=reason)


def _prepare(jobs: Sequence[Job], out: Path) -> None:
    """Recipes beside where run folders will be; a folder with runs of other recipes is refused before any begins."""
    for job in jobs:
        path = place(out, job.name, "toml")
        for before in (path, out / job.name / runs.RECIPE):
            if before.exists() and (key := changed_key(read_recipe(before), job.recipe)):
                raise RunError(
                    f"{before} has another {key!r} than this study; choose another folder, or delete that run."
                )
    for job in jobs:
        place(out, job.name, "toml").parent.mkdir(parents=True, exist_ok=True)
        write_text(place(out, job.name, "toml"), write_recipe(job.recipe))
        for leftover in ("progress", "stop"):
            place(out, job.name, leftover).unlink(missing_ok=True)


def run_process(recipe: str, rotations: int, cwd: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a job in a process of its own, again if it was killed; what came of it is in its files.

    Gives a reason where it ended and those do not say why.
    """
    path = Path(recipe)
    command = [sys.executable, "-m", "rotopath.studies", recipe, str(rotations), str(os.getpid())]
    for _ in range(TRIES):
        with (said := path.with_suffix(".log")).open("ab") as log:
            code = subprocess.call(command, stdout=log, stderr=log, cwd=cwd, env=os.environ | dict(environment or {}))
        if not said.stat().st_size:
            said.unlink()
        if code == BUSY:
            return f"another process works on it ({said.with_name(f'.{path.stem}.pid').read_text()}); wait for it."
        if code >= 0 or code == -signal.SIGINT:
            return f"it ended with exit code {code}; see {said}." if said.exists() else ""
    return f"its process was killed {TRIES} times, last by signal {-code}; perhaps there was too little memory."
