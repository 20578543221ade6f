"""How a network's answers change when its inputs turn, on annotated pictures.

In: a network, pictures and its operating point. Out: how far predictions scatter over angles and how many decisions
change, at angles that are all resampled alike and at the paper's; and the predictions themselves, for polar plots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotopath.data import Picture, Task, middle_batches, sampled_batches
from rotopath.data.batches import reader_of
from rotopath.data.nuclei import BACKGROUND, BORDER
from rotopath.evaluation.robustness import list_angles, measure_robustness
from rotopath.group import covering_size
from rotopath.inference import predict_realigned, predict_turned, surrounded_px
from rotopath.inference.dense import SPLINE_REACH
from rotopath.models import Network
from rotopath.nn import center_crop

WINDOWS = 512  # of mitosis, half of them with one; and patches at most
SHOWN = 48  # of them that figures can show
SAMPLING_SEED = 1_000_003
FIELD_PX = 200  # the middle of each field of nuclei
FOREGROUND = 0.5  # above it, a pixel is said to be of a nucleus


@dataclass(frozen=True)
class Turned:
    """Answers at every angle: probabilities (angles, inputs), or of nuclei (angles, fields, height, width).

    Nuclei have probabilities of their borders beside those of being one, at fair angles.
    """

    fair_degrees: list[float]
    fair: NDArray[np.float32]
    plain_degrees: list[float]
    plain: NDArray[np.float32]
    labels: NDArray[np.int64]  # (inputs,); none for nuclei
    images: NDArray[np.uint8]  # (k, height, width, 3) of the first inputs
    borders: NDArray[np.float32] | None = None


def turn_inputs(
    task: Task, network: Network, pictures: Sequence[Picture], device: torch.device, most: int = WINDOWS
) -> Turned:
    """What the network says at all angles about single windows, `most` at most, or about the middle of fields."""
    network = network.to(device).eval()
    fair, plain = list_angles(), list_angles(fair=False)
    if task == "nuclei":
        fields = [_turn_field(network, picture, device, [*fair, *plain]) for picture in pictures]
        shown, nuclei, borders = (np.stack(maps) for maps in zip(*fields, strict=True))
        answers = np.moveaxis(nuclei, 1, 0)  # (angles, fields, height, width)
        none = np.empty(0, np.int64)
        borders = np.moveaxis(borders, 1, 0)[: len(fair)]
        return Turned(fair, answers[: len(fair)], plain, answers[len(fair) :], none, shown, borders)
    images, labels = _windows(task, network, pictures, device, most)
    answers = predict_turned(network, images, [*fair, *plain])
    seen = center_crop(images[:SHOWN], network.receptive_field, network.receptive_field)
    shown = (seen * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return Turned(fair, answers[: len(fair)], plain, answers[len(fair) :], labels.cpu().numpy(), shown)


def pack(turned: Turned) -> dict[str, NDArray[np.generic]]:
    """What figures need: all answers about windows; of nuclei the mean and the deviation over fair angles."""
    if turned.borders is None:
        return {name: np.asarray(value) for name, value in vars(turned).items() if value is not None}
    maps = {"nuclei": turned.fair, "borders": turned.borders}
    packed: dict[str, NDArray[np.generic]] = {"images": turned.images}
    for name, values in maps.items():
        packed[f"{name}_mean"] = values.mean(axis=0).astype(np.float16)
        packed[f"{name}_deviation"] = values.std(axis=0).astype(np.float16)
    return packed


def summarise(task: Task, turned: Turned, point: Mapping[str, float]) -> dict[str, object]:
    """Two numbers, at fair and at plain angles."""
    threshold = FOREGROUND if task == "nuclei" else point["threshold"]
    return {
        "inputs": "pixels of fields" if task == "nuclei" else "windows",
        "count": int(np.prod(turned.fair.shape[1:])),
        "fair": asdict(measure_robustness(turned.fair, threshold)),
        "plain": asdict(measure_robustness(turned.plain, threshold)),
    }


def _windows(
    task: Task, network: Network, pictures: Sequence[Picture], device: torch.device, most: int
) -> tuple[Tensor, Tensor]:
    """Windows with their surroundings, from which the corners of turned ones come; patches are mirrored for them."""
    cut_px = covering_size(surrounded_px(network)) + 2 * SPLINE_REACH
    if task == "tumor":
        batches, steps = middle_batches(pictures[:most], cut_px, device=device)
    else:
        batches = sampled_batches("mitosis", pictures, cut_px, batch=32, seed=SAMPLING_SEED, device=device)
        steps = range(-(-most // 32))
    images, labels = (torch.cat(parts) for parts in zip(*batches.load(steps, device), strict=True))
    return images[:most], labels[:most]


def _turn_field(
    network: Network, picture: Picture, device: torch.device, degrees: Sequence[float]
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """The middle of a field, and the probability (angles, height, width) that a pixel is of a nucleus, or a border of
    one; each map turned back.
    """
    image = replace(reader_of("nuclei"), with_nuclei=False).planes(picture)
    # With more around the middle than is looked at, turned corners are real pixels where the field is large enough.
    wide = covering_size(FIELD_PX + network.receptive_field)
    top, left = (max(0, (side - wide) // 2) for side in image.shape[:2])
    seen = image[top : top + wide, left : left + wide]
    maps = np.concatenate(list(predict_realigned(network, seen[None], device, degrees)))  # (angles, K, height, width)
    rows, columns = (slice(max(0, (side - FIELD_PX) // 2), (side + FIELD_PX) // 2) for side in seen.shape[:2])
    maps = maps[..., rows, columns]
    return seen[rows, columns], 1 - maps[:, BACKGROUND], maps[:, BORDER]
