"""Audit any model under rotation: `audit` measures how its predictions change when its images are only rotated.

`audited_models` opens the model, which may be of other software; `evaluation` predicts its rotated images, as for
`rotopath evaluate --robustness`; `metrics.equivariance` defines the figures, and `docs/audit.md` explains them. This
module finds the images, and writes the report.
"""

import copy
import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rotopath import runs
from rotopath.audited_models import AuditedModel, ModelOptions, open_model
from rotopath.data import DataError, Dataset, Sample, open_data, problems
from rotopath.data.batches import cut_window
from rotopath.data.dataset import PixelBox, annotated_size_px, image_spacing_um_px, is_read_in_parts
from rotopath.data.formats import is_dataset
from rotopath.data.splits import SPLITS, find_split
from rotopath.environment import describe_machine, describe_software, now
from rotopath.evaluation import (
    FIELD_PX,
    ROTATED_WINDOWS,
    AuditedPredictions,
    RotatedPredictions,
    find_field_px,
    predict_rotated_fields,
    predict_rotated_windows,
    read_windows,
    summarize_rotation,
)
from rotopath.group import covering_size
from rotopath.images.slides import open_slide
from rotopath.images.stain import macenko
from rotopath.images.tissue import find_tissue
from rotopath.inference.predict_files import list_slides
from rotopath.metrics.equivariance import (
    NEIGHBORS,
    ROBUSTNESS_STEPS,
    Similarity,
    mean_cosines,
    measure_resampling,
    measure_robustness,
    measure_similarity,
)
from rotopath.models import DenseNetwork, equivariant
from rotopath.models.foreign import (
    Preprocessed,
)
from rotopath.models.protocols import IMAGE_CHANNELS, in_one_line, unwrap
from rotopath.models.registry import is_equivariant
from rotopath.reports.audit_page import write_audit_page
from rotopath.runs import Device, Run
from rotopath.writing import hold_lock, write_json, write_text

PAGE, TABLE, FIGURES = "audit.html", "audit.csv", "audit.json"
FORMAT = 1  # version of the format of audit.json
Images = Path | str | Sequence[Path | str] | NDArray[np.uint8]
MAX_MAP_VALUES = 2**26  # values of rotated maps that are kept in memory
MAX_FIELDS = 64  # fields of which maps are predicted
SEED = 0  # of the positions of windows on slides and large images
GRID_STEP = ROBUSTNESS_STEPS // 4  # every fourth plain angle is a multiple of 90°


@dataclass(frozen=True)
class Audit:
    """The result of an audit. `figures` is the content of audit.json."""

    figures: Mapping[str, Any]
    rotated: RotatedPredictions
    names: tuple[str, ...]  # of the images
    path: Path | None = None  # the page, if it was written

    @property
    def changed(self) -> float:
        """Fraction of the decisions that change if an image is only rotated. Of an embedding: its lost similarity."""
        return float(self.figures["changed"])

    def __repr__(self) -> str:
        return f"Audit({self.figures['model']['name']}: {self.figures['sentence']})"


def audit(
    model: Run | nn.Module | Callable[[Tensor], Any] | Path | str,
    images: Images,
    out: Path | str | None = None,
    *,
    split: str | None = None,
    count: int = ROTATED_WINDOWS,
    spacing_um_px: float | None = None,
    device: torch.device | Device | str | None = None,
    options: ModelOptions | None = None,
    on_progress: Callable[[str], None] = lambda _stage: None,
    **model_options: Any,
) -> Audit:
    """Measure how the predictions of any model change if images are only rotated. Returns all figures.

    - `model`: a run, the path of its folder, or the name of a pretrained model; a torch module or a function of images
      (B, 3, S, S); the path of an ONNX or TorchScript file, or of a folder of WSInfer's model zoo;
      "package.module:name" of a module or function; or "timm:NAME", with the weights in `checkpoint`.
    - `images`: a dataset (folder or manifest), a folder of patches, slides or other images, files, or an array of
      images (n, H, W, 3) of bytes with the pixel spacing of the model.
    - `out`: folder for the page, the table and the figures (`audit.html`, `audit.csv`, `audit.json`); None: no files.
    - `split`: split of a dataset, or "all"; default: "test" if the dataset has it.
    - `count`: the largest number of windows.
    - `spacing_um_px`: pixel spacing of image files that do not specify it.
    - `model_options`: see `ModelOptions`, such as `window_px=224`; only for models of other software.

    The figures at the fair and plain angles are those of `evaluate` with `robustness=True`. Raises RunError or
    DataError if the model or the images cannot be used.

    >>> import numpy as np
    >>> tissue = np.random.default_rng(0).integers(0, 99, (4, 64, 64, 3), np.uint8)
    >>> darkness = lambda images: 1 - images.mean(dim=(1, 2, 3))[:, None]
    >>> round(rp.audit(darkness, tissue, window_px=32, activation="none").changed, 2)
    0.0
    """
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise DataError(f"{out} is a file, but the audit needs a folder; choose another path.")
    if count < 1:
        raise DataError(f"The number of images is {count}; choose 1 or more.")
    on_progress("loading the model")
    audited = open_model(model, options or ModelOptions(**model_options))
    target = runs.find_device(device)
    on_progress("reading images")
    inputs = _read_inputs(audited, images, split, count, spacing_um_px, target)
    on_progress(f"predicting {len(inputs.names)} rotated images")
    if inputs.fields is not None:
        rotated = predict_rotated_fields(audited, inputs.fields, inputs.names, target, audited=True)
    else:
        assert inputs.windows is not None
        windows, labels = inputs.windows.to(target), torch.zeros(len(inputs.windows))
        rotated = predict_rotated_windows(
            audited, windows, labels, inputs.names, target, audited=True, embeds=audited.is_embedding
        )
    figures = _summarize(audited, inputs, rotated) | {
        "written": now(),
        **describe_software(),
        "hardware": describe_machine(target),
    }
    if out is None:
        return Audit(figures, rotated, inputs.names)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder / FIGURES):
        write_text(folder / TABLE, _format_table(figures, rotated, inputs.names))
        write_audit_page(folder / PAGE, figures, rotated, inputs.names)
        write_json(folder / FIGURES, figures)
    return Audit(figures, rotated, inputs.names, folder / PAGE)


# Images


@dataclass(frozen=True)
class _Inputs:
    """The images of an audit: windows (n, 3, s, s), or fields (H, W, 3)."""

    names: tuple[str, ...]
    source: str  # what they are, for the page
    sides_px: tuple[int, ...]  # the shorter side of each, at the pixel spacing of the model
    field_px: int  # the side from which on rotated windows, or maps, contain no reflected pixels
    windows: Tensor | None = None
    fields: list[NDArray[np.uint8]] | None = None


def _read_inputs(
    model: AuditedModel,
    images: Images,
    split: str | None,
    count: int,
    spacing_um_px: float | None,
    device: torch.device,
) -> _Inputs:
    """Read windows or fields for a model; see `audit` for `images`. Raises DataError if there are none."""
    has_fields = model.task.robustness_inputs == "fields"
    if isinstance(model.network, DenseNetwork):
        network = model.network
        field_px = covering_size(FIELD_PX + network.geometry.smallest_px) if has_fields else find_field_px(network)
        if has_fields:
            count = min(count, MAX_FIELDS)
    else:
        field_px, side = find_field_px(model.network), model.network.window_px
        count = max(2, min(count, MAX_MAP_VALUES // (3 * ROBUSTNESS_STEPS * side**2 * model.task.outputs)))
    if isinstance(images, np.ndarray):
        return _read_array(model, images[:count], field_px, has_fields)
    samples, source, is_labelled = _find_samples(model, images, split, count, spacing_um_px, field_px)
    reader = model.task.reader.without_targets
    sides = tuple(min(reader.size_px(sample)) for sample in samples[:count])
    names = tuple(sample.name for sample in samples[:count])
    if has_fields:
        fields = _make_equal([reader.read(sample) for sample in samples[:count]])
        return _Inputs(names, source, sides, field_px, fields=fields)
    windows, _, _ = read_windows(model, samples, device, count, is_labelled)
    if len(windows) != len(names) or (is_labelled and model.task.prediction_type != "window"):
        names = tuple(f"window {i + 1}" for i in range(len(windows)))
    return _Inputs(names, source, sides, field_px, windows=windows)


def _make_equal(fields: list[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    """Crop fields to the same size, that of their centers which all of them have, because maps are stacked."""
    height, width = (min(field.shape[axis] for field in fields) for axis in (0, 1))
    tops_lefts = [((field.shape[0] - height) // 2, (field.shape[1] - width) // 2) for field in fields]
    if min(height, width) >= FIELD_PX:
        return fields  # their central squares have the same size
    return [
        field[top : top + height, left : left + width] for field, (top, left) in zip(fields, tops_lefts, strict=True)
    ]


def _read_array(model: AuditedModel, images: NDArray[np.uint8], field_px: int, has_fields: bool) -> _Inputs:
    if images.ndim != 4 or images.shape[3] != IMAGE_CHANNELS or images.dtype != np.uint8 or 0 in images.shape:
        raise DataError(
            f"An array of images must have the shape (n, H, W, 3) and the type uint8; got {images.shape} and "
            f"{images.dtype}."
        )
    names = tuple(f"image {i + 1}" for i in range(len(images)))
    stained = [macenko(image) if model.task.stain == "macenko" else image for image in images]
    sides = (min(images.shape[1:3]),)
    if has_fields:
        return _Inputs(names, "array", sides, field_px, fields=stained)
    windows = [
        cut_window(image, (image.shape[0] - field_px) // 2, (image.shape[1] - field_px) // 2, field_px)
        for image in stained
    ]
    pixels = torch.from_numpy(np.stack(windows)).permute(0, 3, 1, 2).float() / 255
    return _Inputs(names, "array", sides, field_px, windows=pixels)


def _find_samples(
    model: AuditedModel,
    images: Path | str | Sequence[Path | str],
    split: str | None,
    count: int,
    spacing_um_px: float | None,
    field_px: int,
) -> tuple[Sequence[Sample], str, bool]:
    """Return the samples of an audit, what they are, and whether their windows are those of an evaluation.

    Patches with labels, and annotated images for a run of the same kind, are used as `evaluate` uses them. Of slides
    and larger images, squares with a side of `field_px` are used, so that windows can be rotated with real pixels at
    their corners.
    """
    paths = [Path(images)] if isinstance(images, Path | str) else [Path(path) for path in images]
    if not paths:
        raise DataError("There are no images to audit; give a dataset, a folder, or files.")
    if len(paths) == 1 and paths[0].exists() and is_dataset(paths[0]):
        dataset = open_data(paths[0], None, spacing_um_px)
        if errors := problems(dataset.findings):
            raise DataError(f"{paths[0]} cannot be audited: {errors[0]}")
        samples, name = _choose_split(dataset, split)
        source = f"{dataset.source}, {name}"
        labelled = model.task.annotated if model.is_run else "labels"
        if dataset.annotated == labelled:
            if model.is_run and problems(model.task.check_data(dataset)):
                return _use_spacing(model, samples), source, False  # other classes than those of the run
            return _use_spacing(model, samples), source, True
        if model.task.robustness_inputs == "fields":
            return _use_spacing(model, samples), source, False
    else:
        if split not in (None, "all"):
            raise DataError(f"{paths[0]} is not a dataset, so it has no split {split!r}; leave out --split.")
        samples, source = _list_files(model, paths, spacing_um_px), "image files"
    return _divide(model, _use_spacing(model, samples), count, field_px), source, False


def _choose_split(dataset: Dataset, split: str | None) -> tuple[Sequence[Sample], str]:
    if split is None:
        split = "test" if any(sample.split == "test" for sample in dataset.samples) else "all"
    if split == "all":
        return dataset.samples, "all images"
    if (known := find_split(split)) is None:
        raise DataError(f"There is no split {split!r}; choose from {', '.join(SPLITS)} and all.")
    return dataset.split(known), f"{known} images"


def _list_files(model: AuditedModel, paths: Sequence[Path], spacing_um_px: float | None) -> list[Sample]:
    samples = []
    for path in list_slides(paths):
        spacing = spacing_um_px or image_spacing_um_px(path)
        if spacing is None and model.has_spacing:
            raise DataError(
                f"{path} does not specify its pixel spacing, but {model.name} reads {model.task.spacing_um_px:g} "
                f"µm/px; give it with --spacing-um-px."
            )
        samples.append(Sample(path, path.name, "", "test", spacing or model.task.spacing_um_px))
    return samples


def _use_spacing(model: AuditedModel, samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples. If the pixel spacing of the model is not known, all samples get that of its task.

    Their pixels are then not resampled.
    """
    if model.has_spacing:
        return samples
    return [replace(sample, spacing_um_px=model.task.spacing_um_px) for sample in samples]


def _divide(model: AuditedModel, samples: Sequence[Sample], count: int, field_px: int) -> list[Sample]:
    """Divide slides and large images into squares of `field_px`, and choose up to `count` of those on tissue.

    The choice is random, with a fixed seed. Images that hold no two squares are used as they are.
    """
    parts: list[Sample] = []
    for sample in samples:
        if sample.box is not None or sample.row is not None:
            parts.append(sample)
            continue
        height, width = annotated_size_px(sample.path)
        side = max(1, round(field_px * model.task.spacing_um_px / sample.spacing_um_px))
        rows, columns = height // side, width // side
        if rows * columns < 2 and not is_read_in_parts(sample.path):
            parts.append(sample)
            continue
        top, left = (height - rows * side) // 2, (width - columns * side) // 2
        boxes = [
            PixelBox(top + row * side, left + column * side, side, side)
            for row in range(rows)
            for column in range(columns)
        ]
        boxes = _keep_tissue(sample, boxes)
        boxes = [boxes[i] for i in np.random.default_rng(SEED).permutation(len(boxes))[:count]]
        parts += [_cut(sample, box) for box in boxes]
    if not parts:
        raise DataError(f"{samples[0].path} has no tissue of {field_px} × {field_px} px; choose another slide.")
    chosen = np.sort(np.random.default_rng(SEED).permutation(len(parts))[:count])
    return [parts[i] for i in chosen]


def _cut(sample: Sample, box: PixelBox) -> Sample:
    return replace(sample, name=f"{sample.name} {box}", box=box)


def _keep_tissue(sample: Sample, boxes: Sequence[PixelBox]) -> list[PixelBox]:
    """Return the squares of a slide or an image whose center is on tissue."""
    with open_slide(sample.path, sample.spacing_um_px, override_spacing=True) as slide:
        tissue = find_tissue(slide)
    um_px = sample.spacing_um_px
    rows = np.array([(box.top_px + box.height_px / 2) * um_px for box in boxes])
    columns = np.array([(box.left_px + box.width_px / 2) * um_px for box in boxes])
    last = np.array(tissue.mask.shape) - 1
    indices = np.minimum(np.stack([rows, columns], axis=1) // tissue.spacing_um_px, last).astype(int)
    return [box for box, (row, column) in zip(boxes, indices, strict=True) if tissue.mask[row, column]]


# Figures


def _summarize(model: AuditedModel, inputs: _Inputs, rotated: RotatedPredictions) -> dict[str, Any]:
    """Return the content of audit.json, without its provenance."""
    assert rotated.audited is not None
    found = rotated.audited
    resampling = measure_resampling(rotated.fair, rotated.fair_decisions, found.nearby, found.nearby_decisions)
    grid = measure_robustness(rotated.plain[::GRID_STEP], rotated.plain_decisions[::GRID_STEP])
    window_px = (
        model.network.geometry.context_px if isinstance(model.network, DenseNetwork) else model.network.window_px
    )
    figures: dict[str, Any] = {
        "format": FORMAT,
        "model": {
            "name": model.name,
            "source": model.source,
            "outputs": [] if model.is_embedding else list(model.task.output_names),
            "window_px": window_px,
            "spacing_um_px": model.task.spacing_um_px if model.has_spacing else None,
            "operating_point": dict(model.point),
        },
        "images": {
            "source": inputs.source,
            "count": len(inputs.names),
            "real_surroundings": float(np.mean(np.array(inputs.sides_px) >= inputs.field_px)),
            "smaller_than_window": float(np.mean(np.array(inputs.sides_px) < window_px)),
        },
        "decisions": None,
        "embedding": _compare_embeddings(found, len(inputs.names)),
        "conversion": _try_conversion(model),
    }
    if not model.is_embedding:
        figures["decisions"] = {
            **{key: value for key, value in summarize_rotation(rotated).items() if key != "cases"},
            "grid": asdict(grid),
            "resampling": {key: value for key, value in asdict(resampling).items() if key != "beyond"},
            "beyond": asdict(resampling.beyond),
            "averaged": {str(n): asdict(robustness) for n, robustness in found.averaged.items()},
        }
        figures["changed"] = max(grid.changed, resampling.beyond.changed)
    else:
        embedding = figures["embedding"]
        figures["changed"] = max(1 - embedding["grid"]["cosine"], 1 - embedding["beyond"]["cosine"])
    figures["changed"] = max(0.0, figures["changed"])
    figures["sentence"] = _describe(model, figures)
    return figures


def _compare_embeddings(found: AuditedPredictions, count: int) -> dict[str, Any] | None:
    """Return the similarity of embeddings over angles: on the grid, at fair angles, and beyond interpolation.

    Embeddings at a fair angle and at the nearby one differ by interpolation. What they lack to 1 is subtracted from
    what the embeddings at the fair angles lack to 1.
    """
    if found.fair_embeddings is None or found.plain_embeddings is None or found.nearby_embeddings is None:
        return None
    grid, fair = measure_similarity(found.plain_embeddings[::GRID_STEP]), measure_similarity(found.fair_embeddings)
    pairs = zip(found.fair_embeddings, found.nearby_embeddings, strict=True)
    alike = [measure_similarity(np.stack(pair)) for pair in pairs]
    cosine = float(np.mean([similarity.cosine for similarity in alike]))
    shared = [similarity.neighbors for similarity in alike if similarity.neighbors is not None]
    resampling = Similarity(cosine, float(np.mean(shared)) if shared else None)
    others = mean_cosines(found.plain_embeddings[:1].swapaxes(0, 1)).mean() if count > 1 else None
    neighbors = min(NEIGHBORS, (count - 1) // 2)
    return {
        "features": found.fair_embeddings.shape[-1],
        "grid": asdict(grid),
        "fair": asdict(fair),
        "resampling": asdict(resampling),
        "beyond": {
            "cosine": min(1.0, 1 + fair.cosine - resampling.cosine),
            "neighbors": None
            if fair.neighbors is None or resampling.neighbors is None
            else min(1.0, 1 + fair.neighbors - resampling.neighbors),
        },
        "different_images": None if others is None else float(others),
        "neighbors": neighbors,
        "chance": neighbors / (count - 1) if count > 1 else None,
    }


def _try_conversion(model: AuditedModel) -> dict[str, Any]:
    """Return whether `equivariant` converts the model, and the number of weights before and after."""
    network = unwrap(cast(Any, model.network))
    module = network.model if isinstance(network, Preprocessed) else network
    scripted = not isinstance(module, nn.Module) or any(
        isinstance(layer, torch.jit.ScriptModule) for layer in module.modules()
    )
    if scripted or model.source == "ONNX":
        return {"possible": False, "reason": "needs the network as a torch module, and not as an exported file"}
    assert isinstance(module, nn.Module)
    if is_equivariant(module):
        orientations = max((getattr(layer, "orientations", 1) for layer in module.modules()), default=1)
        if orientations == 1:
            reason = (
                "is not needed: train the same recipe with orientations = 8, which costs the same number of weights"
            )
        else:
            reason = f"is not needed: the network has SE(2,N) layers, with N = {orientations}"
        return {"possible": False, "reason": reason}
    before = sum(weight.numel() for weight in module.parameters())
    try:
        converted = equivariant(copy.deepcopy(module).cpu(), 8)
    except Exception as error:  # of any type, because the network is code of others
        return {"possible": False, "reason": f"is not possible ({in_one_line(error):.300})"}
    after = sum(weight.numel() for weight in converted.parameters())
    return {"possible": True, "reason": "", "weights": before, "converted_weights": after}


def _describe(model: AuditedModel, figures: Mapping[str, Any]) -> str:
    """Return the main result in one sentence that needs no knowledge of statistics."""
    changed = figures["changed"]
    if model.is_embedding:
        return (
            f"Two embeddings of the same image at different rotations have a cosine similarity of {1 - changed:.3f} on "
            f"average, where 1 would be the same embedding."
        )
    what = "images" if figures["decisions"]["inputs"] == "windows" else "pixels"
    count = figures["decisions"]["count"]
    if changed == 0 and figures["decisions"]["fair"]["changed"] > 0:
        return (
            f"Interpolation explains all decisions that change if an image is rotated, for {count:,} {what}: "
            f"{_of_hundred(figures['decisions']['fair']['changed'])}."
        )
    if changed == 0:
        return f"Rotating an image changes none of the model's decisions, for {count:,} {what}."
    return (
        f"For {_of_hundred(changed)} {what}, the model changes its decision if the image is only rotated, although "
        f"rotating a slide does not change the disease."
    )


def _of_hundred(fraction: float) -> str:
    """Return a fraction as a count, such as "12 of 100".

    >>> from rotopath.auditing import _of_hundred
    >>> _of_hundred(0.12), _of_hundred(0.0042)
    ('12 of 100', '4 of 1,000')
    """
    for total in (100, 1000, 10_000):
        if fraction * total >= 1.5:
            break
    return f"{max(1, round(fraction * total)):,} of {total:,}"


def _format_table(figures: Mapping[str, Any], rotated: RotatedPredictions, names: Sequence[str]) -> str:
    """Return the content of audit.csv: a row for each image.

    Of maps, numbers are means over the pixels of an image.
    """
    assert rotated.audited is not None
    columns: dict[str, list[Any]] = {"image": list(names)}
    if figures["decisions"] is not None:

        def by_image(values: NDArray[Any]) -> list[float]:
            return [round(float(value), 6) for value in values.reshape(len(names), -1).mean(axis=1)]

        plain, plain_decisions = rotated.plain[::GRID_STEP], rotated.plain_decisions[::GRID_STEP]
        columns["deviation on the grid"] = by_image(plain.std(axis=0, dtype=np.float64))
        columns["deviation off the grid"] = by_image(rotated.fair.std(axis=0, dtype=np.float64))
        columns["changed on the grid"] = by_image((plain_decisions != plain_decisions[:1]).any(axis=0))
        columns["changed off the grid"] = by_image((rotated.fair_decisions != rotated.fair_decisions[:1]).any(axis=0))
        angles = sorted(
            [
                *zip(rotated.plain_degrees, rotated.plain, strict=True),
                *zip(rotated.fair_degrees, rotated.fair, strict=True),
            ],
            key=lambda pair: pair[0],
        )
        columns |= {f"{angle:g}°": by_image(values) for angle, values in angles}
    if rotated.audited.fair_embeddings is not None and rotated.audited.plain_embeddings is not None:
        columns["cosine on the grid"] = by_cosine = mean_cosines(rotated.audited.plain_embeddings[::GRID_STEP]).tolist()
        columns["cosine off the grid"] = mean_cosines(rotated.audited.fair_embeddings).tolist()
        assert len(by_cosine) == len(names)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()
