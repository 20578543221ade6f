"""A network made ready to answer on a device, in the form and in the precision that are fast there.

In: a trained network. Out: one with its geometry and, to rounding, its answers, in float32. Where Triton's kernels do
the work it stays as it is, since they need fewer passes over memory than the layers of a plain CNN; elsewhere it is
frozen.
"""

import copy

import torch
from torch import Tensor, nn

from rotopath.models import DenseNetwork, Geometry, freeze
from rotopath.models.promise import find_module, replace_module
from rotopath.models.registry import is_equivariant
from rotopath.nn import gpu


class MixedNetwork(nn.Module):
    """A network whose convolutions compute in another precision (autocast); weights and logits stay float32."""

    def __init__(self, network: DenseNetwork, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network, dtype
        self.training = network.training

    @property
    def geometry(self) -> Geometry:
        return self.network.geometry

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.dtype):
            logits: Tensor = self.network(x)
        return logits.float()  # probabilities near 1 would be coarse in halves


def prepare(network: DenseNetwork, device: torch.device, dtype: torch.dtype = torch.float32) -> DenseNetwork:
    """The network for evaluation on a device, computing in float32 or a half of it; the one given is not changed."""
    ready = copy.deepcopy(network) if gpu.serves(device) else freeze_inside(network)
    ready = ready.to(device).eval()
    return ready if dtype == torch.float32 else MixedNetwork(ready, dtype)


def freeze_inside(network: DenseNetwork) -> DenseNetwork:
    """The network as plain layers. One that has no SE(2) layers, or that cannot be followed, stays as it is."""
    module = find_module(network)
    if not is_equivariant(module):
        return copy.deepcopy(network)
    try:
        return replace_module(network, freeze(module))
    except ValueError:
        return copy.deepcopy(network)  # as right, and slower
