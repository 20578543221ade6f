"""Any plain CNN as its counterpart on SE(2,N): images are lifted, features turn along, answers stay as they were.

In: a module of torch's layers. Out: a module of the same layers on SE(2) features, with the same names and with
fresh weights; or one sentence about the first step that has no counterpart.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import fx, nn

from rotopath import group
from rotopath.models.convert import counterparts as widths
from rotopath.models.convert.counterparts import Channels, ConversionOptions, Width, build, build_projection, count
from rotopath.models.convert.steps import Rewriter, Step, ValueKind, place, read_step
from rotopath.models.trace import expect_no_hooks, follow, is_layer
from rotopath.nn.project import PROJECTIONS, Projection, learned_weights

Keep = Literal["weights", "channels", "maps"]
Strides = Literal["keep", "pool"]


def equivariant(
    module: nn.Module,
    orientations: int = 8,
    keep: Keep = "weights",
    kernel: group.Kernel = "bilinear",
    projection: Projection = "max",
    strides: Strides = "keep",
    reflections: bool = False,
) -> fx.GraphModule:
    """The module as an SE(2,N) network, with fresh weights: turned images give turned, or the same, answers.

    `keep` says what stays as it is: the number of "weights", for which channels C become about C/√N; the "channels" of
    every layer, each now with N orientations; or the number of "maps", C·N, and with it memory and time. With
    `strides="pool"`, strides that cannot lie evenly on even sizes become a mean over windows behind the layer. With
    `reflections`, kernels are mirrored too, and N counts twice.

    >>> plain = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 2, 1))
    >>> net = rp.equivariant(plain, orientations=4, keep="channels")
    >>> net(torch.zeros(1, 3, 30, 30)).shape
    torch.Size([1, 2, 28, 28])
    >>> rp.equivariance_error(net, torch.rand(1, 3, 30, 30)) < 1e-4
    True
    """
    group.check_orientations(orientations)
    _expect_choice("keep", keep, get_args(Keep))
    _expect_choice("kernel", kernel, group.KERNELS)
    _expect_choice("projection", projection, PROJECTIONS)
    _expect_choice("strides", strides, get_args(Strides))
    wrapped = nn.Sequential(module) if is_layer(module) else module
    converter = Converter(wrapped, ConversionOptions(orientations, kernel, projection, strides, reflections))
    chosen = converter.choose_widths(keep)
    net = converter.write(chosen, f"Equivariant{type(module).__name__}")
    return net.train(module.training)


@dataclass(frozen=True)
class Call:
    """A layer as it will be: what it reads and gives, and how wide that is."""

    layer: nn.Module
    reads: ValueKind
    gives: ValueKind
    inputs: Channels
    outputs: Channels


class Converter:
    """Goes through the steps of a module twice: for the channels of each value, and to write the new graph."""

    def __init__(self, module: nn.Module, options: ConversionOptions) -> None:
        self.module = module
        self.options = options
        self.steps = _read_steps(module)
        self.kinds = place(self.steps)
        self.channels: dict[fx.Node, Channels | None] = {}  # none where they are not known, as of images
        self.calls: dict[str, Call] = {}  # by the path of the layer
        self.paths: dict[fx.Node, str] = {}
        for node, step in self.steps.items():
            with _named(node):
                self.channels[node] = self._follow_channels(node, step)

    def choose_widths(self, keep: str) -> dict[Width, int]:
        n = self.options.order
        found = list(
            dict.fromkeys(w for call in self.calls.values() for w in widths.expand(call.inputs + call.outputs))
        )
        if keep == "channels":
            return widths.scale(found, 1.0)
        if keep == "maps":
            return widths.scale(found, 1 / n)
        target = sum(p.numel() for p in nn.ModuleList([call.layer for call in self.calls.values()]).parameters())
        return widths.keep_weights(found, self._count, target, least=1 / n)

    def write(self, chosen: dict[Width, int], name: str) -> fx.GraphModule:
        """The new graph, and its layers under the names that they had."""
        layers: dict[str, Any] = {}
        for path, call in self.calls.items():
            inputs, outputs = (_total(channels, chosen) for channels in (call.inputs, call.outputs))
            with _named(next(node for node, other in self.paths.items() if other == path)):
                layers[path] = build(call.layer, call.reads, call.gives, inputs, outputs, self.options)
        projections = {
            node: build_projection(_total(channels, chosen), self.module, self.options)
            for node, channels in self._projected().items()
        }
        return Rewriter(self.steps, self.kinds, self.paths, layers, projections).write(name)

    def _count(self, chosen: dict[Width, int]) -> int:
        layers = sum(
            count(c.layer, c.reads, c.gives, _total(c.inputs, chosen), _total(c.outputs, chosen), self.options)
            for c in self.calls.values()
        )
        each = learned_weights(self.options.projection, self.options.orientations)
        return layers + each * sum(_total(channels, chosen) for channels in self._projected().values())

    def _projected(self) -> dict[fx.Node, Channels]:
        """Features that plain steps read."""
        return {
            node: self.channels[node] or ()
            for node, kind in self.kinds.items()
            if kind is ValueKind.FEATURES and any(self.kinds[user] is ValueKind.PLAIN for user in node.users)
        }

    def _follow_channels(self, node: fx.Node, step: Step) -> Channels | None:
        read = [each for each in node.all_input_nodes if self.kinds[each] is not ValueKind.NUMBER]
        if self.kinds[node] is ValueKind.NUMBER or step.role == "placeholder":
            return None
        if step.role == "join":
            return self._join(node, read)
        if len(read) > 1 and step.role != "output":
            self._tie(read)
        if step.role == "output":
            for each in read:
                _fix(self.channels[each])
            return None
        channels = next(
            (self.channels[each] for each in read if _size(self.channels[each]) != 1), self.channels[read[0]]
        )
        if step.layer is None or step.role == "resize":
            return channels
        return self._call(node, step.layer, self.kinds[read[0]], channels)

    def _call(self, node: fx.Node, layer: nn.Module, reads: ValueKind, channels: Channels | None) -> Channels | None:
        """Note a layer down under the name it had, or once more if what it reads is of another kind."""
        gives = self.kinds[node]
        reads = reads if gives is ValueKind.FEATURES else ValueKind.PLAIN
        path = str(node.target) if node.op == "call_module" else f"{node.name}_layer"
        inputs, outputs = _follow_layer(layer, channels, reads, gives)
        learns = bool(inputs) or any(True for _ in layer.parameters())
        if path in self.calls and (self.calls[path].reads, self.calls[path].gives) != (reads, gives):
            if learns:
                raise ValueError("it is used on features and on images, which are different layers; use two of them")
            path = f"{path}_{reads.value}"
        # Raises for a kernel that cannot be.
        count(layer, reads, gives, widths.plain_size(inputs), widths.plain_size(outputs), self.options)
        if path not in self.calls:
            self.calls[path] = Call(layer, reads, gives, inputs, outputs)
        elif learns:
            widths.tie(self.calls[path].inputs, inputs)
            outputs = self.calls[path].outputs
        self.paths[node] = path
        return outputs or channels

    def _join(self, node: fx.Node, read: list[fx.Node]) -> Channels | None:
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        if dim not in ((1, -1) if any(map(self._is_flat, read)) else (1, -3)):
            raise ValueError(f"it joins along axis {dim}; join along the channels, axis 1")
        parts = node.args[0] if node.args else next(iter(node.kwargs.values()))
        assert isinstance(parts, list | tuple)
        known = [self.channels[each] for each in parts if isinstance(each, fx.Node)]
        if any(channels is None for channels in known):
            for each in read:
                _fix(self.channels[each])
            return None
        return tuple(width for channels in known if channels for width in channels)

    def _is_flat(self, node: fx.Node) -> bool:
        """Whether a value is (B, K), without positions."""
        if self.steps[node].role in ("flatten", "linear") or (node.target in ("mean", "amax", torch.mean, torch.amax)):
            return self.steps[node].role != "adaptive"
        return self.kinds[node] is ValueKind.PLAIN and any(map(self._is_flat, node.all_input_nodes))

    def _tie(self, read: list[fx.Node]) -> None:
        """What is added or multiplied is equally wide, but for single maps, which go with every channel."""
        known = [self.channels[each] for each in read]
        wide = [channels for channels in known if _size(channels) != 1]
        for channels in known:
            if _size(channels) == 1 or None in wide:
                _fix(channels)
        for channels in wide[1:]:
            if channels is not None and wide[0] is not None:
                widths.tie(wide[0], channels)


def _follow_layer(
    layer: nn.Module, channels: Channels | None, reads: ValueKind, gives: ValueKind
) -> tuple[Channels, Channels]:
    """Channels in and out of a layer that has weights; none of others."""
    match layer:
        case nn.Conv2d() | nn.ConvTranspose2d():
            inputs = _expect_channels(channels, layer.in_channels)
            if 1 < layer.groups == layer.in_channels and reads is gives:
                return inputs, inputs * (layer.out_channels // layer.in_channels)
            outputs = (Width(layer.out_channels, scales=gives is ValueKind.FEATURES),)
            for width in (*widths.expand(inputs), *outputs):
                width.multiple = math.lcm(width.multiple, layer.groups)
            return inputs, outputs
        case nn.Linear():
            return _expect_channels(channels, layer.in_features, "Linear"), (Width(layer.out_features),)
        case nn.BatchNorm2d() | nn.BatchNorm1d() | nn.InstanceNorm2d():
            return _expect_channels(channels, layer.num_features), ()
        case nn.GroupNorm():
            return _expect_channels(channels, layer.num_channels), ()
        case nn.LayerNorm():
            return _expect_channels(channels, math.prod(layer.normalized_shape), "LayerNorm"), ()
        case nn.PReLU() if layer.num_parameters > 1:
            return _expect_channels(channels, layer.num_parameters), ()
    return (), ()


def _expect_channels(channels: Channels | None, size: int, kind: str = "") -> Channels:
    if channels is None:
        return (Width(size, fixed=True),)
    if (found := widths.plain_size(channels)) == size:
        return channels
    if kind == "Linear" and size % found == 0:
        raise ValueError(
            f"it reads {size} numbers, which are {found} channels at {size // found} positions, and positions change "
            f"when the image turns; put AdaptiveAvgPool2d(1) before it, and let it read {found}"
        )
    if kind == "LayerNorm":
        raise ValueError(
            f"it normalises other axes than the {found} channels of answers; for maps use GroupNorm(1, {found})"
        )
    raise ValueError(f"it reads {size} channels, but is given {found}")


def _read_steps(module: nn.Module) -> dict[fx.Node, Step]:
    """What the module does, which must be the same in training and evaluation."""
    expect_no_hooks(module, "equivariant")
    module = copy.deepcopy(module)
    graph, other = (follow(module.train(mode), "equivariant") for mode in (True, False))
    if [(n.target, n.name, *map(str, n.all_input_nodes)) for n in graph.nodes] != [
        (n.target, n.name, *map(str, n.all_input_nodes)) for n in other.nodes
    ]:
        raise ValueError(
            f"equivariant cannot convert {type(module).__name__}, which does something else in training than in "
            f"evaluation; let its forward do the same, but for dropout."
        )
    steps = {}
    for node in graph.nodes:
        with _named(node):
            steps[node] = read_step(node, module)
    return steps


@contextmanager
def _named(node: fx.Node) -> Iterator[None]:
    """Errors as sentences that begin with the name of the layer, or of the function and where it is called."""
    try:
        yield
    except ValueError as error:
        name = str(node.target) if node.op in ("call_module", "get_attr") else node.name
        where = next(reversed(node.meta.get("nn_module_stack", {})), "")
        place = f" in {where}" if where and node.op != "call_module" else ""
        raise ValueError(f"equivariant cannot convert {name!r}{place}: {str(error).rstrip('.')}.") from None


def _expect_choice(name: str, value: object, options: tuple[str, ...]) -> None:
    if value not in options:
        raise ValueError(f"equivariant knows {name} {' or '.join(map(repr, options))}; got {value!r}.")


def _fix(channels: Channels | None) -> None:
    for width in widths.expand(channels or ()):
        width.fixed = True


def _size(channels: Channels | None) -> int | None:
    return None if channels is None else widths.plain_size(channels)


def _total(channels: Channels, chosen: dict[Width, int]) -> int:
    return sum(chosen[width] for width in widths.expand(channels))
