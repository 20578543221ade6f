"""Maps of probabilities all over an image, tile by tile, upright and turned.

In: a network in eval mode, and a way to look at pixels. Out: maps on the network's outputs, turned back for each angle.
Tiles give what the whole image gives: to rounding, but for turns between the pixels, which are interpolated in a tile.

Single windows, upright and rotated: one answer each.

In: a network, and square patches at its spacing. Out: probabilities of their middles.

A network made ready to answer on a device, in the form and in the precision that are fast there.

In: a trained network. Out: one with its geometry and, to rounding, its answers, in float32. Where Triton's kernels do
the work it stays as it is, since they need fewer passes over memory than the layers of a plain CNN; elsewhere it is
frozen.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rotopath import group
from rotopath.inference.tiling import Span, divide, lay_out
from rotopath.models import DenseNetwork, Geometry, freeze
from rotopath.models.protocols import replace_module, unwrap
from rotopath.models.registry import is_equivariant
from rotopath.nn import center_crop, gpu

TILE_PX = 1024  # a side; a network with 8 orientations takes about 1.5 GB of memory for it
SPLINE_REACH = 4  # pixels around a place that interpolation reads there, to about one percent
Look = Callable[[Span, Span], Tensor]  # at rows and columns in pixels: (B, 3, h, w), mirrored beyond edges
Activate = Callable[[Tensor], Tensor]  # logits (B, K, h, w) to probabilities


@dataclass(frozen=True)
class Prediction:
    """Probabilities on a grid of positions; pixels are counted from 0, whole numbers at their centres."""

    probabilities: NDArray[np.float32]  # (K, h, w)
    stride_px: int  # from one position to the next
    first_px: tuple[float, float]  # row and column of the first position

    def positions(self, indices: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows and columns of the map (k, 2), or between them, as rows and columns of the image."""
        return np.asarray(self.first_px) + self.stride_px * indices


def activate(logits: Tensor) -> Tensor:
    """Probabilities of a single yes or no, or of one of several classes. Tasks may have an activation of their own."""
    return logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)


def predict(
    network: DenseNetwork,
    image: NDArray[np.uint8],
    device: torch.device,
    rotations: int = 1,
    tile_px: int | None = None,
    full: bool = False,
    activation: Activate = activate,
) -> Prediction:
    """Probabilities all over an image (H, W, 3): the mean over `rotations` turns of it, each turned back.

    The network has to be on the device. The image is mirrored beyond its edges, so that outputs cover it: a network of
    stride 1 answers for every pixel, any other for places of which every pixel has one within half a stride; or, with
    `full`, for every pixel between the first and the last of those, at stride² times the cost.
    """
    return predict_batch(network, image[None], device, rotations, tile_px, full, activation)[0]


def predict_batch(
    network: DenseNetwork,
    images: NDArray[np.uint8],
    device: torch.device,
    rotations: int = 1,
    tile_px: int | None = None,
    full: bool = False,
    activation: Activate = activate,
) -> list[Prediction]:
    """What `predict` says about each of several images (B, H, W, 3), which go through the network together."""
    maps = predict_rotations(network, images, device, group.angles(rotations), tile_px, full, activation)
    total = next(maps)
    for probabilities in maps:
        total = total + probabilities
    rows, columns = (lay_out(network.geometry, size) for size in images.shape[1:3])
    stride = 1 if full else network.geometry.stride_px
    return [Prediction(mean, stride, (rows.first_px, columns.first_px)) for mean in total / np.float32(rotations)]


def predict_rotations(
    network: DenseNetwork,
    images: NDArray[np.uint8],
    device: torch.device,
    degrees: Sequence[float],
    tile_px: int | None = None,
    full: bool = False,
    activation: Activate = activate,
) -> Iterator[NDArray[np.float32]]:
    """The maps (B, K, h, w) that `predict` takes the mean of: for each angle those of turned images, turned back.

    Multiples of 90° are exact. For others the image is mirrored further, so that no turned window lacks pixels.
    """
    expect_eval(network)
    if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8 or 0 in images.shape:
        raise ValueError(f"predict takes images (H, W, 3) of bytes; got shape {images.shape[1:]} of {images.dtype}.")
    layouts = [lay_out(network.geometry, size) for size in images.shape[1:3]]
    pixels = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).to(device)
    finer = network.geometry.stride_px if full else 1
    rows, columns = (slice(side.kept.start * finer, (side.kept.stop - 1) * finer + 1) for side in layouts)

    def look(rows_px: Span, columns_px: Span) -> Tensor:
        return mirror_around(pixels, rows_px, columns_px)

    for angle in degrees:
        frame = tuple(side.frame_px for side in layouts)
        maps = predict_frame(network, look, frame, angle, finer, tile_px, activation)
        yield maps[..., rows, columns].cpu().numpy()


def predict_frame(
    network: DenseNetwork,
    look: Look,
    frame: tuple[Span, ...],
    angle: float,
    finer: int = 1,
    tile_px: int | None = None,
    activation: Activate = activate,
) -> Tensor:
    """Probabilities (B, K, h, w) of a frame on the pooling grid, rotated by the angle, and rotated back.

    With `finer`, a map has as many outputs more: those between two places, of the network moved by less than a stride.
    """
    rest = angle % 90
    if rest == 0:
        turned = group.rotate(look(*frame), angle)
        return group.rotate(_answer_finely(network, turned, finer, tile_px, activation), -angle).clamp(0, 1)
    wide = tuple(_widened(network, frame))
    turned = group.rotate(_turned(network, look, wide, rest), angle - rest)
    maps = _answer_finely(network, turned, finer, tile_px, activation)
    maps = group.rotate(group.rotate(maps, rest - angle), -rest).clamp(0, 1)  # splines swing over
    return center_crop(maps, *((network.geometry.output_size(span.size) - 1) * finer + 1 for span in frame))


def reach_px(network: DenseNetwork, frame: tuple[Span, ...], degrees: Sequence[float]) -> tuple[Span, ...]:
    """The pixels that `predict_frame` looks at for all of the angles."""
    if all(angle % 90 == 0 for angle in degrees):
        return frame
    return tuple(span.widened(_corners_px(network)) for span in _widened(network, frame))


def _answer_finely(
    network: DenseNetwork, frame: Tensor, finer: int, tile_px: int | None, activation: Activate
) -> Tensor:
    """The answers to a frame and, between them, to all of its parts that lie a fraction of the stride further."""
    upright = _answer_in_tiles(network, frame, tile_px, activation)
    if finer == 1:
        return upright
    stride = network.geometry.stride_px
    step, (height, width) = stride // finer, upright.shape[-2:]
    maps = upright.new_empty(*upright.shape[:2], (height - 1) * finer + 1, (width - 1) * finer + 1)
    maps[..., ::finer, ::finer] = upright
    moves = [(down, right) for down in range(finer if height > 1 else 1) for right in range(finer if width > 1 else 1)]
    for down, right in moves[1:]:
        # Between the first output and the last there is one less.
        rows, columns = (
            slice(by * step, size - (stride - by * step) % stride)
            for by, size in zip((down, right), frame.shape[-2:], strict=True)
        )
        maps[..., down::finer, right::finer] = _answer_in_tiles(network, frame[..., rows, columns], tile_px, activation)
    return maps


def _answer_in_tiles(network: DenseNetwork, frame: Tensor, tile_px: int | None, activation: Activate) -> Tensor:
    """Probabilities (B, K, h, w) of a frame (B, 3, H, W) on the pooling grid, put together from tiles."""
    geometry = network.geometry
    lost, stride, block = geometry.lost_px, geometry.stride_px, geometry.block
    height, width = (geometry.output_size(size) for size in frame.shape[-2:])
    maps = torch.empty(len(frame), geometry.outputs, height, width, device=frame.device)
    size_px = TILE_PX if tile_px is None else tile_px
    for rows, seen_rows in divide(geometry, Span(0, height), height, size_px, block):
        for columns, seen_columns in divide(geometry, Span(0, width), width, size_px, block):
            down, across = (slice(seen.start * stride, seen.stop * stride + lost) for seen in (seen_rows, seen_columns))
            found = answer(network, frame[..., down, across], activation)
            maps[..., slice(*rows), slice(*columns)] = found[..., rows.within(seen_rows), columns.within(seen_columns)]
    return maps


def _widened(network: DenseNetwork, frame: tuple[Span, ...]) -> Iterator[Span]:
    """Frames about the same middle, and on the grid, whose outputs cover those of the frame when they are turned."""
    step, stride = network.geometry.step_px, network.geometry.stride_px
    outputs = [network.geometry.output_size(span.size) for span in frame]
    # The circle through the corners of the upright outputs, and what a spline reads there.
    across_px = (math.hypot(*outputs) + 2 * SPLINE_REACH) * stride
    for span, count in zip(frame, outputs, strict=True):
        yield span.widened(math.ceil((across_px - count * stride) / (2 * step)) * step)


def _corners_px(network: DenseNetwork) -> int:
    """By how much the corners of turned windows reach further out than the middles of a frame's sides."""
    field = network.geometry.smallest_px
    return (group.covering_size(field) - field) // 2 + network.geometry.step_px + SPLINE_REACH


def _turned(network: DenseNetwork, look: Look, frame: tuple[Span, ...], angle: float) -> Tensor:
    """What the network sees of an image turned by less than 90°."""
    rows, columns = frame
    pixels = look(*(span.widened(_corners_px(network)) for span in frame))
    turned = group.rotate(pixels.to(torch.float32) / 255, angle).clamp(0, 1)
    return center_crop(turned, rows.size, columns.size)


@torch.no_grad()
def answer(network: DenseNetwork, images: Tensor, activation: Activate = activate) -> Tensor:
    """Probabilities (B, K, h, w)."""
    return activation(network(images)).float()


def mirror_around(pixels: Tensor, rows: Span, columns: Span) -> Tensor:
    """The pixels (..., H, W) of spans that reach beyond the image, where they see it mirrored."""
    height, width = pixels.shape[-2:]
    rows_read = group.mirror(torch.arange(rows.start, rows.stop, device=pixels.device), height)
    columns_read = group.mirror(torch.arange(columns.start, columns.stop, device=pixels.device), width)
    return pixels[..., rows_read[:, None], columns_read]


def expect_eval(network: DenseNetwork) -> None:
    if network.training:
        raise ValueError("The network is in training mode, and would normalise by what it sees; use network.eval().")


PIXELS_AT_ONCE = 2**20  # 135 windows of 88 px; a network with 8 orientations takes about 2 GB of memory for them


def predict_patches(
    network: DenseNetwork, windows: Tensor, rotations: int = 1, activation: Activate = activate
) -> NDArray[np.float32]:
    """The probabilities (B, K) of the middle of each patch (B, 3, S, S): the mean over `rotations` rotations of it."""
    answers: NDArray[np.float32] = predict_rotated(network, windows, group.angles(rotations), activation).mean(axis=0)
    return answers


def predict_rotated(
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


class MixedNetwork(nn.Module):
    """A network whose convolutions compute in another precision (autocast); weights and logits stay float32."""

    def __init__(self, network: DenseNetwork, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network, dtype
        self.training = network.training

    @property
    def geometry(self) -> Geometry:
        return self.network.geometry

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.dtype):
            logits: Tensor = self.network(x)
        return logits.float()  # probabilities near 1 would be coarse in halves


def prepare(network: DenseNetwork, device: torch.device, dtype: torch.dtype = torch.float32) -> DenseNetwork:
    """The network for evaluation on a device, computing in float32 or a half of it; the one given is not changed."""
    ready = copy.deepcopy(network) if gpu.serves(device) else freeze_inside(network)
    ready = ready.to(device).eval()
    return ready if dtype == torch.float32 else MixedNetwork(ready, dtype)


def freeze_inside(network: DenseNetwork) -> DenseNetwork:
    """The network as plain layers. One that has no SE(2) layers, or that cannot be followed, stays as it is."""
    module = unwrap(network)
    if not is_equivariant(module):
        return copy.deepcopy(network)
    try:
        return replace_module(network, freeze(module))
    except ValueError:
        return copy.deepcopy(network)  # as right, and slower
