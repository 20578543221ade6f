"""Convert a plain CNN to its SE(2,N) counterpart: a network with N orientations that is equivariant to rotation.

`equivariant` takes a module that consists of layers of torch. It returns a module with the corresponding layers of
`rp.nn`, which have the same names and newly initialized weights. If a layer or function has no counterpart,
`equivariant` raises ValueError with the name of this layer or function.

The conversion has four steps:

1. Trace the module, and rewrite its graph with standard layers (module `standard`). The graph has one node for each
   call of a layer, function or method.
2. Classify the nodes. Choose where images are lifted to SE(2) features, and where features are projected to maps
   without orientations (module `nodes`).
3. Choose the numbers of channels, and build the new layers (module `group_layers`).
4. Write the new graph, which calls the new layers.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn

from rotopath import group
from rotopath.models.convert.copying import copy_weights, expect_linear_head
from rotopath.models.convert.group_layers import (
    Channels,
    ConversionOptions,
    Width,
    build_counterpart,
    build_projection,
    count_weights,
    fit_widths,
    layer_channels,
    plain_channels,
    resolve_parts,
    scale_widths,
    tie,
)
from rotopath.models.convert.nodes import Operation, ValueKind, assign_kinds, classify_node
from rotopath.models.convert.standard import standardize
from rotopath.models.trace import is_layer, scope_of
from rotopath.nn import GroupAvgPool2d, GroupMaxPool2d, Project, concatenate, finish
from rotopath.nn.features import SizeError
from rotopath.nn.pool import pad_evenly, resize, take_channels
from rotopath.nn.project import PROJECTIONS, Projection, weights_per_channel

Keep = Literal["weights", "channels", "maps"]
Strides = Literal["keep", "pool"]
Weights = Literal["new", "copy"]
Preset = Literal["paper", "faithful"]
# Defaults of options of `equivariant`, for each preset and for copied weights.
PRESETS: Mapping[str, Any] = {
    "paper": {"kernel": "bilinear", "projection": "max", "strides": "keep"},
    "faithful": {"kernel": "harmonic", "projection": "mean", "strides": "pool"},
}
COPIED: Mapping[str, Any] = {"kernel": "square", "projection": "mean", "strides": "keep"}
SEARCH_PX = 130  # sizes of images up to this distance are tried for error messages
RESIZE_OPTIONS = ("size", "scale_factor", "mode", "align_corners")


def equivariant(
    module: nn.Module,
    orientations: int = 8,
    keep: Keep | None = None,
    kernel: group.Kernel | None = None,
    projection: Projection | None = None,
    strides: Strides | None = None,
    reflections: bool = False,
    weights: Weights = "new",
    preset: Preset = "paper",
) -> "EquivariantModule":
    """Return the SE(2,N) counterpart of a plain CNN, with N = `orientations`.

    If the input image (B, C, H, W) of the new network is rotated, output maps rotate with the image, and output vectors
    stay the same. `module` is not changed. Raises ValueError if a layer or function of `module` has no counterpart.

    `weights` are "new", which initializes all weights, or "copy". With "copy", each orientation computes the plain
    network with rotated kernels, and the output is the mean over the orientations. For N = 4 in evaluation mode, it
    equals the mean of the plain network's outputs for the image rotated by 0°, 90°, 180° and 270° (output maps are
    rotated back), up to rounding errors.

    `keep` determines the numbers of channels. "weights", the default, keeps the number of weights: C channels become
    about C/√N channels with N orientations. "channels", the default and the only choice of weights="copy", keeps C
    channels in every layer. "maps" keeps the product of channels and orientations, and therefore about the same memory
    and time.

    `preset` determines the next three options. "paper" is for `kernel="bilinear"`, `projection="max"` and
    `strides="keep"`. "faithful" rotates more accurately between multiples of 90°: it is for `kernel="harmonic"`,
    `projection="mean"` and `strides="pool"`, and all pools and strides smooth before they subsample. With
    weights="copy", the options are `kernel="square"`, `projection="mean"` and `strides="keep"`.

    `kernel` is the kernel family of `rp.nn.GroupConv2d`. `projection` is the mode of `rp.nn.Project`. With
    `reflections`, the network is equivariant to flips too: its kernels are rotated and mirrored, and it has 2N
    orientations.

    A layer of `rp.nn` raises ValueError if its windows do not cover the height and width of the input exactly.
    Therefore, `strides` determines which heights and widths of images the new network accepts. "keep" keeps all
    strides. The usual 3 × 3 convolution with stride 2 and padding 1 then accepts odd heights and widths only. "pool" is
    for even heights and widths. A layer with stride s stays as it is if it accepts all multiples of s as height and
    width. Otherwise, it gets stride 1, and a mean pool over windows of s × s px reduces the size instead. Most of these
    convolutions are computed together with their mean pool, as one convolution (argument `pool` of
    `rp.nn.GroupConv2d`). If the new network gets an image of a size that it does not accept, the error message names
    the nearest sizes that it does accept.

    >>> plain = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 2, 1))
    >>> net = rp.equivariant(plain, orientations=4, keep="channels")
    >>> net(torch.zeros(1, 3, 30, 30)).shape
    torch.Size([1, 2, 28, 28])
    >>> rp.equivariance_error(net, torch.rand(1, 3, 30, 30)) < 1e-4
    True
    >>> start, x = rp.equivariant(plain, orientations=4, weights="copy"), torch.rand(1, 3, 30, 30)
    >>> angles = (0, 90, 180, 270)
    >>> mean = sum(rp.group.rotate(plain(rp.group.rotate(x, angle)), -angle) for angle in angles) / 4
    >>> torch.allclose(start(x), mean, atol=1e-5)
    True
    """
    group.check_orientations(orientations)
    _expect_choice("weights", weights, get_args(Weights))
    _expect_choice("preset", preset, tuple(PRESETS))
    copies = weights == "copy"
    defaults = COPIED if copies else PRESETS[preset]
    keep = keep or ("channels" if copies else "weights")
    kernel, projection = kernel or defaults["kernel"], projection or defaults["projection"]
    strides = strides or defaults["strides"]
    _expect_choice("keep", keep, get_args(Keep))
    _expect_choice("kernel", kernel, group.KERNELS)
    _expect_choice("projection", projection, PROJECTIONS)
    _expect_choice("strides", strides, get_args(Strides))
    if copies and (keep, projection, strides, preset) != ("channels", "mean", "keep", "paper"):
        raise ValueError(
            f"equivariant() with weights='copy' needs keep='channels', projection='mean', strides='keep' and "
            f"preset='paper', so that it computes the mean of the plain network's outputs; got keep={keep!r}, "
            f"projection={projection!r}, strides={strides!r} and preset={preset!r}. Leave these options out."
        )
    wrapped = nn.Sequential(module) if is_layer(module) else module
    smooth = preset == "faithful"
    options = ConversionOptions(orientations, kernel, projection, strides, reflections, copies, smooth)
    converter = Converter(wrapped, options)
    chosen = converter.choose_widths(keep)
    net = converter.write(chosen, f"Equivariant{type(module).__name__}")
    net.meta["strides"] = strides
    return net.train(module.training)


@dataclass(frozen=True)
class LayerPlan:
    """Description of a layer of the new network, from which the layer is built later.

    `layer` is the corresponding layer of the plain network. `reads` and `returns` are the kinds of the new layer's
    input and output. `inputs` and `outputs` are its input channels and output channels, as `layer_channels` returns
    them: tuples of `Width`, whose numbers of channels are not chosen yet.
    """

    layer: nn.Module
    reads: ValueKind
    returns: ValueKind
    inputs: Channels
    outputs: Channels


class Converter:
    """Convert a module: plan its layers (`LayerPlan`), choose the numbers of channels, and write the new graph."""

    def __init__(self, module: nn.Module, options: ConversionOptions) -> None:
        self.options = options
        self.module, self.operations = _classify_nodes(module, options)
        self.kinds = assign_kinds(self.operations, linear_head=options.copies)
        if options.copies:
            expect_linear_head((operation, self.kinds[node]) for node, operation in self.operations.items())
        self.parts: dict[fx.Node, tuple[Channels, Channels]] = {}  # of nodes that take channels: those before, those
        self.channels: dict[fx.Node, Channels | None] = {}  # of each node's output; None if not known, as for images
        self.plans: dict[str, LayerPlan] = {}  # path of each layer in the new module → its plan
        self.paths: dict[fx.Node, str] = {}  # each node that calls a layer → path of the layer in the new module
        for node, operation in self.operations.items():
            with _naming_node(node, self.module):
                self.channels[node] = self._propagate_channels(node, operation)

    def choose_widths(self, keep: str) -> dict[Width, int]:
        """Choose the number of channels for each `Width`, and return these numbers.

        `keep` is the option of `equivariant`: "weights", "channels" or "maps".
        """
        n = self.options.order
        widths = list(dict.fromkeys(w for p in self.plans.values() for w in resolve_parts(p.inputs + p.outputs)))
        if keep == "channels":
            return scale_widths(widths, 1.0)
        if keep == "maps":
            return scale_widths(widths, 1 / n)
        target = _count_plain_weights([plan.layer for plan in self.plans.values()])
        return fit_widths(widths, self.count_weights, target, least=1 / n)

    def count_weights(self, chosen: Mapping[Width, int]) -> int:
        """Return the number of weights of the new network, for the numbers of channels in `chosen`."""
        layers = 0
        for plan in self.plans.values():
            inputs, outputs = (_count_channels(channels, chosen) for channels in (plan.inputs, plan.outputs))
            layers += count_weights(plan.layer, plan.reads, plan.returns, inputs, outputs, self.options)
        per_channel = weights_per_channel(self.options.projection, self.options.orientations)
        return layers + per_channel * sum(_count_channels(c, chosen) for c in self._projected_channels().values())

    def write(self, chosen: Mapping[Width, int], name: str) -> "EquivariantModule":
        """Build the layers with the chosen numbers of channels, and return the new module that calls them.

        `name` is the class name of the new module.
        """
        layers: dict[str, nn.Module] = {}
        for path, plan in self.plans.items():
            inputs, outputs = (_count_channels(channels, chosen) for channels in (plan.inputs, plan.outputs))
            with _naming_node(next(node for node, other in self.paths.items() if other == path), self.module):
                layers[path] = build_counterpart(plan.layer, plan.reads, plan.returns, inputs, outputs, self.options)
                if self.options.copies:
                    copy_weights(layers[path], plan.layer)
        projections = {
            node: build_projection(_count_channels(channels, chosen), self.module, self.options)
            for node, channels in self._projected_channels().items()
        }
        parts = {
            node: (_count_channels(before, chosen), _count_channels(part, chosen))
            for node, (before, part) in self.parts.items()
        }
        return GraphRewriter(self.operations, self.kinds, self.paths, layers, projections, parts).write(name)

    def _projected_channels(self) -> dict[fx.Node, Channels]:
        """Return the nodes whose output must be projected, and the channels of the output of each of these nodes.

        These are the nodes of kind `ValueKind.FEATURES` whose output is an input of a node of kind `ValueKind.PLAIN`.
        """
        return {
            node: self.channels[node] or ()
            for node, kind in self.kinds.items()
            if kind is ValueKind.FEATURES and any(self.kinds[user] is ValueKind.PLAIN for user in node.users)
        }

    def _propagate_channels(self, node: fx.Node, operation: Operation) -> Channels | None:
        """Return the channels of a node's output; None if they are not known, as for images and numbers.

        If the node calls a layer, also add the plan of this layer to `plans`. If the node combines several inputs
        elementwise, for example in a sum, also require equal numbers of channels of these inputs (`tie`). If the node
        returns the output of the network, also keep the plain network's numbers of channels for this output (`_fix`).
        """
        sources = [source for source in node.all_input_nodes if self.kinds[source] is not ValueKind.NUMBER]
        if self.kinds[node] is ValueKind.NUMBER or operation.role == "placeholder":
            return None
        if operation.role == "concatenation":
            return self._concatenate(node, sources)
        if operation.role in ("take", "shuffle", "reduce"):
            return self._select_channels(node, operation.role, self.channels[sources[0]])
        if len(sources) > 1 and operation.role != "output":
            self._tie_sources(sources)
        if operation.role == "output":
            for source in sources:
                _fix(self.channels[source])
            return None
        wide = (self.channels[source] for source in sources if not self._has_single_channel(source))
        channels = next(wide, self.channels[sources[0]])
        if operation.layer is None or operation.role == "resize":
            return channels
        return self._plan_layer(node, operation.layer, self.kinds[sources[0]], channels)

    def _plan_layer(
        self, node: fx.Node, layer: nn.Module, reads: ValueKind, channels: Channels | None
    ) -> Channels | None:
        """Add the plan of a node's layer to `plans`, and return the channels of the node's output.

        `reads` is the kind of the layer's input. `channels` are the channels of this input; None if they are not known.
        A layer without weights may be applied to values of two kinds. It then gets two plans, under two paths. For a
        layer with weights, two kinds raise ValueError.
        """
        returns = self.kinds[node]
        reads = reads if returns is ValueKind.FEATURES else ValueKind.PLAIN
        path = str(node.target) if node.op == "call_module" else f"{node.name}_layer"
        inputs, outputs = layer_channels(layer, channels, reads, returns)
        has_weights = bool(inputs) or any(True for _ in layer.parameters())
        if path in self.plans and (self.plans[path].reads, self.plans[path].returns) != (reads, returns):
            if has_weights:
                raise ValueError(
                    "it is applied to values of two kinds (images, SE(2) features or projected maps); use one layer "
                    "for each kind"
                )
            path = f"{path}_{reads.value}"
        # This call raises ValueError for some layers without counterpart, before the numbers of channels are chosen.
        count_weights(layer, reads, returns, plain_channels(inputs), plain_channels(outputs), self.options)
        if path not in self.plans:
            self.plans[path] = LayerPlan(layer, reads, returns, inputs, outputs)
        elif has_weights:
            tie(self.plans[path].inputs, inputs)
            outputs = self.plans[path].outputs
        self.paths[node] = path
        return outputs or channels

    def _concatenate(self, node: fx.Node, sources: list[fx.Node]) -> Channels | None:
        """Return the channels of a node that concatenates the outputs of `sources` along the channel axis.

        If the channels of one source are not known, keep the plain network's numbers of channels for all other sources
        (`_fix`), and return None.
        """
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        if dim not in ((1, -1) if any(map(self._is_vector, sources)) else (1, -3)):
            raise ValueError(f"it concatenates along axis {dim}; concatenate along axis 1, the channels")
        parts = node.args[0] if node.args else next(iter(node.kwargs.values()))
        assert isinstance(parts, list | tuple)
        known = [self.channels[part] for part in parts if isinstance(part, fx.Node)]
        if any(channels is None for channels in known):
            for source in sources:
                _fix(self.channels[source])
            return None
        return tuple(width for channels in known if channels for width in channels)

    def _select_channels(self, node: fx.Node, role: str, channels: Channels | None) -> Channels | None:
        """Return the channels of a node that takes, shuffles or reduces the channels of its input.

        A width of the input is split where a part begins or ends (`tie`). The groups of a shuffle have equal widths.
        """
        if role == "reduce":
            return (Width(1, fixed=True),)
        if channels is None:
            if role == "take":
                raise ValueError("it takes some channels of a value whose channels are not known, such as an image")
            return None
        total = plain_channels(channels)
        if role == "shuffle":
            groups: Any = node.args[1]
            group_width = Width(total // groups)
            tie(channels, (group_width,) * groups)
            return resolve_parts((group_width,) * groups)
        first, count = (int(number) for number in node.args[1:])  # type: ignore[arg-type]
        sizes = [size for size in (first, count, total - first - count) if size]
        parts = tuple(Width(size) for size in sizes)
        tie(channels, parts)
        before, part = parts[: int(first > 0)], parts[int(first > 0) :][:1]
        self.parts[node] = (before, part)
        return resolve_parts(part)

    def _tie_sources(self, sources: list[fx.Node]) -> None:
        """Require equal numbers of channels (`tie`) of the outputs of `sources`, which a node combines elementwise.

        An output with one channel keeps one channel, because torch broadcasts it over the channels of other outputs. If
        the channels of one output are not known, all other outputs keep their numbers of channels (`_fix`).
        """
        wide = [self.channels[source] for source in sources if not self._has_single_channel(source)]
        for source in sources:
            if self._has_single_channel(source) or None in wide:
                _fix(self.channels[source])
        for channels in wide[1:]:
            if channels is not None and wide[0] is not None:
                tie(wide[0], channels)

    def _has_single_channel(self, node: fx.Node) -> bool:
        channels = self.channels[node]
        return channels is not None and plain_channels(channels) == 1

    def _is_vector(self, node: fx.Node) -> bool:
        """Return whether the output of a node is a vector (B, K), not a map (B, K, H, W)."""
        operation = self.operations[node]
        if operation.role in ("flatten", "linear") or (node.target in ("mean", "amax", torch.mean, torch.amax)):
            return operation.role != "adaptive"
        return self.kinds[node] is ValueKind.PLAIN and any(map(self._is_vector, node.all_input_nodes))


class EquivariantModule(fx.GraphModule):
    """Converted network: a graph module that names sizes of images which all its layers accept, if one does not."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except SizeError as error:
            images = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim >= 4]
            if not images:
                raise
            raise ValueError(describe_sizes(self, images[0], str(error))) from None


def describe_sizes(net: fx.GraphModule, image: Tensor, reason: str) -> str:
    """Return the error message for an image that `net` does not accept, with the nearest sizes that it accepts.

    `reason` is the message of the layer, whose last part names sizes that this layer alone accepts.
    """
    height, width = image.shape[-2:]
    sizes = nearest_sizes(net, image, height)
    others = nearest_sizes(net, image, width) if height != width else sizes
    other = {"keep": "pool", "pool": "keep"}.get(net.meta.get("strides", ""), "pool")
    remedy = f"convert the network with strides={other!r}, which accepts other sizes"
    if sizes and others:
        named = [" or ".join(map(str, nearest)) for nearest in (sizes, others)]
        sides = f"{named[0]} px" if height == width else f"a height of {named[0]} px and a width of {named[1]} px"
        remedy = f"{remedy}, or use {sides}"
    reason = reason.rpartition(";")[0] or reason.rstrip(".")
    return f"The converted network does not accept images of {height} × {width} px, because of {reason}; {remedy}."


def nearest_sizes(net: nn.Module, image: Tensor, side: int) -> list[int]:
    """Return up to two sides in px, nearest to `side` and on both sides of it, of square images that `net` accepts.

    `image` (B, C, …, H, W) is an example. The network computes shapes only.
    """
    meta = copy.deepcopy(net).to("meta").eval()
    nearest = []
    for candidates in (range(side, max(side // 2, side - SEARCH_PX), -1), range(side + 1, side + SEARCH_PX)):
        for candidate in candidates:
            example = torch.empty(1, *image.shape[1:-2], candidate, candidate, device="meta", dtype=image.dtype)
            try:
                with torch.no_grad():
                    nn.Module.__call__(meta, example)
            except (ValueError, RuntimeError):
                continue  # windows that do not fit, or branches whose sizes differ, so that their sum fails
            nearest.append(candidate)
            break
    return nearest


class GraphRewriter:
    """Write the graph of the converted network.

    An old node is a node of the traced graph; a new node is a node of the converted graph. `paths` contains, for each
    old node that calls a layer, the path of the new layer. `layers` contains the new layer for each path. `parts`
    contains, for each old node that takes channels, the first of them and their number in the new network. Some old
    nodes return features that must be projected. For each of these nodes, `projections` contains a `Project` layer.

    While the graph is written, `values` contains the new value of each old node: the new node that computes the
    corresponding output. If the output is the size of features, or a slice of this size, the new value is a tuple with
    one new node for each axis. For each old node in `projections`, `projected` contains the new node that calls the
    `Project` layer. Nodes of kind `ValueKind.PLAIN` read the projected values instead of the features.
    """

    def __init__(
        self,
        operations: Mapping[fx.Node, Operation],
        kinds: Mapping[fx.Node, ValueKind],
        paths: Mapping[fx.Node, str],
        layers: Mapping[str, nn.Module],
        projections: Mapping[fx.Node, Project],
        parts: Mapping[fx.Node, tuple[int, int]],
    ) -> None:
        self.parts = parts
        self.operations = operations
        self.kinds = kinds
        self.paths = paths
        self.projection_names = dict(zip(projections, _projection_names(layers), strict=False))
        named = {self.projection_names[node]: projection for node, projection in projections.items()}
        self.layers: dict[str, Any] = {**layers, **named}
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.projected: dict[fx.Node, fx.Node] = {}

    def write(self, name: str) -> EquivariantModule:
        """Write the graph, and return the new module. `name` is its class name."""
        for node, operation in self.operations.items():
            self.values[node] = self._rewrite(node, operation)
            if node in self.projection_names:
                self.projected[node] = self.graph.call_module(self.projection_names[node], (self.values[node],))
        for new in reversed(self.graph.nodes):  # remove sizes that no new node reads
            if new.target == "size" and not new.users:
                self.graph.erase_node(new)
        self._finish_before_pools()
        return EquivariantModule(self.layers, self.graph, name)

    def _finish_before_pools(self) -> None:
        """Insert a call of `finish` after each node whose output is read by a pool and by other nodes.

        `finish` computes operations that `rp.nn.fuse` has deferred, such as a norm and a ReLU. Without this call, these
        operations may be computed several times: once for each node that reads their output.
        """
        for features in list(self.graph.nodes):
            if len(features.users) > 1 and any(
                isinstance(self.layers.get(str(user.target)), GroupMaxPool2d | GroupAvgPool2d)
                for user in features.users
            ):
                with self.graph.inserting_after(features):
                    finished = self.graph.call_function(finish, (features,))
                features.replace_all_uses_with(finished, lambda user, new=finished: user is not new)

    def _rewrite(self, node: fx.Node, operation: Operation) -> Any:
        """Add new nodes for an old node, and return the new value of the old node."""
        kind = self.kinds[node]
        args, kwargs = self._new(node.args, kind), self._new(node.kwargs, kind)
        if operation.role == "output":
            return self.graph.output(args[0])
        if operation.role == "size":
            return self._rewrite_size(node, args)
        if operation.role == "constant":
            self.layers[str(node.target)] = operation.constant
        if operation.role == "take":
            return self.graph.call_function(take_channels, (args[0], *self.parts[node]))
        if operation.role == "flatten":
            return self.graph.call_function(torch.flatten, (args[0], 1))
        if operation.role == "concatenation":
            parts = args[0] if args else next(iter(kwargs.values()))
            if kind is ValueKind.FEATURES:
                return self.graph.call_function(concatenate, (parts,))
            return self.graph.call_function(torch.cat, (parts,), {"dim": 1})
        if operation.role == "resize":
            options = {key: getattr(operation.layer, key, None) for key in RESIZE_OPTIONS} if operation.layer else {}
            options |= dict(zip(RESIZE_OPTIONS, args[1:], strict=False)) | kwargs
            options = {key: value for key, value in options.items() if key in RESIZE_OPTIONS and value is not None}
            return self.graph.call_function(resize, (args[0],), options)
        if operation.role == "pad":
            return self.graph.call_function(pad_evenly, args, kwargs)
        if operation.layer is not None:
            return self.graph.call_module(self.paths[node], (self._new(node.all_input_nodes[0], kind),))
        return self.graph.node_copy(node, lambda source: self._new(source, kind))

    def _rewrite_size(self, node: fx.Node, args: Any) -> Any:
        """Return the new value of an old node that returns a size, or a number computed from sizes.

        `args` are the arguments of the old node, with old nodes replaced by their new values. The plain network's
        `forward()` expects sizes (B, C, H, W). The new size of features therefore omits their orientation axis.
        """
        source = node.all_input_nodes[0]
        if self.kinds[source] is ValueKind.FEATURES:
            sizes = tuple(self.graph.call_method("size", (self.values[source], axis)) for axis in (0, 1, -2, -1))
            return sizes[args[1]] if node.target == "size" and len(args) > 1 else sizes
        if self.kinds[source] is not ValueKind.NUMBER:
            return self.graph.node_copy(node, lambda old: self.values[old])
        if isinstance(args[0], tuple):  # the node returns an item or a slice of the size of features
            return args[0][args[1]]
        return self.graph.create_node("call_function", node.target, args)

    def _new(self, old: Any, user: ValueKind) -> Any:
        """Return the argument `old` of an old node, with all old nodes in this argument replaced by their new values.

        `user` is the kind of the node that has this argument. If `user` is `ValueKind.PLAIN`, projected values are used
        instead of features.
        """

        def replace(node: fx.Node) -> Any:
            value = self.values[node]
            return self.projected.get(node, value) if user is ValueKind.PLAIN else value

        return fx.map_arg(old, replace)


def _classify_nodes(module: nn.Module, options: ConversionOptions) -> tuple[nn.Module, dict[fx.Node, Operation]]:
    """Trace a module, and return a copy of it with standard layers, and the operation of each node.

    Raises ValueError if the module has hooks, if it cannot be traced, if the behavior of a node under rotation is not
    known, or if `forward()` differs between training and evaluation mode.
    """
    module, graph = standardize(module, as_maps=options.copies)
    operations = {}
    for node in graph.nodes:
        with _naming_node(node, module):
            operations[node] = classify_node(node, module)
    return module, operations


def _projection_names(layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """Return an endless iterator of names for the projection layers: "project", "project_2", and so on.

    Names of modules in `layers` are not used. If "project" is such a name, the names start with "project_layer".
    """
    taken = {path.partition(".")[0] for path in layers}
    name = next(name for name in ("project", "project_layer", "_project") if name not in taken)
    names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
    return (name for name in names if name not in taken)


def _count_plain_weights(layers: Sequence[nn.Module]) -> int:
    """Return the number of weights of the plain network, before kernels were made square (`make_square`)."""
    added = 0
    for layer in layers:
        weights: Any = getattr(layer, "plain_weights", None)
        added += 0 if weights is None else sum(p.numel() for p in layer.parameters()) - weights
    return sum(p.numel() for p in nn.ModuleList(layers).parameters()) - added


def _count_channels(channels: Channels, chosen: Mapping[Width, int]) -> int:
    return sum(chosen[width] for width in resolve_parts(channels))


def _fix(channels: Channels | None) -> None:
    """Fix each number of channels to that of the plain network. If `channels` is None (not known), do nothing."""
    for width in resolve_parts(channels or ()):
        width.fixed = True


@contextmanager
def _naming_node(node: fx.Node, module: nn.Module) -> Iterator[None]:
    """Return a context manager that adds the name of `node` to the message of each ValueError raised inside.

    For a layer or tensor, the name is its path in `module`, with the class of the layer. For a function, the message
    contains the name of the node, and the path and the class of the submodule that calls the function.
    """
    try:
        yield
    except ValueError as error:
        name = str(node.target) if node.op in ("call_module", "get_attr") else node.name
        scope = scope_of(node)
        where = f" in {scope} ({type(module.get_submodule(scope)).__name__})" if scope else ""
        if node.op == "call_module":
            where = f" ({type(module.get_submodule(name)).__name__})"
        raise ValueError(f"equivariant() cannot convert {name!r}{where}: {str(error).rstrip('.')}.") from None


def _expect_choice(name: str, value: object, options: tuple[str, ...]) -> None:
    if value not in options:
        raise ValueError(
            f"The option {name!r} of equivariant() must be {' or '.join(map(repr, options))}; got {value!r}."
        )
