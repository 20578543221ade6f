"""Maps of probabilities all over an image, tile by tile, upright and turned.

In: a network in eval mode, and a way to look at pixels. Out: maps on the network's outputs, turned back for each angle.
Tiles give what the whole image gives: to rounding, but for turns between the pixels, which are interpolated in a tile.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotopath import group
from rotopath.inference.layout import Span, divide, lay_out
from rotopath.models import DenseNetwork
from rotopath.nn import center_crop

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
    return predict_alike(network, image[None], device, rotations, tile_px, full, activation)[0]


def predict_alike(
    network: DenseNetwork,
    images: NDArray[np.uint8],
    device: torch.device,
    rotations: int = 1,
    tile_px: int | None = None,
    full: bool = False,
    activation: Activate = activate,
) -> list[Prediction]:
    """What `predict` says about each of several images (B, H, W, 3), which go through the network together."""
    maps = predict_realigned(network, images, device, group.angles(rotations), tile_px, full, activation)
    total = next(maps)
    for probabilities in maps:
        total = total + probabilities
    rows, columns = (lay_out(network.geometry, size) for size in images.shape[1:3])
    stride = 1 if full else network.geometry.stride_px
    return [Prediction(mean, stride, (rows.first_px, columns.first_px)) for mean in total / np.float32(rotations)]


def predict_realigned(
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
