"""What each step of a network is to a rotation: a convolution, a pool, something that acts point by point, an answer.

In: a node of a module's graph. Out: its role, and the layer that does it, whether the module calls that or a function.

Where a network lifts and where it projects: which of its values are images, features, and answers.

In: the steps of a plain network. Out: for each value, whether it is an image that nothing has lifted yet, SE(2)
features, or plain: behind the projection, which lies between features and whatever plain step reads them.

Writes the graph of a converted network: the same steps, a projection where plain ones read features, the same sizes.

In: the steps of the plain network, what kind of value each gives, and the layers to call. Out: a graph module.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from rotopath.models.freeze.plain_layers import DROPOUTS
from rotopath.models.freeze.plain_layers import POINTWISE as POINTWISE_LAYERS
from rotopath.models.freeze.translate import POINTWISE, POINTWISE_METHODS, RELUS, is_size
from rotopath.nn import Project, center_crop
from rotopath.nn.resize import pad_evenly, resize

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


PLAIN_ONLY = ("flatten", "linear", "answer", "output")
MOVABLE = (
    "pointwise",
    "dropout",
    "norm",
    "adaptive",
    "resize",
    "pad",
    "crop",
)  # as exact behind the projection as before it


class ValueKind(Enum):
    IMAGE = "image"
    FEATURES = "features"
    PLAIN = "plain"
    NUMBER = "number"  # a size, or a constant


def place(steps: dict[fx.Node, Step]) -> dict[fx.Node, ValueKind]:
    """Images are lifted by the first convolutions that look further than a point, and projected as late as possible.

    That is before what has no orientations, such as `Linear`, and at the latest at the output. But a position keeps
    an orientation of its own: the projection comes before the last gathering of all positions, and not behind it. And
    the last map to the answers, a 1×1 convolution where it is not `Linear`, reads what has been projected.
    """
    kinds: dict[fx.Node, ValueKind] = {}
    for node, step in steps.items():
        kinds[node] = _kind(node, step, kinds)
    if ValueKind.FEATURES not in kinds.values():
        raise ValueError(
            "equivariant found no convolution larger than 1×1 that reads images; there is nothing to lift."
        )
    for node in reversed(kinds):
        if kinds[node] is ValueKind.FEATURES and all(kinds[user] is ValueKind.PLAIN for user in _readers(node, kinds)):
            for each in _head(node, steps, kinds):
                kinds[each] = ValueKind.PLAIN
    return kinds


def _kind(node: fx.Node, step: Step, kinds: dict[fx.Node, ValueKind]) -> ValueKind:
    read = {kinds[each] for each in node.all_input_nodes} - {ValueKind.NUMBER}
    if step.role in ("size", "constant"):
        return ValueKind.NUMBER
    if step.role == "placeholder":
        return ValueKind.IMAGE
    if not read:
        return ValueKind.NUMBER
    if step.role in PLAIN_ONLY or ValueKind.PLAIN in read or len(read) > 1:
        return ValueKind.PLAIN
    lifts = step.role in ("convolution", "transposed") and not step.looks_at_points()
    return ValueKind.FEATURES if lifts else read.pop()


def _head(last: fx.Node, steps: dict[fx.Node, Step], kinds: dict[fx.Node, ValueKind]) -> list[fx.Node]:
    """The steps up to `last`, in single file, that belong behind the projection."""
    mapped = any(_is_map(steps[node]) for node in _descendants(last) if node in steps)
    file: list[fx.Node] = []
    behind = 0  # how many of the file
    node = last
    while all(user in file or kinds[user] is ValueKind.PLAIN for user in _readers(node, kinds)):
        step = steps[node]
        is_head = step.looks_at_points() and not mapped
        if step.role not in MOVABLE and not is_head:
            break
        file.append(node)
        if step.role == "adaptive" or is_head:
            behind = len(file)
        mapped = mapped or is_head
        read = [each for each in node.all_input_nodes if kinds[each] is ValueKind.FEATURES]
        if len(read) != 1:
            break
        node = read[0]
    return file[:behind]


def _is_map(step: Step) -> bool:
    return isinstance(step.layer, nn.Linear | nn.Conv2d)


def _readers(node: fx.Node, kinds: dict[fx.Node, ValueKind]) -> list[fx.Node]:
    return [user for user in node.users if kinds[user] is not ValueKind.NUMBER]


def _descendants(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    left = list(node.users)
    while left:
        if (user := left.pop()) not in found:
            found.add(user)
            left += user.users
    return found


RESIZING = ("size", "scale_factor", "mode", "align_corners")


class Rewriter:
    """Goes through the steps; what stands for a value is a node of the new graph, a number, or a tuple of those."""

    def __init__(
        self,
        steps: dict[fx.Node, Step],
        kinds: dict[fx.Node, ValueKind],
        paths: dict[fx.Node, str],
        layers: dict[str, nn.Module],
        projections: dict[fx.Node, Project],
    ) -> None:
        self.steps = steps
        self.kinds = kinds
        self.paths = paths
        taken = {path.partition(".")[0] for path in layers}
        name = next(name for name in ("project", "project_layer", "_project") if name not in taken)
        names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
        self.projections = dict(zip(projections, (each for each in names if each not in taken), strict=False))
        self.layers: dict[str, Any] = {**layers, **{self.projections[node]: projections[node] for node in projections}}
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.projected: dict[fx.Node, fx.Node] = {}

    def write(self, name: str) -> fx.GraphModule:
        for node, step in self.steps.items():
            self.values[node] = self._write(node, step)
            if node in self.projections:
                self.projected[node] = self.graph.call_module(self.projections[node], (self.values[node],))
        for new in reversed(self.graph.nodes):
            if new.target == "size" and not new.users:
                self.graph.erase_node(new)  # nobody asked for it
        return fx.GraphModule(self.layers, self.graph, name)

    def _write(self, node: fx.Node, step: Step) -> Any:
        kind = self.kinds[node]
        args, kwargs = self._new(node.args, kind), self._new(node.kwargs, kind)
        if step.role == "output":
            return self.graph.output(args[0])
        if step.role == "size":
            return self._write_size(node, args)
        if step.role == "constant":
            self.layers[str(node.target)] = step.constant
        if step.role == "flatten":
            return self.graph.call_function(torch.flatten, (args[0], 1))
        if step.role == "join":
            parts = args[0] if args else next(iter(kwargs.values()))
            return self.graph.call_function(torch.cat, (parts,), {"dim": 1})
        if step.role == "resize":
            given = {name: getattr(step.layer, name, None) for name in RESIZING} if step.layer else {}
            given |= dict(zip(RESIZING, args[1:], strict=False)) | kwargs
            given = {name: value for name, value in given.items() if name in RESIZING and value is not None}
            return self.graph.call_function(resize, (args[0],), given)
        if step.role == "pad":
            return self.graph.call_function(pad_evenly, args, kwargs)
        if step.layer is not None:
            return self.graph.call_module(self.paths[node], (self._new(node.all_input_nodes[0], kind),))
        return self.graph.node_copy(node, lambda each: self._new(each, kind))

    def _write_size(self, node: fx.Node, args: Any) -> Any:
        """Sizes (B, C, H, W), also of features, and what is computed from them."""
        asked = node.all_input_nodes[0]
        if self.kinds[asked] is not ValueKind.NUMBER:
            axes = (0, 1, -2, -1) if self.kinds[asked] is ValueKind.FEATURES else None
            if axes is None:
                return self.graph.node_copy(node, lambda each: self.values[each])
            sizes = tuple(self.graph.call_method("size", (self.values[asked], axis)) for axis in axes)
            return sizes[args[1]] if node.target == "size" and len(args) > 1 else sizes
        if isinstance(args[0], tuple):  # of which parts are asked for
            return args[0][args[1]]
        return self.graph.create_node("call_function", node.target, args)

    def _new(self, old: Any, reader: ValueKind) -> Any:
        """What an argument has become; for plain readers behind the projection."""
        return fx.map_arg(
            old,
            lambda node: (
                self.projected.get(node, self.values[node]) if reader is ValueKind.PLAIN else self.values[node]
            ),
        )
