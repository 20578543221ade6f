"""Score a model on annotated images, and measure how its predictions change when the images are rotated.

`evaluate` scores a finished run on a split of a dataset, and writes the scores to a JSON file. `gather_evidence`
collects the *evidence*: the prediction and the ground truth of each sample. From the evidence, a task computes its
scores and chooses its operating point (decision thresholds).

`predict_rotated_inputs` predicts the same inputs at many angles, to measure robustness to rotation. There are two sets
of angles. The *plain* angles are those of the paper (Lafarge et al., 2020): 0°, 22.5°, 45°, … Rotation blurs an image
by interpolation, except at multiples of 90°, and the blur alone changes predictions. The *fair* angles are 11.25°,
33.75°, … At these angles, all images are blurred about equally.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotopath import runs
from rotopath.data import NO_AUGMENTATION, Augmentation, Batches, DataError, Dataset, Sample, open_data, problems
from rotopath.data.batches import Cache, SampleReader, open_pixels
from rotopath.data.sampling import CenterSampler, Ints, SamplerName, SamplerSettings
from rotopath.data.splits import SPLITS, Split, find_split
from rotopath.group import covering_size
from rotopath.inference import predict_batch, predict_patches, predict_rotated, predict_rotations
from rotopath.inference.dense import MAX_ROTATIONS, check_rotations
from rotopath.inference.tiling import SPLINE_REACH
from rotopath.metrics.equivariance import measure_robustness, robustness_angles
from rotopath.model_file import RunError, read_json
from rotopath.models import DenseNetwork
from rotopath.nn import center_crop
from rotopath.runs import Run
from rotopath.tasks import Task, TrainingWindow
from rotopath.tasks.task import Evidence
from rotopath.writing import atomic_file, hold_lock, write_json

OnProgress = Callable[[int, int], None]  # receives the number of finished samples, and the number of all samples
CPU = torch.device("cpu")
STACK_PX = 2**18  # images of the same size are predicted together, up to this total number of pixels
PATCH_BATCH = 256  # patches predicted together
ROTATED_WINDOWS = 512  # robustness is measured on at most this number of windows, by default
ROTATED_BATCH = 32  # number of these windows that are sampled together
ROTATED_SEED = 1_000_003  # seed for sampling these windows
SHOWN_WINDOWS = 48  # number of windows whose pixels are saved for figures
FIELD_PX = 200  # side of the central square of a field (annotated image); only this square is compared over angles
FOREGROUND = 0.5  # in maps of rotated fields, pixels with at least this probability of an object are foreground


# Scores


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on one split of a dataset, and the path of the JSON file with these scores."""

    split: str  # train, valid or test
    # Scores by name, as returned by `Task.score`. Additional names: "rotations" (number of rotations over which
    # predictions were averaged), "data" (path of the dataset) and, if it was measured, "rotation" (robustness).
    scores: Mapping[str, Any]
    path: Path

    def __repr__(self) -> str:
        single = {name: value for name, value in self.scores.items() if isinstance(value, float)}
        numbers = ", ".join(f"{name} {value:.3f}" for name, value in single.items())
        return f"Evaluation({self.split}: {numbers})"


def evaluate(
    model: Run | Path | str,
    data: Path | str | None = None,
    *,
    split: Split = "test",
    rotations: int = 1,
    robustness: bool = False,
    out: Path | str | None = None,
    rule: str | None = None,
    spacing_um_px: float | None = None,
    on_progress: Callable[[str, int, int], None] = lambda _split, _done, _all: None,
) -> Evaluation:
    """Score a finished run or a pretrained model on a split of a dataset, and write the scores to a JSON file.

    - `model`: a run, the path of a run folder, or the name of a pretrained model. A pretrained model requires `data`.
    - `data`: path of the dataset; default: the dataset that the run was trained on.
    - `rotations`: number of rotations of each image, over which predictions are averaged (test-time augmentation).
    - `robustness`: also measure how predictions change when inputs are rotated, and save arrays for figures in an
      `.npz` file beside the scores.
    - `out`: file for the scores; default: a file such as `evaluation-test.json` (see `evaluation_file`) in the run
      folder or, if the model is pretrained, in the folder `runs/NAME`.
    - `rule`: rule for counting true positives, one of `task.rules`; default: the first of them.
    - `spacing_um_px`: pixel spacing in µm/px of images that do not specify it. For the dataset that the run was trained
      on, the default is `data_spacing_um_px` of the recipe.
    - `on_progress`: function that receives the split, the number of finished samples and the number of all samples.

    Returns the scores and the path of the file. With several rotations, or if `rule` is given, the operating point is
    chosen again on the validation set of the dataset. Raises DataError if the split does not exist or is empty, if the
    data does not fit the task, or if the task does not have the rule.
    """
    run = model if isinstance(model, Run) else runs.load(model)
    if (known_split := find_split(split)) is None:
        raise DataError(f"There is no split {split!r}; choose from {', '.join(SPLITS)}.")
    split = known_split
    check_rotations(rotations)
    task = run.task
    if data is None and run.is_pretrained:
        raise DataError(
            f"The pretrained model {run.name} does not include its training data; give a dataset for the task "
            f"{task.name} with --data."
        )
    is_own = data is None or (not run.is_pretrained and Path(data).resolve() == Path(run.recipe.data).resolve())
    if is_own and spacing_um_px is None:
        spacing_um_px = run.recipe.data_spacing_um_px
    dataset = open_task_data(task, data or run.recipe.data, spacing_um_px)
    cpu_only = not run.is_pretrained and run.recipe.accelerator == "cpu"
    device = torch.device("cuda" if torch.cuda.is_available() and not cpu_only else "cpu")
    gather = partial(gather_evidence, task, run.network, device=device, rotations=rotations)

    other_data = None if is_own else Path(data or "")
    path = Path(out) if out else evaluation_file(run.output_folder, split, rotations, rule, other_data)
    keeps_rotation = not robustness and out is None
    if keeps_rotation and path.exists():
        read_scores(path, split)  # a damaged file is reported at once

    evidence = gather(samples=dataset.split(split), on_progress=partial(on_progress, split))
    point = run.point
    if rotations > 1 or rule is not None:  # the best thresholds may differ from those of the training
        validation = gather(samples=dataset.split("valid"), on_progress=partial(on_progress, "valid"))
        point = task.choose_operating_point(validation, rule)
    scores = task.score(evidence, point, rule) | {"rotations": rotations, "data": str(dataset.root)}

    rotated = predict_rotated_inputs(run, dataset.split(split), device) if robustness else None
    with hold_lock(path, None):  # another process may write scores of the same run
        if rotated is not None:
            scores["rotation"] = summarize_rotation(rotated)
            with atomic_file(path.with_suffix(".npz")) as unfinished, unfinished.open("wb") as file:
                np.savez_compressed(file, **pack_for_figures(rotated))  # type: ignore[arg-type]
        elif keeps_rotation and path.exists():
            before = read_scores(path, split)
            if "rotation" in before and before.get("data") == scores["data"]:
                scores["rotation"] = before["rotation"]  # measured by an earlier evaluation on the same data
        write_json(path, {split: scores})
    return Evaluation(split, scores, path)


def evaluation_file(
    folder: Path, split: str, rotations: int = 1, rule: str | None = None, data: Path | None = None
) -> Path:
    """Return the path of the score file in `folder`. The file name contains the split.

    The file name also contains each of the following values that is not the default: `rotations` (default: 1, no
    test-time augmentation), `rule` (default: None, the first rule of the task), and the last part of the path `data`
    of the dataset (default: None, the dataset that the run was trained on).

    >>> from rotopath.evaluation import evaluation_file
    >>> evaluation_file(Path("runs/a"), "test", rotations=4).as_posix()
    'runs/a/evaluation-test-tta4.json'
    """
    rotated = f"-tta{rotations}" if rotations > 1 else ""
    by_rule = f"-{rule}" if rule else ""
    on_data = f"-on-{data.resolve().name}" if data else ""
    return folder / f"evaluation-{split}{rotated}{by_rule}{on_data}.json"


def read_scores(path: Path, split: str) -> dict[str, Any]:
    """Return the scores of a split in a file that `evaluate` has written.

    Raises RunError if the file is damaged, or if the values that rotopath reads have other types or ranges.
    """
    scores = read_json(path).get(split)
    if not isinstance(scores, dict):
        raise _damaged_scores(path, f"{split!r} must be a JSON object; got {scores!r:.40}")
    if type(rotations := scores.get("rotations")) is not int or not 1 <= rotations <= MAX_ROTATIONS:
        raise _damaged_scores(path, f"'rotations' must be a whole number from 1 to {MAX_ROTATIONS}; got {rotations!r}")
    if "rotation" in scores:
        measured = scores["rotation"].get("fair") if isinstance(scores["rotation"], dict) else None
        for name in ("deviation", "changed"):
            value = measured.get(name) if isinstance(measured, dict) else None
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise _damaged_scores(path, f"{name!r} of 'rotation' must be a number from 0 to 1; got {value!r:.40}")
        try:
            terms = np.array(list(scores["rotation"].get("cases", {}).values()), np.float64).reshape(-1, 2)
        except (TypeError, ValueError, AttributeError, OverflowError):
            terms = np.full((1, 2), np.nan)
        if not (np.isfinite(terms).all() and (terms[:, 0] >= 0).all() and (terms[:, 1] > 0).all()):
            raise _damaged_scores(path, "'cases' of 'rotation' must have two numbers for each case")
    return scores


def _damaged_scores(path: Path, fault: str) -> RunError:
    return RunError(f"{path} is damaged: {fault}. Delete the file, and evaluate the run again.")


def open_task_data(task: Task, data: Path | str, spacing_um_px: float | None = None) -> Dataset:
    """Open the dataset at the path `data`, check that its annotations fit a task, and return the dataset.

    `spacing_um_px` is the pixel spacing in µm/px of images that do not specify it. Raises DataError if the dataset has
    another type of annotation than the task needs, or labels that are not classes of the task.
    """
    dataset = open_data(data, task.annotated, spacing_um_px)
    if errors := problems(task.check_data(dataset)):
        raise DataError(f"{data} does not fit the task {task.name}: {errors[0]}")
    return dataset


# Evidence: predictions and ground truth


def gather_evidence(
    task: Task,
    network: DenseNetwork,
    samples: Sequence[Sample],
    device: torch.device,
    rotations: int = 1,
    on_progress: OnProgress = lambda _done, _all: None,
) -> list[Evidence]:
    """Predict all samples, and return the evidence of each sample: its prediction and its ground truth.

    Predictions are averaged over `rotations` rotations of each image. The network is moved to `device`. The function
    `on_progress` receives the number of finished samples and the number of all samples.
    """
    network = network.to(device).eval()
    if task.prediction_type == "window":
        return _gather_patches(task, network, samples, device, rotations, on_progress)
    evidence: list[Evidence] = []
    for images in _stack_images(samples, task.reader.without_targets):
        for prediction in predict_batch(network, images, device, rotations, activation=task.to_probabilities):
            evidence.append(task.collect_evidence(prediction, samples[len(evidence)]))
        on_progress(len(evidence), len(samples))
    return evidence


def _stack_images(samples: Sequence[Sample], reader: SampleReader) -> Iterator[NDArray[np.uint8]]:
    """Read the samples in order, and yield stacks (B, H, W, 3) of consecutive images of the same size."""
    stack: list[NDArray[np.uint8]] = []
    for image in map(reader.read, samples):
        if stack and (image.shape != stack[0].shape or (len(stack) + 1) * image[..., 0].size > STACK_PX):
            yield np.stack(stack)
            stack = []
        stack.append(image)
    if stack:
        yield np.stack(stack)


def _gather_patches(
    task: Task,
    network: DenseNetwork,
    samples: Sequence[Sample],
    device: torch.device,
    rotations: int,
    on_progress: OnProgress,
) -> list[Evidence]:
    """Return the evidence of each patch, for a task with one prediction per patch. Patches are predicted in batches."""
    window_px = network.geometry.context_px
    cut_px = covering_size(window_px) if 4 % rotations else window_px  # other angles than k · 90° need larger windows
    batches, steps = make_center_batches(task, samples, cut_px, device=device)
    evidence: list[Evidence] = []
    for images, _ in batches.load(steps, device):
        probabilities = predict_patches(network, images, rotations, task.to_probabilities)
        for sample, probability in zip(samples[len(evidence) :], probabilities, strict=False):
            evidence.append(task.collect_evidence(probability, sample))
        on_progress(len(evidence), len(samples))
    return evidence


# Batches of windows, for training, validation and robustness


def make_center_batches(
    task: Task,
    samples: Sequence[Sample],
    window_px: int,
    batch: int = PATCH_BATCH,
    cache: Cache = "auto",
    device: torch.device = CPU,
) -> tuple[Batches, range]:
    """Return batches of windows, one window at the center of each sample, and the range of steps.

    A step is the index of a batch. The windows are in the order of the samples. `window_px` is the side of a window in
    pixels. `batch` is the number of windows per batch; the last batch may be smaller. `cache` states where decoded
    images are kept: "device" (in the memory of `device`), "memory" (RAM), "none" (only in files), or "auto" (selected
    by the amount of free memory).
    """
    pixels = open_pixels(samples, task.reader, cache, device)
    sampler = CenterSampler(task.image_targets(samples), pixels.sizes_px, window_px, batch)
    return Batches(pixels, sampler, window_px), range(len(sampler))


def make_sampled_batches(
    task: Task,
    samples: Sequence[Sample],
    window: TrainingWindow,
    batch: int,
    seed: int,
    *,
    cache: Cache = "auto",
    device: torch.device = CPU,
    augmentation: Augmentation = NO_AUGMENTATION,
    mined: Ints | None = None,
    sampler: SamplerName | None = None,
) -> Batches:
    """Return batches of random windows, drawn by the task's sampler.

    `window` states the size of the windows. `batch` is the number of windows per batch. `seed` is the seed of the
    windows and of the augmentation. `cache` and `device` are those of `make_center_batches`. `mined` contains hard
    examples: mistakes of a baseline network, which the sampler draws more often. `task.examples_for_sampler` returns
    this array: either sample indices (k,), or an array (k, 3) with the columns sample index, row and column (in
    pixels). None means no hard examples. `sampler` states how often each class is drawn; None means the default of the
    task.
    """
    if batch < 1 or seed < 0:
        raise DataError(f"The batch size must be 1 or more and the seed 0 or more; got {batch} and {seed}.")
    if mined is not None and len(mined):
        index = int(mined.reshape(len(mined), -1)[:, 0].max())
        if not 0 <= index < len(samples):
            raise DataError(
                f"A hard example has the image index {index}, but there are {len(samples)} training images (indices "
                f"from 0 to {len(samples) - 1}); mine hard examples again."
            )
    pixels = open_pixels(samples, task.reader, cache, device)
    settings = SamplerSettings(pixels.sizes_px, window.window_px, batch, seed, sampler)
    chosen = task.make_sampler(samples, settings, window, mined)
    target_px = window.target_px if task.reader.target_maps else None
    return Batches(pixels, chosen, window.window_px, target_px, augmentation, seed)


# Robustness: predictions of rotated inputs


@dataclass(frozen=True)
class RotatedPredictions:
    """Predictions of the same inputs, rotated by fair angles (11.25°, 33.75°, …) and by plain angles (0°, 22.5°, …).

    The inputs are windows, or the central squares of fields. A field is an annotated image.

    For windows, probabilities and decisions have the shape (angles, windows). The probability of a window is that of
    one channel, which is the same for all angles: the channel with the highest mean probability over the angles.

    For fields, probabilities and decisions have the shape (angles, fields, height, width). The probability of a pixel
    is the probability that it belongs to an object.
    """

    fair_degrees: list[float]  # angles, counterclockwise
    fair: NDArray[np.float32]  # probabilities at the fair angles
    plain_degrees: list[float]  # angles, counterclockwise
    plain: NDArray[np.float32]  # probabilities at the plain angles
    labels: NDArray[np.int64]  # class numbers (windows,); empty for fields
    images: NDArray[np.uint8]  # (k, height, width, 3), not rotated; only the first windows, but all fields
    fair_decisions: NDArray[np.generic]  # decisions at the fair angles, such as predicted classes
    plain_decisions: NDArray[np.generic]  # decisions at the plain angles
    cases: Sequence[str]  # the case of each window or field, such as a patient; the name of the image if it is unknown
    # Maps (angles, fields, height, width) by name, at the fair angles; empty for windows
    maps: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


def predict_rotated_inputs(
    run: Run, samples: Sequence[Sample], device: torch.device, max_windows: int = ROTATED_WINDOWS
) -> RotatedPredictions:
    """Predict inputs, rotated by all fair and plain angles.

    If `task.robustness_inputs` is "fields", the inputs are the central squares of all fields (annotated images).
    Otherwise, the inputs are up to `max_windows` windows.
    """
    run.network.to(device).eval()
    if run.task.robustness_inputs == "fields":
        return _predict_rotated_fields(run, samples, device)
    return _predict_rotated_windows(run, samples, device, max_windows)


def summarize_rotation(rotated: RotatedPredictions) -> dict[str, object]:
    """Return the entry "rotation" of the JSON file of scores.

    The entry contains the type of the inputs ("windows" or "pixels of fields"), their number, and the robustness at
    fair and at plain angles. The robustness consists of the standard deviation of the probability over angles, averaged
    over inputs, and the fraction of inputs with different decisions at different angles. The entry "cases" has two
    numbers for each case: the sum of the standard deviations of its inputs at fair angles, and the number of inputs.
    """
    deviations = rotated.fair.std(axis=0, dtype=np.float64)  # (inputs,), or (fields, height, width)
    deviations = deviations.reshape(len(deviations), -1)
    cases: dict[str, list[float]] = {}
    for case, values in zip(rotated.cases, deviations, strict=True):
        terms = cases.setdefault(case, [0.0, 0])
        terms[0] += float(values.sum())
        terms[1] += values.size
    return {
        "inputs": "pixels of fields" if rotated.maps else "windows",
        "count": int(np.prod(rotated.fair.shape[1:])),
        "fair": asdict(measure_robustness(rotated.fair, rotated.fair_decisions)),
        "plain": asdict(measure_robustness(rotated.plain, rotated.plain_decisions)),
        "cases": cases,
    }


def pack_for_figures(rotated: RotatedPredictions) -> dict[str, NDArray[np.generic]]:
    """Return arrays for figures, by name: the images, and their predictions.

    If the inputs are windows, the predictions at all angles are returned. If the inputs are fields, the mean and the
    standard deviation of each map over the fair angles are returned.
    """
    if not rotated.maps:
        names = ("fair_degrees", "fair", "plain_degrees", "plain", "labels", "images")
        return {name: np.asarray(getattr(rotated, name)) for name in names}
    packed: dict[str, NDArray[np.generic]] = {"images": rotated.images}
    for name, values in rotated.maps.items():
        packed[f"{name}_mean"] = values.mean(axis=0).astype(np.float16)
        packed[f"{name}_deviation"] = values.std(axis=0).astype(np.float16)
    return packed


def _predict_rotated_windows(
    run: Run, samples: Sequence[Sample], device: torch.device, max_windows: int
) -> RotatedPredictions:
    """Predict up to `max_windows` windows, rotated by all fair and plain angles."""
    fair, plain = robustness_angles(), robustness_angles(fair=False)
    images, labels, cases = _read_windows(run, samples, device, max_windows)
    probabilities = predict_rotated(run.network, images, [*fair, *plain], run.task.to_probabilities)  # (angles, B, K)
    decisions = run.task.decide(probabilities, run.point)  # (angles, B)
    # For each window, compare one channel over the angles: the channel with the highest mean probability.
    channels = probabilities.mean(axis=0).argmax(axis=-1)  # (B,)
    probability = np.take_along_axis(probabilities, channels[None, :, None], axis=2)[..., 0]  # (angles, B)
    side_px = run.network.geometry.smallest_px
    shown = (center_crop(images[:SHOWN_WINDOWS], side_px, side_px) * 255).round().byte()
    return RotatedPredictions(
        fair_degrees=fair,
        fair=probability[: len(fair)],
        plain_degrees=plain,
        plain=probability[len(fair) :],
        labels=labels.cpu().numpy(),
        images=shown.permute(0, 2, 3, 1).cpu().numpy(),
        fair_decisions=decisions[: len(fair)],
        plain_decisions=decisions[len(fair) :],
        cases=cases,
    )


def _read_windows(
    run: Run, samples: Sequence[Sample], device: torch.device, max_windows: int
) -> tuple[Tensor, Tensor, list[str]]:
    """Return up to `max_windows` windows (B, 3, s, s), their labels (B,), and the case of each window.

    If the task has one prediction per window, the windows are at the centers of the first samples. Otherwise, they are
    random windows of all samples. The side s is larger than the input of the network, so that windows can be rotated by
    any angle without empty corners. Where a window extends beyond the image, the image is extended by reflection.
    """
    task, geometry = run.task, run.network.geometry
    cut_px = covering_size(geometry.context_px) + 2 * SPLINE_REACH
    if task.prediction_type == "window":
        batches, steps = make_center_batches(task, samples[:max_windows], cut_px, device=device)
    else:
        window = TrainingWindow(cut_px, geometry.stride_px, geometry.stride_px)
        batches = make_sampled_batches(task, samples, window, ROTATED_BATCH, ROTATED_SEED, device=device)
        steps = range(-(-max_windows // ROTATED_BATCH))
    images, labels = (torch.cat(parts) for parts in zip(*batches.load(steps, device), strict=True))
    cases = [_case_of(samples[i]) for step in steps for i in batches.sampler.draw(step).images]
    return images[:max_windows], labels[:max_windows], cases[:max_windows]


def _case_of(sample: Sample) -> str:
    """Return the case of an image, such as a patient, or the name of the image if the case is unknown."""
    return sample.case or sample.name


def _predict_rotated_fields(run: Run, samples: Sequence[Sample], device: torch.device) -> RotatedPredictions:
    """Predict the central squares of all fields, rotated by all fair and plain angles."""
    fair, plain = robustness_angles(), robustness_angles(fair=False)
    predicted = [_predict_rotated_field(run, sample, device, [*fair, *plain]) for sample in samples]
    images, fields = zip(*predicted, strict=True)
    maps = {name: np.stack([named[name] for named in fields], axis=1) for name in fields[0]}  # (angles, fields, h, w)
    probability = maps["objects"]
    decisions = probability >= FOREGROUND
    return RotatedPredictions(
        fair_degrees=fair,
        fair=probability[: len(fair)],
        plain_degrees=plain,
        plain=probability[len(fair) :],
        labels=np.empty(0, np.int64),
        images=np.stack(images),
        fair_decisions=decisions[: len(fair)],
        plain_decisions=decisions[len(fair) :],
        cases=[_case_of(sample) for sample in samples],
        maps={name: values[: len(fair)] for name, values in maps.items()},
    )


def _predict_rotated_field(
    run: Run, sample: Sample, device: torch.device, degrees: Sequence[float]
) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.float32]]]:
    """Return the central square (h, w, 3) of a field, and a dictionary of the maps (angles, h, w) of this square.

    For each angle in `degrees`, the field is rotated and predicted, and the maps are rotated back.
    """
    image = run.task.reader.without_targets.read(sample)
    # Predict more than the central square, so that the rotated square contains no pixels added by reflection.
    read_px = covering_size(FIELD_PX + run.network.geometry.smallest_px)
    top, left = (max(0, (side - read_px) // 2) for side in image.shape[:2])
    part = image[top : top + read_px, left : left + read_px]
    rotated = predict_rotations(run.network, part[None], device, degrees, activation=run.task.to_probabilities)
    probabilities = np.concatenate(list(rotated))  # (angles, K, height, width)
    rows, columns = (slice(max(0, (side - FIELD_PX) // 2), (side + FIELD_PX) // 2) for side in part.shape[:2])
    maps = [run.task.maps_for_report(outputs) for outputs in probabilities[..., rows, columns]]
    return part[rows, columns], {name: np.stack([named[name] for named in maps]) for name in maps[0]}
