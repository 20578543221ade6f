"""A model scored on annotated images, upright and under rotation.

In: a model, samples of one split, and how often each is to be rotated. Out: evidence, from which a task's operating
point and scores follow; and how far answers change when inputs are rotated, at angles that are all resampled alike and
at the paper's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotopath import runs
from rotopath.data import Batches, DataError, Dataset, Sample, open_data, problems
from rotopath.data.batches import Cache, SampleReader, open_pixels
from rotopath.data.sampling import MiddleWindows
from rotopath.data.splits import SPLITS
from rotopath.group import covering_size
from rotopath.inference import predict_batch, predict_patches, predict_rotated, predict_rotations
from rotopath.inference.dense import SPLINE_REACH
from rotopath.metrics.equivariance import list_angles, measure_robustness
from rotopath.model_file import read_json
from rotopath.models import DenseNetwork
from rotopath.nn import center_crop
from rotopath.runs import Run
from rotopath.tasks import Frame, Task
from rotopath.tasks.task import Evidence
from rotopath.writing import atomic_file, write_json

Split = Literal["train", "valid", "test"]
OnProgress = Callable[[int, int], None]  # given how many samples are done, and how many there are
TOGETHER_PX = 2**18  # pixels of small samples go through a network at once; rotated, they take several times as many
PATCHES_AT_ONCE = 256
WINDOWS = 512  # that are rotated, at most
SHOWN = 48  # of them that figures can show
SAMPLING_SEED = 1_000_003
SAMPLED_AT_ONCE = 32
FIELD_PX = 200  # the middle of each field, where maps are compared
FOREGROUND = 0.5  # above it, a pixel of a field is called an object


def gather_evidence(
    task: Task,
    network: DenseNetwork,
    samples: Sequence[Sample],
    device: torch.device,
    rotations: int = 1,
    on_progress: OnProgress = lambda _done, _all: None,
) -> list[Evidence]:
    """What the network says about each sample, beside its annotation."""
    network = network.to(device).eval()
    if task.answers == "window":
        return _gather_patches(task, network, samples, device, rotations, on_progress)
    evidence: list[Evidence] = []
    for images in _read_alike(samples, task.reader.image_only):
        for prediction in predict_batch(network, images, device, rotations, activation=task.probabilities):
            evidence.append(task.examine(prediction, samples[len(evidence)]))
        on_progress(len(evidence), len(samples))
    return evidence


def _read_alike(samples: Sequence[Sample], reader: SampleReader) -> Iterator[NDArray[np.uint8]]:
    """All samples in their order, put together while they are of one size and small."""
    together: list[NDArray[np.uint8]] = []
    for image in map(reader.planes, samples):
        if together and (image.shape != together[0].shape or (len(together) + 1) * image[..., 0].size > TOGETHER_PX):
            yield np.stack(together)
            together = []
        together.append(image)
    if together:
        yield np.stack(together)


def _gather_patches(
    task: Task,
    network: DenseNetwork,
    samples: Sequence[Sample],
    device: torch.device,
    rotations: int,
    on_progress: OnProgress,
) -> list[Evidence]:
    """Patches are many and small, so they go through the network in batches."""
    window_px = network.geometry.surrounded_px
    cut_px = covering_size(window_px) if 4 % rotations else window_px  # corners of rotated windows lie further out
    batches, steps = make_middle_batches(task, samples, cut_px, device=device)
    evidence: list[Evidence] = []
    for images, _ in batches.load(steps, device):
        probabilities = predict_patches(network, images, rotations, task.probabilities)
        for sample, answer in zip(samples[len(evidence) :], probabilities, strict=False):
            evidence.append(task.examine(answer, sample))
        on_progress(len(evidence), len(samples))
    return evidence


def make_middle_batches(
    task: Task,
    samples: Sequence[Sample],
    window_px: int,
    batch: int = PATCHES_AT_ONCE,
    cache: Cache = "auto",
    device: torch.device | None = None,
) -> tuple[Batches, range]:
    """The middle of every patch, in order, and the steps that bring each of them once."""
    pixels = open_pixels(samples, task.reader, cache, device or torch.device("cpu"))
    sampler = MiddleWindows(task.labels(samples), pixels.sizes_px, window_px, batch)
    return Batches(pixels, sampler, window_px), range(len(sampler))


# Rotated inputs


@dataclass(frozen=True)
class RotatedAnswers:
    """Answers at every angle: probabilities (angles, inputs), or of fields (angles, fields, height, width).

    Decisions have the same shape. Fields have maps by name that a report shows, at fair angles.
    """

    fair_degrees: list[float]
    fair: NDArray[np.float32]
    plain_degrees: list[float]
    plain: NDArray[np.float32]
    labels: NDArray[np.int64]  # (inputs,); none for fields
    images: NDArray[np.uint8]  # (k, height, width, 3) of the first inputs
    fair_decisions: NDArray[np.generic]
    plain_decisions: NDArray[np.generic]
    maps: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # none for windows


def answer_rotated_inputs(
    run: Run, samples: Sequence[Sample], device: torch.device, most: int = WINDOWS
) -> RotatedAnswers:
    """What the model says at all angles about single windows, `most` at most, or about the middle of fields."""
    run.network.to(device).eval()
    if run.task.rotated == "fields":
        return _turn_fields(run, samples, device)
    return _turn_windows(run, samples, device, most)


def _turn_fields(run: Run, samples: Sequence[Sample], device: torch.device) -> RotatedAnswers:
    fair, plain = list_angles(), list_angles(fair=False)
    turned = [_turn_field(run.task, run.network, sample, device, [*fair, *plain]) for sample in samples]
    images, fields = zip(*turned, strict=True)
    maps = {name: np.stack([each[name] for each in fields], axis=1) for name in fields[0]}  # (angles, fields, h, w)
    answers, split = maps["objects"], len(fair)
    decided = answers >= FOREGROUND
    return RotatedAnswers(
        *(fair, answers[:split], plain, answers[split:], np.empty(0, np.int64), np.stack(images)),
        *(decided[:split], decided[split:]),
        {name: values[:split] for name, values in maps.items()},
    )


def _turn_windows(run: Run, samples: Sequence[Sample], device: torch.device, most: int) -> RotatedAnswers:
    fair, plain = list_angles(), list_angles(fair=False)
    task, side = run.task, run.network.geometry.smallest_px
    images, labels = _take_windows(run, samples, device, most)
    answers = predict_rotated(run.network, images, [*fair, *plain], task.probabilities)  # (angles, inputs, K)
    decided, split = task.decide(answers, run.point), len(fair)
    # Of several outputs the one that is the likeliest over all angles is followed.
    followed = answers.mean(axis=0).argmax(axis=-1)
    single = np.take_along_axis(answers, followed[None, :, None], axis=2)[..., 0]
    middle = center_crop(images[:SHOWN], side, side)
    shown = (middle * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return RotatedAnswers(
        *(fair, single[:split], plain, single[split:], labels.cpu().numpy(), shown), decided[:split], decided[split:]
    )


def pack(turned: RotatedAnswers) -> dict[str, NDArray[np.generic]]:
    """What figures need: all answers about windows; of fields the mean and the deviation over fair angles."""
    if not turned.maps:
        kept = ("fair_degrees", "fair", "plain_degrees", "plain", "labels", "images")
        return {name: np.asarray(getattr(turned, name)) for name in kept}
    packed: dict[str, NDArray[np.generic]] = {"images": turned.images}
    for name, values in turned.maps.items():
        packed[f"{name}_mean"] = values.mean(axis=0).astype(np.float16)
        packed[f"{name}_deviation"] = values.std(axis=0).astype(np.float16)
    return packed


def summarise(turned: RotatedAnswers) -> dict[str, object]:
    """How far answers scatter and how many decisions change, at fair and at plain angles."""
    return {
        "inputs": "pixels of fields" if turned.maps else "windows",
        "count": int(np.prod(turned.fair.shape[1:])),
        "fair": asdict(measure_robustness(turned.fair, turned.fair_decisions)),
        "plain": asdict(measure_robustness(turned.plain, turned.plain_decisions)),
    }


def _take_windows(run: Run, samples: Sequence[Sample], device: torch.device, most: int) -> tuple[Tensor, Tensor]:
    """Windows with their surroundings, from which the corners of rotated ones come; patches are mirrored for them."""
    task, geometry = run.task, run.network.geometry
    cut_px = covering_size(geometry.surrounded_px) + 2 * SPLINE_REACH
    if task.answers == "window":
        chosen = samples[:most]
        batches, steps = make_middle_batches(task, chosen, cut_px, device=device)
    else:
        frame = Frame(cut_px, geometry.stride_px, geometry.stride_px)
        batches = make_sampled_batches(task, samples, frame, SAMPLED_AT_ONCE, SAMPLING_SEED, device=device)
        steps = range(-(-most // SAMPLED_AT_ONCE))
    images, labels = (torch.cat(parts) for parts in zip(*batches.load(steps, device), strict=True))
    return images[:most], labels[:most]


def make_sampled_batches(
    task: Task,
    samples: Sequence[Sample],
    frame: Frame,
    batch: int,
    seed: int,
    cache: Cache = "auto",
    device: torch.device | None = None,
    **options: Any,
) -> Batches:
    """Balanced batches of random windows, as a task is trained on; options are `mined` examples and `augmentation`."""
    if batch < 1 or seed < 0:
        raise DataError(f"A batch has 1 or more windows, and a seed is 0 or more; got {batch} and {seed}.")
    mined = options.pop("mined", None)
    if mined is not None and len(mined) and not 0 <= mined.reshape(len(mined), -1)[:, 0].max() < len(samples):
        raise DataError(f"The mined examples name images that are not among the {len(samples)} of the training set.")
    reader = task.reader
    pixels = open_pixels(samples, reader, cache, device or torch.device("cpu"))
    sampler = task.make_sampler(samples, pixels.sizes_px, frame, batch, seed, mined)
    target_px = frame.target_px if reader.maps else None
    return Batches(pixels, sampler, frame.window_px, target_px, seed=seed, **options)


def _turn_field(
    task: Task, network: DenseNetwork, sample: Sample, device: torch.device, degrees: Sequence[float]
) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.float32]]]:
    """The middle of a field, and the task's maps (angles, height, width) of it by name, each rotated back."""
    image = task.reader.image_only.planes(sample)
    geometry = network.geometry
    # With more around the middle than is compared, rotated corners are real pixels where the field is large enough.
    wide = covering_size(FIELD_PX + geometry.smallest_px)
    top, left = (max(0, (side - wide) // 2) for side in image.shape[:2])
    part = image[top : top + wide, left : left + wide]
    rotated = predict_rotations(network, part[None], device, degrees, activation=task.probabilities)
    maps = np.concatenate(list(rotated))  # (angles, K, height, width)
    rows, columns = (slice(max(0, (side - FIELD_PX) // 2), (side + FIELD_PX) // 2) for side in part.shape[:2])
    maps = maps[..., rows, columns]
    shown = [task.report_maps(each) for each in maps]
    return part[rows, columns], {name: np.stack([each[name] for each in shown]) for name in shown[0]}


# Scores


def evaluation_file(
    folder: Path, split: str, rotations: int = 1, rule: str | None = None, data: Path | None = None
) -> Path:
    """Where the scores of a run are written: those by another rule or on other data do not replace its own."""
    turned = f"-tta{rotations}" if rotations > 1 else ""
    by = f"-{rule}" if rule else ""
    on = f"-on-{data.resolve().name}" if data else ""
    return folder / f"evaluation-{split}{turned}{by}{on}.json"


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on one split, and the file they are in."""

    split: str
    scores: Mapping[str, Any]
    path: Path

    def __repr__(self) -> str:
        single = {name: value for name, value in self.scores.items() if isinstance(value, float)}
        numbers = ", ".join(f"{name} {value:.3f}" for name, value in single.items())
        return f"Evaluation({self.split}: {numbers})"


def evaluate(
    model: Run | Path | str,
    data: Path | str | None = None,
    split: Split = "test",
    rotations: int = 1,
    robustness: bool = False,
    out: Path | str | None = None,
    rule: str | None = None,
    spacing_um_px: float | None = None,
    on_progress: Callable[[str, int, int], None] = lambda _split, _done, _all: None,
) -> Evaluation:
    """Score a finished run on a split of its data, or of other data, at its operating point.

    A pretrained model is named instead of a folder, and needs data; its scores go to `runs/`. With `robustness` the
    answers to rotated inputs are measured too, and kept beside the file of scores. `spacing_um_px` is the side of a
    pixel, for images that do not say it; of a run's own data, its recipe knows it.
    """
    run = model if isinstance(model, Run) else runs.load(model)
    if split not in SPLITS:
        raise DataError(f"There is no split {split!r}; choose from {', '.join(SPLITS)}.")
    task = run.task
    if data is None and run.is_pretrained:
        raise DataError(
            f"{run.name} comes without the data that it was trained on; name some for {task.name} with --data."
        )
    own = data is None or (not run.is_pretrained and Path(data).resolve() == Path(run.recipe.data).resolve())
    if own and spacing_um_px is None:
        spacing_um_px = run.recipe.data_spacing_um_px
    dataset = open_task_data(task, data or run.recipe.data, spacing_um_px)
    cpu_only = not run.is_pretrained and run.recipe.accelerator == "cpu"
    device = torch.device("cuda" if torch.cuda.is_available() and not cpu_only else "cpu")
    look = partial(gather_evidence, task, run.network, device=device, rotations=rotations)
    evidence = look(samples=dataset.split(split), on_progress=partial(on_progress, split))
    point = run.point
    if rotations > 1 or rule is not None:  # other probabilities, or another score, have another operating point
        validation = look(samples=dataset.split("valid"), on_progress=partial(on_progress, "valid"))
        point = task.choose_point(validation, rule)
    scores = task.score(evidence, point, rule) | {"rotations": rotations, "data": str(dataset.root)}
    written = Path(out) if out else evaluation_file(run.out, split, rotations, rule, None if own else Path(data or ""))
    written.parent.mkdir(parents=True, exist_ok=True)
    if robustness:
        turned = answer_rotated_inputs(run, dataset.split(split), device)
        scores["rotation"] = summarise(turned)
        with atomic_file(written.with_suffix(".npz")) as unfinished, unfinished.open("wb") as file:
            np.savez_compressed(file, **pack(turned))  # type: ignore[arg-type]
    elif out is None and written.exists():
        # What was measured before about rotated inputs still holds: the file is this run's own.
        before = read_json(written).get(split, {})
        if "rotation" in before and before.get("data") == scores["data"]:
            scores["rotation"] = before["rotation"]
    write_json(written, {split: scores})
    return Evaluation(split, scores, written)


def open_task_data(task: Task, data: Path | str, spacing_um_px: float | None = None) -> Dataset:
    """Data with the annotations that a task needs, refused where its labels are not the task's."""
    dataset = open_data(data, task.annotated, spacing_um_px)
    if found := problems(task.check_data(dataset)):
        raise DataError(f"{data} does not fit the task {task.name}: {found[0]}")
    return dataset
