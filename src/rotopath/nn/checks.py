"""Check the arguments and inputs of layers, and raise errors that state what was given and what was expected.

Checks read shapes and data types only, so that networks can be compiled and exported. `check_brightness` is the
exception: it reads pixel values, on the CPU only.
"""

from numbers import Integral

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from rotopath import group

MAX_BRIGHTNESS = 20.0  # standardized images have far smaller values, images with values up to 255 far larger ones


def check_image(x: Tensor, layer: nn.Module, channels: int) -> None:
    """Require a batch of floating-point images (B, C, H, W)."""
    _check_tensor(x, layer)
    if x.ndim != 4:
        hints = {
            3: " Give a single image a batch axis: x[None].",
            5: " These are SE(2) features already: use a Group layer, or Project them first.",
        }
        raise ValueError(
            f"{_name(layer)} takes images (B, C, H, W), but got a tensor of shape {_shape(x)}.{hints.get(x.ndim, '')}"
        )
    seems_channels_last = x.shape[1] != channels and x.shape[3] == channels
    hint = " It seems to be (B, H, W, C): use x.permute(0, 3, 1, 2)." if seems_channels_last else ""
    _check_channels(x, layer, channels, hint)


def check_brightness(x: Tensor, layer: nn.Module) -> None:
    """Require image values from 0 to 1 rather than 0 to 255; values slightly outside the range are accepted.

    Images on a GPU are not checked, because reading their values would wait for all pending work of the GPU.
    """
    if x.device.type != "cpu" or is_being_recorded():
        return
    brightest = float(x.detach().amax()) if x.numel() else 0.0
    if brightest > MAX_BRIGHTNESS:
        raise ValueError(
            f"{_name(layer)} takes images from 0 to 1, but got values up to {brightest:g}; divide bytes by 255, or "
            f"pass them as torch.uint8."
        )


def check_features(
    x: Tensor, layer: nn.Module | str, channels: int | None = None, orientations: int | None = None
) -> None:
    """Require SE(2) features (B, C, N, H, W), with C channels and N orientations where the layer fixes them."""
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
            f"{_name(layer)} was built for {orientations} orientations{reflected}, but got {x.shape[2]} in {_shape(x)}."
        )


def check_grid(x: Tensor, layer: nn.Module, window: int, stride: int, padding: int, dilation: int = 1) -> None:
    """Require a height and a width that the windows of a layer cover evenly, with no pixels left over at one end."""
    for size in x.shape[-2:]:
        try:
            group.output_size(size, window, stride, padding, dilation)
        except ValueError as error:
            raise ValueError(f"{_name(layer)} on {x.shape[-2]} × {x.shape[-1]} px: {error}") from None


def check_padding(x: Tensor, layer: nn.Module, padding: int, mode: str) -> None:
    """Require enough pixels for padding by reflection or by wrapping around."""
    minimum = {"reflect": padding + 1, "circular": padding, "replicate": 1}[mode]
    if min(x.shape[-2:]) < minimum:
        raise ValueError(
            f"{_name(layer)} pads by {padding} px in mode {mode!r}, which needs sides of {minimum} px or more; "
            f"got {x.shape[-2]} × {x.shape[-1]} px."
        )


def check_whole_number(layer: nn.Module, minimum: int = 1, **arguments: object) -> None:
    """Require whole numbers of at least `minimum`; a pair for height and width is refused.

    A layer with different sizes for height and width is not equivariant to rotations by 90°.
    """
    for name, value in arguments.items():
        if not isinstance(value, Integral) or value < minimum:
            same = ", the same for height and width" if isinstance(value, tuple | list) else ""
            raise ValueError(
                f"{_name(layer)} needs {name} as one whole number, {minimum} or more{same}; got {value!r}."
            )


def check_choice(layer: nn.Module, options: tuple[object, ...], **arguments: object) -> None:
    """Require that arguments are among the options."""
    for name, value in arguments.items():
        if value not in options:
            raise ValueError(f"{_name(layer)} accepts {name} {' or '.join(map(repr, options))}; got {value!r}.")


def is_being_recorded() -> bool:
    """Return whether torch is compiling, tracing or transforming (torch.func) the running code.

    Tensors may then have no values, and the fast paths of layers must not be used.
    """
    recorded: bool = (
        torch.compiler.is_compiling()
        or is_tracing()  # type: ignore[no-untyped-call]
        or torch._C._are_functorch_transforms_active()  # private; test_torch_integration.py tests that it still works
    )
    return recorded


def _check_tensor(x: object, layer: nn.Module | str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{_name(layer)} takes a torch.Tensor, but got {type(x).__name__}; convert it first.")
    if not x.is_floating_point():
        raise ValueError(
            f"{_name(layer)} takes floating point numbers, but got {x.dtype}; convert first, bytes by x.float() / 255."
        )


def _check_channels(x: Tensor, layer: nn.Module | str, channels: int, hint: str = "") -> None:
    if x.shape[1] != channels:
        raise ValueError(
            f"{_name(layer)} was built for {channels} input channels, but got {x.shape[1]} in {_shape(x)}.{hint}"
        )


def _name(layer: nn.Module | str) -> str:
    if isinstance(layer, str):
        return layer
    name: str = layer._get_name()  # type: ignore[no-untyped-call]
    return name


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))
