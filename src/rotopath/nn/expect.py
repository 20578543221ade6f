"""What layers expect of their arguments and inputs, and the sentence a user reads when it is something else."""

from numbers import Integral

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from rotopath import group

BRIGHTEST = 20.0  # of an image: standardised ones stay far below, and an image of bytes is far above


def image(x: Tensor, layer: nn.Module, channels: int) -> None:
    """A batch of images (B, C, H, W) in floating point."""
    _tensor(x, layer)
    if x.ndim != 4:
        hints = {
            3: " Give a single image a batch axis: x[None].",
            5: " These are SE(2) features already: use a Group layer, or Project them first.",
        }
        raise ValueError(
            f"{_name(layer)} takes images (B, C, H, W), but got a tensor of shape {_shape(x)}.{hints.get(x.ndim, '')}"
        )
    seems_channels_last = x.shape[1] != channels and x.shape[3] == channels
    _channels(x, layer, channels, " It seems to be (B, H, W, C): x.permute(0, 3, 1, 2)." if seems_channels_last else "")


def brightness(x: Tensor, layer: nn.Module) -> None:
    """Images from 0 to 1, and not the 0 to 255 that bytes have; what is a little outside does no harm.

    On a GPU to look at values would be to wait for them, so only what is on the CPU is looked at.
    """
    hidden = torch.compiler.is_compiling() or is_tracing()  # type: ignore[no-untyped-call]
    if x.device.type != "cpu" or hidden or torch._C._are_functorch_transforms_active():
        return
    brightest = float(x.detach().amax()) if x.numel() else 0.0
    if brightest > BRIGHTEST:
        raise ValueError(
            f"{_name(layer)} takes images from 0 to 1, but got values up to {brightest:g}; divide bytes by 255, or "
            f"give them as torch.uint8."
        )


def features(x: Tensor, layer: nn.Module | str, channels: int | None = None, orientations: int | None = None) -> None:
    """SE(2) features (B, C, N, H, W); channels and orientations are checked where the layer fixes them."""
    _tensor(x, layer)
    if x.ndim != 5:
        hint = " This is an image: lift it first with LiftConv2d." if x.ndim == 4 else ""
        raise ValueError(
            f"{_name(layer)} takes SE(2) features (B, C, N, H, W), but got a tensor of shape {_shape(x)}.{hint}"
        )
    if channels is not None:
        _channels(x, layer, channels)
    if orientations is not None and x.shape[2] != orientations:
        mirrored = " (reflections counted in)" if getattr(layer, "reflections", False) else ""
        raise ValueError(
            f"{_name(layer)} was built for {orientations} orientations{mirrored}, but got {x.shape[2]} in {_shape(x)}."
        )


def on_grid(x: Tensor, layer: nn.Module, window: int, stride: int, padding: int, dilation: int = 1) -> None:
    """Height and width on which the layer's windows lie symmetrically."""
    for size in x.shape[-2:]:
        try:
            group.windows(size, window, stride, padding, dilation)
        except ValueError as error:
            raise ValueError(f"{_name(layer)} on {x.shape[-2]} × {x.shape[-1]} px: {error}") from None


def paddable(x: Tensor, layer: nn.Module, padding: int, mode: str) -> None:
    """Sizes that have as many pixels as reflecting or going round takes."""
    least = {"reflect": padding + 1, "circular": padding, "replicate": 1}[mode]
    if min(x.shape[-2:]) < least:
        raise ValueError(
            f"{_name(layer)} pads by {padding} px in mode {mode!r}, which takes sides of {least} px or more; "
            f"got {x.shape[-2]} × {x.shape[-1]} px."
        )


def whole(layer: nn.Module, least: int = 1, **arguments: object) -> None:
    """Whole numbers, `least` or more; one for each axis would not survive a quarter turn."""
    for name, value in arguments.items():
        if not isinstance(value, Integral) or value < least:
            alike = ", the same for height and width" if isinstance(value, tuple | list) else ""
            raise ValueError(f"{_name(layer)} needs {name} as one whole number, {least} or more{alike}; got {value!r}.")


def choice(layer: nn.Module, options: tuple[object, ...], **argument: object) -> None:
    for name, value in argument.items():
        if value not in options:
            raise ValueError(f"{_name(layer)} knows {name} {' or '.join(map(repr, options))}; got {value!r}.")


def _tensor(x: object, layer: nn.Module | str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{_name(layer)} takes a torch.Tensor, but got {type(x).__name__}; convert it first.")
    if not x.is_floating_point():
        raise ValueError(
            f"{_name(layer)} takes floating point numbers, but got {x.dtype}; convert first, bytes by x.float() / 255."
        )


def _channels(x: Tensor, layer: nn.Module | str, channels: int, hint: str = "") -> None:
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
