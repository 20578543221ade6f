"""What each step of a network is to a rotation: a convolution, a pool, something that acts point by point, an answer.

In: a node of a module's graph. Out: its role, and the layer that does it, whether the module calls that or a function.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from rotopath.models.replacing import DROPOUTS
from rotopath.models.replacing import POINTWISE as POINTWISE_LAYERS
from rotopath.models.translating import POINTWISE, POINTWISE_METHODS, RELUS, is_size
from rotopath.nn import center_crop

ROLES: dict[type[nn.Module] | tuple[type[nn.Module], ...], str] = {
    nn.Conv2d: "convolution",
    nn.ConvTranspose2d: "transposed",
    (nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d): "norm",
    (nn.MaxPool2d, nn.AvgPool2d): "window",
    (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d): "adaptive",
    (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d): "resize",
    (*POINTWISE_LAYERS, nn.PReLU, nn.Identity): "pointwise",
    DROPOUTS: "dropout",
    nn.Flatten: "flatten",
    nn.Linear: "linear",
    (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.BatchNorm1d, nn.LayerNorm): "answer",
}
LAYERS_OF_FUNCTIONS: dict[Callable[..., Any], type[nn.Module]] = {
    F.max_pool2d: nn.MaxPool2d,
    torch.max_pool2d: nn.MaxPool2d,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.adaptive_max_pool2d: nn.AdaptiveMaxPool2d,
    F.dropout: nn.Dropout,
    F.dropout2d: nn.Dropout2d,
}
MEANS = {"mean": nn.AdaptiveAvgPool2d, "amax": nn.AdaptiveMaxPool2d}  # over all positions
ANSWERS = ("softmax", "log_softmax", "argmax", "squeeze", "normalize")  # of what has no orientations
FLATTENING = ("flatten", "view", "reshape")
JOINS = (torch.cat, torch.concat, torch.concatenate)


class Step(NamedTuple):
    role: str
    layer: nn.Module | None = None
    constant: Tensor | None = None

    def looks_at_points(self) -> bool:
        """Whether it is a convolution that reads one position at a time, and so the same whichever way that lies."""
        conv = self.layer
        if not isinstance(conv, nn.Conv2d) or conv.padding not in ("same", "valid", (0, 0)):
            return False
        return set(conv.kernel_size) == set(conv.stride) == {1}


def read_step(node: fx.Node, model: nn.Module) -> Step:
    """The role of a node, or one sentence about why it has none."""
    if node.op in ("placeholder", "output"):
        return Step(node.op)
    if node.op == "get_attr":
        return _read_constant(node, model)
    if node.op == "call_module":
        return _read_layer(model.get_submodule(str(node.target)))
    if is_size(node):
        return Step("size")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.target in LAYERS_OF_FUNCTIONS:
        return _read_layer(_make_layer(node))
    if node.target is F.interpolate:
        return _read_resize(node.kwargs.get("size", node.args[1] if len(node.args) > 1 else None), node.kwargs)
    if node.target is F.pad:
        return _read_pad(node)
    if node.target in JOINS:
        return Step("join")
    if node.target is center_crop:
        return Step("crop")
    if node.target in RELUS or node.target in (POINTWISE if node.op == "call_function" else POINTWISE_METHODS):
        return Step("pointwise")
    if name in MEANS and _gathers_positions(node):
        kept = node.kwargs.get("keepdim", len(node.args) > 2 and node.args[2])
        return Step("adaptive", MEANS[name](1)) if kept else Step("answer")
    if name in FLATTENING and _keeps_the_batch(node):
        return Step("flatten")
    if name in ANSWERS:
        return Step("answer")
    raise ValueError(
        "what it does when the image turns is not known; use layers, or functions that stand in docs/equivariant.md"
    )


def _read_layer(layer: nn.Module) -> Step:
    for kinds, role in ROLES.items():
        if isinstance(layer, kinds):
            if nn.utils.parametrize.is_parametrized(layer):
                raise ValueError("its weights are parametrised; remove the parametrisation first")
            if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1):
                raise ValueError("it flattens other axes than all but the batch; use Flatten()")
            if getattr(layer, "return_indices", False):
                raise ValueError("it returns indices; use one that does not")
            return _read_resize(layer.size, vars(layer), layer) if role == "resize" else Step(role, layer)
    if type(layer).__module__.startswith("rotopath."):
        raise ValueError("it is a layer of rotopath already; give a plain module")
    raise ValueError(f"{type(layer).__name__} has no counterpart on SE(2); use another layer, or leave it outside")


def _read_resize(size: Any, options: Mapping[str, Any], layer: nn.Module | None = None) -> Step:
    for value in (size, options.get("scale_factor")):
        if (
            isinstance(value, tuple | list)
            and all(isinstance(each, int | float) for each in value)
            and len(set(value)) > 1
        ):
            raise ValueError(f"{tuple(value)} would not survive a quarter turn; use the same for height and width")
    if options.get("antialias"):
        raise ValueError("it does so with a filter against aliasing; use a pool")
    return Step("resize", layer)


def _read_pad(node: fx.Node) -> Step:
    given = node.args[1] if len(node.args) > 1 else node.kwargs["pad"]
    mode = node.kwargs.get("mode", node.args[2] if len(node.args) > 2 else "constant")
    if not isinstance(given, tuple | list) or len(given) != 4 or mode != "constant":
        raise ValueError("it may put a constant around rows and columns; for others use padding_mode of a convolution")
    return Step("pad")


def _read_constant(node: fx.Node, model: nn.Module) -> Step:
    found: Any = model
    for name in str(node.target).split("."):
        found = getattr(found, name)
    if found.numel() != 1:
        raise ValueError(
            f"it is a tensor of shape {tuple(found.shape)} that the forward reads; use a layer, such as a norm, or a "
            f"single number"
        )
    return Step("constant", constant=found)


def _make_layer(node: fx.Node) -> nn.Module:
    """The layer that does what a call of a function does."""
    kind = LAYERS_OF_FUNCTIONS[node.target]  # type: ignore[index]
    given = dict(zip(_parameters(node.target), node.args[1:], strict=False)) | dict(node.kwargs)
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in given.items() if name in known and name != "input"}
    if any(isinstance(each, fx.Node) for value in options.values() for each in _flat(value)):
        raise ValueError("its window hangs on the size of the image; use fixed numbers, or an adaptive pool")
    return kind(**options)


def _parameters(function: object) -> list[str]:
    """Names of what a function takes behind its input, as torch's documentation has them."""
    if function in (F.dropout, F.dropout2d):
        return ["p", "training", "inplace"]
    if function is F.avg_pool2d:
        return ["kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"]
    if function in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d):
        return ["output_size", "return_indices"]
    return ["kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"]


def _gathers_positions(node: fx.Node) -> bool:
    given = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    return set(_flat(given)) in ({2, 3}, {-1, -2})


def _keeps_the_batch(node: fx.Node) -> bool:
    """Whether it makes (B, K) of (B, C, H, W)."""
    if node.target is torch.flatten or node.target == "flatten":
        start = node.kwargs.get("start_dim", node.args[1] if len(node.args) > 1 else 0)
        return bool(start == 1 and node.kwargs.get("end_dim", -1) == -1 and len(node.args) < 3)
    shape = node.args[1] if len(node.args) == 2 else node.args[1:]
    return isinstance(shape, tuple | list) and len(shape) == 2


def _flat(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
