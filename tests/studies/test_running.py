"""Studies that are run: skipped, resumed, failed, killed, here and on a cluster; and reports on them."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import pcam
from sharing import make_once
from typer.testing import CliRunner

from rotopath.cli import app
from rotopath.model_file import MODEL, WEIGHTS, RunError
from rotopath.reports.study_report import report
from rotopath.studies import job, read_study, run_study, schedule
from rotopath.studies.job import place
from rotopath.studies.schedule import Future

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}  # the same rounding everywhere
ROTOPATH = (sys.executable, "-m", "rotopath", "study")
PATIENCE_S = 300  # with processes that start on a busy machine; what hangs, hangs longer


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_once(tmp_path_factory, "study", _make_study)


def _make_study(folder: Path) -> None:
    """Two runs, N=1, also with test-time augmentation, and N=4; and the study of them, finished."""
    data = pcam(folder / "data", (16, 8, 8))
    keys = f'task = "tumor"\ndata = "{data}"\nepochs = 2\nsteps = 8\nbatch = 4\ncheckpoint_steps = 3\n'
    (folder / "r.toml").write_text(keys + 'accelerator = "cpu"\n')
    (folder / "s.toml").write_text(
        '[plain]\nrecipe = "r.toml"\norientations = [1]\nseed = [0]\ntta = 4\n'
        '[turning]\nrecipe = "r.toml"\norientations = [4]\nseed = [0]\n'
    )
    done = call("run", str(folder / "s.toml"), "--out", str(folder / "finished"), "--at-once", "2")
    assert done.returncode == 0, done.stderr
    assert "2 of 2 done, 0 running, 0 failed" in done.stdout


@pytest.fixture
def study(shared: Path) -> Path:
    return shared / "s.toml"


@pytest.fixture
def finished(shared: Path) -> Path:
    return shared / "finished"


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ROTOPATH, *words], capture_output=True, text=True, timeout=PATIENCE_S, env=ENVIRONMENT)


def tables(out: Path) -> list[str]:
    report(out, folder := out.parent / f"{out.name}-report-{os.getpid()}")
    return [(folder / f"{name}.csv").read_text() for name in ("results", "summary")]


def wait_for(seen: Path, process: "subprocess.Popen[Any]") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not seen.exists():
        assert process.poll() is None, f"it ended before {seen} appeared"
        assert time.monotonic() < deadline, f"{seen} did not appear"
        time.sleep(0.05)


def test_a_study_leaves_runs_and_nothing_else(finished: Path) -> None:
    for part, name in (("plain", "N1-seed0"), ("turning", "N4-seed0")):
        files = {path.name for path in (finished / part).iterdir() if not path.name.startswith(".")}
        assert files == {name, f"{name}.toml"}
    run = {path.name for path in (finished / "plain/N1-seed0").iterdir()}
    assert {WEIGHTS, MODEL, "evaluation-test.json", "evaluation-test.npz", "evaluation-test-tta4.json"} <= run


def test_the_same_command_does_nothing_twice(study: Path, finished: Path) -> None:
    def never(*job: object) -> Future:
        raise AssertionError(job)

    states = run_study(read_study(study), finished, never)
    assert {one.state for one in states.values()} == {"done"}


def test_a_folder_of_another_study_is_refused(study: Path, finished: Path) -> None:
    with pytest.raises(RunError, match="has another 'steps' than this study; choose another folder, or delete that"):
        run_study(read_study(study, ["plain.set.steps=13"]), finished, lambda *_: pytest.fail("begun"))


def test_a_study_that_is_killed_twice_ends_in_the_same_tables(study: Path, finished: Path) -> None:
    """The whole of it at once, as when a machine goes down: at random times, and with a run under way."""
    out = study.parent / "killed"
    command = [*ROTOPATH, "run", str(study), "--out", str(out), "--at-once", "2"]
    for number in range(2):
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        if number == 0:
            wait_for(place(out, "turning/N4-seed0", "progress"), process)
        time.sleep(random.uniform(0, 4))
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = call("run", str(study), "--out", str(out), "--at-once", "2")
    assert done.returncode == 0, done.stderr
    assert tables(out) == tables(finished)


def test_a_job_ends_with_a_parent_that_died_before_it_began(study: Path, tmp_path: Path) -> None:
    """As when a scheduler is killed while its job still imports: 'true' has ended long before that."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    recipe = tmp_path / "N4-seed0.toml"
    recipe.write_text((study.parent / "r.toml").read_text().replace("steps = 8", "steps = 100000"))
    job = [sys.executable, "-m", "rotopath.studies.job", str(recipe), "1", str(gone.pid)]
    done = subprocess.run(job, env=ENVIRONMENT, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert not (tmp_path / "N4-seed0" / WEIGHTS).exists()


def test_ctrl_c_stops_all_runs_and_says_how_to_go_on(study: Path) -> None:
    out = study.parent / "stopped"
    command = [*ROTOPATH, "run", str(study), "--out", str(out), "--at-once", "1", "--set", "plain.set.steps=4000"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    wait_for(checkpoint := out / "plain/N1-seed0/resume.ckpt", process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert f"stopped; the same command goes on with {out}" in said.replace("\n", "")
    assert checkpoint.exists(), "it can go on"
    assert not place(out, "plain/N1-seed0", "stop").exists()


def test_an_interrupt_that_is_lost_comes_again(tmp_path: Path) -> None:
    stop = tmp_path / "run.stop"
    stop.touch()
    program = f"""
import os, time
from pathlib import Path
from rotopath.studies import job

job.INTERRUPT_AGAIN_S = 0.2
job._end_in_time(os.getppid(), Path({str(stop)!r}))
for _ in range(2):
    try:
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("interrupted")
"""
    said = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert said.stdout.split() == ["interrupted", "interrupted"]


HOLD = """
import os, sys, time
from pathlib import Path
from rotopath.studies import job

with job._alone(Path(sys.argv[1])):
    child = os.fork() if "fork" in sys.argv else None
    if child != 0:
        Path(sys.argv[1]).with_suffix(".child").write_text(str(child))
        Path(sys.argv[1]).with_suffix(".held").touch()
    time.sleep(1000)
"""


def hold(lock: Path, *words: str) -> "subprocess.Popen[bytes]":
    """A process that has a lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock), *words], env=ENVIRONMENT)
    wait_for(lock.with_suffix(".held"), process)
    return process


def test_a_job_that_another_process_works_on_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on Windows, where nobody can read a file that is locked."""
    lock, read_text = tmp_path / ".N4.lock", Path.read_text

    def take_lock(*_: object, **__: object) -> int:
        with pytest.raises(job.BusyError), job._alone(lock):
            pass
        return job.BUSY

    def read_unlocked(path: Path, **options: Any) -> str:
        if path.suffix == ".lock":
            raise PermissionError(path)
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", read_unlocked)
    monkeypatch.setattr(job, "WAIT_FOR_LOCK_S", 0.3)
    monkeypatch.setattr(schedule.subprocess, "call", take_lock)
    process = hold(lock)
    try:
        reason = schedule.run_process(str(tmp_path / "N4.toml"), 1, str(tmp_path))
    finally:
        process.kill()
        process.wait()
    assert reason == f"another process works on it ({process.pid}); wait for it."


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "WAIT_FOR_LOCK_S", 2.0)
    lock = tmp_path / ".N4.lock"
    process = hold(lock)
    process.kill()
    process.wait()
    for _ in range(2):  # and free again after it was held
        with job._alone(lock):
            assert (tmp_path / ".N4.pid").read_text() == str(os.getpid())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_lock_ends_with_its_process_and_not_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that load data, which may outlive a process that was killed."""
    monkeypatch.setattr(job, "WAIT_FOR_LOCK_S", 2.0)
    lock = tmp_path / ".N4.lock"
    process = hold(lock, "fork")
    child = int(lock.with_suffix(".child").read_text())
    process.kill()
    process.wait()
    try:
        with job._alone(lock):
            assert (tmp_path / ".N4.pid").read_text() == str(os.getpid())
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_system_without_fcntl_runs_jobs_too() -> None:
    """As Windows, of which nobody should hear that a package is missing."""
    program = "import sys; sys.modules['fcntl'] = None; import rotopath.studies.job"
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_that_fails_does_not_stop_the_others(study: Path, finished: Path) -> None:
    out = study.parent / "failing"
    changes = ("--set", "plain.set.data=nowhere")
    failed = call("run", str(study), *changes, "--out", str(out), "--at-once", "1")
    assert failed.returncode == 1
    assert "plain/N1-seed0 failed: nowhere does not exist." in failed.stderr
    assert (out / "turning/N4-seed0" / WEIGHTS).read_bytes() == (finished / "turning/N4-seed0" / WEIGHTS).read_bytes()
    assert "plain" not in "".join(tables(out))


def test_no_study_and_no_cluster_are_said(study: Path, tmp_path: Path) -> None:
    for words, sentence in (
        (("report", str(tmp_path)), "has no finished runs; run `rotopath study run` first."),
        (("report", str(tmp_path / "gone")), "there is no such folder."),
        (("run", str(study), "--out", str(tmp_path / "x"), "--cluster", "moon"), "There is no cluster 'moon'"),
    ):
        done = CliRunner().invoke(app, ["study", *words])
        assert done.exit_code == 2
        assert sentence in done.stderr


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, Callable[[], "subprocess.Popen[bytes]"]]]:
    """The address of a scheduler, and a function that starts a worker; each is a process of its own."""
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


def test_a_study_survives_the_death_of_a_worker(
    study: Path, finished: Path, cluster: tuple[str, Callable[[], "subprocess.Popen[bytes]"]]
) -> None:
    address, start_worker = cluster
    out = study.parent / "cluster"
    command = [*ROTOPATH, "run", str(study), "--out", str(out), "--cluster", address, "--at-once", "1"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = start_worker()
    wait_for(place(out, "plain/N1-seed0", "progress"), process)
    first.kill()  # its run is under way
    start_worker()
    said, complaints = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, complaints
    assert "2 of 2 done, 0 running, 0 failed" in said
    assert tables(out) == tables(finished)


def test_the_papers_scores_stand_beside_those_that_can_be_compared(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rotopath.reports.study_report.incomparable", lambda *_: None)
    CliRunner().invoke(app, ["study", "report", str(finished), "--out", str(tmp_path)])
    assert "0.863 ± 0.003" in (tmp_path / "report.html").read_text()


def test_the_report(finished: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["study", "report", str(finished), "--out", str(tmp_path / "report")])
    assert done.exit_code == 0, done.stderr
    page = (tmp_path / "report/report.html").read_text()
    assert "the paper tests on the 32,768 patches of PCam&#x27;s test set, and here there are 8." in page
    assert "0.863 ± 0.003" not in page, "which is the paper's, and no measure of these"
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
    row = next(
        line for line in (tmp_path / "report/results.csv").read_text().splitlines() if line.startswith("turning")
    )
    assert row.split(",")[7] == f"{scores['accuracy']:.4f}"


def test_a_run_of_another_recipe_is_found_before_any_begins(study: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "plain/N1-seed0"
    run_folder.mkdir(parents=True)
    data = read_study(study).jobs[0].recipe.data
    (run_folder / "recipe.toml").write_text(f'task = "tumor"\ndata = "{data}"\norientations = 1\nepochs = 9\n')
    with pytest.raises(RunError, match="has another 'epochs' than this study"):
        run_study(read_study(study), tmp_path, lambda *_: pytest.fail("begun"))


@pytest.mark.parametrize(
    ("gpus", "cores", "jobs"), [(1, 16, 12), (1, 64, 12), (4, 64, 48), (1, 4, 3), (1, 1, 1), (0, 16, 4), (0, 2, 1)]
)
def test_jobs_at_once_suit_the_machine(monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, jobs: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(schedule, "count_cores", lambda: cores)
    assert schedule.count_at_once() == jobs
