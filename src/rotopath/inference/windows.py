"""Single windows, upright and rotated: one answer each.

In: a network, and square patches at its spacing. Out: probabilities of their middles.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotopath import group
from rotopath.inference.dense import SPLINE_REACH, Activate, activate, answer, expect_eval, mirror_around
from rotopath.inference.layout import Span
from rotopath.models import DenseNetwork
from rotopath.nn import center_crop

PIXELS_AT_ONCE = 2**20  # 135 windows of 88 px; a network with 8 orientations takes about 2 GB of memory for them


def predict_patches(
    network: DenseNetwork, windows: Tensor, rotations: int = 1, activation: Activate = activate
) -> NDArray[np.float32]:
    """The probabilities (B, K) of the middle of each patch (B, 3, S, S): the mean over `rotations` rotations of it."""
    answers: NDArray[np.float32] = predict_turned(network, windows, group.angles(rotations), activation).mean(axis=0)
    return answers


def predict_turned(
    network: DenseNetwork, images: Tensor, degrees: Sequence[float], activation: Activate = activate
) -> NDArray[np.float32]:
    """The probabilities (angles, B, K) of the middle of images (B, 3, S, S) rotated by each angle, on any device.

    Windows are cut out after the rotation, with the rim that the network sees around them, so that an answer is that of
    the same position in a slide; images that are smaller than their corners need are mirrored beyond their edges.
    """
    expect_eval(network)
    geometry = network.geometry
    field_px, window_px = geometry.smallest_px, geometry.surrounded_px
    spare_px = images.shape[-1] - field_px
    if images.ndim != 4 or images.shape[-1] != images.shape[-2] or spare_px < 0 or spare_px % 2:
        raise ValueError(
            f"Windows of {field_px} px are cut out of the middle of square images (B, 3, S, S) that have as many, or "
            f"an even number more; got shape {tuple(images.shape)}."
        )
    if geometry.block != 1:
        raise ValueError("Single windows have one answer, but this network gives a map for the smallest window.")
    answers = np.empty((len(degrees), len(images), geometry.outputs), np.float32)
    at_once = max(1, PIXELS_AT_ONCE // window_px**2)
    for start in range(0, len(images), at_once):
        part = images[start : start + at_once]
        turned: dict[float, Tensor] = {}  # by less than 90°
        for i, angle in enumerate(degrees):
            rest = angle % 90
            if rest not in turned:
                turned[rest] = center_crop(_turn_windows(part, window_px, rest), window_px, window_px)
            maps = center_crop(answer(network, group.rotate(turned[rest], angle - rest), activation), 1, 1)
            answers[i, start : start + len(part)] = maps.flatten(1).cpu().numpy()
    return answers


def _turn_windows(images: Tensor, window_px: int, angle: float) -> Tensor:
    """The middle of images turned by less than 90°, no smaller than the window."""
    needed_px = group.covering_size(window_px) + 2 * SPLINE_REACH if angle else window_px
    missing = needed_px - images.shape[-1]  # negative where there is more
    span = Span(0, images.shape[-1]).widened(-(-missing // 2))
    surrounded = mirror_around(images, span, span)
    if angle == 0:
        return surrounded
    values = surrounded if surrounded.is_floating_point() else surrounded.to(torch.float32) / 255
    return group.rotate(values, angle).clamp(0, 1)
