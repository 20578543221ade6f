"""The run folder during a training: prepare it, and write the log, the checkpoints and the hard examples.

`prepare_folder` creates a run folder, or checks that an existing one belongs to the same recipe and the same data.
`RunRecorder`, a Lightning callback, writes three files during the training:

- `log.csv`: loss, learning rate and speed of every step, validation loss and accuracy of every epoch.
- `kept.safetensors`: weights of the network after the best epoch (lowest validation loss) or after the last epoch. The
  key `keep` of the recipe selects the epoch.
- `resume.ckpt`: a checkpoint with weights, optimizer, step and log. If the same command is run again, `loop.fit` loads
  this checkpoint. On the CPU, a resumed training ends with exactly the same weights as an uninterrupted training.

The last two files are removed when the run is finished. If the recipe mines hard examples, the module `loop` first
trains a baseline network, and `mine_hard_examples` writes the worst mistakes of this network to `mined.csv`, one row
per mistake, the worst first. In the training that follows, the sampler draws windows at their positions more often.
Every file is written atomically (see `rotopath.writing`), so
that it is complete even if the process is killed.
"""

import csv
import hashlib
import io
import math
import shutil
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from rotopath import runs
from rotopath.data import DataError, Dataset, Sample
from rotopath.data.annotations import class_table_path
from rotopath.data.dataset import read_table
from rotopath.data.sampling import Ints
from rotopath.environment import describe_software, now
from rotopath.evaluation import gather_evidence
from rotopath.images.files import UnreadableFileError, expect_file
from rotopath.model_file import WEIGHTS, RunError, find_weight_fault, load_weights, pack_weights, read_json
from rotopath.models import DenseNetwork
from rotopath.recipe import Recipe, find_changed_key, format_recipe
from rotopath.tasks import HardExample, Task
from rotopath.writing import atomic_file, write_bytes, write_json, write_text

MINED_COLUMNS = ("image", "row", "column", "score")
RESUME, KEPT = "resume.ckpt", "kept.safetensors"  # removed when the run is finished
BASELINE, TENSORBOARD = "baseline", "tensorboard"  # subfolders: the run that finds hard examples, and a log
STATE_KEY = "Keeper"  # of the state of `RunRecorder` in a checkpoint
LOG_COLUMNS = ("step", "epoch", "loss", "learning_rate", "images_per_second", "validation_loss", "validation_accuracy")
LOG_EVERY_STEPS = 25  # losses of this number of steps are read together, because each read waits for the GPU
LOG_EVERY_S = 20.0  # or earlier, if the steps take long
FINGERPRINT_PREFIX = "content:"  # missing in fingerprints of rotopath 0.1, which ignored the content of files
HASH_BLOCK_BYTES = 2**20
Row = dict[str, float]  # one row of the log: from column name to value


# Create a run folder, or check an existing one


def prepare_folder(folder: Path, recipe: Recipe, dataset: Dataset, parent: runs.Parent | None = None) -> None:
    """Create the folder of a new run, or check that an existing folder contains this run, still unfinished.

    A new folder gets the recipe and the provenance. An existing run must have the same data and the same recipe, except
    for keys that do not change the result, such as `devices`. `parent` is the model whose weights the training starts
    from; its weights must be the same too. Raises RunError if the run differs, if it is finished, or
    if the folder contains files that do not belong to a run.
    """
    if (folder / WEIGHTS).exists() and (folder / runs.RECIPE).exists():
        remove_checkpoints(folder)  # of a process that was killed after it had written the weights
        raise RunError(f"{folder} contains a finished run; evaluate it, or choose another folder with --out.")
    if (folder / runs.RECIPE).exists() and not _is_untouched(folder):
        _check_unchanged(folder, recipe, dataset, parent)
        return
    if folder.exists() and not _is_untouched(folder):
        raise RunError(f"{folder} exists and is not a run folder of rotopath; choose another folder with --out.")
    provenance = describe_training(recipe.seed, dataset, parent)
    for leftover in (TENSORBOARD, BASELINE):  # of a training that ended before its first checkpoint
        shutil.rmtree(folder / leftover, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / runs.PROVENANCE, provenance)
    write_text(folder / runs.RECIPE, format_recipe(recipe))


def can_resume(folder: Path) -> bool:
    """Return whether a training in a run folder, or that of its baseline network, has written a checkpoint."""
    return any((folder / name).exists() for name in (RESUME, runs.MINED, Path(BASELINE) / RESUME))


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoint and the weights to keep of a finished run."""
    for name in (RESUME, KEPT):
        (folder / name).unlink(missing_ok=True)


def _is_untouched(folder: Path) -> bool:
    """Return whether a folder exists and contains nothing that a training writes at its first checkpoint or later.

    A new run can use such a folder, because no work of another run is lost.
    """
    if not folder.is_dir():
        return False
    names = (runs.PROVENANCE, runs.RECIPE, RESUME, KEPT, runs.LOG)
    temporary = (f".{name}.{state}" for name in names for state in ("unfinished", "lock"))  # of a killed process
    allowed = {runs.PROVENANCE, runs.RECIPE, TENSORBOARD, *temporary}
    return all(path.name in allowed or (path.name == BASELINE and _is_untouched(path)) for path in folder.iterdir())


def _check_unchanged(folder: Path, recipe: Recipe, dataset: Dataset, parent: runs.Parent | None) -> None:
    """Raise a RunError if the run in `folder` was started with another recipe than `recipe`, or with other data.

    Also raise it if the weights of `parent`, from which the training starts, have changed.
    """
    first_recipe = runs.read_run_recipe(folder)
    if key := find_changed_key(first_recipe, recipe):
        old, new = getattr(first_recipe, key), getattr(recipe, key)
        raise RunError(
            f"The training in {folder} was started with {key.removesuffix('_')} = {old!r}; the recipe now has "
            f"{new!r}. Restore the value, or choose another folder with --out."
        )
    first_fingerprint = _read_fingerprint(folder)
    if not first_fingerprint.startswith(FINGERPRINT_PREFIX):
        raise RunError(
            f"The training in {folder} was started by an older rotopath, which did not record the content of the data; "
            f"finish it with that version, or choose another folder with --out."
        )
    if compute_fingerprint(dataset) != first_fingerprint:
        raise RunError(
            f"{recipe.data} has changed since the training in {folder} was started; restore the data, or choose "
            f"another folder with --out."
        )
    first_parent = read_json(folder / runs.PROVENANCE).get("from")
    if parent and (not isinstance(first_parent, dict) or first_parent.get("weights") != parent.weights_sha256):
        raise RunError(
            f"The weights of {parent.name} have changed since the training in {folder} was started; restore them, or "
            f"choose another folder with --out."
        )


def _read_fingerprint(folder: Path) -> str:
    """Read the fingerprint (hash) of the data with which the training in a run folder was started.

    Raises RunError if the provenance file has no fingerprint.
    """
    data = read_json(folder / runs.PROVENANCE).get("data")
    fingerprint = data.get("fingerprint") if isinstance(data, dict) else None
    if not isinstance(fingerprint, str):
        raise RunError(
            f"{folder / runs.PROVENANCE} is damaged: it has no fingerprint of the data. Restore the file from a copy, "
            f"or choose another folder with --out."
        )
    return fingerprint


def describe_training(seed: int, dataset: Dataset, parent: runs.Parent | None = None) -> dict[str, object]:
    """Return the provenance of a new training: current time, software versions, git commit, seed and data.

    If the training starts from the weights of the model `parent`, the key "from" describes this model.
    """
    return {
        "begun": now(),
        **describe_software(),
        "seed": seed,
        "data": {
            "source": dataset.source,
            "path": str(dataset.root),
            "fingerprint": compute_fingerprint(dataset),
            "images": len(dataset.samples),
        },
        **({"from": parent.describe()} if parent else {}),
    }


def compute_fingerprint(dataset: Dataset) -> str:
    """Return a hash of the content of a dataset.

    The hash depends on the bytes of the image and annotation files, and on the name, case, split, label and the other
    properties of each sample. It does not depend on modification times or on the path of the dataset.
    """
    files = {sample: _list_files(sample) for sample in dataset.samples}
    paths = sorted({path for listed in files.values() for path in listed})
    with ThreadPoolExecutor() as pool:
        hashes = dict(zip(paths, pool.map(_hash_file, paths), strict=True))
    digest = hashlib.sha256(dataset.annotated.encode())
    for sample, listed in files.items():
        columns = (sample.name, sample.case, sample.split, sample.row, sample.label, sample.spacing_um_px)
        digest.update(repr((*columns, sample.stratum, [hashes[path] for path in listed])).encode())
    return FINGERPRINT_PREFIX + digest.hexdigest()[:16]


def _list_files(sample: Sample) -> list[Path]:
    """Return all files of a sample: its image, its annotations, and the CSV tables with the classes of label maps."""
    tables = [table for table in map(class_table_path, sample.annotations) if table.is_file()]
    return [sample.path, *sample.annotations, *tables]


def _hash_file(path: Path) -> str:
    """Return the SHA-256 hash of a file in hexadecimal. Raises UnreadableFileError if the file cannot be read."""
    digest = hashlib.sha256()
    expect_file(path)
    try:
        with path.open("rb") as file:
            while block := file.read(HASH_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise UnreadableFileError(
            path, f"cannot be read ({error.strerror}); make it readable, or copy it again from its source."
        ) from None
    return digest.hexdigest()


# Write the log and checkpoints during the training


class RunRecorder(Callback):
    """Lightning callback: writes the log, the weights to keep and the checkpoints, and can stop the training early.

    The training stops after `patience` epochs without a lower validation loss (`patience` is a key of the recipe). It
    does not stop early if the recipe has `keep = "last"` or a cosine schedule. `folder` is the run folder. `on_row` is
    a function that is called with the last row of the log whenever the log has new values.

    This class replaces Lightning's ModelCheckpoint and EarlyStopping for two reasons. First, files must be written
    atomically. Second, all contents of a checkpoint must belong to the same step: the weights, the log, and the number
    of epochs without a lower validation loss. Otherwise a resumed training could end with other weights than an
    uninterrupted training.
    """

    def __init__(self, folder: Path, recipe: Recipe, on_row: Callable[[Row], None]) -> None:
        super().__init__()
        self._folder, self._recipe, self._on_row = folder, recipe, on_row
        self.best, self.worse_epochs = math.inf, 0
        self.rows: list[Row] = []
        self._pending: list[tuple[int, float, Tensor]] = []  # steps not yet in the log: step, learning rate, loss
        self._rate, self._timer_start = recipe.learning_rate, time.perf_counter()

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint.

        The key is the name that this class had in rotopath 0.1, so that checkpoints of that version can be read.
        """
        return STATE_KEY

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "worse_epochs": self.worse_epochs, "rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.worse_epochs = state_dict["best"], state_dict["worse_epochs"]
        self.rows = list(state_dict["rows"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        trainer.should_stop = self._has_converged()  # it may have converged before an interruption
        self._timer_start = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._rate = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:  # noqa: ARG002
        step = trainer.global_step
        self._pending.append((step, self._rate, outputs["loss"].detach()))
        # Several processes must read the losses at the same step.
        is_slow = trainer.world_size == 1 and time.perf_counter() - self._timer_start > LOG_EVERY_S
        if step % LOG_EVERY_STEPS == 0 or is_slow:
            self._log_losses(trainer)
        # At the end of an epoch, `on_train_epoch_end` writes a checkpoint, after validation.
        ends_epoch = step % self._recipe.step_count == 0
        if step % self._recipe.checkpoint_steps == 0 and not ends_epoch:
            self._write_checkpoint(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_losses(trainer)
        loss = float(trainer.callback_metrics["validation_loss"])
        accuracy = float(trainer.callback_metrics["validation_accuracy"])
        _check_finite(loss, trainer.global_step, "validation loss")
        self.rows[-1] |= {"validation_loss": loss, "validation_accuracy": accuracy}
        self._on_row(dict(self.rows[-1]))
        is_better = loss < self.best
        self.best, self.worse_epochs = (loss, 0) if is_better else (self.best, self.worse_epochs + 1)
        if (is_better or self._recipe.keep == "last") and trainer.is_global_zero:
            network = pl_module.network
            assert isinstance(network, torch.nn.Module)
            write_bytes(self._folder / KEPT, pack_weights(network, seal=True))
        self._timer_start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        trainer.should_stop = self._has_converged()
        self._write_checkpoint(trainer)

    def _has_converged(self) -> bool:
        return self._recipe.can_stop_early and self.worse_epochs >= self._recipe.patience

    def _log_losses(self, trainer: Trainer) -> None:
        """Append one row to the log for each step in `_pending`, and empty `_pending`.

        This reads the losses from the device. With several processes, the logged loss is the mean over processes.
        """
        if not self._pending:
            return
        own_losses = torch.stack([loss for _, _, loss in self._pending])
        losses = trainer.strategy.reduce(own_losses, reduce_op="mean").tolist()
        images_per_second = self._recipe.batch_size * len(losses) / (time.perf_counter() - self._timer_start)
        for (step, rate, _), loss in zip(self._pending, losses, strict=True):
            _check_finite(loss, step, "loss")
            self.rows.append(
                {
                    "step": step,
                    "epoch": (step - 1) // self._recipe.step_count,
                    "loss": loss,
                    "learning_rate": rate,
                    "images_per_second": round(images_per_second, 1),
                }
            )
        for logger in trainer.loggers:
            logger.log_metrics({"loss": losses[-1], "learning_rate": self._rate}, self._pending[-1][0])
        self._on_row(dict(self.rows[-1]))
        self._pending.clear()
        self._timer_start = time.perf_counter()

    def _write_checkpoint(self, trainer: Trainer) -> None:
        """Write the checkpoint `resume.ckpt`, and the file `log.csv` with all rows up to this step."""
        self._log_losses(trainer)
        checkpoint = self._folder / RESUME
        with atomic_file(checkpoint) if trainer.is_global_zero else nullcontext(checkpoint) as unfinished:
            trainer.save_checkpoint(unfinished)  # all processes must call this; only the first process writes
        if trainer.is_global_zero:
            self.write_log()

    def write_log(self) -> None:
        """Write the file `log.csv`. A process may be killed after the last checkpoint, before it has done this."""
        text = io.StringIO()
        writer = csv.DictWriter(text, LOG_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_text(self._folder / runs.LOG, text.getvalue())


def find_checkpoint(folder: Path, network: torch.nn.Module) -> Path | None:
    """Return the path of the checkpoint in a run folder, or None if there is none.

    `network` is the network that will get its weights. Raises RunError if a byte of the checkpoint has changed, if it
    does not contain weights of this network, or if the weights of the best epoch are damaged or missing. torch writes a
    checksum (CRC) for each part of a checkpoint, but does not compare them when it reads one.
    """
    path = folder / RESUME
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as parts:
            if part := parts.testzip():
                raise ValueError(f"the checksum of its part {part} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        weights = {name.removeprefix("network."): weight for name, weight in state["state_dict"].items()}
        recorded = state["callbacks"][STATE_KEY]
        if missing := {"best", "worse_epochs", "rows"} - recorded.keys():
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
        if fault := find_weight_fault(weights, network.state_dict()):
            raise ValueError(fault)
        has_kept = math.isfinite(recorded["best"])
    except Exception as error:  # damaged bytes raise errors of any type
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise RunError(
            f"{path} is damaged ({reason:.200}). Restore the file from a copy, or delete it to train again from the "
            f"first step."
        ) from None
    if has_kept:
        load_weights(deepcopy(network), folder / KEPT)  # only a check: `loop.fit` loads them at the end
    return path


def _check_finite(loss: float, step: int, name: str) -> None:
    """Raise a RunError if a loss is NaN or infinite. `name` is "loss" or "validation loss"."""
    if not math.isfinite(loss):
        raise RunError(
            f"The {name} became {loss} at step {step}; train with a lower learning_rate in another folder, or run the "
            f"same command again to resume from the last checkpoint."
        )


# Hard examples: the worst mistakes of a baseline network on the training images


def mine_hard_examples(
    task: Task, network: DenseNetwork, samples: Sequence[Sample], device: torch.device, max_examples: int, path: Path
) -> None:
    """Write the worst mistakes of a baseline network on the training samples `samples` to the CSV file `path`.

    `network` is the baseline network. At most `max_examples` mistakes are written, the worst first.
    """
    evidence = gather_evidence(task, network, samples, device)
    write_hard_examples(path, task.find_hard_examples(evidence, max_examples))


def write_hard_examples(path: Path, examples: Sequence[HardExample]) -> None:
    """Write hard examples to a CSV file, in the given order."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(MINED_COLUMNS)
    writer.writerows((example.image, example.row, example.column, f"{example.score:.6f}") for example in examples)
    write_text(path, text.getvalue())


def read_hard_examples(path: Path) -> list[HardExample]:
    """Read hard examples from a CSV file, in the order in which they were written."""
    return [
        HardExample(row["image"], int(row["row"]), int(row["column"]), float(row["score"]))
        for _, row in read_table(path, MINED_COLUMNS)
    ]


def index_hard_examples(examples: Sequence[HardExample], task: Task, samples: Sequence[Sample]) -> Ints:
    """Convert hard examples to the array `mined` for the sampler of the task (`Task.make_sampler`).

    The array (n, 3) has the columns image index, row and column; row and column are in pixels. For tasks that classify
    whole images, the array (n,) contains only the image index. The image index i stands for `samples[i]`. Raises
    DataError if the image of a hard example is not among the samples.
    """
    index_of = {sample.name: index for index, sample in enumerate(samples)}
    if unknown := [example.image for example in examples if example.image not in index_of]:
        raise DataError(
            f"The image {unknown[0]!r} of a hard example in {runs.MINED} is not among the training images; restore the "
            f"data, or choose another folder with --out."
        )
    positions = [(index_of[example.image], example.row, example.column) for example in examples]
    return task.examples_for_sampler(np.array(positions, np.int64).reshape(-1, 3))
