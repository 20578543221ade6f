"""A trained network applied to images: whole ones, and single windows.

In: a network in eval mode, and images at its spacing. Out: probabilities, and where they lie; the mean over turned
inputs if asked for. Large images are predicted tile by tile, with the same result.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotopath import group
from rotopath.models import Network
from rotopath.nn import center_crop
from rotopath.tasks.prediction import Prediction

TILE_PX = 1024  # a side; a network with 8 orientations takes about 1.5 GB of memory for it
WINDOWS_AT_ONCE = 256
SPLINE_REACH = 4  # pixels around a place that interpolation reads there, to about one percent


def predict(
    network: Network, image: NDArray[np.uint8], device: torch.device, rotations: int = 1, tile_px: int | None = None
) -> Prediction:
    """Probabilities all over an image (H, W, 3): the mean over `rotations` turns of it, each turned back.

    The network has to be on the device. The image is mirrored beyond its edges, so that outputs cover it: a network of
    stride 1 answers for every pixel, any other for places of which every pixel has one within half a stride.
    """
    return predict_alike(network, image[None], device, rotations, tile_px)[0]


def predict_alike(
    network: Network, images: NDArray[np.uint8], device: torch.device, rotations: int = 1, tile_px: int | None = None
) -> list[Prediction]:
    """What `predict` says about each of several images (B, H, W, 3), which go through the network together."""
    maps = predict_realigned(network, images, device, group.angles(rotations), tile_px)
    total = next(maps)
    for probabilities in maps:
        total = total + probabilities
    rows, columns = (_lay_out(network, size) for size in images.shape[1:3])
    return [
        Prediction(mean, network.stride, (rows.first_px, columns.first_px)) for mean in total / np.float32(rotations)
    ]


def predict_realigned(
    network: Network,
    images: NDArray[np.uint8],
    device: torch.device,
    degrees: Sequence[float],
    tile_px: int | None = None,
) -> Iterator[NDArray[np.float32]]:
    """The maps (B, K, h, w) that `predict` takes the mean of: for each angle those of turned images, turned back.

    Multiples of 90° are exact. For others the image is mirrored further, so that no turned window lacks pixels.
    """
    _expect_eval(network)
    if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8 or 0 in images.shape:
        raise ValueError(f"predict takes images (H, W, 3) of bytes; got shape {images.shape[1:]} of {images.dtype}.")
    rows, columns = (_lay_out(network, size) for size in images.shape[1:3])
    pixels = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2)
    frames: dict[float, Tensor] = {}  # turned by less than 90°, and used four times in a full turn
    for angle in degrees:
        rest = angle % 90
        if rest not in frames:
            frames[rest] = _turn_frame(network, pixels.to(device), rows, columns, rest)
        maps = _predict_frame(network, group.rotate(frames[rest], angle - rest), tile_px)
        maps = group.rotate(group.rotate(maps, rest - angle), -rest)
        maps = center_crop(maps, rows.outputs, columns.outputs)[..., rows.kept, columns.kept]
        yield maps.clamp(0, 1).cpu().numpy()  # splines swing over


def predict_patches(network: Network, windows: Tensor, rotations: int = 1) -> NDArray[np.float32]:
    """The probability (B,) of the middle of each patch (B, 3, S, S): the mean over `rotations` turns of it."""
    answers: NDArray[np.float32] = predict_turned(network, windows, group.angles(rotations)).mean(axis=0)
    return answers


def predict_turned(network: Network, images: Tensor, degrees: Sequence[float]) -> NDArray[np.float32]:
    """The probabilities (angles, B) of the middle of images (B, 3, S, S) turned by each angle, wherever those are.

    The window is cut out after turning, so larger images lend their surroundings to its corners; smaller ones are
    mirrored beyond their edges.
    """
    _expect_eval(network)
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
            answer = _probabilities(network, group.rotate(turned[rest], angle - rest))
            answers[i, start : start + len(part)] = answer.flatten().cpu().numpy()
    return answers


class _Span(NamedTuple):
    """Pixels along one side, of which some may lie outside of the image; or outputs."""

    start: int
    stop: int

    def widened(self, by: int) -> "_Span":
        return _Span(self.start - by, self.stop + by)

    def scaled(self, by: int) -> "_Span":
        return _Span(self.start * by, self.stop * by)

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class _Layout:
    """How outputs come to lie along one side of an image."""

    frame_px: _Span  # that the network sees, on the pooling grid and about the middle of the image
    outputs: int
    kept: slice  # those outputs that lie on the image
    first_px: float  # of the first one that is kept


def _lay_out(network: Network, size_px: int) -> _Layout:
    framed = network.nearest_sizes(size_px + _lost_px(network))[-1]
    # As much on either side, so that a turned image gets a turned frame: exactly, where an even number is added.
    before = (framed - size_px) // 2
    outputs, stride = network.output_size(framed), network.stride
    first = (framed - 1 - (outputs - 1) * stride) / 2 - before
    places = first + stride * np.arange(outputs)
    on_image = np.flatnonzero((places >= -0.5) & (places <= size_px - 0.5))
    kept = slice(int(on_image[0]), int(on_image[-1]) + 1)
    return _Layout(_Span(-before, framed - before), outputs, kept, float(places[kept.start]))


def _lost_px(network: Network) -> int:
    """By how much the pixels that outputs stand for are fewer than those that the network sees, along a side."""
    return network.receptive_field - network.output_size(network.receptive_field) * network.stride


def _turn_frame(network: Network, pixels: Tensor, rows: _Layout, columns: _Layout, angle: float) -> Tensor:
    """What the network sees of an image turned by less than 90°, so that its outputs, turned back, cover the image."""
    if angle == 0:
        return _mirror_around(pixels, rows.frame_px, columns.frame_px)
    step, field = network.architecture.size_step, network.receptive_field
    # Turned outputs have to cover the circle through the corners of the upright ones, and what a spline reads there.
    across_px = (math.hypot(rows.outputs, columns.outputs) + 2 * SPLINE_REACH) * network.stride
    seen = []
    for side in (rows, columns):
        steps = math.ceil((across_px - side.outputs * network.stride) / (2 * step))
        seen.append(side.frame_px.widened(steps * step))  # still on the grid, and about the same middle
    # The corners of windows on that circle reach further out than the middles of the frame's sides.
    more = (group.covering_size(field) - field) // 2 + step + SPLINE_REACH
    wide = _mirror_around(pixels, *(span.widened(more) for span in seen))
    turned = group.rotate(wide.to(torch.float32) / 255, angle).clamp(0, 1)
    return center_crop(turned, seen[0].size, seen[1].size)


def _predict_frame(network: Network, frame: Tensor, tile_px: int | None) -> Tensor:
    """Probabilities (B, K, h, w) of a frame (B, 3, H, W) on the pooling grid, put together from tiles."""
    tile_px = TILE_PX if tile_px is None else tile_px
    if tile_px < network.receptive_field:
        raise ValueError(f"Tiles have at least the {network.receptive_field} px that an answer needs; got {tile_px}.")
    lost, stride = _lost_px(network), network.stride
    height, width = (network.output_size(size) for size in frame.shape[-2:])
    maps = torch.empty(len(frame), network.architecture.outputs, height, width, device=frame.device)
    for rows, seen_rows in _divide(network, height, tile_px):
        for columns, seen_columns in _divide(network, width, tile_px):
            top, left = (slice(seen.start * stride, seen.stop * stride + lost) for seen in (seen_rows, seen_columns))
            answers = _probabilities(network, frame[..., top, left])
            kept_rows, kept_columns = (
                slice(part.start - seen.start, part.stop - seen.start)
                for part, seen in ((rows, seen_rows), (columns, seen_columns))
            )
            maps[..., rows.start : rows.stop, columns.start : columns.stop] = answers[..., kept_rows, kept_columns]
    return maps


def _divide(network: Network, outputs: int, tile_px: int) -> list[tuple[_Span, _Span]]:
    """Where tiles lie along a side, in outputs: as few as will do, of like size, on the pooling grid.

    The second span of each is what the network has to see for it: further, where outputs feel the edge of a tile.
    """
    block = network.output_size(network.receptive_field)  # outputs come in blocks, one a step of the grid
    rim = -(-network.architecture.rim // block)
    most = max(1, network.output_size(network.nearest_sizes(tile_px)[0]) // block - 2 * rim)
    blocks = outputs // block
    tiles = -(-blocks // most)
    parts = [_Span(*edges) for edges in pairwise([i * blocks // tiles for i in range(tiles + 1)])]
    seen = [_Span(max(0, part.start - rim), min(blocks, part.stop + rim)) for part in parts]
    return [(part.scaled(block), whole.scaled(block)) for part, whole in zip(parts, seen, strict=True)]


@torch.no_grad()
def _probabilities(network: Network, images: Tensor) -> Tensor:
    logits: Tensor = network(images)
    return (logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)).float()


def _mirror_around(pixels: Tensor, rows: _Span, columns: _Span) -> Tensor:
    """The pixels (..., H, W) of spans that reach beyond the image, where they see it mirrored."""
    height, width = pixels.shape[-2:]
    rows_read = group.mirror(torch.arange(rows.start, rows.stop, device=pixels.device), height)
    columns_read = group.mirror(torch.arange(columns.start, columns.stop, device=pixels.device), width)
    return pixels[..., rows_read[:, None], columns_read]


def _turn_windows(images: Tensor, window_px: int, angle: float) -> Tensor:
    """The middle of images turned by less than 90°, somewhat larger than the window."""
    if angle == 0:
        return images
    values = images if images.is_floating_point() else images.to(torch.float32) / 255
    missing = group.covering_size(window_px) + 2 * SPLINE_REACH - images.shape[-1]  # negative where there is more
    span = _Span(0, images.shape[-1]).widened(-(-missing // 2))
    return group.rotate(_mirror_around(values, span, span), angle).clamp(0, 1)


def _expect_eval(network: Network) -> None:
    if network.training:
        raise ValueError("The network is in training mode, and would normalise by what it sees; use network.eval().")
