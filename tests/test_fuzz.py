"""Damaged inputs: a short run of the fuzzer, and checks that it would notice failures."""

import json
import math
import random
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import fuzz
import pytest
import torch

pytestmark = pytest.mark.slow

CASES, PARTS = 2000, 2


@pytest.mark.parametrize("part", range(PARTS))
def test_no_damaged_input_ends_in_a_traceback_or_a_wrong_result(part: int) -> None:
    """In a process of its own, because the fuzzer forks, and threads of torch do not survive a fork."""
    formats = ",".join(entry.name for entry in fuzz.FORMATS[part::PARTS])
    command = [sys.executable, fuzz.__file__, "--cases", str(CASES // PARTS), "--formats", formats]
    done = subprocess.run([*command, "--seed", "1", "--jobs", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    header, *_, everything = done.stdout.strip().splitlines()
    assert header.startswith("format,cases,ok,refused")
    assert int(everything.split(",")[1]) == pytest.approx(CASES / PARTS, rel=0.02)  # formats have whole numbers


@pytest.mark.parametrize(
    ("code", "output", "must_refuse", "outcome"),
    [
        (0, "Results: out", False, "ok"),
        (0, "Results: out", True, "silently wrong"),
        (2, "rotopath: a.png does not exist.", True, "refused"),
        (2, "rotopath: a.png does not exist.", False, "refused"),
        (fuzz.EXIT_TRACEBACK, "", False, "traceback"),
        (2, "a.svs failed: KeyError: 'x'; the traceback is in out/a.svs.log.", False, "traceback"),
        (1, "Traceback (most recent call last):\n", False, "traceback"),
        (-signal.SIGALRM, "", False, "hang"),
        (-signal.SIGSEGV, "", False, "crash"),
        (-signal.SIGKILL, "", False, "memory"),
        (fuzz.EXIT_TRACEBACK, "numpy._ArrayMemoryError: Unable to allocate", False, "memory"),
        (2, "a.png failed: memory is too small; not enough memory", False, "memory"),
    ],
)
def test_the_outcome_of_a_command_is_known(code: int, output: str, must_refuse: bool, outcome: str) -> None:
    assert fuzz.judge(code, output, must_refuse) == outcome


def test_only_changes_of_the_parts_of_a_checkpoint_must_be_refused(tmp_path: Path) -> None:
    path = tmp_path / "resume.ckpt"
    torch.save({"weights": torch.randn(50, 50)}, path)
    content = path.read_bytes()
    seen = set()
    for number in range(200):
        change = fuzz.change_checkpoint(random.Random(number), content)
        path.write_bytes(change.content)
        try:
            with zipfile.ZipFile(path) as parts:
                is_whole = parts.testzip() is None
        except Exception:  # zipfile raises errors of many types
            is_whole = False
        assert not (change.must_refuse and is_whole)
        seen.add((change.must_refuse, is_whole))
    assert {(True, False), (False, True)} <= seen


def test_wrong_thresholds_are_known() -> None:
    content = json.dumps({"threshold": 0.5}).encode()
    must_refuse = []
    for number in range(300):
        change = fuzz.change_json(fuzz.is_wrong_threshold)(random.Random(number), content)
        try:
            value = json.loads(change.content)
        except (ValueError, RecursionError):
            continue
        is_right = isinstance(value, dict) and type(value.get("threshold")) in (int, float)
        if is_right and 0 <= value["threshold"] <= 1:
            assert not change.must_refuse
        must_refuse.append(change.must_refuse)
    assert 0.1 < sum(must_refuse) / len(must_refuse) < 0.99


def test_settings_that_must_be_refused_are_written_as_toml() -> None:
    found: dict[str, list[Any]] = {}
    for number in range(1000):
        change = fuzz.change_recipe(random.Random(number), b'task = "tumor"\nseed = 0')
        if change.must_refuse:
            values = tomllib.loads(change.content.decode())
            key = next(key for key in reversed(values))
            found.setdefault(key, []).append(values[key])
    assert set(found) == {key for key, _ in fuzz.REFUSED_SETTINGS}
    assert any(isinstance(value, float) and math.isnan(value) for value in found["momentum"])


def test_cases_depend_on_their_number_only() -> None:
    content = bytes(range(256)) * 20
    changes = [fuzz.change_bytes(random.Random(f"0 png {number}"), content) for number in (1, 2, 1)]
    assert changes[0] == changes[2] != changes[1]


def test_the_table_has_a_row_for_each_format_and_one_for_all() -> None:
    counts = {"png": fuzz.Counter(ok=2, refused=3), "hdf5": fuzz.Counter(traceback=1)}
    header, png, hdf5, everything = fuzz.table(counts)
    assert header[:4] == ["format", "cases", "ok", "refused"]
    assert png[:4] == ["png", "5", "2", "3"]
    assert hdf5[:5] == ["hdf5", "1", "0", "0", "1"]
    assert everything[:5] == ["all", "6", "2", "3", "1"]
