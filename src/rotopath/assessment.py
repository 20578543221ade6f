"""A network assessed on annotated pictures.

In: a network, pictures of one split, and how often each is to be turned. Out: evidence, from which a task's operating
point and scores follow.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from rotopath import runs
from rotopath.data import DataError, Picture, Task, middle_batches, open_data
from rotopath.data.batches import reader_of
from rotopath.data.pixels import Reader
from rotopath.data.splits import SPLITS
from rotopath.evaluation.detection import Rule
from rotopath.evaluation.overlap import HitRule
from rotopath.group import covering_size
from rotopath.inference import predict_alike, predict_patches, surrounded_px
from rotopath.models import Network
from rotopath.rotation import pack, summarise, turn_inputs
from rotopath.tasks import TASKS
from rotopath.writing import replaced

Evidence = Any  # of one picture; each task has its own kind
Seen = Callable[[int, int], None]  # told how many pictures are done, and how many there are
TOGETHER_PX = 2**18  # pixels of small pictures go through a network at once; turned, they take several times as many
RULES: Mapping[Task, tuple[str, ...]] = {"mitosis": get_args(Rule), "nuclei": get_args(HitRule)}


def gather(
    task: Task,
    network: Network,
    pictures: Sequence[Picture],
    device: torch.device,
    rotations: int = 1,
    seen: Seen = lambda _done, _all: None,
) -> list[Evidence]:
    """What the network says about each picture, beside its annotations; `seen` is told how many are done."""
    network = network.to(device).eval()
    if task == "tumor":
        return _gather_patches(network, pictures, device, rotations, seen)
    reader = replace(reader_of(task), with_nuclei=False)
    evidence: list[Evidence] = []
    for images in _read_alike(pictures, reader):
        for prediction in predict_alike(network, images, device, rotations):
            evidence.append(TASKS[task].examine(prediction, pictures[len(evidence)], reader.spacing_um_px))
        seen(len(evidence), len(pictures))
    return evidence


def _read_alike(pictures: Sequence[Picture], reader: Reader) -> Iterator[NDArray[np.uint8]]:
    """All pictures in their order, put together while they are of one size and small."""
    together: list[NDArray[np.uint8]] = []
    for image in map(reader.planes, pictures):
        if together and (image.shape != together[0].shape or (len(together) + 1) * image[..., 0].size > TOGETHER_PX):
            yield np.stack(together)
            together = []
        together.append(image)
    if together:
        yield np.stack(together)


def _gather_patches(
    network: Network,
    pictures: Sequence[Picture],
    device: torch.device,
    rotations: int,
    seen: Seen,
) -> list[Evidence]:
    """Patches are many and small, so they go through the network in batches."""
    window_px = surrounded_px(network)
    cut_px = covering_size(window_px) if 4 % rotations else window_px  # corners of turned windows lie further out
    batches, steps = middle_batches(pictures, cut_px, device=device)
    spacing_um_px = reader_of("tumor").spacing_um_px
    evidence: list[Evidence] = []
    for images, _ in batches.load(steps, device):
        probabilities = predict_patches(network, images, rotations)
        for picture, probability in zip(pictures[len(evidence) :], probabilities.tolist(), strict=False):
            evidence.append(TASKS["tumor"].examine(probability, picture, spacing_um_px))
        seen(len(evidence), len(pictures))
    return evidence


def choose_point(task: Task, evidence: Sequence[Evidence], **options: str) -> dict[str, float]:
    """The operating point that maximises the task's score on a validation set."""
    point: dict[str, float] = TASKS[task].choose_point(evidence, **options)
    return point


def score(task: Task, evidence: Sequence[Evidence], point: Mapping[str, float], **options: str) -> dict[str, object]:
    """The task's scores at an operating point."""
    scores: dict[str, object] = TASKS[task].score(evidence, point, **options)
    return scores


def evaluation_file(
    folder: Path, split: str, rotations: int = 1, rule: str | None = None, data: Path | None = None
) -> Path:
    """Where the scores of a run are written: those by another rule or on other data do not replace its own."""
    turned = f"-tta{rotations}" if rotations > 1 else ""
    by = f"-{rule}" if rule else ""
    on = f"-on-{data.resolve().name}" if data else ""
    return folder / f"evaluation-{split}{turned}{by}{on}.json"


def evaluate(
    folder: Path,
    data: Path | None = None,
    split: str = "test",
    rotations: int = 1,
    robustness: bool = False,
    out: Path | None = None,
    rule: str | None = None,
    seen: Callable[[str, int, int], None] = lambda _what, _done, _all: None,
) -> Path:
    """Score a finished run on a split of its data, or of other data, at its operating point; gives the file written.

    A pretrained model is named instead of a folder, and needs data; its scores go to `runs/`. With `robustness` the
    answers to turned inputs are measured too, and kept beside that file.
    """
    run = runs.load(folder)
    if split not in SPLITS:
        raise DataError(f"There is no split {split!r}; choose from {', '.join(SPLITS)}.")
    task = run.recipe.task
    if data is None and run.is_pretrained:
        raise DataError(f"{run.name} comes without the data that it was trained on; name some for {task} with --data.")
    collection = open_data(data or Path(run.recipe.data), task)
    device = torch.device("cuda" if torch.cuda.is_available() and run.recipe.accelerator != "cpu" else "cpu")
    evidence = gather(task, run.network, collection.split(split), device, rotations, partial(seen, split))
    point = run.point
    if rotations > 1 or rule is not None:  # other probabilities, or another score, have another operating point
        validation = gather(task, run.network, collection.split("valid"), device, rotations, partial(seen, "valid"))
        point = choose_point(task, validation, **_options(task, rule))
    scores = score(task, evidence, point, **_options(task, rule)) | {
        "rotations": rotations,
        "data": str(collection.root),
    }
    own = data is None or (not run.is_pretrained and data.resolve() == Path(run.recipe.data).resolve())
    written = out or evaluation_file(run.out, split, rotations, rule, None if own else data)
    if run.is_pretrained:
        written.parent.mkdir(parents=True, exist_ok=True)
    if robustness:
        turned = turn_inputs(task, run.network, collection.split(split), device)
        scores["rotation"] = summarise(task, turned, run.point)
        with replaced(written.with_suffix(".npz")) as unfinished, unfinished.open("wb") as file:
            np.savez_compressed(file, **pack(turned))  # type: ignore[arg-type]
    elif written.exists():  # what was measured before about turned inputs still holds
        before = json.loads(written.read_text(encoding="utf-8"))
        scores |= {"rotation": before[split]["rotation"]} if "rotation" in before.get(split, {}) else {}
    runs.write_json(written, {split: scores})
    return written


def _options(task: Task, rule: str | None) -> dict[str, str]:
    """The rule by which hits are counted, if it is one of the task's."""
    if rule is None:
        return {}
    known = RULES.get(task, ())
    if rule not in known:
        raise DataError(f"The task {task} has no rule {rule!r}; choose from {', '.join(known) or 'none'}.")
    return {"rule": rule}
