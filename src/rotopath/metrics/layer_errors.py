"""Find where a network loses equivariance, layer by layer, and why.

`equivariance_report` runs a module on an image and on the rotated image. For each layer, it measures the *own* error:
the equivariance error of this layer alone, for the input that it gets in the network. A layer whose own error is not 0
loses equivariance, and the report states the cause. The *error so far* compares the output of the layer for the rotated
image with its rotated output for the image, and thus includes the errors of all layers before.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn

from rotopath import group
from rotopath.metrics.equivariance import FADE_FROM, Transform, relative_error
from rotopath.nn import GroupConv2d, GroupConvTranspose2d, LiftConv2d

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # own errors up to this are rounding errors
OFF_GRID_TOLERANCE = 1e-2  # for rotations that interpolate, which no layer follows exactly
MAX_LINES = 40  # lines of a printed report


@dataclass(frozen=True)
class LayerError:
    """How much equivariance a layer of a network loses."""

    name: str  # path of the layer in the module
    kind: str  # class of the layer
    shape: tuple[int, ...]  # of its output
    error: float  # so far: of the layer's output in the network; NaN if this output cannot be rotated
    own: float  # of this layer alone; NaN if it cannot be measured
    cause: str  # why the layer is not equivariant; "" if it is


@dataclass(frozen=True)
class EquivarianceReport:
    """Equivariance errors of the layers of a network, in the order in which they run."""

    angle: float  # of the rotation of the image, in degrees
    error: float  # of the output of the network
    layers: Sequence[LayerError]

    @property
    def lossy(self) -> list[LayerError]:
        """The layers that lose equivariance."""
        return [layer for layer in self.layers if layer.cause]

    def __str__(self) -> str:
        shown = list(self.layers) if len(self.layers) <= MAX_LINES else self.lossy[:MAX_LINES]
        rows = [("layer", "class", "output", "error so far", "own error", "cause")]
        for layer in shown:
            shape = " × ".join(map(str, layer.shape[1:]))
            rows.append((layer.name, layer.kind, shape, _number(layer.error), _number(layer.own), layer.cause))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = []
        for row in rows:
            left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
            right = [cell.rjust(width) for cell, width in zip(row[3:5], widths[3:], strict=True)]
            lines.append("  ".join([*left, *right, row[5]]).rstrip())
        if len(shown) < len(self.layers):
            lines.append(f"… {len(self.layers) - len(shown)} more layers, of which {len(self.lossy) - len(shown)} lose "
                         f"equivariance")  # fmt: skip
        lost = f"{len(self.lossy)} of {len(self.layers)} layers lose equivariance"
        first = f", {self.lossy[0].name} first" if self.lossy else ""
        lines.append(f"Rotation by {self.angle:g}°: equivariance error {self.error:.1e}; {lost}{first}.")
        return "\n".join(lines)


def equivariance_report(module: nn.Module, x: Tensor, angle: float = 90.0) -> EquivarianceReport:
    """Return the equivariance error of each layer of a module for the input `x`, and the causes of these errors.

    The module can be any torch module, converted or not, whose input is images (B, C, H, W) or SE(2) features
    (B, C, N, H, W). Layers are its submodules without children. If functions in the `forward()` of a module with
    children lose equivariance, the report names this module. Measure a network before `rp.freeze`: tensors of a
    frozen network contain orientations among their channels, and rotating them needs to know which. The module is not
    changed.

    `angle` is the rotation in degrees, counter-clockwise. For angles that are not multiples of 90°, every layer has
    some error, because rotations interpolate; causes are named for own errors above 1 %.

    >>> plain = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
    >>> report = rp.equivariance_report(plain, torch.rand(1, 3, 15, 15))
    >>> [(layer.name, layer.cause) for layer in report.lossy]
    [('0', 'kernel: an ordinary kernel of 3 × 3 px does not rotate with the image'),
     ('2', 'size: windows of 2 px at stride 2 leave 1 of 13 px at one end')]
    """
    if not isinstance(x, Tensor) or x.ndim not in (4, 5) or not x.is_floating_point():
        raise ValueError(
            f"equivariance_report() takes images (B, C, H, W) or SE(2) features (B, C, N, H, W) in floating point; got "
            f"{f'a tensor of shape {tuple(x.shape)}, {x.dtype}' if isinstance(x, Tensor) else type(x).__name__}."
        )
    reflections = any(getattr(m, "reflections", False) for m in module.modules())
    recorder = _Recorder(copy.deepcopy(module), Transform(angle, False, bool(reflections)), angle)
    if not recorder.on_grid:
        height, width = x.shape[-2:]
        x = x * group.inscribed_disc(height, width, FADE_FROM).to(x)
    return recorder.measure(x)


class _Recorder:
    """Runs a module twice, for an image and its rotation, and compares the outputs of all layers."""

    def __init__(self, module: nn.Module, rotate: Callable[[Tensor], Tensor], angle: float) -> None:
        self.module = module
        self.rotate = rotate
        self.angle = angle
        self.on_grid = angle % 90 == 0
        self.is_recording = False
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []  # for the image, in the order of calls
        self.names: list[str] = []
        self.own: list[float] = []
        self.errors: list[float] = []

    def measure(self, x: Tensor) -> EquivarianceReport:
        seed = torch.initial_seed()
        hooks = [m.register_forward_hook(self._hook(name)) for name, m in self.module.named_modules()]
        with torch.no_grad(), torch.random.fork_rng():
            self.is_recording = True
            torch.manual_seed(seed)
            output = self.module(x)
            first, self.second = self.outputs, []
            self.outputs = self.second
            self.is_first = False
            torch.manual_seed(seed)
            output_of_rotated = self.module(self.rotate(x))
        for hook in hooks:
            hook.remove()
        if len(first) != len(self.second):
            raise ValueError(
                "equivariance_report() needs a module that calls the same layers for the image and the rotated image."
            )
        layers = list(self._describe(first, self.second))
        error = self._compare(output_of_rotated, output)
        return EquivarianceReport(self.angle, error, layers)

    is_first = True
    second: list[Tensor]

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            if not self.is_recording or not isinstance(output, Tensor):
                return
            source = next((a for a in args if isinstance(a, Tensor)), None)
            if source is None:
                return
            self.outputs.append(output.clone())
            if self.is_first:
                self.names.append(name)
                self.inputs.append(source.detach())
                self.own.append(self._own_error(module, args))

        return record

    def _own_error(self, module: nn.Module, args: tuple[Any, ...]) -> float:
        """Return the equivariance error of one module for its arguments in the network."""
        self.is_recording = False
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                plain = module.forward(*(a.clone() if isinstance(a, Tensor) else a for a in args))
                torch.manual_seed(0)
                rotated = module.forward(*(self.rotate(a) if isinstance(a, Tensor) else a for a in args))
            return self._compare(rotated, plain)
        except (ValueError, RuntimeError, TypeError):
            return float("nan")
        finally:
            self.is_recording = True

    def _compare(self, rotated: Any, plain: Any) -> float:
        """Return the error of a value for the rotated image; NaN if it is not known how the value rotates."""
        if not isinstance(plain, Tensor) or not plain.is_floating_point() or plain.ndim not in (1, 2, 4, 5):
            return float("nan")
        try:
            expected = self.rotate(plain)
        except ValueError:  # the angle is not one of the orientations of these features
            return float("nan")
        if expected.shape != rotated.shape:
            return float("inf")
        return relative_error(rotated.double().cpu(), expected.double().cpu(), self.on_grid)

    def _describe(self, first: list[Tensor], second: list[Tensor]) -> Iterator[LayerError]:
        """Yield the errors of all layers, and of modules with children whose own functions lose equivariance."""
        tolerance = TOLERANCES.get(first[0].dtype, 1e-2) if self.on_grid else OFF_GRID_TOLERANCE
        lossy: list[str] = []
        for i, name in enumerate(self.names):
            module = self.module.get_submodule(name)
            loses = self.own[i] > tolerance or (self._lacks_angle(module) and isnan(self.own[i]))
            cause = ""
            if next(module.children(), None) is None:
                if loses:
                    cause = self._find_cause(module, self.inputs[i], first[i])
                    lossy.append(name)
            elif loses and not any(_contains(name, other) for other in lossy):
                cause = "functions in its forward()"
                lossy.append(name)
            else:
                continue
            error = self._compare(second[i], first[i])
            yield LayerError(
                name or "the module", type(module).__name__, tuple(first[i].shape), error, self.own[i], cause
            )

    def _find_cause(self, layer: nn.Module, x: Tensor, y: Tensor) -> str:
        causes = [*_find_size_causes(layer, x), *self._find_kernel_causes(layer)]
        if isinstance(layer, nn.Upsample) and layer.mode.startswith("nearest") and x.ndim == 4:
            pairs = zip(x.shape[-2:], y.shape[-2:], strict=True)
            causes += [f"size: nearest neighbors from {a} to {b} px" for a, b in pairs if b % a][:1]
        if x.ndim >= 4 and y.ndim == 2 and min(x.shape[-2:]) > 1:
            causes.append(f"positions: it puts {x.shape[-2]} × {x.shape[-1]} positions into a vector")
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.training:
            causes.append("dropout: the pattern of dropped values does not rotate")
        if not causes and not self.on_grid:
            stride = getattr(layer, "stride", 1)
            step = max(stride) if isinstance(stride, tuple) else stride
            causes.append(f"stride: it keeps one of {step} px" if step and step > 1 else "interpolation")
        return "; ".join(causes) or f"not known for {type(layer).__name__}"

    def _lacks_angle(self, layer: nn.Module) -> bool:
        """Return whether a layer has kernels for some orientations, but not for the angle of the report."""
        is_rotated = isinstance(layer, LiftConv2d | GroupConv2d | GroupConvTranspose2d)
        orientations: Any = getattr(layer, "orientations", 0)
        return is_rotated and bool(self.angle * orientations % 360)

    def _find_kernel_causes(self, layer: nn.Module) -> Iterator[str]:
        if isinstance(layer, LiftConv2d | GroupConv2d | GroupConvTranspose2d):
            if self._lacks_angle(layer):
                yield f"kernel: {layer.orientations} orientations do not include {self.angle:g}°"
            elif not self.on_grid and layer.kernel_size > 1:
                yield f"kernel: {layer.kernel!r} interpolates {layer.kernel_size} × {layer.kernel_size} px"
        elif isinstance(layer, nn.Conv2d | nn.ConvTranspose2d) and max(layer.kernel_size) > 1:
            height, width = layer.kernel_size
            weight = layer.weight
            if height != width or not group.equals_its_rotation(weight):
                yield f"kernel: an ordinary kernel of {height} × {width} px does not rotate with the image"


def _find_size_causes(layer: nn.Module, x: Tensor) -> Iterator[str]:
    """Yield the causes that depend on the size of the input: windows that do not fit, padding that is not symmetric."""
    if isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d) and x.ndim >= 4:
        options = (layer.kernel_size, layer.stride, layer.padding, getattr(layer, "dilation", 1))
        if isinstance(layer.padding, str):
            extents = [d * (k - 1) for k, d in zip(*map(_pair, (layer.kernel_size, layer.dilation)), strict=True)]
            if layer.padding == "same" and any(extent % 2 for extent in extents):
                yield "padding: 'same' pads an even kernel by one more pixel at one end"
            return
        for size, kernel, stride, padding, dilation in zip(x.shape[-2:], *map(_pair, options), strict=True):
            extent = dilation * (kernel - 1) + 1
            if left := (size + 2 * padding - extent) % stride:
                side = size + 2 * padding
                yield f"size: windows of {extent} px at stride {stride} leave {left} of {side} px at one end"
                return
    padding = getattr(layer, "padding", None)
    if isinstance(padding, tuple) and len(padding) == 4 and len(set(padding)) > 1:
        yield f"padding: {padding} px (left, right, top, bottom) differ"


def _number(value: float) -> str:
    return "" if isnan(value) else f"{value:.1e}"


def _pair(value: Any) -> tuple[int, int]:
    return tuple(value) if isinstance(value, tuple | list) else (value, value)


def _contains(name: str, other: str) -> bool:
    return name == "" or other.startswith(f"{name}.")
