"""Studies that are run: jobs are skipped, resumed, failed and killed, here and on a cluster; and their reports."""

import csv
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import pcam
from sharing import hold_elsewhere, make_once
from typer.testing import CliRunner, Result

from rotopath import runs
from rotopath.cli import app
from rotopath.model_file import MODEL, WEIGHTS, RunError
from rotopath.reports.study_report import report
from rotopath.studies import jobs, read_study
from rotopath.studies.jobs import JobFuture, Submit, job_file, run_study
from rotopath.writing import BusyError, hold_lock

pytestmark = pytest.mark.slow

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}  # the same rounding in all processes
ROTOPATH = (sys.executable, "-m", "rotopath", "study")
TIMEOUT_S = 300  # processes start slowly on a busy machine; one that hangs would take longer


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_once(tmp_path_factory, "study", _make_study)


def _make_study(folder: Path) -> None:
    """Write a study of two runs, N=1, also with test-time augmentation, and N=4, and run it twice.

    At first, the data of N=1 are missing, and its job fails. Folders: `s.toml`, `first.txt` and `finished`. The files
    `plain.toml` and `turning.toml` have one of the runs each.
    """
    data = pcam(folder / "data", (16, 8, 8))
    keys = 'task = "tumor"\nepochs = 2\nsteps = 8\nbatch = 4\ncheckpoint_steps = 3\naccelerator = "cpu"\n'
    (folder / "r.toml").write_text(f'{keys}data = "{folder / "late"}"\n')
    (folder / "t.toml").write_text(f'{keys}data = "{data}"\n')
    plain = '[plain]\nrecipe = "r.toml"\norientations = [1]\nseed = [0]\ntta = 4\n'
    turning = '[turning]\nrecipe = "t.toml"\norientations = [4]\nseed = [0]\n'
    for name, parts in (("plain", plain), ("turning", turning), ("s", plain + turning)):
        (folder / f"{name}.toml").write_text(parts)
    command = ("run", str(folder / "s.toml"), "--out", str(folder / "finished"), "--at-once", "1")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jobs, "run_here", run_forked)
        first = call(*command)
        assert first.exit_code == 1
        (folder / "first.txt").write_text(first.output)
        shutil.copytree(folder / "finished", folder / "first")
        (folder / "late").symlink_to(data)
        second = call(*command)
    assert second.exit_code == 0, second.stderr
    assert "2 of 2 done, 0 running, 0 failed" in second.stdout


@contextmanager
def run_forked(at_once: int) -> Iterator[Submit]:
    """Run jobs as `run_here` does, but in forked processes, which need no time to import torch and Lightning."""
    assert at_once == 1

    def run(recipe: str, rotations: int) -> None:
        sys.settrace(None)  # coverage of other processes is not measured
        sys.exit(jobs.try_job(Path(recipe), rotations))

    def submit(recipe: str, rotations: int, _cwd: str) -> JobFuture:
        process = multiprocessing.get_context("fork").Process(target=run, args=(recipe, rotations))
        process.start()
        process.join(TIMEOUT_S)
        future: Future[str] = Future()
        future.set_result("" if process.exitcode == 0 else f"exit code {process.exitcode}")
        return future

    yield submit


@pytest.fixture
def study(shared: Path) -> Path:
    return shared / "s.toml"


@pytest.fixture
def finished(shared: Path) -> Path:
    return shared / "finished"


def call(*words: str) -> Result:
    """Run a command in this process. Jobs have their own processes."""
    return CliRunner().invoke(app, ["study", *words])


def tables(out: Path) -> list[list[str]]:
    report(out, folder := out.parent / f"{out.name}-report-{os.getpid()}")
    return [(folder / f"{name}.csv").read_text().splitlines() for name in ("results", "summary")]


def expect_results_of(finished: Path, part: str, out: Path) -> None:
    """Expect that `out`, a study with one of the parts of the finished study, has the same weights and results."""
    (weights,) = out.glob(f"{part}/*/{WEIGHTS}")
    assert weights.read_bytes() == (finished / weights.relative_to(out)).read_bytes()
    for rows, all_rows in zip(tables(out), tables(finished), strict=True):
        assert rows == [all_rows[0], *(row for row in all_rows[1:] if row.startswith(f"{part},"))]
        assert len(rows) > 1


def wait_for(path: Path, process: "subprocess.Popen[Any] | None" = None) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert process is None or process.poll() is None, f"it ended before {path} appeared"
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def test_a_finished_study_consists_of_runs_and_recipes(finished: Path) -> None:
    for part, name in (("plain", "N1-seed0"), ("turning", "N4-seed0")):
        files = {path.name for path in (finished / part).iterdir() if not path.name.startswith(".")}
        assert files == {name, f"{name}.toml"}
    run = {path.name for path in (finished / "plain/N1-seed0").iterdir()}
    assert {WEIGHTS, MODEL, "evaluation-test.json", "evaluation-test.npz", "evaluation-test-tta4.json"} <= run


def test_finished_jobs_are_not_run_again(study: Path, finished: Path) -> None:
    def never(*job: object) -> JobFuture:
        raise AssertionError(job)

    before = {path.name for path in finished.rglob("*")}
    for name in ("N1-seed0.log", "N1-seed0.progress", ".N1-seed0.lock", ".N1-seed0.pid"):
        (finished / "plain" / name).touch()  # as a process leaves it that is killed when its job is done
    states = run_study(read_study(study), finished, never)
    assert {state.state for state in states.values()} == {"done"}
    assert {path.name for path in finished.rglob("*")} == before


def test_a_folder_of_another_study_is_refused(study: Path, finished: Path) -> None:
    with pytest.raises(RunError, match=r"The value of 'steps' in .* differs from this study; choose another folder"):
        run_study(read_study(study, ["plain.set.steps=13"]), finished, lambda *_: pytest.fail("started"))


def test_a_study_that_another_process_runs_is_refused(study: Path, tmp_path: Path) -> None:
    with hold_elsewhere(tmp_path / "out"), pytest.raises(BusyError, match=r"is writing to .*out; wait until it has"):
        run_study(read_study(study), tmp_path / "out", lambda *_: pytest.fail("started"))
    assert not list(tmp_path.iterdir())


def test_a_study_that_is_killed_ends_in_the_same_tables(study: Path, finished: Path) -> None:
    """As when a machine goes down, at a random time while a job runs."""
    out = study.parent / "killed"
    command = ("run", str(study.parent / "turning.toml"), "--out", str(out))
    process = subprocess.Popen([*ROTOPATH, *command], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    wait_for(job_file(out, "turning/N4-seed0", "progress"), process)
    time.sleep(random.uniform(0, 1))
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = call(*command)
    assert done.exit_code == 0, done.stderr
    expect_results_of(finished, "turning", out)


def test_a_job_ends_if_its_parent_died_before_it_started(study: Path, tmp_path: Path) -> None:
    """As when the parent is killed while the job still imports: 'true' has ended long before that."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    recipe = tmp_path / "N4-seed0.toml"
    recipe.write_text((study.parent / "r.toml").read_text().replace("steps = 8", "steps = 100000"))
    command = [sys.executable, "-m", "rotopath.studies.jobs", str(gone.pid)]
    job = json.dumps([str(recipe), 1])
    done = subprocess.run(command, env=ENVIRONMENT, timeout=TIMEOUT_S, check=False, input=f"{job}\n", text=True)
    assert done.returncode == 1
    assert not (tmp_path / "N4-seed0" / WEIGHTS).exists()


def test_ctrl_c_stops_all_jobs_and_prints_how_to_resume(study: Path) -> None:
    out = study.parent / "stopped"
    command = [*ROTOPATH, "run", str(study), "--out", str(out), "--at-once", "1", "--set", "plain.set.steps=4000"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    wait_for(checkpoint := out / "plain/N1-seed0/resume.ckpt", process)
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert f"interrupted; run the same command again to resume the work in {out}" in output.replace("\n", "")
    assert checkpoint.exists(), "it can be resumed"
    assert not job_file(out, "plain/N1-seed0", "stop").exists()


def test_an_interrupt_that_is_lost_is_repeated(tmp_path: Path) -> None:
    stop = tmp_path / "run.stop"
    stop.touch()
    program = f"""
import os, time
from pathlib import Path
from rotopath.studies import jobs

jobs.INTERRUPT_AGAIN_S = 0.2
jobs._stop_on_request(os.getppid(), lambda: Path({str(stop)!r}))
for _ in range(2):
    try:
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("interrupted")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.stdout.split() == ["interrupted", "interrupted"]


HOLD = """
import os, sys, time
from pathlib import Path
from rotopath.writing import hold_lock

path = Path(sys.argv[1])
with hold_lock(path, 20):
    child = os.fork() if "fork" in sys.argv else None
    if child != 0:
        path.with_suffix(".child").write_text(str(child))
        path.with_suffix(".held").touch()
    time.sleep(1000)
"""


def hold(path: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Start a process that holds the lock of a path."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), *words], env=ENVIRONMENT)
    wait_for(path.with_suffix(".held"), process)
    return process


def test_a_job_that_another_process_is_working_on_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on Windows, where no other process can read a locked file."""
    folder, read_text = tmp_path / "N4", Path.read_text

    def take_lock(*_: object, **__: object) -> int:
        with pytest.raises(BusyError), hold_lock(folder, 0.3):
            pass
        return jobs.EXIT_BUSY

    def read_unlocked(path: Path, **options: Any) -> str:
        if path.suffix == ".lock":
            raise PermissionError(path)
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", read_unlocked)
    monkeypatch.setattr(jobs.JobProcess, "_run_once", take_lock)
    process = hold(folder)
    try:
        reason = jobs.run_process(str(tmp_path / "N4.toml"), 1, str(tmp_path))
    finally:
        process.kill()
        process.wait()
    assert reason == f"another process (ID {process.pid}) is working on this job; wait until that process has ended."


def test_a_job_on_a_full_disk_is_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file, because none can be written; logs of earlier attempts are removed."""
    recipe = tmp_path / "N4.toml"
    (tmp_path / "N4.log").write_text("Traceback of an earlier attempt")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def run_once(_: jobs.JobProcess, recipe: str, rotations: int, log: Path) -> int:
        log.touch()
        return jobs.try_job(Path(recipe), rotations)

    monkeypatch.setattr(jobs, "run_job", fail)
    monkeypatch.setattr(jobs.JobProcess, "_run_once", run_once)
    reason = jobs.run_process(str(recipe), 1, str(tmp_path))
    assert reason == "the disk is full; free some space, and run the same command again."
    assert not list(tmp_path.iterdir())


PROCESS_OF_JOBS = """
import os, sys
from rotopath.studies import jobs

def run_job(path, rotations):
    if path.stem == "broken":
        raise RuntimeError("CUDA error: device-side assert triggered")
    if path.stem == "refused":
        raise jobs.DataError("The data has problems.")
    print(os.getpid())

jobs.run_job = run_job
sys.exit(jobs.main(int(sys.argv[1])))
"""


def test_a_process_runs_several_jobs_and_ends_after_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some errors of a GPU, no later job of the same process can use it."""
    start = subprocess.Popen
    monkeypatch.setattr(
        jobs.subprocess,
        "Popen",
        lambda command, **options: start([command[0], "-c", PROCESS_OF_JOBS, command[-1]], **options),
    )
    process = jobs.JobProcess(str(tmp_path), {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        for name in ("first", "refused", "second", "broken", "third"):
            process.run(str(tmp_path / f"{name}.toml"), 1)
    finally:
        process.close()
    first, second, third = ((tmp_path / f"{name}.log").read_text() for name in ("first", "second", "third"))
    assert first == second != third
    assert (tmp_path / "refused.failed").read_text() == "The data has problems.\n"
    assert (tmp_path / "broken.failed").read_text() == "RuntimeError: CUDA error: device-side assert triggered\n"


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    folder = tmp_path / "N4"
    process = hold(folder)
    process.kill()
    process.wait()
    for _ in range(2):  # and free again after it is released
        with hold_lock(folder):
            assert (tmp_path / ".N4.pid").read_text() == str(os.getpid())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_lock_ends_with_its_process_and_not_with_its_children(tmp_path: Path) -> None:
    """Children that load data may outlive a killed process."""
    folder = tmp_path / "N4"
    process = hold(folder, "fork")
    child = int(folder.with_suffix(".child").read_text())
    process.kill()
    process.wait()
    try:
        with hold_lock(folder):
            assert (tmp_path / ".N4.pid").read_text() == str(os.getpid())
    finally:
        os.kill(child, signal.SIGKILL)


def test_jobs_run_on_systems_without_fcntl() -> None:
    """Such as Windows, where no package may be reported as missing."""
    program = "import sys; sys.modules['fcntl'] = None; import rotopath.studies.jobs"
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_job_that_fails_does_not_stop_the_others(shared: Path) -> None:
    """And the same command runs it again, see `_make_study`."""
    output = (shared / "first.txt").read_text()
    assert "1 of 2 done, 0 running, 1 failed" in output
    assert f"plain/N1-seed0 failed: {shared / 'late'} does not exist." in output
    assert {row.split(",")[0] for rows in tables(shared / "first") for row in rows[1:]} == {"turning"}


def test_jobs_that_share_a_baseline_wait_for_its_hard_examples(tmp_path: Path) -> None:
    """So no two of them train it, also on file systems without locks, and none occupies a process while it waits."""
    recipe = tmp_path / "r.toml"
    recipe.write_text('task = "tumor"\ndata = "d"\n[mining]\n')
    plan = tmp_path / "s.toml"
    plan.write_text('[a]\nrecipe = "r.toml"\norientations = [1, 4]\nregime = [1, 0.5]\nseed = [0]\n')
    out = tmp_path / "out"
    futures: dict[str, Future[str]] = {}

    def submit(recipe: str, _rotations: int, _cwd: str) -> JobFuture:
        return futures.setdefault(Path(recipe).stem, Future())

    submitted: list[list[str]] = []  # after each pass over all jobs

    def go_on(_states: object) -> None:
        submitted.append(list(futures))
        if len(futures) == 2:
            (out / "a/baseline-regime1").mkdir()
            (out / "a/baseline-regime1" / runs.MINED).touch()
            futures["N4-regime0.5-seed0"].set_result("it failed before it found any")
        elif len(futures) == 4:
            for future in futures.values():
                if not future.done():
                    future.set_result("it ended")

    states = run_study(read_study(plan), out, submit, go_on)
    assert submitted[0] == ["N4-regime1-seed0", "N4-regime0.5-seed0"]
    assert len(states) == len(futures) == 4


def test_a_missing_study_and_an_unknown_cluster_are_reported(study: Path, tmp_path: Path) -> None:
    for words, sentence in (
        (("report", str(tmp_path)), "contains no finished runs; run `rotopath study run` first."),
        (("report", str(tmp_path / "gone")), "does not exist; choose the folder of a study."),
        (("run", str(study), "--out", str(tmp_path / "x"), "--cluster", "moon"), "There is no cluster 'moon'"),
    ):
        done = call(*words)
        assert done.exit_code == 2
        assert sentence in done.stderr


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, Callable[[], "subprocess.Popen[bytes]"]]]:
    """Start a scheduler; yield its address, and a function that starts a worker. Each is a process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    processes: list[subprocess.Popen[bytes]] = []
    with (tmp_path / "dask.log").open("wb") as log:

        def start(*words: str) -> "subprocess.Popen[bytes]":
            command = [sys.executable, "-m", "dask", *words, "--no-dashboard"]
            processes.append(subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log, cwd=tmp_path))
            return processes[-1]

        start("scheduler", "--host", "127.0.0.1", "--port", str(port))
        yield address, partial(start, "worker", address, "--nthreads", "1", "--no-nanny", "--resources", "GPU=1")
        for process in processes:
            process.kill()
            process.wait()


def test_a_job_whose_worker_is_killed_is_resumed_by_another_worker(
    study: Path, finished: Path, cluster: tuple[str, Callable[[], "subprocess.Popen[bytes]"]]
) -> None:
    address, start_worker = cluster
    out = study.parent / "cluster"
    plan = str(study.parent / "plain.toml")
    first = start_worker()
    killed = threading.Event()

    def replace_worker() -> None:
        wait_for(job_file(out, "plain/N1-seed0", "progress"))
        first.kill()  # while its job runs
        killed.set()
        start_worker()

    thread = threading.Thread(target=replace_worker)
    thread.start()
    done = call("run", plan, "--out", str(out), "--cluster", address, "--at-once", "1")
    thread.join()
    assert killed.is_set()
    assert done.exit_code == 0, done.output
    assert "1 of 1 done, 0 running, 0 failed" in done.stdout
    expect_results_of(finished, "plain", out)


def test_the_papers_scores_are_shown_next_to_comparable_ones(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rotopath.reports.study_report.why_not_comparable", lambda *_: None)
    call("report", str(finished), "--out", str(tmp_path))
    assert "0.863 ± 0.003" in (tmp_path / "report.html").read_text()


def test_the_report(finished: Path, tmp_path: Path) -> None:
    done = call("report", str(finished), "--out", str(tmp_path / "report"))
    assert done.exit_code == 0, done.stderr
    page = (tmp_path / "report/report.html").read_text()
    assert "the paper&#x27;s test set has 32,768 patches (PCam); this test set has 8." in page
    assert "0.863 ± 0.003" not in page, "the paper's score is not comparable with these"
    for text in ("N=1 + 4 rotations", "89,425", "orientations = 4"):
        assert text in page
    assert "http://" not in page
    assert "https://" not in page
    figures = {path.name for path in (tmp_path / "report/figures").iterdir()}
    expected = {
        f"{part}-{what}.{kind}"
        for part in ("plain", "turning")
        for what in ("scores", "polar", "curves")
        for kind in ("png", "pdf")
    }
    assert figures == expected
    scores = json.loads((finished / "turning/N4-seed0/evaluation-test.json").read_text())["test"]
    with (tmp_path / "report/results.csv").open(newline="") as table:
        row = next(row for row in csv.DictReader(table) if row["part"] == "turning")
    assert row["test"] == f"{scores['accuracy']:.4f}"


def test_a_run_of_another_recipe_is_refused_before_any_job_starts(study: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "plain/N1-seed0"
    run_folder.mkdir(parents=True)
    data = read_study(study).jobs[0].recipe.data
    (run_folder / "recipe.toml").write_text(f'task = "tumor"\ndata = "{data}"\norientations = 1\nepochs = 9\n')
    with pytest.raises(RunError, match=r"The value of 'epochs' in .* differs from this study"):
        run_study(read_study(study), tmp_path, lambda *_: pytest.fail("started"))


@pytest.mark.parametrize(
    ("gpus", "cores", "expected"), [(1, 16, 12), (1, 64, 12), (4, 64, 48), (1, 4, 3), (1, 1, 1), (0, 16, 4), (0, 2, 1)]
)
def test_the_number_of_jobs_side_by_side_suits_the_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(jobs, "count_cores", lambda: cores)
    assert jobs.count_at_once() == expected
