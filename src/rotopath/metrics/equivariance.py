"""Measure the equivariance of models, and the robustness of predictions to rotations of the inputs.

A model is equivariant if rotating the input only rotates the output. `equivariance_error` measures how far a layer or
network is from being equivariant. `measure_robustness` measures how much the probabilities and decisions of a trained
network differ between rotations of the same inputs; `measure_resampling` measures which part of this is an effect of
interpolating pixels, and not of the rotation; `measure_similarity` compares embeddings. `docs/audit.md` explains them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from rotopath import group

FADE_FROM = 0.7  # inputs fade to zero between this fraction of the radius of their inscribed disc and its edge
ROBUSTNESS_STEPS = 16  # number of rotations, 22.5° apart, as in the paper of Lafarge et al. (arXiv:2002.08725)
QUARTERS = 4  # of these rotations are multiples of 90°, on the grid of pixels
MOVED_PX = 2  # by nearby rotations, at the edges of an image
NEARBY_DEGREES = (1.0, 5.0)  # lowest and highest difference of these rotations
NEIGHBORS = 10  # nearest neighbors of an embedding that are compared


# Equivariance


def equivariance_error(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    angle: float = 90.0,
    flip: bool = False,
    reflections: bool | None = None,
) -> float:
    """Return the equivariance error of a model, which is 0 if rotating the input only rotates the output.

    The error is relative: ‖model(Rx) - R model(x)‖ / ‖R model(x)‖. R is a rotation by `angle` degrees,
    counter-clockwise; with `flip`, R is a left-right flip followed by the rotation.

    Inputs and outputs are images (B, C, H, W) or SE(2) features (B, C, N, H, W), in floating point. R also shifts the
    orientation axis N of features. `reflections` states whether the second half of this axis is for reflected
    orientations. None means True if a layer of the model has reflections, otherwise False. Outputs may also be vectors
    (B, K), which R does not change.

    Rotations by multiples of 90° move pixels without interpolation, so that an exactly equivariant model has only
    rounding errors. Rotations by other angles interpolate. For these angles, the input is faded to zero towards the
    edge of its inscribed disc, so that the rotation moves no content out of the image. The outputs are then compared on
    their inscribed disc only.

    The model, its batch norm statistics and the random state are not changed. Raises ValueError for tensors of other
    shapes or types, or if the outputs for the original and the rotated input differ in shape.

    >>> images = torch.rand(2, 3, 76, 76)
    >>> rp.equivariance_error(rp.models.mitosis(orientations=4), images) < 1e-4
    True
    >>> rp.equivariance_error(rp.models.mitosis(orientations=1), images) > 1e-2
    True
    """
    _check_has_positions(x)
    if reflections is None:
        reflections = isinstance(model, nn.Module) and any(getattr(m, "reflections", False) for m in model.modules())
    transform = Transform(angle, flip, reflections)
    on_grid = angle % 90 == 0
    if not on_grid:
        height, width = x.shape[-2:]
        x = x * group.inscribed_disc(height, width, inner=FADE_FROM).to(x)
    with torch.no_grad():
        expected = transform(_call(model, x)).cpu().double()
        actual = _call(model, transform(x)).cpu().double()
    if actual.shape != expected.shape:
        raise ValueError(
            f"equivariance_error() compares outputs of equal shape, but the output for the rotated input has the shape "
            f"{tuple(actual.shape)}, and the rotated output for the original input has the shape "
            f"{tuple(expected.shape)}; use an input size for which both shapes are equal."
        )
    return relative_error(actual, expected, on_grid)


def relative_error(actual: Tensor, expected: Tensor, on_grid: bool = True) -> float:
    """Return ‖actual - expected‖ / ‖expected‖; for rotations off the grid, on the inscribed disc of maps only."""
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
    """Return the equivariance errors of `draws` newly initialized models, sorted from low to high.

    `build` is a function that returns a new model. `x` and `angle`, in degrees, are those of `equivariance_error`. The
    models are in training mode if `training` is True, otherwise in evaluation mode. Their weights are initialized with
    the random seeds 0, 1, …, so that every call measures the same models.
    """
    errors = []
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        for seed in range(draws):
            torch.manual_seed(seed)
            errors.append(equivariance_error(build().train(training).to(x), x, angle))
    return sorted(errors)


def smooth_images(count: int, size: int, channels: int = 3, blur_px: float = 2.0, seed: int = 0) -> Tensor:
    """Return smooth random images (count, channels, size, size), whose rotations have small interpolation errors.

    The images are white noise after a Gaussian blur with a standard deviation of `blur_px` pixels, scaled to a standard
    deviation of 1.
    """
    noise = torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(seed))
    frequency = torch.fft.fftfreq(size).square()
    gaussian = torch.exp(-2 * (torch.pi * blur_px) ** 2 * (frequency[:, None] + frequency[None, :]))
    smooth: Tensor = torch.fft.ifft2(torch.fft.fft2(noise) * gaussian).real
    return smooth / smooth.std()


def _call(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return model(x) without changing x, the buffers of the model or the random state.

    Two calls in succession therefore use the same random numbers, for example in dropout layers.
    """
    x = x.clone()  # the model may change its input in place
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        if not isinstance(model, nn.Module):
            return model(x)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        output: Tensor = functional_call(model, buffers, (x,))
        return output


@dataclass(frozen=True)
class Transform:
    """Flip (optionally) and then rotate images or features. Vectors (B, K) do not change."""

    angle: float  # in degrees, counter-clockwise
    flip: bool  # left to right
    reflections: bool  # whether the second half of the orientation axis of features is for reflected orientations

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor) and x.ndim < 3:
            return x
        _check_has_positions(x)
        if x.ndim == 4:
            return group.rotate(group.flip(x) if self.flip else x, self.angle)
        if self.flip and not self.reflections:
            raise ValueError("Features without reflections cannot be flipped; build layers with reflections=True.")
        return group.rotate_features(group.flip_features(x) if self.flip else x, self.angle, self.reflections)


def _check_has_positions(x: object) -> None:
    """Raise ValueError unless x is a floating-point tensor of images or of SE(2) features."""
    if not isinstance(x, Tensor) or x.ndim not in (4, 5) or not x.is_floating_point():
        got = f"a tensor of shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"equivariance_error() takes models whose input is images (B, C, H, W) or SE(2) features (B, C, N, H, W), "
            f"and whose output is one tensor of images, features or vectors (B, K), all in floating point; got {got}."
        )


# Robustness of predictions


@dataclass(frozen=True)
class Robustness:
    """Change of predictions when the inputs are rotated."""

    deviation: float  # standard deviation of the probability over angles, averaged over inputs
    changed: float  # fraction of inputs with different decisions at different angles


def robustness_angles(fair: bool = True) -> list[float]:
    """Return the 16 angles, in degrees, at which predictions are compared.

    With `fair=False`, these are the angles of the paper of Lafarge et al. (arXiv:2002.08725): 0°, 22.5°, 45°, …
    Rotations by multiples of 90° are exact, but all other rotations blur the image, and the blur alone changes
    predictions. With `fair=True`, 11.25° is added to each angle. All rotations then blur the image about equally, so
    that the blur causes almost no differences between predictions.

    >>> from rotopath.metrics.equivariance import robustness_angles
    >>> robustness_angles(fair=False)[:3], robustness_angles()[:3]
    ([0.0, 22.5, 45.0], [11.25, 33.75, 56.25])
    """
    offset = 360 / ROBUSTNESS_STEPS / 2 if fair else 0.0
    return [angle + offset for angle in group.angles(ROBUSTNESS_STEPS)]


def measure_robustness(probabilities: NDArray[np.floating], decisions: NDArray[np.generic]) -> Robustness:
    """Measure how much the predictions for the same inputs differ between rotation angles.

    `probabilities` (angles, inputs) has a probability for each angle and input. `decisions` (angles, inputs) has the
    decision, such as the predicted class. Both arrays may have further axes, such as pixels, which count as inputs.
    Raises ValueError if the shapes of the arrays differ or the arrays are empty.
    """
    if probabilities.ndim < 2 or 0 in probabilities.shape or decisions.shape != probabilities.shape:
        raise ValueError(
            f"The probabilities have the shape {probabilities.shape} and the decisions {decisions.shape}; both must be "
            f"(angles, inputs) and not empty."
        )
    changed = (decisions != decisions[:1]).any(axis=0)
    return Robustness(float(probabilities.std(axis=0, dtype=np.float64).mean()), float(changed.mean()))


def quarter_angles() -> list[float]:
    """Return the angles of the grid of pixels, 0°, 90°, 180° and 270°. Rotations by these do not interpolate."""
    return group.angles(QUARTERS)


def find_nearby_step(side_px: float) -> float:
    """Return the angle, in degrees, by which a rotation moves pixels at the edges of an image by two pixels.

    These pixels are then interpolated in another way, although the image is hardly rotated. The angle is at least 1°
    and at most 5°.

    >>> from rotopath.metrics.equivariance import find_nearby_step
    >>> round(find_nearby_step(88), 1), find_nearby_step(10)
    (2.6, 5.0)
    """
    return float(min(max(math.degrees(2 * MOVED_PX / side_px), NEARBY_DEGREES[0]), NEARBY_DEGREES[1]))


@dataclass(frozen=True)
class Resampling:
    """The part of the change of predictions under rotation that is due to interpolating pixels."""

    deviation: float  # standard deviation of the probability over interpolations at nearly the same angle, averaged
    changed: float  # fraction of inputs whose decision differs between two interpolations at nearly the same angle
    fraction: float  # fraction of the variance over the rotations that interpolation explains, 0 to 1
    same_pixels: float  # fraction of the variance between rotations of the same pixels, without interpolation
    beyond: Robustness  # change over the rotations after the part of interpolation is subtracted


def measure_resampling(
    probabilities: NDArray[np.floating],
    decisions: NDArray[np.generic],
    nearby: NDArray[np.floating],
    nearby_decisions: NDArray[np.generic],
) -> Resampling:
    """Measure the part of interpolation in the change of predictions over the 16 fair angles, and subtract it.

    All arrays are (16, inputs), or have further axes, in the order of `robustness_angles()`. `probabilities` and
    `decisions` are those of `measure_robustness`. `nearby` and `nearby_decisions` are those at slightly larger angles
    (`find_nearby_step`), at which the images are interpolated in another way, but hardly rotated.

    The fair angles are γ + 90°·j, with four γ between 0° and 90°. Images with equal γ have the same interpolated
    pixels, at other positions. Interpolation can thus only explain differences between the means over j. If it changes
    these by independent random numbers with the variance v, it adds v·3/4 to the variance of the four means. Half of
    the squared difference of the means at γ and at the nearby angle estimates v. At most the variance of the means is
    subtracted, summed over inputs.

    A decision changes beyond interpolation if it differs between angles with equal γ, or if it differs between other
    angles but not between any angle and the nearby one.
    """
    before = measure_robustness(probabilities, decisions)
    measure_robustness(nearby, nearby_decisions)  # checks the shapes
    angles, others = (_group_by_quarter(values.astype(np.float64)) for values in (probabilities, nearby))
    total = angles.var(axis=(0, 1)).sum()
    between = angles.mean(axis=0).var(axis=0).sum()
    noise = np.square(angles.mean(axis=0) - others.mean(axis=0)).mean(axis=0) / 2
    fraction = float(min(between, noise.sum() * (1 - 1 / angles.shape[1])) / total) if total else 0.0
    chosen = _group_by_quarter(decisions)
    by_rotation = (chosen != chosen[:1]).any(axis=(0, 1))
    by_interpolation = (decisions != nearby_decisions).any(axis=0)
    differs = (decisions != decisions[:1]).any(axis=0)
    return Resampling(
        deviation=float(np.sqrt(np.square(probabilities.astype(np.float64) - nearby).mean(axis=0) / 2).mean()),
        changed=float(by_interpolation.mean()),
        fraction=fraction,
        same_pixels=float(1 - between / total) if total else 0.0,
        beyond=Robustness(
            before.deviation * math.sqrt(1 - fraction), float((by_rotation | (differs & ~by_interpolation)).mean())
        ),
    )


def _group_by_quarter(values: NDArray[np.generic]) -> NDArray[Any]:
    """Split the axis of the fair angles γ + 90°·j: the result is (j, γ, ...)."""
    return values.reshape(QUARTERS, ROBUSTNESS_STEPS // QUARTERS, *values.shape[1:])


# Embeddings


@dataclass(frozen=True)
class Similarity:
    """How similar the embeddings of an input are at different angles. Both numbers are 1 if they are equal."""

    cosine: float  # cosine similarity between two angles, averaged over pairs of angles and inputs
    neighbors: float | None  # fraction of the nearest neighbors that two angles share; None for fewer than 3 inputs


def measure_similarity(embeddings: NDArray[np.floating]) -> Similarity:
    """Measure how similar embeddings (angles, inputs, F) are between angles.

    The nearest neighbors of an input are the other inputs with the highest cosine similarity at the same angle: up to
    ten, but at most half of them. Raises ValueError if there are fewer than two angles.
    """
    angles, inputs = embeddings.shape[:2]
    if angles < 2 or not inputs:
        raise ValueError(
            f"Embeddings of two angles or more, and of one input or more, are needed; got {angles, inputs}."
        )
    units, pairs = _normalize(embeddings), angles * (angles - 1)
    cosine = float(mean_cosines(embeddings).mean())
    count = min(NEIGHBORS, (inputs - 1) // 2)
    if not count:
        return Similarity(cosine, None)
    times = np.zeros(
        (inputs, inputs), np.int64
    )  # number of angles at which the second input is a neighbor of the first
    for vectors in units:
        similarity = vectors @ vectors.T
        np.fill_diagonal(similarity, -np.inf)
        nearest = np.argpartition(-similarity, count - 1, axis=1)[:, :count]
        times[np.arange(inputs)[:, None], nearest] += 1
    return Similarity(cosine, float((times * (times - 1)).sum() / (pairs * inputs * count)))


def mean_cosines(embeddings: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the mean cosine similarity (inputs,) between pairs of angles, for embeddings (angles, inputs, F)."""
    units, angles = _normalize(embeddings), len(embeddings)
    sums: NDArray[np.float64] = np.square(units.sum(axis=0)).sum(axis=-1) - np.square(units).sum(axis=(0, 2))
    return sums / (angles * (angles - 1))


def _normalize(embeddings: NDArray[np.floating]) -> NDArray[np.float64]:
    """Scale vectors to length 1. Vectors of zeros, which have no direction, stay zeros."""
    vectors = embeddings.astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths == 0, 1, lengths)
