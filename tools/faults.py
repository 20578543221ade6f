"""Disturb the long commands at random moments, run them again, and compare their files with those of another run.

.venv/bin/python tools/faults.py [--kills 100] [--seed 0] [--commands train,predict] [--faults SIGKILL] [--out FILE.csv]

The commands are train, predict, study, export, evaluate, data make and data import, with inputs so small that a command
takes seconds. The faults are:

- SIGKILL, SIGTERM: sent to the process of the command, or to all its processes, at a random moment.
- full disk: the disk of the output has a random size that is too small (a tmpfs; needs Linux and root, or user
  namespaces). Then it gets larger.
- full temporary disk: so does the disk of the folder for temporary files, for commands that write such files.
- at once: the command runs in two processes with one `--out`.
- killed worker: a worker of a local Dask cluster gets SIGKILL. The command itself survives this, unless no worker has
  started yet.
- removed input: a file that the command reads is removed at a random moment, and then restored.

After a fault, the same command runs again, until its end. A case is

- *clean* if no process printed a traceback, crashed, or waited longer than its limit;
- *identical* if all files have the same content as after an undisturbed run, except for times and speeds;
- without *leftovers* if there are no other files, neither beside the output nor in the folder for temporary files.

TensorBoard logs are not compared: a resumed training appends a file to them. Moments depend on the seed, and on how
fast the machine is.
"""

import argparse
import csv
import io
import json
import multiprocessing.util
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fuzz import EXIT_TRACEBACK, import_all, run_command

LIMIT_S = 300  # of one command
ROOM_BYTES = 2**30  # on the disk, after it was full
COLUMNS = ("command", "fault", "cases", "clean", "identical", "leftovers")
TIMES = {"begun", "finished", "exported", "written", "seconds", "seconds_of_stages", "hardware", "images_per_second"}
MODEL = "tumor-pcam-n8"
OUTLINING = "nuclei-kumar-n8"  # its maps of objects, and its workers, need many temporary files


@dataclass(frozen=True)
class Command:
    """A command: a folder with its inputs, the words of the command line, and a file that it reads."""

    name: str
    folder: str  # in the corpus; FOLDER in `words` stands for a copy of it
    words: tuple[str, ...]
    kills: int  # of 100 kills: fewer for slow commands
    input: str = ""  # in the folder; "" if the command reads no file of the user


COMMANDS = (
    Command("train", "training", ("train", "FOLDER/recipe.toml", "--out", "FOLDER/out/run"), 20, "recipe.toml"),
    Command(
        "predict",
        "slides",
        (
            "predict",
            MODEL,
            "FOLDER/in",
            "--out",
            "FOLDER/out/results",
            "--spacing-um-px",
            "1",
            "--keep-map",
            "--device",
            "cpu",
        ),
        20,
        "in/b.png",
    ),
    Command(
        "study",
        "study",
        ("study", "run", "FOLDER/study.toml", "--out", "FOLDER/out/study", "--at-once", "1"),
        6,
        "recipe.toml",
    ),
    Command("export", "run", ("export", "FOLDER/run", "--out", "FOLDER/out/model"), 16, "run/weights.safetensors"),
    Command(
        "evaluate",
        "run",
        ("evaluate", "FOLDER/run", "--robustness", "--out", "FOLDER/out/scores.json"),
        14,
        "run/weights.safetensors",
    ),
    Command("data make", "nothing", ("data", "make", "--task", "mitosis", "--out", "FOLDER/out/data"), 12),
    Command(
        "data import",
        "import",
        ("data", "import", "FOLDER/in", "--out", "FOLDER/out/data", "--spacing-um-px", "0.25"),
        12,
        "in/7.geojson",
    ),
)
DASK = "dask-scratch-space"  # a folder for temporary files of Dask, which it always leaves
ON_CLUSTER = ("--cluster", "local", "--at-once", "1")


# Inputs, made once


def make_corpus(root: Path) -> None:
    """Write the inputs of all commands."""
    import h5py
    import numpy as np
    import torch
    from PIL import Image

    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    for name in ("training", "slides/in", "study", "nothing", "import/in", "pcam"):
        (root / name).mkdir(parents=True)

    def draw(*size: int) -> Any:
        return np.clip(generator.normal((190, 110, 170), 35, (*size, 3)), 0, 255).astype(np.uint8)

    for split, count in (("train", 8), ("valid", 4), ("test", 12)):
        labels = (np.arange(count) % 2).astype(np.uint8).reshape(count, 1, 1, 1)
        for key, values in (("x", draw(count, 96, 96)), ("y", labels)):
            with h5py.File(root / "pcam" / f"camelyonpatch_level_2_split_{split}_{key}.h5", "w") as file:
                file.create_dataset(key, data=values, chunks=(1, *values.shape[1:]), compression="gzip")
    recipe = {"task": "tumor", "data": str(root / "pcam"), "orientations": 1, "epochs": 3, "steps": 4, "batch": 4}
    recipe |= {"checkpoint_steps": 1, "validation_steps": 1, "accelerator": "cpu", "cache": "memory", "window_px": 88}
    lines = [f"{key} = {json.dumps(value)}" for key, value in recipe.items()]
    (root / "study/recipe.toml").write_text("\n".join(lines))
    (root / "study/study.toml").write_text('[tumor]\nrecipe = "recipe.toml"\norientations = [1]\nseed = [0]\n')
    mining = ["[mining]", "epochs = 1", "examples = 2"]
    (root / "training/recipe.toml").write_text("\n".join([*lines, *mining]))
    for name in ("a", "b"):
        Image.fromarray(draw(256, 256)).save(root / f"slides/in/{name}.png")
    for number in range(30):
        Image.fromarray(draw(40, 40)).save(root / f"import/in/{number}.png")
        ring = [[5, 5], [30, 5], [30, 30], [5, 30], [5, 5]]
        feature = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}, "properties": {}}
        content = {"type": "FeatureCollection", "features": [feature]}
        (root / f"import/in/{number}.geojson").write_text(json.dumps(content))
    assert run_command(["train", str(root / "study/recipe.toml"), "--out", str(root / "run/run")]) == 0


# Processes


@contextmanager
def run_process(words: Sequence[str], folder: Path) -> Iterator[Callable[[], int | None]]:
    """Start a command in a forked process, the leader of a new group.

    Yields a function that returns the exit code, or None while the process runs. At the end, all processes of the group
    are killed. What they print is appended to `output.txt` in the folder of the case.
    """
    child = os.fork()
    if child == 0:
        _be_process(words, folder)
    code: list[int] = []

    def poll() -> int | None:
        if not code:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code.append(os.waitstatus_to_exitcode(status))
        return code[0] if code else None

    poll.child = child  # type: ignore[attr-defined]
    try:
        yield poll
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not code:
            os.waitpid(child, 0)


def _be_process(words: Sequence[str], folder: Path) -> None:
    code = EXIT_TRACEBACK
    try:
        os.setsid()
        file = os.open(folder / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(file, stream)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(LIMIT_S)
        os.chdir(folder)
        os.environ["TMPDIR"] = str(folder / "tmp")
        tempfile.tempdir = str(folder / "tmp")
        import torch

        torch.set_num_threads(1)
        code = run_command(words)
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # private; os._exit leaves its folder
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def finish(words: Sequence[str], folder: Path) -> int:
    """Run a command until its end, and return its exit code."""
    with run_process(words, folder) as poll:
        while (code := poll()) is None:
            time.sleep(0.01)
        return code


def measure_temporary(words: Sequence[str], folder: Path) -> int:
    """Run a command until its end, and return how many bytes of temporary files it had at the same time."""
    mount(folder / "tmp", ROOM_BYTES)
    most = empty = _used_bytes(folder / "tmp")
    with run_process(words, folder) as poll:
        while poll() is None:
            most = max(most, _used_bytes(folder / "tmp"))
            time.sleep(0.001)
    unmount(folder / "tmp")
    return most - empty


def _used_bytes(disk: Path) -> int:
    state = os.statvfs(disk)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def list_descendants(process: int) -> list[int]:
    """Return the IDs of the processes that a process has started, directly or not (Linux)."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [process]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]


# Files


def read_files(folder: Path) -> dict[str, object]:
    """Return the content of all files in a folder, by path, without times and speeds. Folders have the content None."""
    content: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if "tensorboard" not in name.split("/"):
            content[name] = None if path.is_dir() else _normalize(path)
    return content


def _normalize(path: Path) -> object:
    raw = path.read_bytes()
    if path.name == "summary.json":
        return _without_times(json.loads(re.sub(rb'"sha256": "[0-9a-f]{64}"', b'"sha256": ""', raw)))  # of OME-TIFFs
    if path.suffix == ".json":
        return _without_times(json.loads(raw))
    if path.name.endswith(".ome.tif"):
        return re.sub(rb"urn:uuid:[0-9a-f-]{36}", b"", raw)  # each OME-TIFF has a random identifier
    if path.name == "log.csv":
        rows = list(csv.DictReader(io.StringIO(raw.decode())))
        return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]
    if path.suffix in (".pt", ".npz", ".zip"):
        with zipfile.ZipFile(io.BytesIO(raw)) as parts:
            return {name: parts.read(name) for name in parts.namelist() if not name.endswith(".debug_pkl")}
    return raw


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_times(inside) for name, inside in value.items() if name not in TIMES}
    return [_without_times(inside) for inside in value] if isinstance(value, list) else value


def compare(expected: dict[str, object], folder: Path) -> tuple[list[str], list[str]]:
    """Return the paths of files that are missing or differ from those of an undisturbed run, and of other files."""
    found = read_files(folder / "out")
    different = [name for name, content in expected.items() if name not in found or found[name] != content]
    leftovers = [name for name in found if name not in expected]
    temporary = [path.name for path in (folder / "tmp").iterdir() if path.name != DASK]
    return different, [*leftovers, *(f"tmp/{name}" for name in temporary)]


# Faults. Each function disturbs a command in a folder, and returns whether the command was disturbed before its end.


@dataclass(frozen=True)
class Case:
    """A command that is disturbed in a folder."""

    command: Command
    folder: Path
    words: list[str]
    usual_s: float  # duration of an undisturbed run
    usual_bytes: int  # of its files
    temporary_bytes: int  # of its temporary files
    rng: random.Random

    def sleep(self, poll: Callable[[], int | None]) -> bool:
        """Wait until a random moment of the command. Return False if the command has ended before."""
        end = time.monotonic() + self.rng.random() * self.usual_s
        while time.monotonic() < end:
            if poll() is not None:
                return False
            time.sleep(0.002)
        return poll() is None

    def wait(self, poll: Callable[[], int | None]) -> int:
        """Wait until a command has ended, and return its exit code."""
        while (code := poll()) is None:
            time.sleep(0.01)
        return code


def send(number: signal.Signals, case: Case) -> bool:
    """Send a signal to the process of the command or, in every other case, to all its processes."""
    with run_process(case.words, case.folder) as poll:
        if not case.sleep(poll):
            return False
        child: int = poll.child  # type: ignore[attr-defined]
        (os.kill if case.rng.random() < 0.5 else os.killpg)(child, number)
        code = case.wait(poll)
    if number == signal.SIGTERM and code not in (143, 130, 0, -signal.SIGTERM):
        print(f"exit code {code} after SIGTERM")
    return True


def fill_disk(name: str, case: Case) -> bool:
    """Run the command on a disk that is too small, and then enlarge the disk. The folder stays mounted.

    `name` is that of the folder: `out` for results, or `tmp` for temporary files.
    """
    usual = case.usual_bytes if name == "out" else case.temporary_bytes
    size = int(usual * (0.02 + 0.9 * case.rng.random())) // 4096 * 4096 + 4096
    mount(case.folder / name, size)
    code = finish(case.words, case.folder)
    subprocess.run(["mount", "-o", f"remount,size={ROOM_BYTES}", case.folder / name], check=True)
    if code not in (0, 1, 2):
        with (case.folder / "output.txt").open("a") as output:
            output.write(f"Traceback (most recent call last): exit code {code}\n")
    return code != 0


def run_twice(case: Case) -> bool:
    """Run the command in two processes at the same time. At least one must succeed."""
    with run_process(case.words, case.folder) as first:
        time.sleep(case.rng.random() ** 2 * case.usual_s)  # often almost at once
        with run_process(case.words, case.folder) as second:
            codes = {case.wait(first), case.wait(second)}
    if 0 not in codes or not codes <= {0, 1, 2}:
        print(f"exit codes {codes} of two processes")
    return True


def kill_worker(case: Case) -> bool:
    """Kill a process of a Dask cluster."""
    with run_process(case.words, case.folder) as poll:
        if not case.sleep(poll):
            return False
        workers = [
            process
            for process in list_descendants(poll.child)  # type: ignore[attr-defined]
            if b"spawn_main" in _read_command(process)
        ]
        if not workers:
            return False
        with suppress(ProcessLookupError):
            os.kill(case.rng.choice(workers), signal.SIGKILL)
        if (code := case.wait(poll)) not in (0, 2):
            print(f"exit code {code} after the death of a worker")
    return True


def _read_command(process: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


def remove_input(case: Case) -> bool:
    """Remove a file that the command reads, at a random moment, and restore it after the end of the command."""
    path = case.folder / case.command.input
    content = path.read_bytes()
    with run_process(case.words, case.folder) as poll:
        running = case.sleep(poll)
        path.unlink()
        code = case.wait(poll)
    path.write_bytes(content)
    if code not in (0, 1, 2):
        print(f"exit code {code} without the input")
    return running


FAULTS: dict[str, Callable[[Case], bool]] = {
    "SIGKILL": partial(send, signal.SIGKILL),
    "SIGTERM": partial(send, signal.SIGTERM),
    "full disk": partial(fill_disk, "out"),
    "full temporary disk": partial(fill_disk, "tmp"),
    "at once": run_twice,
    "killed worker": kill_worker,
    "removed input": remove_input,
}
CASES = {
    "SIGKILL": 0.6,
    "SIGTERM": 0.4,
    "full disk": 0.2,
    "full temporary disk": 0.2,
    "at once": 0.2,
    "killed worker": 0.1,
    "removed input": 0.1,
}  # for each kill


def inject(command: Command, fault: str, cases: int, corpus: Path, work: Path, seed: int) -> Counter[str]:
    """Disturb a command a number of times, and count the cases that were clean, identical and without leftovers."""
    folder = work / command.folder
    words = [word.replace("FOLDER", str(folder)) for word in command.words]
    if fault == "killed worker":  # workers have other numbers of threads, and therefore other rounding
        words = [*(words[: words.index("--at-once")] if "--at-once" in words else words), *ON_CLUSTER]
    if fault == "full temporary disk" and command.name == "predict":
        words = [{MODEL: OUTLINING, "1": "0.25"}.get(word, word) for word in words] + ["--workers", "1"]

    def prepare() -> None:
        for name in ("out", "tmp"):
            unmount(folder / name)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(corpus / command.folder, folder)
        for name in ("out", "tmp"):
            (folder / name).mkdir()

    def measure(words: list[str]) -> float:
        prepare()
        started = time.monotonic()
        if finish(words, folder) not in (0, 1):
            raise SystemExit(f"{command.name} fails undisturbed: {(folder / 'output.txt').read_text()}")
        return time.monotonic() - started

    usual_s = measure(words)
    expected = read_files(folder / "out")
    measured = measure(words)
    different, _ = compare(expected, folder)
    if different:
        raise SystemExit(f"Two undisturbed runs of {command.name} differ in {different}.")
    usual_s = min(usual_s, measured)
    usual_bytes = sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file())
    counts: Counter[str] = Counter()
    temporary_bytes = 0
    if fault == "full temporary disk":
        prepare()
        temporary_bytes = measure_temporary(words, folder)
        if not temporary_bytes:
            return counts
    number = 0
    while counts["cases"] < cases and number < 5 * cases:
        number += 1
        prepare()
        rng = random.Random(f"{seed} {command.name} {fault} {number}")
        is_disturbed = FAULTS[fault](Case(command, folder, words, usual_s, usual_bytes, temporary_bytes, rng))
        if not is_disturbed:
            continue  # the command had already ended
        again = finish(words, folder)
        text = (folder / "output.txt").read_text(errors="replace")
        different, leftovers = compare(expected, folder)
        is_clean = not re.search(r"Traceback \(most recent|Fatal Python error|terminate called", text) and again in (
            0,
            2,
        )
        counts.update(cases=1, clean=int(is_clean), identical=int(not different), leftovers=int(bool(leftovers)))
        if different or leftovers or not is_clean:
            print(
                f"{command.name}, {fault} {number}: {different=} {leftovers=}, exit code {again}:\n{text}", flush=True
            )
    for name in ("out", "tmp"):
        unmount(folder / name)
    return counts


def mount(folder: Path, size: int) -> None:
    """Mount a disk in memory of `size` bytes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)


def unmount(folder: Path) -> None:
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", folder], check=True)  # a process that was killed may not have ended yet


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="number of SIGKILLs and SIGTERMs for all commands")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", default="", help="names of commands, separated by commas; default: all")
    parser.add_argument("--faults", default="", help="names of faults, separated by commas; default: all")
    parser.add_argument("--out", type=Path, help="CSV file for the table")
    given = parser.parse_args()
    commands, faults = ([*filter(None, names.split(","))] for names in (given.commands, given.faults))
    out = given.out and given.out.absolute()
    import_all()
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        corpus, work = Path(name, "corpus"), Path(name, "work")
        corpus.mkdir()
        work.mkdir()
        make_in_process(corpus)
        shrink_data()
        for command in COMMANDS:
            for fault, fraction in CASES.items():
                if (commands and command.name not in commands) or (faults and fault not in faults):
                    continue
                if (fault == "killed worker" and command.name not in ("predict", "study")) or (
                    fault == "removed input" and not command.input
                ):
                    continue
                started = time.monotonic()
                cases = max(1, round(given.kills / 100 * command.kills * fraction))
                counts = inject(command, fault, cases, corpus, work, given.seed)
                if not counts:
                    continue  # the command writes no temporary files
                rows.append([command.name, fault, *(counts[column] for column in COLUMNS[2:])])
                print(*rows[-1], f"{time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows])
    print(text.getvalue())
    if out is not None:
        out.write_text(text.getvalue())
    if any(row[3] != row[2] or row[4] != row[2] or row[5] for row in rows):
        raise SystemExit(1)


def make_in_process(corpus: Path) -> None:
    """Make the inputs in a forked process, because torch may not run in the process that forks the others."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            make_corpus(corpus)
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("The inputs cannot be made.")


def shrink_data() -> None:
    """Let `rotopath data make` generate smaller images, so that it takes a second."""
    from rotopath import synthetic

    synthetic.make_mitosis = partial(synthetic.make_mitosis, fields_per_case=1, size_px=64)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
