"""A study run to its end: jobs side by side in processes of their own, here or on the workers of a cluster.

In: a study and a folder. Out: a run folder for each job, and the state of all of them, told while it goes on. What is
done is skipped, what was cut off goes on, and a job that fails does not stop the others.

Where the jobs of a study run: in processes on this machine, or on the workers of a Dask cluster.

In: how many at once, or a cluster. Out: a function that takes a job and gives a future of it.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from rotopath import runs
from rotopath.data.batches import count_cores
from rotopath.model_file import RunError
from rotopath.recipe import changed_key, read_recipe, write_recipe
from rotopath.studies.job import BUSY, needed, place
from rotopath.studies.plan import Job, Study
from rotopath.writing import write_text

LOOK_EVERY_S = 0.5
TRIES = 3  # of a job whose process, or worker, was killed
State = Literal["waiting", "running", "done", "failed"]


@dataclass(frozen=True)
class JobState:
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
Watch = Callable[[Mapping[Job, JobState]], None]


def run_study(study: Study, out: Path, submit: Submit, watch: Watch = lambda _: None) -> dict[Job, JobState]:
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


def look_at(job: Job, out: Path) -> JobState:
    """The state of a job, as its files tell it."""
    if all(file.exists() for file in needed(out / job.name, job.recipe.orientations, job.rotations)):
        return JobState("done", share=1.0)
    if (failed := place(out, job.name, "failed")).exists():
        return JobState("failed", reason=failed.read_text(encoding="utf-8").strip())
    try:
        told = json.loads(place(out, job.name, "progress").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return JobState("waiting")
    share = 1.0 if "step" not in told else told["step"] / told["steps"]
    return JobState("running", told["stage"], share)


def _end(job: Job, future: Future, out: Path) -> JobState:
    """The state of a job whose process has ended."""
    place(out, job.name, "progress").unlink(missing_ok=True)
    try:
        reason = str(future.result() or "it ended without a word.")
    except Exception as error:  # such as a cluster's, which has lost its workers
        reason = f"{error}"
    found = look_at(job, out)
    return found if found.state in ("done", "failed") else JobState("failed", reason=reason)


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
    command = [sys.executable, "-m", "rotopath.studies.job", recipe, str(rotations), str(os.getpid())]
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


ON_A_GPU = 12  # small trainings leave most of a GPU idle; more were not tried (benchmarks/together.py)
JOIN_WITHIN_S = 600  # the first worker of a cluster


def count_at_once() -> int:
    """How many jobs run side by side on this machine if nobody says so."""
    gpus = torch.cuda.device_count()
    return max(1, min(gpus * ON_A_GPU, count_cores() * 3 // 4)) if gpus else max(1, count_cores() // 4)


@contextmanager
def here(at_once: int) -> Iterator[Submit]:
    """So many processes on this machine, spread over its GPUs; each has its share of the cores."""
    gpus = torch.cuda.device_count()
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(at_once):
        slots.put(slot)

    mine = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or list(
        map(str, range(gpus))
    )

    def run(recipe: str, rotations: int, cwd: str) -> str:
        slot = slots.get()
        share = str(max(1, count_cores() // at_once))
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", share)}
        if gpus > 1:
            environment["CUDA_VISIBLE_DEVICES"] = mine[slot % gpus]
        try:
            return run_process(recipe, rotations, cwd, environment)
        finally:
            slots.put(slot)

    pool = ThreadPoolExecutor(at_once)
    try:
        yield lambda *job: pool.submit(run, *job)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def on_cluster(cluster: str, at_once: int) -> Iterator[Submit]:
    """A Dask cluster: the address of its scheduler, `local` for so many workers here, or `slurm` for so many jobs.

    Where workers declare GPUs (`--resources GPU=1`), each of them takes `at_once` jobs a GPU if an address is given.
    """
    with connected(cluster, at_once) as (client, resources):

        def submit(*job: object) -> Future:
            # A new key each time: a job that failed is to run again, and not to be looked up.
            future: Future = _Cancellable(
                client.submit(run_process, *job, pure=False, retries=TRIES, resources=resources)
            )
            return future

        yield submit


@contextmanager
def connected(cluster: str, at_once: int) -> Iterator[tuple[Any, dict[str, float] | None]]:
    """A client of a cluster that has workers, and what a job takes of a worker's GPUs, if they have some."""
    from distributed import Client

    with _cluster(cluster, at_once) as address, Client(address, timeout=30) as client:
        client.wait_for_workers(1, JOIN_WITHIN_S)
        workers = client.scheduler_info()["workers"].values()
        gpus = any(worker["resources"].get("GPU") for worker in workers)
        yield client, {"GPU": 1 / at_once - 1e-6} if gpus else None  # so that rounded shares add up to one


class _Cancellable:
    """A Dask future that can say, as others do, that a task was under way and goes on for now."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def done(self) -> bool:
        return bool(self._future.done())

    def result(self) -> object:
        return self._future.result()

    def cancel(self) -> bool:
        self._future.cancel()
        return False


@contextmanager
def _cluster(cluster: str, at_once: int) -> Iterator[Any]:
    if cluster == "local":
        from distributed import LocalCluster

        with LocalCluster(n_workers=at_once, threads_per_worker=1, dashboard_address=":0") as local:
            yield local
    elif cluster == "slurm":
        from dask_jobqueue import SLURMCluster

        try:
            jobs = SLURMCluster()  # its settings are in Dask's jobqueue.yaml
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise RunError(f"Dask's jobqueue.yaml does not describe SLURM jobs yet: {reason}") from None
        with jobs as slurm:
            slurm.scale(jobs=at_once)
            yield slurm
    elif "://" in cluster:
        yield cluster
    else:
        raise RunError(
            f"There is no cluster {cluster!r}; give 'local', 'slurm', or an address such as tcp://10.0.0.1:8786."
        )
