"""Writes the graph of a converted network: the same steps, a projection where plain ones read features, the same sizes.

In: the steps of the plain network, what kind of value each gives, and the layers to call. Out: a graph module.
"""

import itertools
from typing import Any

import torch
from torch import fx, nn

from rotopath.models.placing import Kind
from rotopath.models.steps import Step
from rotopath.nn import Project
from rotopath.nn.join import pad_evenly
from rotopath.nn.upsample import resize

RESIZING = ("size", "scale_factor", "mode", "align_corners")


class Rewriter:
    """Goes through the steps; what stands for a value is a node of the new graph, a number, or a tuple of those."""

    def __init__(
        self,
        steps: dict[fx.Node, Step],
        kinds: dict[fx.Node, Kind],
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
        if self.kinds[asked] is not Kind.NUMBER:
            axes = (0, 1, -2, -1) if self.kinds[asked] is Kind.FEATURES else None
            if axes is None:
                return self.graph.node_copy(node, lambda each: self.values[each])
            sizes = tuple(self.graph.call_method("size", (self.values[asked], axis)) for axis in axes)
            return sizes[args[1]] if node.target == "size" and len(args) > 1 else sizes
        if isinstance(args[0], tuple):  # of which parts are asked for
            return args[0][args[1]]
        return self.graph.create_node("call_function", node.target, args)

    def _new(self, old: Any, reader: Kind) -> Any:
        """What an argument has become; for plain readers behind the projection."""
        return fx.map_arg(
            old, lambda node: self.projected.get(node, self.values[node]) if reader is Kind.PLAIN else self.values[node]
        )
