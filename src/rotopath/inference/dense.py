"""Predict images in memory: probability maps of whole images, and probabilities at the center of patches.

The network must be in evaluation mode, and images must have the pixel spacing (µm/px) that the network was trained on.

- Output: one position of the map that a network returns, with K logits or probabilities.
- Patch: a square image for which only the output at its center is predicted.
- Window of a patch: the central square on which this output depends. Its side is `geometry.context_px`.
- Test-time augmentation: functions with the argument `rotations` rotate the input by 0°, 360°/rotations, …, predict
  each rotated input, rotate the maps back, and return the mean of the probabilities.

`prepare` converts a trained network to the form and precision that are fast on a device. Slides are predicted by the
module `slide_pass`, tile by tile; the module `tiling` rotates the tiles.
"""

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rotopath import group
from rotopath.data.dataset import DataError
from rotopath.group.rotation import SPLINE_REACH
from rotopath.inference.tiling import (
    TILE_PX,
    Activation,
    Span,
    activate,
    compute_probabilities,
    expect_eval,
    lay_out,
    predict_frame,
    predict_in_tiles,
)
from rotopath.models import DenseNetwork, Geometry, freeze
from rotopath.models.foreign import OnnxModule
from rotopath.models.foreign import load_onnx as load_onnx  # exporting uses it, too
from rotopath.models.protocols import (
    IMAGE_CHANNELS,
    DenseModule,
    SlidingModule,
    WindowNetwork,
    as_floats,
    in_one_line,
    replace_module,
    unwrap,
)
from rotopath.models.registry import is_equivariant
from rotopath.models.trace import TRACE_LOCK
from rotopath.nn import center_crop, triton

# Windows are predicted in batches of at most this many pixels, such as 135 windows of 88 × 88 px. For this number, a
# network with 8 orientations needs about 2 GB of memory.
PIXELS_PER_BATCH = 2**20
MAX_ROTATIONS = 360  # of test-time augmentation; more than one for each degree would only take time
ONNX_TOLERANCE = 1e-3  # largest difference of logits between torch and ONNX Runtime
Backend = Literal["torch", "onnxruntime"]  # the library that computes a network


def check_rotations(rotations: int) -> None:
    """Raise DataError unless a number of rotations for test-time augmentation is a whole number in its range."""
    if type(rotations) is not int or not 1 <= rotations <= MAX_ROTATIONS:
        raise DataError(
            f"The number of rotations for test-time augmentation is {rotations!r}; choose a whole number from 1 to "
            f"{MAX_ROTATIONS}."
        )


# Maps of whole images


@dataclass(frozen=True)
class Prediction:
    """Probability map of an image, and the positions of the map's outputs on the image.

    Positions are (row, column) in pixels. The center of the first pixel of the image is at (0, 0).
    """

    probabilities: NDArray[np.float32]  # (K, h, w)
    stride_px: int  # distance between neighboring outputs
    first_px: tuple[float, float]  # position of the top left output

    def positions(self, indices: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert indices (row, column) in the map to positions on the image. Both are arrays (n, 2).

        Indices may be fractions, for positions between outputs.
        """
        return np.asarray(self.first_px) + self.stride_px * indices


def predict(
    network: DenseNetwork,
    image: NDArray[np.uint8],
    device: torch.device,
    rotations: int = 1,
    tile_px: int | None = None,
    full: bool = False,
    activation: Activation = activate,
) -> Prediction:
    """Predict probabilities of a whole image (H, W, 3).

    The network must be on `device`. With `rotations` above 1, the result is the mean over this number of rotations
    (test-time augmentation). The image is reflected beyond its edges, so that the outputs cover the whole image.
    Outputs are one stride apart. With `full`, they are one pixel apart, which takes about stride² times as long.
    `tile_px` (default: 1024) is the largest side, in pixels, that the network reads at once. Larger images are
    predicted in tiles, with the same result up to rounding. `activation` is the function that converts logits to
    probabilities: by default, sigmoid for a single logit, otherwise softmax.

    >>> import numpy as np
    >>> network = rp.models.tumor(orientations=1).eval()
    >>> prediction = rp.inference.predict(network, np.zeros((100, 100, 3), np.uint8), torch.device("cpu"))
    >>> prediction.probabilities.shape, prediction.stride_px, prediction.first_px
    ((1, 9, 9), 12, (1.5, 1.5))
    """
    return predict_batch(network, image[None], device, rotations, tile_px, full, activation)[0]


def predict_batch(
    network: DenseNetwork,
    images: NDArray[np.uint8],
    device: torch.device,
    rotations: int = 1,
    tile_px: int | None = None,
    full: bool = False,
    activation: Activation = activate,
) -> list[Prediction]:
    """Predict images (B, H, W, 3) of the same size in one batch, and return a `Prediction` for each of them.

    The other arguments are those of `predict`.
    """
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
    activation: Activation = activate,
) -> Iterator[NDArray[np.float32]]:
    """For each angle, rotate images (B, H, W, 3), predict them, rotate the maps (B, K, h, w) back, and yield the maps.

    The angles `degrees` are counter-clockwise. Rotations by multiples of 90° are exact. Rotations by other angles
    interpolate; for these, more pixels are reflected beyond the edges, to fill the corners of the rotated images. The
    other arguments are those of `predict`. The mean of the maps over the angles is test-time augmentation; the standard
    deviation of the maps measures robustness to rotation.
    """
    expect_eval(network)
    if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8 or 0 in images.shape:
        raise ValueError(
            f"An image must have the shape (H, W, 3) and the type uint8, and must not be empty; got shape "
            f"{images.shape[1:]} and type {images.dtype}. Convert the image first."
        )
    layouts = [lay_out(network.geometry, size) for size in images.shape[1:3]]
    pixels = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).to(device)
    refinement = network.geometry.stride_px if full else 1
    largest_px = TILE_PX if tile_px is None else tile_px

    def read_pixels(rows_px: Span, columns_px: Span) -> Tensor:
        return read_reflected(pixels, rows_px, columns_px)

    def predict_pixels(frame_pixels: Tensor) -> Tensor:
        return _predict_refined(network, frame_pixels, refinement, largest_px, activation)

    frame = (layouts[0].frame_px, layouts[1].frame_px)
    rows, columns = (slice(side.kept.start * refinement, (side.kept.stop - 1) * refinement + 1) for side in layouts)
    for angle in degrees:
        maps = predict_frame(network.geometry, predict_pixels, read_pixels, frame, angle, refinement)
        yield maps[..., rows, columns].cpu().numpy()


def _predict_refined(
    network: DenseNetwork, frame: Tensor, refinement: int, tile_px: int, activation: Activation
) -> Tensor:
    """Predict a frame (B, 3, H, W), and return a map (B, K, h, w) with outputs stride / refinement pixels apart.

    A frame is an image of a size that the network accepts. `refinement` must divide the stride. If `refinement` is 1,
    the result is the network's usual map, of h₁ × w₁ outputs. Otherwise, crops of the frame are predicted, one for each
    i and j from 0 to refinement - 1. A crop starts i · stride / refinement pixels below the top edge of the frame, and
    j · stride / refinement pixels right of its left edge. (If h₁ is 1, only i = 0 is used; if w₁ is 1, only j = 0.) The
    maps of all crops are interleaved. The result has the height h = (h₁ - 1) · refinement + 1 and the width
    w = (w₁ - 1) · refinement + 1.
    """
    unshifted = predict_in_tiles(network, frame, tile_px, activation)
    if refinement == 1:
        return unshifted
    stride = network.geometry.stride_px
    step, (height, width) = stride // refinement, unshifted.shape[-2:]
    maps = unshifted.new_empty(*unshifted.shape[:2], (height - 1) * refinement + 1, (width - 1) * refinement + 1)
    maps[..., ::refinement, ::refinement] = unshifted
    shifts = [
        (down, right)
        for down in range(refinement if height > 1 else 1)
        for right in range(refinement if width > 1 else 1)
    ]
    for down, right in shifts[1:]:
        # Along a shifted side there is one output less, because each shifted output is between two unshifted outputs.
        rows, columns = (
            slice(shift * step, size - (stride - shift * step) % stride)
            for shift, size in zip((down, right), frame.shape[-2:], strict=True)
        )
        shifted = predict_in_tiles(network, frame[..., rows, columns], tile_px, activation)
        maps[..., down::refinement, right::refinement] = shifted
    return maps


def read_reflected(pixels: Tensor, rows: Span, columns: Span) -> Tensor:
    """Return the given ranges of rows and columns of an image (..., H, W), which is reflected beyond its edges."""
    height, width = pixels.shape[-2:]
    row_indices = group.reflect_index(torch.arange(*rows, device=pixels.device), height)
    column_indices = group.reflect_index(torch.arange(*columns, device=pixels.device), width)
    return pixels[..., row_indices[:, None], column_indices]


# Patches


def predict_patches(
    network: DenseNetwork, windows: Tensor, rotations: int = 1, activation: Activation = activate
) -> NDArray[np.float32]:
    """Predict class probabilities (B, K) at the center of patches.

    `windows` (B, 3, S, S) are the whole patches, in the form that `predict_rotated` describes. With `rotations` above
    1, the result is the mean over this number of rotations (test-time augmentation).
    """
    probabilities = predict_rotated(network, windows, group.angles(rotations), activation)
    mean: NDArray[np.float32] = probabilities.mean(axis=0)
    return mean


def predict_rotated(
    network: DenseNetwork,
    images: Tensor,
    degrees: Sequence[float],
    activation: Activation = activate,
) -> NDArray[np.float32]:
    """Rotate patches by each angle, and predict the class probabilities (angles, B, K) at their centers.

    The angles `degrees` are counter-clockwise. `images` (B, 3, S, S) are the patches, as bytes or as floats from 0 to
    1, on the device of the network. S must be `geometry.smallest_px`, or larger by an even number of pixels. Each patch
    is rotated. Then its window (the central square of side `geometry.context_px`) is predicted. A patch is reflected
    beyond its edges if it is too small to fill the window and the corners of the rotated window.

    If a patch is cut from a larger image, centered on an output of this image, and S is at least `geometry.context_px`,
    the result agrees with the probabilities that `predict_rotations` returns for this output. At multiples of 90°, they
    are equal up to rounding. At other angles, they differ slightly, because `predict_rotations` interpolates its
    rotated maps.

    Raises ValueError if the network returns a map of more than 1 × 1 outputs for its smallest valid image.
    """
    expect_eval(network)
    geometry = network.geometry
    field_px, window_px = geometry.smallest_px, geometry.context_px
    spare_px = images.shape[-1] - field_px
    if images.ndim != 4 or images.shape[-1] != images.shape[-2] or spare_px < 0 or spare_px % 2:
        raise ValueError(
            f"Patches must have the shape (B, 3, S, S) with a side S of {field_px} px, or larger by an even number of "
            f"pixels; got {tuple(images.shape)}. Cut out patches of such a size."
        )
    if geometry.block != 1:
        raise ValueError(
            f"Patch-wise prediction needs a network that returns a map of 1 × 1 outputs for its smallest valid image, "
            f"but this network returns a map of {geometry.block} × {geometry.block} outputs for {field_px} × "
            f"{field_px} px; predict whole images with `rotopath.inference.predict` instead."
        )
    probabilities = np.empty((len(degrees), len(images), geometry.outputs), np.float32)
    batch_size = max(1, PIXELS_PER_BATCH // window_px**2)
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        for i, _, rotated in _rotate_batch(batch, window_px, degrees):
            maps = center_crop(compute_probabilities(network, rotated, activation), 1, 1)
            probabilities[i, start : start + len(batch)] = maps.flatten(1).cpu().numpy()
    return probabilities


def predict_realigned(
    network: WindowNetwork,
    images: Tensor,
    degrees: Sequence[float],
    activation: Activation = activate,
) -> NDArray[np.float32]:
    """Rotate patches by each angle, predict maps of their windows, rotate the maps back, and return their disc.

    This is for a network that returns a map (B, K, h, h) for windows of one size, with a side of `network.window_px`.
    `images` (B, 3, S, S) and `degrees` are those of `predict_rotated`; S may be any size. The maps are compared
    where all of them have values: on the P positions of the inscribed disc of a map. The result is (angles, B, P, K).
    """
    parts: list[list[NDArray[np.float32]]] = [[] for _ in degrees]
    batch_size = max(1, PIXELS_PER_BATCH // network.window_px**2)
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        for i, angle, rotated in _rotate_batch(batch, network.window_px, degrees):
            with torch.no_grad():
                maps = activation(network(rotated)).float()
            between = angle % 90
            maps = group.rotate(group.rotate(maps, between - angle), -between).clamp(0, 1)  # splines may overshoot
            inside = group.inscribed_disc(*maps.shape[-2:]).bool()
            parts[i].append(maps[..., inside.to(maps.device)].movedim(1, -1).cpu().numpy())
    return np.stack([np.concatenate(part) for part in parts])


def _rotate_batch(images: Tensor, window_px: int, degrees: Sequence[float]) -> Iterator[tuple[int, float, Tensor]]:
    """Rotate patches (B, 3, S, S) by each angle. Yield the index of the angle, the angle, and the rotated windows."""
    windows: dict[float, Tensor] = {}  # windows rotated by the angle modulo 90°, which needs interpolation
    for i, angle in enumerate(degrees):
        between = angle % 90
        if between not in windows:
            windows[between] = center_crop(_rotate_windows(images, window_px, between), window_px, window_px)
        yield i, angle, group.rotate(windows[between], angle - between)


def _rotate_windows(images: Tensor, window_px: int, angle: float) -> Tensor:
    """Rotate patches (B, 3, S, S) counter-clockwise by `angle` degrees (0 to less than 90).

    Before the rotation, patches are cropped to the size that the rotation needs, or extended to this size by reflection
    at their edges. The central `window_px` × `window_px` pixels of the rotated patches therefore have no gaps. The
    caller must crop the rotated patches to these pixels. Rotated patches are floats from 0 to 1. If `angle` is 0,
    patches keep their data type.
    """
    needed_px = group.covering_size(window_px) + 2 * SPLINE_REACH if angle else window_px
    missing = needed_px - images.shape[-1]  # negative if patches are cropped
    span = Span(0, images.shape[-1]).widened(-(-missing // 2))
    surrounded = read_reflected(images, span, span)
    if angle == 0:
        return surrounded
    values = surrounded if surrounded.is_floating_point() else surrounded.to(torch.float32) / 255
    return group.rotate(values, angle).clamp(0, 1)


# Networks prepared for a device


class MixedNetwork(nn.Module):
    """A network whose convolutions are computed in `dtype`, by autocast. Its weights and logits stay float32."""

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
        return logits.float()  # half precision cannot resolve probabilities near 1


class FeatureNetwork(nn.Module):
    """Returns the features of a network: the input of its last layer, instead of logits.

    `network` is in evaluation mode, and ready for prediction (see `prepare`). Features (B, F, h, w) have the positions
    of the logits; if the network is applied to windows, they are means over the positions in each window. With
    `keep_logits`, the result is the logits (K channels), followed by the features. In an SE(2,N) network, features come
    after the projection, and do not change if the image is rotated by a multiple of 360°/N, apart from the
    interpolation of rotated kernels; at multiples of 90°, they are exact. Raises ValueError if the last layer is not a
    convolution or linear layer of torch, or does not compute each output from features at its position.
    """

    def __init__(self, network: DenseNetwork, keep_logits: bool = False) -> None:
        super().__init__()
        inner = network.network if isinstance(network, MixedNetwork) else network
        module = unwrap(inner)
        self._slides = isinstance(inner, SlidingModule)
        if any(isinstance(layer, OnnxModule) for layer in module.modules()):
            raise ValueError("ONNX Runtime computes no features; use the backend 'torch'.")
        self.network, self.geometry, self._keep_logits = network, network.geometry, False
        self.training = network.training
        called: list[nn.Module] = []
        layers = [layer for layer in module.modules() if _has_kernel(layer)]
        hooks = [layer.register_forward_pre_hook(lambda layer, _: called.append(layer)) for layer in layers]
        side = self.geometry.smallest_px
        device = next((weight.device for weight in module.parameters()), None)
        image = torch.zeros(1, IMAGE_CHANNELS, side, side, device=device)
        try:
            with torch.no_grad():
                network(image)
        finally:
            for hook in hooks:
                hook.remove()
        self._last = called[-1] if called else None
        if not isinstance(self._last, nn.Conv2d | nn.Linear):
            raise ValueError(
                "The last layer of the network is not a convolution or a linear layer of torch, so it is not known "
                "whether its features change under rotation; predict without the embedding."
            )
        with torch.no_grad():
            self.channels = self(image).shape[1]  # this also checks the positions of the features
        self._keep_logits = keep_logits
        self.geometry = replace(self.geometry, outputs=self.channels + keep_logits * self.geometry.outputs)

    def forward(self, x: Tensor) -> Tensor:
        assert self._last is not None
        inputs: list[Tensor] = []
        hook = self._last.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        try:
            logits = self.network(x)
        finally:
            hook.remove()
        if self._slides:  # the network was applied to windows, in several batches
            rows, columns = logits.shape[-2:]
            means = [part if part.ndim == 2 else part.flatten(2).mean(dim=2) for part in inputs]
            features = torch.cat(means).view(len(x), rows, columns, -1).permute(0, 3, 1, 2)
        else:
            (features,) = inputs
        if features.shape[2:] != logits.shape[2:]:
            raise ValueError(
                f"The last layer of the network has {tuple(logits.shape[2:])} outputs, but features at "
                f"{tuple(features.shape[2:])} positions; predict without the embedding."
            )
        return (torch.cat([logits, features], dim=1) if self._keep_logits else features).float()


def _has_kernel(layer: nn.Module) -> bool:
    """Return whether a layer of torch has own weights with two or more axes, unlike batch norm.

    Layers of TorchScript do not count, because they do not call hooks.
    """
    return not isinstance(layer, torch.jit.ScriptModule) and any(
        weight.ndim > 1 for weight in layer.parameters(recurse=False)
    )


def prepare(
    network: DenseNetwork, device: torch.device, dtype: torch.dtype = torch.float32, backend: Backend = "torch"
) -> DenseNetwork:
    """Return a copy of a network that is fast on a device, in evaluation mode, with convolutions in `dtype`.

    The copy has the same geometry (receptive field, stride, valid image sizes), and the same logits up to rounding. On
    GPUs that can run the package's Triton kernels, the copy keeps its SE(2) layers, because with these kernels the
    layers need fewer passes over memory than a plain CNN. On other devices, the copy is frozen to a plain CNN (see
    `rotopath.freeze`) if possible. The backend "onnxruntime" runs the plain CNN in ONNX Runtime, on the CPU in float32.
    Raises ValueError if the network cannot be converted to ONNX.
    """
    if backend == "onnxruntime":
        frozen = _freeze_if_possible(network).to(torch.device("cpu")).eval()
        return replace_module(frozen, OnnxNetwork(frozen)).eval()
    ready = copy.deepcopy(network) if triton.supports_device(device) else _freeze_if_possible(network)
    ready = ready.to(device).eval()
    return ready if dtype == torch.float32 else MixedNetwork(ready, dtype)


def _freeze_if_possible(network: DenseNetwork) -> DenseNetwork:
    """Return the network as a plain CNN. A network that has no SE(2) layers or cannot be frozen is only copied."""
    module = unwrap(network)
    if not is_equivariant(module):
        return copy.deepcopy(network)
    try:
        return replace_module(network, freeze(module))
    except ValueError:
        return copy.deepcopy(network)  # the copy predicts the same as a plain CNN, but more slowly


# ONNX


class OnnxNetwork(nn.Module):
    """A network that ONNX Runtime computes on the CPU, without gradients.

    `network` is the network in torch, in evaluation mode. Raises ValueError if it cannot be converted, or if ONNX
    Runtime computes other logits.
    """

    def __init__(self, network: DenseNetwork) -> None:
        super().__init__()
        self.geometry = network.geometry
        module = unwrap(network)
        try:
            with prepare_export():
                self._compute = load_onnx(to_onnx(module, network))
        except ModuleNotFoundError:
            raise
        except Exception as error:  # torch's exporter raises errors of any type
            raise ValueError(
                f"The network cannot be converted to ONNX ({in_one_line(error)}); use the backend 'torch'."
            ) from None
        images = make_example(network)[0].uniform_(0, 1, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            difference = float((self._compute(images) - module(images)).abs().max())
        if not difference <= ONNX_TOLERANCE:
            raise ValueError(
                f"ONNX Runtime computes logits that differ by {difference:.2g} from those of torch; use the backend "
                f"'torch'."
            )
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self._compute(as_floats(x, self))
        return logits


def to_onnx(model: nn.Module, network: DenseNetwork) -> bytes:
    """Convert a module to an ONNX model with the input "image" and the output "logits", and return the file's content.

    `network` states the valid image sizes. The size of the batch and, unless `has_fixed_size`, the height and the width
    may vary.
    """
    import onnxruntime  # noqa: F401  # so that a missing package is reported before any work is done
    import onnxscript  # noqa: F401

    example, dynamic_shapes = make_example(network)
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        dynamic_shapes=(dynamic_shapes,),
        input_names=["image"],
        output_names=["logits"],
        verbose=False,
    )
    assert program is not None
    for node in program.model.graph:
        node.metadata_props.clear()  # they contain local paths
    content: bytes = program.model_proto.SerializeToString()
    return content


def has_fixed_size(network: DenseNetwork) -> bool:
    """Return whether the exported model accepts images of one size only.

    Within rotopath, such a network is applied to larger images as a sliding window.
    """
    return isinstance(network, SlidingModule)


def smallest_image_px(network: DenseNetwork) -> int:
    """Return the smallest image side, in px, that an exported model should be used with.

    A `DenseModule` may pad its input. For such a network, this side is large enough that padding does not affect the
    outputs at the center.
    """
    geometry = network.geometry
    is_padded = isinstance(network, DenseModule)
    return geometry.nearest_sizes(geometry.context_px)[-1] if is_padded else geometry.smallest_px


def make_example(network: DenseNetwork) -> tuple[Tensor, dict[int, Any]]:
    """Return example images (B, 3, H, W) for an exporter, and a dictionary of the axes whose size may vary.

    The dictionary maps axis numbers to symbolic sizes (`torch.export.Dim`). The size of axis 0, the batch, may always
    vary. The sizes of axes 2 and 3, H and W, may vary unless the network accepts one image size only.
    """
    step, side = network.geometry.step_px, smallest_image_px(network)
    batch = torch.export.Dim("batch", min=1)
    if has_fixed_size(network):
        return torch.zeros(2, IMAGE_CHANNELS, side, side), {0: batch}
    height, width = (torch.export.Dim(name, min=side // step) for name in ("rows", "columns"))
    shapes = {0: batch, 2: step * height + side % step, 3: step * width + side % step}
    return torch.zeros(2, IMAGE_CHANNELS, side + step, side + 2 * step), shapes


@contextmanager
def prepare_export() -> Iterator[None]:
    """Context manager for torch's exporters: only one thread at a time exports, and harmless warnings are suppressed.

    The exporters replace functions of torch for all threads of the process, as torch.fx does.
    """
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    with TRACE_LOCK, warnings.catch_warnings():
        level = logger.level
        logger.setLevel(logging.ERROR)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "No complete tensor found in the group", UserWarning)
        try:
            yield
        finally:
            logger.setLevel(level)
