"""How far a layer or a network is from commuting with rotation, as a number.

In: any callable from images or SE(2) features to images or features, an input, an angle. Out: a relative error.

How much predictions change when inputs turn.

In: probabilities of the same inputs at several angles, and the decisions made from them. Out: how far probabilities
scatter, and how many decisions depend on the angle.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from rotopath import group

FADE_FROM = 0.7  # of the inscribed radius: where inputs begin to fade when they are turned off the pixel grid


def equivariance_error(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    angle: float = 90.0,
    flip: bool = False,
    reflections: bool | None = None,
) -> float:
    """‖model(turned x) - turned model(x)‖ / ‖turned model(x)‖ for a turn by `angle` degrees; 0 is perfect.

    With `flip`, to turn is to mirror left and right first. Tensors with four axes are images (B, C, H, W), those with
    five SE(2) features (B, C, N, H, W), whose orientation axis shifts along; whether half of it is mirrored, its layers
    know, unless `reflections` says so. Outputs without positions, (B, K), should not change at all.

    Multiples of 90° permute pixels, and an exact model errs by rounding only. Other angles resample: x is then faded
    to zero towards the rim of its inscribed disc, so that turning it loses nothing, and outputs are compared on
    their inscribed disc. The model is left as it was found, batch statistics and random state included.

    >>> images = torch.rand(2, 3, 76, 76)
    >>> rp.equivariance_error(rp.models.mitosis(orientations=4), images) < 1e-4
    True
    >>> rp.equivariance_error(rp.models.mitosis(orientations=1), images) > 1e-2
    True
    """
    _expect_positions(x)
    if reflections is None:
        reflections = isinstance(model, nn.Module) and any(getattr(m, "reflections", False) for m in model.modules())
    turn = Motion(angle, flip, reflections)
    on_grid = angle % 90 == 0
    if not on_grid:
        height, width = x.shape[-2:]
        x = x * group.inscribed_disc(height, width, inner=FADE_FROM).to(x)
    with torch.no_grad():
        expected = turn(_call(model, x)).cpu().double()
        actual = _call(model, turn(x)).cpu().double()
    if actual.shape != expected.shape:
        raise ValueError(
            f"equivariance_error compares equal shapes, but the model gave {tuple(actual.shape)} for the turned input "
            f"and {tuple(expected.shape)}, turned, for the upright one."
        )
    if not on_grid and expected.ndim >= 4:
        disc = group.inscribed_disc(*expected.shape[-2:]).to(expected)
        expected, actual = expected * disc, actual * disc
    error, scale = float((actual - expected).norm()), float(expected.norm())
    if error == 0:
        return 0.0
    return error / scale if scale else math.inf


def untrained_errors(
    build: Callable[[], nn.Module], x: Tensor, angle: float = 90.0, draws: int = 9, training: bool = False
) -> list[float]:
    """The equivariance errors of freshly initialised models, the same ones each time, in rising order."""
    errors = []
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        for seed in range(draws):
            torch.manual_seed(seed)
            errors.append(equivariance_error(build().train(training).to(x), x, angle))
    return sorted(errors)


def smooth_images(count: int, size: int, channels: int = 3, blur_px: float = 2.0, seed: int = 0) -> Tensor:
    """Band-limited noise of unit variance, (count, channels, size, size): images that survive resampling."""
    noise = torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(seed))
    frequency = torch.fft.fftfreq(size).square()
    gaussian = torch.exp(-2 * (torch.pi * blur_px) ** 2 * (frequency[:, None] + frequency[None, :]))
    smooth: Tensor = torch.fft.ifft2(torch.fft.fft2(noise) * gaussian).real
    return smooth / smooth.std()


def _call(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The model's output, from the same random numbers each time and without a trace in its buffers."""
    x = x.clone()  # the model may work in place
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        if not isinstance(model, nn.Module):
            return model(x)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        output: Tensor = functional_call(model, buffers, (x,))
        return output


@dataclass(frozen=True)
class Motion:
    """What is done to images, features and answers: perhaps a flip, then a rotation."""

    angle: float
    flip: bool
    reflections: bool  # in features

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor) and x.ndim < 3:
            return x
        _expect_positions(x)
        if x.ndim == 4:
            return group.rotate(group.flip(x) if self.flip else x, self.angle)
        if self.flip and not self.reflections:
            raise ValueError("features without reflections cannot be mirrored; use layers with reflections=True.")
        return group.rotate_features(group.flip_features(x) if self.flip else x, self.angle, self.reflections)


def _expect_positions(x: object) -> None:
    if not isinstance(x, Tensor) or x.ndim not in (4, 5) or not x.is_floating_point():
        got = f"a tensor of shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"equivariance_error takes models from images (B, C, H, W) or SE(2) features (B, C, N, H, W) to one tensor "
            f"of images, features, or answers (B, K), in floating point; got {got}."
        )


STEPS = 16  # of a full turn: the paper's π/8


@dataclass(frozen=True)
class Robustness:
    deviation: float  # the standard deviation over angles, on average over inputs
    changed: float  # the share of inputs whose decision is not the same at every angle


def list_angles(fair: bool = True) -> list[float]:
    """The angles in degrees at which inputs are compared: steps of 22.5°, offset by half a step if fair.

    The paper's own steps include multiples of 90°, which leave pixels as they are, while the others blur; between the
    steps all angles resample alike, and what is left is the network's doing.

    >>> from rotopath.metrics.equivariance import list_angles
    >>> list_angles(fair=False)[:3], list_angles()[:3]
    ([0.0, 22.5, 45.0], [11.25, 33.75, 56.25])
    """
    offset = 360 / STEPS / 2 if fair else 0.0
    return [angle + offset for angle in group.angles(STEPS)]


def measure_robustness(probabilities: NDArray[np.floating], decisions: NDArray[np.generic]) -> Robustness:
    """From probabilities and decisions (angles, inputs), or of further axes, such as pixels that were rotated back."""
    if probabilities.ndim < 2 or 0 in probabilities.shape or decisions.shape != probabilities.shape:
        raise ValueError(
            f"Robustness takes probabilities and decisions (angles, inputs), one or more of each; got shapes "
            f"{probabilities.shape} and {decisions.shape}."
        )
    changed = (decisions != decisions[:1]).any(axis=0)
    return Robustness(float(probabilities.std(axis=0, dtype=np.float64).mean()), float(changed.mean()))
