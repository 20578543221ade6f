"""One run of a study, in a process of its own: `python -m rotopath.studies RECIPE.toml ROTATIONS PARENT`.

In: a recipe, which lies beside the run folder of the same name. Out: the run folder, trained and evaluated, a file that
says how far it is, and one that says why it failed, if it did. Nothing is done twice, and no two processes do it; one
ends when its parent does, or when a file says stop.

The process of one job, as `running.run_process` starts it.
"""

import _thread
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from rotopath.evaluation import Split, evaluate, evaluation_file
from rotopath.model_file import WEIGHTS, RunError
from rotopath.recipe import read_recipe
from rotopath.studies.plan import PLAIN
from rotopath.writing import write_text

SPLIT: Split = "test"
TELL_EVERY_S = 1.0
WAIT_FOR_LOCK_S = 20.0  # an orphan ends itself sooner than that
INTERRUPT_AGAIN_S = 5.0  # one that hits where exceptions are ignored, such as in a destructor, is lost
BUSY = 75  # exit code, as the system's: try again later


class BusyError(Exception):
    """Another process has the lock of the job."""


def place(out: Path, name: str, kind: str) -> Path:
    """A file of a job beside its run folder: its recipe (toml), progress, log, stop, or the reason why it failed."""
    return out / f"{name}.{kind}"


def needed(folder: Path, orientations: int, rotations: int) -> list[Path]:
    """The files that a job ends with."""
    evaluations = [evaluation_file(folder, SPLIT)]
    if orientations == PLAIN and rotations > 1:
        evaluations.append(evaluation_file(folder, SPLIT, rotations))
    return [folder / WEIGHTS, *evaluations]


def run(path: Path, rotations: int) -> None:
    """Whatever is left to do of a job."""
    from rotopath.training import train

    recipe, folder = read_recipe(path), path.with_suffix("")
    teller = _Teller(path.with_suffix(".progress"), recipe.epochs * recipe.steps)
    weights, plain, *turned = needed(folder, recipe.orientations, rotations)
    if not weights.exists():
        train(recipe, folder, on_progress=teller.tell)
    if not plain.exists():
        teller.say("evaluating")
        evaluate(folder, split=SPLIT, robustness=True)
    if turned and not turned[0].exists():
        teller.say(f"evaluating {rotations} rotations")
        evaluate(folder, split=SPLIT, rotations=rotations)


class _Teller:
    """Writes down how far a job is, for whoever watches, once in a while."""

    def __init__(self, path: Path, steps: int) -> None:
        self._path, self._steps, self._last = path, steps, 0.0

    def tell(self, stage: str, row: dict[str, float]) -> None:
        if time.monotonic() - self._last >= TELL_EVERY_S:
            self.say(stage, **row)

    def say(self, stage: str, **numbers: float) -> None:
        self._last = time.monotonic()
        write_text(self._path, json.dumps({"stage": stage, "steps": self._steps, **numbers}))


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock, which the system frees when the process ends, however it does; a file beside it has the process ID.

    The ID is not in the lock itself, since Windows lets nobody else read a file that is locked.
    """
    try:  # on a file system without such locks, filelock has others, which a process that was killed holds forever
        held = FileLock(lock, fallback_to_soft=False).acquire(timeout=WAIT_FOR_LOCK_S)
    except Timeout:
        raise BusyError(f"{lock} is held by another process.") from None
    with held:
        write_text(lock.with_suffix(".pid"), str(os.getpid()))
        yield


def _end_in_time(parent: int, stop: Path) -> None:
    """A job whose parent was killed ends too, since another one will be sent to do it; one that is to stop, stops."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.3)
            if stop.exists():
                _thread.interrupt_main()
                time.sleep(INTERRUPT_AGAIN_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(path: Path, rotations: int, parent: int) -> int:
    """The exit code: 0 if all is done, or written why not; BUSY if that is for another process to say."""
    from rotopath.data import DataError
    from rotopath.images import UnreadableFileError
    from rotopath.recipe import RecipeError

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a study in the background inherits that it is ignored
    _end_in_time(parent, path.with_suffix(".stop"))
    failed = path.with_suffix(".failed")
    try:
        with _alone(path.with_name(f".{path.stem}.lock")):
            failed.unlink(missing_ok=True)
            run(path, rotations)
            path.with_suffix(".progress").unlink(missing_ok=True)
    except KeyboardInterrupt:
        path.with_suffix(".stop").unlink(missing_ok=True)
        return 130
    except BusyError:
        return BUSY
    except (DataError, UnreadableFileError, RecipeError, RunError) as error:
        write_text(failed, f"{error}\n")
    except Exception as error:
        traceback.print_exc()
        write_text(failed, f"{type(error).__name__}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
