"""The environment: versions, commit and time, as they are recorded with every run."""

import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from multiprocessing import get_all_start_methods
from pathlib import Path

import pytest
import torch

import rotopath as rp
from rotopath import environment
from rotopath.environment import describe_machine, describe_software, now


def test_versions_are_those_of_installed_packages() -> None:
    software = describe_software(("torch", "numpy", "no-such-package"))
    assert software["packages"] == {"torch": version("torch"), "numpy": version("numpy")}
    assert software["rotopath"] == rp.__version__
    assert software["python"] == ".".join(map(str, sys.version_info[:3]))


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_that_of_the_source_tree_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "repository" / "package" / "environment.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    monkeypatch.setattr(environment, "__file__", str(source))
    assert describe_software()["commit"] is None, "no repository"
    git(tmp_path / "repository", "init")
    (tmp_path / "repository" / "other.txt").write_text("x")
    git(tmp_path / "repository", "add", "other.txt")
    git(tmp_path / "repository", "commit", "-m", "first")
    assert describe_software()["commit"] is None, "a repository that does not track the package"
    git(source.parent, "add", "environment.py")
    git(source.parent, "commit", "-m", "second")
    commit = git(source.parent, "rev-parse", "HEAD")
    assert describe_software()["commit"] == commit[:12]
    source.write_text("changed = True")
    assert describe_software()["commit"] == f"{commit[:12]}-dirty"


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert describe_software()["commit"] is None


def test_the_machine_is_described() -> None:
    machine = describe_machine(torch.device("cpu"))
    assert machine["device"]
    assert machine["threads"] == torch.get_num_threads()


def test_the_time_is_in_utc() -> None:
    time = datetime.fromisoformat(now())
    assert time.utcoffset() == timedelta(0)
    assert abs(time - datetime.now(UTC)) < timedelta(seconds=60)


@pytest.mark.slow
@pytest.mark.skipif("forkserver" not in get_all_start_methods(), reason="processes are not forked from a server")
def test_ctrl_c_does_not_interrupt_the_server_of_other_processes(tmp_path: Path) -> None:
    """A terminal sends it to all processes. The server would print a traceback while it imports packages."""
    script = """
        import os, signal, sys, time
        from rotopath.environment import start_fork_server
        start_fork_server()
        assert "torch" not in sys.modules, "both processes import it at the same time"
        try:
            time.sleep(0.3)
            os.killpg(0, signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            print("interrupted")
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, tmp_path / "script.py"]
    ended = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=120, check=False)
    assert ended.stdout == "interrupted\n"
    assert not ended.stderr
