"""SE(2) features: how they are stored in memory, and checks of the tensors and arguments that layers get.

Features (B, C, N, H, W) are stored *channels-last*: in the order B, H, W, C, N. Then C and N can be merged without a
copy, and a group convolution is an ordinary convolution of *maps* (B, C·N, H, W), which are channels-last too.

Each check raises ValueError with a message that states what was given and what was expected. `layer` is the layer, or
the name of the function, that the message names. All checks except `check_brightness` read only shapes and data types,
so that networks can be compiled and exported.
"""

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from rotopath import group

MAX_BRIGHTNESS = 20.0  # far above the values of standardized images, far below the values of images from 0 to 255


# Layout in memory


def merge_orientations(features: Tensor) -> Tensor:
    """Return features (B, C, N, H, W) as maps (B, C·N, H, W). If the features are channels-last, the maps are a view.

    `features.flatten(1, 2)` returns the same values. But for a batch of one image, it sets the stride of the batch axis
    such that torch does not recognize the maps as channels-last. The next layer then copies them.
    """
    return features.permute(0, 3, 4, 1, 2).flatten(3).permute(0, 3, 1, 2)


def split_orientations(maps: Tensor, orientations: int) -> Tensor:
    """Return maps (B, C·N, H, W) as features (B, C, N, H, W), for N = `orientations`. The result is a view."""
    return torch.unflatten(maps.permute(0, 2, 3, 1), 3, (-1, orientations)).permute(0, 3, 4, 1, 2)


def is_channels_last(features: Tensor) -> bool:
    """Return whether features (B, C, N, H, W) are channels-last, without gaps between their values."""
    return features.permute(0, 3, 4, 1, 2).is_contiguous()


def channels_last_strides(shape: Sequence[int]) -> tuple[int, int, int, int, int]:
    """Return the strides of channels-last features with the shape (B, C, N, H, W)."""
    _, channels, n, height, width = shape
    columns = channels * n
    return height * width * columns, n, 1, width * columns, columns


def empty_features(shape: Sequence[int], like: Tensor) -> Tensor:
    """Allocate channels-last features of a shape (B, C, N, H, W), with the data type and the device of `like`.

    The result is not a view of another tensor. Autograd would copy a view whenever a user changes it in place.
    """
    return like.new_empty_strided(shape, channels_last_strides(shape))


# Checks


def check_image(x: Tensor, layer: nn.Module, channels: int) -> None:
    """Require a batch of floating-point images (B, C, H, W) with C = `channels`."""
    _check_tensor(x, layer)
    if x.ndim != 4:
        hints = {
            3: " Give a single image a batch axis: x[None].",
            5: " These seem to be SE(2) features: use a Group layer such as GroupConv2d, or apply rp.nn.Project first.",
        }
        raise ValueError(
            f"{_name(layer)} takes images (B, C, H, W), but got a tensor of shape {_shape(x)}.{hints.get(x.ndim, '')}"
        )
    seems_channels_last = x.shape[1] != channels and x.shape[3] == channels
    hint = " It seems to be (B, H, W, C): use x.permute(0, 3, 1, 2)." if seems_channels_last else ""
    _check_channels(x, layer, channels, hint)


def check_brightness(x: Tensor, layer: nn.Module) -> None:
    """Refuse images with values above MAX_BRIGHTNESS: their values are probably from 0 to 255 instead of 0 to 1.

    Standardized images are accepted, although some of their values are negative or above 1. Images on a GPU are not
    checked, because reading their values would wait until the GPU has finished all pending work. Nothing is checked
    while torch compiles or traces the code, because the images may then have no values.
    """
    if x.device.type != "cpu" or is_being_recorded():
        return
    brightest = float(x.detach().amax()) if x.numel() else 0.0
    if brightest > MAX_BRIGHTNESS:
        raise ValueError(
            f"{_name(layer)} takes images from 0 to 1, but got values up to {brightest:g}; divide the values by "
            f"255, or pass the images as torch.uint8."
        )


def check_features(
    x: Tensor, layer: nn.Module | str, channels: int | None = None, orientations: int | None = None
) -> None:
    """Require SE(2) features (B, C, N, H, W), with C = `channels` and N = `orientations`.

    N is the length of the orientation axis, including reflected entries. If `channels` or `orientations` is None, the
    length of this axis is not checked.
    """
    _check_tensor(x, layer)
    if x.ndim != 5:
        hint = " This is an image: lift it first with LiftConv2d." if x.ndim == 4 else ""
        raise ValueError(
            f"{_name(layer)} takes SE(2) features (B, C, N, H, W), but got a tensor of shape {_shape(x)}.{hint}"
        )
    if channels is not None:
        _check_channels(x, layer, channels)
    if orientations is not None and x.shape[2] != orientations:
        reflected = " (including reflections)" if getattr(layer, "reflections", False) else ""
        raise ValueError(
            f"{_name(layer)} was built for {orientations} orientations{reflected}, but got {x.shape[2]} in a tensor of "
            f"shape {_shape(x)}; build all layers with the same orientations and reflections."
        )


class SizeError(ValueError):
    """The height or the width of a layer's input does not fit its windows."""


def check_grid(x: Tensor, layer: nn.Module, window: int, stride: int, padding: int, dilation: int = 1) -> None:
    """Require that the windows of a layer cover the height and the width of x (..., H, W) exactly.

    No pixels may be left over at one end of an axis. `window` is the side of a window. `window`, `stride` and `padding`
    are in pixels, and `dilation` is the distance between neighboring taps of a window in pixels.
    """
    for size in x.shape[-2:]:
        try:
            group.output_size(size, window, stride, padding, dilation)
        except ValueError as error:
            raise SizeError(f"{_name(layer)} on {x.shape[-2]} × {x.shape[-1]} px: {error}") from None


def check_padding(x: Tensor, layer: nn.Module, padding: int, mode: str) -> None:
    """Require that x (..., H, W) is large enough for padding by `padding` pixels with copies of its own pixels.

    `mode` is "reflect", "circular" or "replicate", as in `torch.nn.functional.pad`.
    """
    minimum = {"reflect": padding + 1, "circular": padding, "replicate": 1}[mode]
    if min(x.shape[-2:]) < minimum:
        raise ValueError(
            f"{_name(layer)} pads by {padding} px in mode {mode!r}, which needs sides of {minimum} px or more; "
            f"got {x.shape[-2]} × {x.shape[-1]} px. Use larger inputs or less padding."
        )


def check_whole_number(layer: nn.Module, minimum: int = 1, **arguments: object) -> None:
    """Require that the value of each of `arguments` (name=value) is a whole number, `minimum` or more.

    Pairs (height, width) are refused, because a layer with two different sizes is not equivariant to rotations by 90°.
    """
    for name, value in arguments.items():
        if not isinstance(value, Integral) or value < minimum:
            same = ", the same for height and width" if isinstance(value, tuple | list) else ""
            raise ValueError(
                f"The argument {name!r} of {_name(layer)} must be a whole number, {minimum} or more{same}; "
                f"got {value!r}."
            )


def check_choice(layer: nn.Module, options: tuple[object, ...], **arguments: object) -> None:
    """Require that the value of each of `arguments` (name=value) is one of `options`."""
    for name, value in arguments.items():
        if value not in options:
            raise ValueError(
                f"The argument {name!r} of {_name(layer)} must be {' or '.join(map(repr, options))}; got {value!r}."
            )


def is_being_recorded() -> bool:
    """Return whether torch is compiling, tracing or transforming (torch.func) the code that is running.

    If so, tensors may have shapes but no values, and layers must compute with torch's own operations only.
    """
    recorded: bool = (
        torch.compiler.is_compiling()
        or is_tracing()  # type: ignore[no-untyped-call]
        or torch._C._are_functorch_transforms_active()  # private; test_torch_integration.py tests that it still works
    )
    return recorded


def _check_tensor(x: object, layer: nn.Module | str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{_name(layer)} takes a torch.Tensor, but got {type(x).__name__}; use torch.as_tensor.")
    if not x.is_floating_point():
        raise ValueError(
            f"{_name(layer)} takes floating point numbers, but got {x.dtype}; convert 8-bit images with "
            f"x.float() / 255."
        )


def _check_channels(x: Tensor, layer: nn.Module | str, channels: int, hint: str = "") -> None:
    if x.shape[1] != channels:
        raise ValueError(
            f"{_name(layer)} was built for {channels} input channels, but got {x.shape[1]} in a tensor of shape "
            f"{_shape(x)}.{hint}"
        )


def _name(layer: nn.Module | str) -> str:
    if isinstance(layer, str):
        return layer
    name: str = layer._get_name()  # type: ignore[no-untyped-call]
    return name


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))
