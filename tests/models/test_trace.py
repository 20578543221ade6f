"""Tracing by torch.fx: one node per layer, and the parts of torch that `rotopath.models.trace` relies on."""

import pytest
import torch
from torch import Tensor, fx, nn

import rotopath as rp
from rotopath.models import network
from rotopath.models.trace import LayerTracer, expect_no_hooks, get_attribute, is_size, scope_of, trace_graph


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.strength = nn.Conv2d(3, 3, 3, padding=1), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        return self.conv(x).relu() * (self.strength * (height - 1) / width)


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_layers_are_single_nodes_and_blocks_are_not() -> None:
    graph = trace_graph(TwoBlocks())
    layers = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    assert layers == ["blocks.0.conv", "blocks.1.conv"]


def test_the_papers_networks_are_traced_without_their_checks() -> None:
    network_graph = trace_graph(rp.models.mitosis(4).eval())
    layers = [str(node.target) for node in network_graph.nodes if node.op == "call_module"]
    assert layers[:3] == ["smooth", "stages.0.conv", "stages.0.norm"]
    wrapped = trace_graph(nn.Sequential(rp.models.mitosis(4)))
    assert [str(node.target) for node in wrapped.nodes if node.op == "call_module"] == ["0"]


def test_sizes_and_numbers_computed_from_them_are_recognized() -> None:
    sizes = [node.name for node in trace_graph(Block()).nodes if is_size(node)]
    assert {"getattr_1", "sub"} <= set(sizes)
    assert "mul" not in sizes
    assert "truediv" not in sizes


def test_the_scope_of_a_node_is_the_module_that_calls_it() -> None:
    nodes = {node.name: node for node in trace_graph(TwoBlocks()).nodes}
    assert scope_of(nodes["relu_1"]) == "blocks.1"
    assert scope_of(nodes["output"]) == ""


def test_attributes_are_found_by_path() -> None:
    module = TwoBlocks()
    assert get_attribute(module, "blocks.1.strength") is module.blocks[1].strength


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_refused_until_they_are_removed(register: str) -> None:
    module = TwoBlocks()
    handle = getattr(module.blocks[1].conv, register)(lambda *_: None)
    with pytest.raises(ValueError, match=r"freeze\(\) does not support hooks, but blocks.1.conv has some; remove them"):
        expect_no_hooks(module)
    handle.remove()
    expect_no_hooks(module)


def test_torch_still_has_the_undocumented_parts_that_are_used() -> None:
    """If this fails after an update of torch, adapt `models/trace.py`, `network.py` and `protocols.py`."""
    tracer = fx.Tracer()
    assert hasattr(tracer, "module_stack"), "trace.LayerTracer.current_class_name"
    assert fx.Tracer.traced_func_name == "forward", "trace.trace_graph"
    for method in ("call_module", "create_node", "create_proxy", "getattr", "is_leaf_module", "iter", "proxy"):
        assert callable(getattr(fx.Tracer, method)), f"trace.LayerTracer.{method}"
    module = nn.Conv2d(3, 3, 3)
    assert module._forward_hooks == {}, "trace.expect_no_hooks"
    assert module._forward_pre_hooks == {}, "trace.expect_no_hooks"
    assert module._get_name() == "Conv2d", "protocols"
    assert "_get_name" in vars(network.ArchitectureNetwork), "network, for repr"
    graph = LayerTracer().trace(TwoBlocks())
    assert any("nn_module_stack" in node.meta for node in graph.nodes), "trace.scope_of"
