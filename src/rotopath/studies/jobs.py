"""Run the jobs of a study in parallel, in several processes, on this machine or on the workers of a cluster.

A job trains a network, evaluates it, and writes the results to a run folder. Finished jobs are skipped, interrupted
jobs are resumed, and a job that fails does not stop the other jobs.

The run folder of a job is `PART/NAME` in the folder of the study, such as `tumor/N8-seed0`. PART is the name of the
part of the study to which the job belongs (see `rotopath.studies.plan`). The attribute `Job.name` is the whole path
`PART/NAME`. These files are next to the run folder:

- `NAME.toml`: the recipe.
- `NAME.progress`: the current stage and step, while the job is running.
- `NAME.failed`: the error message, if the job failed.
- `NAME.log`: the output of the process of the job, if the process printed anything.
- `NAME.stop`: a request to stop. The process of the job stops when this file is created.
- `.NAME.lock` and `.NAME.pid`: the lock that the process of the job holds, and the ID of this process.

If the jobs mine hard examples, the jobs of a part with the same amount of training data share a baseline network, an
ordinary CNN, and its hard examples. They are in the folder `PART/baseline`, such as `mitosis/baseline-regime4`. The
first job that needs them trains the baseline; the others are submitted when the hard examples are found.

A process of jobs runs this module as a program, `python -m rotopath.studies.jobs PARENT_PROCESS_ID`, and runs one job
after another, so that it imports packages and prepares the GPU only once. It reads a line for each job, a JSON list
with the path of the recipe file and the number of rotations for test-time augmentation (1: no augmentation), and
prints a line with the exit code of the job.
"""

import _thread
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from rotopath import runs
from rotopath.data import DataError
from rotopath.environment import count_cores
from rotopath.evaluation import evaluate, evaluation_file
from rotopath.images import UnreadableFileError
from rotopath.inference.cluster import connect, describe_failure
from rotopath.model_file import WEIGHTS, RunError
from rotopath.recipe import Recipe, RecipeError, find_changed_key, format_recipe, read_recipe
from rotopath.studies.plan import PLAIN, SPLIT, Job, Study, name_regime, read_study
from rotopath.writing import BusyError, hold_lock, is_disk_full, parse_json, read_owner, remove_leftovers, write_text

READ_STATES_EVERY_S = 0.5
WRITE_PROGRESS_EVERY_S = 1.0
CHECK_STOP_EVERY_S = 0.3
INTERRUPT_AGAIN_S = 5.0  # time until an interrupt is repeated; the first may be lost, for example in a destructor
WAIT_FOR_LOCK_S = 20.0  # longer than a process needs to end itself after its parent process has died
JOBS_PER_GPU = 12  # a small training uses only part of a GPU; more than 12 were not measured (benchmarks/together.py)
TRIES = 3  # a killed process is started up to 3 times; on a cluster, a failed call is repeated up to 3 times
EXIT_BUSY = 75  # exit code if another process is working on the job; on Unix, 75 means "try again later"
EXIT_DISK_FULL = 74  # on Unix, 74 means "input/output error"
EXIT_FAILED = 70  # exit code after an unexpected error; on Unix, 70 means "internal software error"
EXIT_INTERRUPTED = 130
State = Literal["waiting", "running", "done", "failed"]


@dataclass(frozen=True)
class JobState:
    """State and progress of a job."""

    state: State  # "waiting", "running", "done" or "failed"
    stage: str = ""  # such as "training" or "evaluating"
    fraction: float = 0.0  # fraction of the training steps that are finished, 0 to 1; 1 after the training
    reason: str = ""  # error message if the job failed


class JobFuture(Protocol):
    """A submitted job. It has the methods of a `concurrent.futures.Future` that `run_study` uses."""

    def done(self) -> bool:
        """Return whether the job has ended."""

    def cancel(self) -> object:
        """Cancel the job if it has not started, and return True.

        Return False if the job has started, or if it is unknown whether the job has started.
        """

    def result(self) -> object:
        """Wait until the job has ended. Return the result of `run_process`: a message about a problem, or ""."""


Submit = Callable[[str, int, str], JobFuture]  # starts a job; arguments: recipe file, rotations, working directory
OnProgress = Callable[[Mapping[Job, JobState]], None]


# Run a study


def study(
    plan: Study | Path | str,
    out: Path | str | None = None,
    changes: Sequence[str] = (),
    at_once: int | None = None,
    cluster: str | None = None,
    on_progress: OnProgress = lambda _states: None,
) -> Mapping[Job, JobState]:
    """Run all trainings and evaluations of a study, and return the final state of each job.

    Finished jobs are skipped, and interrupted jobs are resumed.

    - `plan`: a `Study`, or the path of a TOML file that describes a study.
    - `out`: folder for the runs; default: `runs/FILE` for the file `FILE.toml`, and `runs/study` for a `Study`.
    - `changes`: overrides of keys in the TOML file, such as "tumor.seed=[0]".
    - `at_once`: number of jobs that run in parallel; default: depends on the GPUs and CPU cores of this machine. With
      `cluster`, `at_once` has two meanings: the number of workers to start ("local", "slurm"), and the largest number
      of jobs that share a GPU.
    - `cluster`: a Dask cluster ("local", "slurm", or the address of a scheduler); default: this machine, without Dask.
    - `on_progress`: function that is called with the states of all jobs, about twice a second.
    """
    if changes and isinstance(plan, Study):
        raise RecipeError(
            f"Overrides such as {changes[0]!r} apply to study files only; set the value in the `Study` object."
        )
    chosen = plan if isinstance(plan, Study) else read_study(Path(plan), changes)
    folder = Path(out) if out else Path("runs") / ("study" if isinstance(plan, Study) else Path(plan).stem)
    count = at_once or count_at_once()
    with run_here(count) if cluster is None else run_on_cluster(cluster, count) as submit:
        return run_study(chosen, folder, submit, on_progress)


def run_study(
    study: Study, out: Path, submit: Submit, on_progress: OnProgress = lambda _states: None
) -> dict[Job, JobState]:
    """Run the unfinished jobs of a study, and return the final state of all jobs.

    The run folders are written to the folder `out`. `submit` is a function that starts a job and returns the future of
    the job. Its arguments are the path of the recipe file, the number of rotations for test-time augmentation, and the
    working directory. `on_progress` is a function that is called with the states of all jobs about twice a second.

    If `run_study` is interrupted, for example by Ctrl-C, all jobs are stopped. Raises BusyError if another process runs
    a study in the same folder.
    """
    jobs = study.jobs
    _expect_same_recipes(jobs, out)
    with hold_lock(out):
        return _run_jobs(jobs, out, submit, on_progress)


def _run_jobs(jobs: Sequence[Job], out: Path, submit: Submit, on_progress: OnProgress) -> dict[Job, JobState]:
    """Run unfinished jobs, while the lock of the folder `out` is held. See `run_study`."""
    _prepare_files(jobs, out)
    states = {job: read_state(job, out) for job in jobs}
    futures: dict[Job, JobFuture] = {}
    waiting = [job for job in jobs if states[job].state != "done"]
    for job in waiting:
        job_file(out, job.name, "failed").unlink(missing_ok=True)
    try:
        while waiting or futures:
            for job in list(waiting):
                if not _waits_for_hard_examples(job, futures, out):
                    waiting.remove(job)
                    recipe = str(job_file(out, job.name, "toml").resolve())
                    futures[job] = submit(recipe, job.rotations, str(Path.cwd()))
            for job, future in list(futures.items()):
                if future.done():
                    states[job] = _read_final_state(job, futures.pop(job), out)
                else:
                    states[job] = read_state(job, out)
            on_progress(states)
            time.sleep(READ_STATES_EVERY_S if waiting or futures else 0)
    finally:
        for job, future in futures.items():
            if not future.cancel():
                job_file(out, job.name, "stop").touch()
    on_progress(states)
    return states


def _waits_for_hard_examples(job: Job, submitted: Collection[Job], out: Path) -> bool:
    """Return whether one of the jobs in `submitted` finds the hard examples that a job needs.

    Such a job is submitted later, so that it takes no process from others while it waits, and so that no two jobs train
    the same baseline on file systems without locks.
    """
    if job.recipe.mining is None or (baseline_folder(job.recipe, out / job.part) / runs.MINED).exists():
        return False
    same = job.part, job.recipe.regime
    return any((other.part, other.recipe.regime) == same for other in submitted)


def baseline_folder(recipe: Recipe, part: Path) -> Path:
    """Return the folder of the baseline that finds hard examples for a recipe; `part` is the folder of the part."""
    return part / f"baseline{name_regime(recipe)}"


def read_state(job: Job, out: Path) -> JobState:
    """Read the state of a job from its files in `out`, the folder of the study."""
    if all(file.exists() for file in list_results(out / job.name, job.recipe.orientations, job.rotations)):
        return JobState("done", fraction=1.0)
    if (failed := job_file(out, job.name, "failed")).exists():
        return JobState("failed", reason=failed.read_text(encoding="utf-8").strip())
    try:
        progress = parse_json(job_file(out, job.name, "progress").read_bytes())
        fraction = progress["step"] / progress["steps"] if "step" in progress else 1.0
        return JobState("running", str(progress["stage"]), fraction)
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError):  # missing or damaged
        return JobState("waiting")


def job_file(out: Path, name: str, kind: str) -> Path:
    """Return the path of one of the files of a job. `out` is the folder of the study, and `name` is `Job.name`.

    `kind` is the suffix of the file: "toml" (the recipe), "progress", "failed", "log" or "stop".
    """
    return out / f"{name}.{kind}"


def list_results(folder: Path, orientations: int, rotations: int) -> list[Path]:
    """Return the paths of the files that exist when a job is done: the weights file, and one or two score files.

    `folder` is the run folder, and `orientations` the number of orientations of the network. The second score file
    contains the scores with test-time augmentation. It exists only if the network is an ordinary CNN and `rotations` is
    above 1.
    """
    evaluations = [evaluation_file(folder, SPLIT)]
    if orientations == PLAIN and rotations > 1:
        evaluations.append(evaluation_file(folder, SPLIT, rotations))
    return [folder / WEIGHTS, *evaluations]


def _expect_same_recipes(jobs: Sequence[Job], out: Path) -> None:
    """Raise RunError if `out` contains a run of one of these jobs with another recipe."""
    for job in jobs:
        path = job_file(out, job.name, "toml")
        for existing in (path, out / job.name / runs.RECIPE):
            if existing.exists() and (key := find_changed_key(read_recipe(existing), job.recipe)):
                raise RunError(
                    f"The value of {key!r} in {existing} differs from this study; choose another folder with --out, or "
                    f"delete the run folder and the recipe file next to the run folder."
                )


def _prepare_files(jobs: Sequence[Job], out: Path) -> None:
    """Write the recipes of all jobs, and remove the progress and stop files of earlier attempts.

    Also remove what killed processes have left, such as empty logs: nothing else does this if their jobs are done.
    """
    for job in jobs:
        job_file(out, job.name, "toml").parent.mkdir(parents=True, exist_ok=True)
        write_text(job_file(out, job.name, "toml"), format_recipe(job.recipe))
        for leftover in ("progress", "stop"):
            job_file(out, job.name, leftover).unlink(missing_ok=True)
        if (log := job_file(out, job.name, "log")).exists() and not log.stat().st_size:
            log.unlink()
        for path in (out / job.name, *list_results(out / job.name, job.recipe.orientations, job.rotations)):
            remove_leftovers(path)


def _read_final_state(job: Job, future: JobFuture, out: Path) -> JobState:
    """Return the state of a job whose future is done: "done", or "failed" with an error message.

    `out` is the folder of the study. This function also deletes the progress file of the job.
    """
    job_file(out, job.name, "progress").unlink(missing_ok=True)
    try:
        reason = str(future.result() or "the process of the job ended without an error message.")
    except Exception as error:  # for example, a cluster has lost its workers
        reason = f"{error}"
    state = read_state(job, out)
    return state if state.state in ("done", "failed") else JobState("failed", reason=reason)


# Start the processes of jobs, here or on a cluster


def count_at_once() -> int:
    """Return the default number of jobs that run in parallel on this machine. It depends on GPUs and CPU cores."""
    gpus = torch.cuda.device_count()
    return max(1, min(gpus * JOBS_PER_GPU, count_cores() * 3 // 4)) if gpus else max(1, count_cores() // 4)


@contextmanager
def run_here(at_once: int) -> Iterator[Submit]:
    """Yield a function that submits jobs to this machine. At most `at_once` jobs run in parallel.

    The jobs are distributed evenly over the GPUs, and share the CPU cores equally.
    """
    gpus = torch.cuda.device_count()
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(at_once):
        slots.put(slot)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpu_names = visible or [str(number) for number in range(gpus)]

    processes: dict[int, JobProcess] = {}  # by slot

    def run(recipe: str, rotations: int, cwd: str) -> str:
        slot = slots.get()
        if slot not in processes:
            threads = str(max(1, count_cores() // at_once))
            environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
            if gpus > 1:
                environment["CUDA_VISIBLE_DEVICES"] = gpu_names[slot % gpus]
            processes[slot] = JobProcess(cwd, environment)
        try:
            return processes[slot].run(recipe, rotations)
        finally:
            slots.put(slot)

    pool = ThreadPoolExecutor(at_once)
    try:
        yield lambda *job: pool.submit(run, *job)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for process in processes.values():
            process.close()


@contextmanager
def run_on_cluster(cluster: str, at_once: int) -> Iterator[Submit]:
    """Yield a function that submits jobs to a Dask cluster. The workers of the cluster start the processes of jobs.

    `cluster` is "local", "slurm", or the address of a scheduler. `at_once` is the number of workers to start ("local",
    "slurm"), and the largest number of jobs that share a GPU.
    """
    with connect(cluster, at_once) as workers:

        def submit(recipe: str, rotations: int, cwd: str) -> JobFuture:
            return _ClusterFuture(workers.submit(run_process, recipe, rotations, cwd, retries=TRIES))

        yield submit


class _ClusterFuture:
    """Adapts a Dask future to the methods of `JobFuture`.

    `cancel` always returns False, because Dask does not report whether a cancelled job had already started.
    """

    def __init__(self, future: Any) -> None:
        self._future = future

    def done(self) -> bool:
        return bool(self._future.done())

    def cancel(self) -> bool:
        self._future.cancel()
        return False

    def result(self) -> object:
        try:
            return self._future.result()
        except Exception as error:
            raise RuntimeError(describe_failure(error)) from error


def run_process(recipe: str, rotations: int, cwd: str) -> str:
    """Run a job in a process of its own, as `JobProcess.run` does. `cwd` is the working directory of the process."""
    process = JobProcess(cwd)
    try:
        return process.run(recipe, rotations)
    finally:
        process.close()


class JobProcess:
    """A process that runs one job after another. It is started for the first job, and again for a job after it ended.

    `cwd` is the working directory of the process, and `environment` contains additional environment variables.
    """

    def __init__(self, cwd: str, environment: Mapping[str, str] | None = None) -> None:
        self._cwd, self._environment = cwd, os.environ | dict(environment or {})
        self._process: subprocess.Popen[str] | None = None

    def run(self, recipe: str, rotations: int) -> str:
        """Run a job, and wait until it ends. If the process is killed, the job is run again, up to two times.

        `recipe` is the path of the recipe file, and `rotations` the number of rotations for test-time augmentation.

        Returns a message in four cases, and otherwise an empty text:

        - Another process is working on the job. The message contains the ID of this other process.
        - The disk is full.
        - The process was killed three times. The message contains the last signal.
        - The job ended, and its log is not empty. The message contains the exit code and the path of the log.

        In the last case, the job may be done, because a log may contain only warnings. The caller therefore first
        reads the files of the job, and uses the message only if these files contain neither results nor an error
        message.
        """
        path = Path(recipe)
        log = path.with_suffix(".log")
        log.unlink(missing_ok=True)  # of an earlier attempt
        for _ in range(TRIES):
            code = self._run_once(recipe, rotations, log)
            if log.exists() and not log.stat().st_size:
                log.unlink()
            if code == EXIT_BUSY:
                process_id = read_owner(path.with_suffix(""))
                return f"another process (ID {process_id}) is working on this job; wait until that process has ended."
            if code == EXIT_DISK_FULL:
                return "the disk is full; free some space, and run the same command again."
            if code >= 0 or code == -signal.SIGINT:
                return f"the process of the job ended with exit code {code}; see {log}." if log.exists() else ""
        return (
            f"the process of the job was killed {TRIES} times, the last time by signal {-code}, perhaps for lack of "
            f"memory; run fewer jobs in parallel (--at-once)."
        )

    def _run_once(self, recipe: str, rotations: int, log: Path) -> int:
        """Run a job, and return its exit code, or that of the process if the process ends. Start the process first."""
        if self._process is None:
            command = [sys.executable, "-m", "rotopath.studies.jobs", str(os.getpid())]
            with log.open("ab") as errors:  # later, the process opens the log of each job
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    cwd=self._cwd,
                    env=self._environment,
                )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([recipe, rotations]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return int(answer)
        self.close()
        return process.returncode

    def close(self) -> None:
        """End the process, which must not be running a job, or wait until it has ended."""
        if self._process is not None:
            self._process.communicate()  # closes its input, which ends it
            self._process = None


# The process of the jobs


def main(parent: int) -> int:
    """Run the jobs whose lines are read from the standard input, until it is closed, and return the exit code.

    `parent` is the ID of the parent process. The output of a job goes to its log. The standard output has one line for
    each job: its exit code, see `try_job`. If a job was stopped, or if it failed unexpectedly, the process ends with
    this exit code instead. Some errors of a GPU would otherwise make all later jobs of the process fail.
    """
    # A process in the background may have inherited that SIGINT is ignored. Restore the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    current: list[Path] = []  # the recipe file of the current job, if there is one
    _stop_on_request(parent, lambda: current[0].with_suffix(".stop") if current else None)
    with os.fdopen(os.dup(1), "w") as answers:
        try:
            while line := sys.stdin.readline():
                recipe, rotations = json.loads(line)
                path = Path(recipe)
                _redirect_output(path.with_suffix(".log"))
                current.append(path)
                code = try_job(path, rotations)
                current.clear()
                _redirect_output(Path(os.devnull))  # Windows removes no log that is open
                if code in (EXIT_INTERRUPTED, EXIT_FAILED):
                    return code
                answers.write(f"{code}\n")
                answers.flush()
                free_memory()
        except KeyboardInterrupt:  # while it waits for a job
            return EXIT_INTERRUPTED
    return 0


def _redirect_output(path: Path) -> None:
    """Append what this process prints from now on to a file, also what libraries of other languages print."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with path.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def try_job(path: Path, rotations: int) -> int:
    """Run the job of the recipe at `path`, and return its exit code.

    `rotations` is the number of rotations for test-time augmentation. Exit codes: 0 if the job is done, and also if it
    failed because of its data or recipe; `EXIT_FAILED` if it failed because of another error; `EXIT_BUSY` if another
    process is working on the job; `EXIT_DISK_FULL`; `EXIT_INTERRUPTED` if the job was stopped. Error messages are
    written to `NAME.failed`.
    """
    failed = path.with_suffix(".failed")
    try:
        with hold_lock(path.with_suffix(""), WAIT_FOR_LOCK_S):
            failed.unlink(missing_ok=True)
            run_job(path, rotations)
            path.with_suffix(".progress").unlink(missing_ok=True)
    except KeyboardInterrupt:
        path.with_suffix(".stop").unlink(missing_ok=True)
        return EXIT_INTERRUPTED
    except BusyError:
        return EXIT_BUSY
    except (DataError, UnreadableFileError, RecipeError, RunError) as error:
        write_text(failed, f"{error}\n")
    except Exception as error:
        if is_disk_full(error):
            return EXIT_DISK_FULL
        traceback.print_exc()
        write_text(failed, f"{type(error).__name__}: {error}\n")
        return EXIT_FAILED
    return 0


def free_memory() -> None:
    """Free the memory of the last job, also on the GPU, where other processes may need it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_job(path: Path, rotations: int) -> None:
    """Train a network with the recipe at `path`, and evaluate the run. A finished training or evaluation is skipped.

    If the network is an ordinary CNN and `rotations` is above 1, the run is also evaluated with test-time augmentation.
    """
    from rotopath.training import train  # imports Lightning, which only the process of a job needs

    recipe, folder = read_recipe(path), path.with_suffix("")
    progress = _ProgressFile(path.with_suffix(".progress"))
    weights, scores, *rotated_scores = list_results(folder, recipe.orientations, rotations)
    if not weights.exists():
        hard_examples = None if recipe.mining is None else find_shared_examples(recipe, path.parent, progress)
        train(recipe, folder, on_progress=progress.write_throttled, hard_examples=hard_examples)
    if not scores.exists():
        progress.write("evaluating")
        evaluate(folder, split=SPLIT, robustness=True)
    if rotated_scores and not rotated_scores[0].exists():
        progress.write(f"evaluating {rotations} rotations")
        evaluate(folder, split=SPLIT, rotations=rotations)


def find_shared_examples(recipe: Recipe, part: Path, progress: "_ProgressFile") -> Path:
    """Return the CSV file with the hard examples for a recipe, which all jobs with as much training data share.

    The first job trains the baseline network. `part` is the folder of the part of
    the study. Raises RunError if the folder of the baseline was written for other settings.
    """
    from rotopath.training.loop import find_hard_examples

    folder = baseline_folder(recipe, part)
    shared = replace(recipe.baseline, mining=recipe.mining)
    progress.write("waiting", step=0, steps=1)
    with hold_lock(folder, wait_s=None):
        if (known := folder / runs.RECIPE).exists() and (key := find_changed_key(read_recipe(known), shared)):
            raise RunError(f"The value of {key!r} in {known} differs from this study; delete the folder {folder}.")
        folder.mkdir(exist_ok=True)
        write_text(known, format_recipe(shared))
        return find_hard_examples(shared, folder, progress.write_throttled)


class _ProgressFile:
    """Writes the progress of a job to a file, from which `read_state` reads it."""

    def __init__(self, path: Path) -> None:
        self._path, self._written_s = path, 0.0

    def write_throttled(self, stage: str, row: dict[str, float]) -> None:
        """Write the stage and the numbers in `row`, unless something was written in the last second.

        `train` calls this method as its function `on_progress`, with a stage and a dictionary of numbers.
        """
        if time.monotonic() - self._written_s >= WRITE_PROGRESS_EVERY_S:
            self.write(stage, **row)

    def write(self, stage: str, **numbers: float) -> None:
        """Write the stage, and numbers such as the current step, as JSON."""
        self._written_s = time.monotonic()
        write_text(self._path, json.dumps({"stage": stage, **numbers}))


def _stop_on_request(parent: int, find_stop: Callable[[], Path | None]) -> None:
    """Start a thread that interrupts this process when the file exists whose path `find_stop` returns.

    `find_stop` returns None if there is no job. `parent` is the ID of the parent process. If the parent process has
    died, the thread ends this process at once. If the user then starts the study again, a new process can continue the
    job.
    """

    def check() -> None:
        while os.getppid() == parent:
            time.sleep(CHECK_STOP_EVERY_S)
            if (stop := find_stop()) is not None and stop.exists():
                _thread.interrupt_main()
                time.sleep(INTERRUPT_AGAIN_S)
        os._exit(1)

    threading.Thread(target=check, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
