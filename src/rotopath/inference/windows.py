"""Single windows, upright and turned: one answer each.

In: a network with one logit, and square patches at its spacing. Out: probabilities of their middles.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotopath import group
from rotopath.inference.dense import SPLINE_REACH, answer, expect_eval, mirror_around
from rotopath.inference.layout import Span
from rotopath.models import Network
from rotopath.nn import center_crop

WINDOWS_AT_ONCE = 256


def predict_patches(network: Network, windows: Tensor, rotations: int = 1) -> NDArray[np.float32]:
    """The probability (B,) of the middle of each patch (B, 3, S, S): the mean over `rotations` turns of it."""
    answers: NDArray[np.float32] = predict_turned(network, windows, group.angles(rotations)).mean(axis=0)
    return answers


def predict_turned(network: Network, images: Tensor, degrees: Sequence[float]) -> NDArray[np.float32]:
    """The probabilities (angles, B) of the middle of images (B, 3, S, S) turned by each angle, wherever those are.

    The window is cut out after turning, so larger images lend their surroundings to its corners; smaller ones are
    mirrored beyond their edges.
    """
    expect_eval(network)
    window_px = network.receptive_field
    if images.ndim != 4 or images.shape[-1] != images.shape[-2] or images.shape[-1] < window_px:
        raise ValueError(
            f"Windows of {window_px} px are cut out of square images (B, 3, S, S) that have at least as many; "
            f"got shape {tuple(images.shape)}."
        )
    if network.architecture.outputs != 1:
        raise ValueError(f"Single windows have one answer, but {network.architecture.name} gives a map of classes.")
    answers = np.empty((len(degrees), len(images)), np.float32)
    for start in range(0, len(images), WINDOWS_AT_ONCE):
        part = images[start : start + WINDOWS_AT_ONCE]
        turned: dict[float, Tensor] = {}  # by less than 90°
        for i, angle in enumerate(degrees):
            rest = angle % 90
            if rest not in turned:
                turned[rest] = center_crop(_turn_windows(part, window_px, rest), window_px, window_px)
            found = answer(network, group.rotate(turned[rest], angle - rest))
            answers[i, start : start + len(part)] = found.flatten().cpu().numpy()
    return answers


def _turn_windows(images: Tensor, window_px: int, angle: float) -> Tensor:
    """The middle of images turned by less than 90°, somewhat larger than the window."""
    if angle == 0:
        return images
    values = images if images.is_floating_point() else images.to(torch.float32) / 255
    missing = group.covering_size(window_px) + 2 * SPLINE_REACH - images.shape[-1]  # negative where there is more
    span = Span(0, images.shape[-1]).widened(-(-missing // 2))
    return group.rotate(mirror_around(values, span, span), angle).clamp(0, 1)
