"""A network made ready to answer on a device, in the form and in the precision that are fast there.

In: a trained network. Out: one with its sizes and, to rounding, its answers, in float32. Where Triton's kernels do the
work it stays as it is, since they need fewer passes over memory than the layers of a plain CNN; elsewhere it is frozen.
"""

import copy

import torch
from torch import Tensor, nn

from rotopath.models import Network, freeze
from rotopath.nn import gpu


class MixedNetwork(Network):
    """A network whose convolutions compute in another precision (autocast); weights and logits stay float32."""

    def __init__(self, network: Network, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # its layers are the network's
        self.architecture, self.orientations = network.architecture, network.orientations
        self.network, self.dtype = network, dtype
        self.train(network.training)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.dtype):
            logits: Tensor = self.network(x)
        return logits.float()  # probabilities near 1 would be coarse in halves


def prepare(network: Network, device: torch.device, dtype: torch.dtype = torch.float32) -> Network:
    """The network for evaluation on a device, computing in float32 or a half of it; the one given is not changed."""
    ready = copy.deepcopy(network) if gpu.serves(device) else freeze(network)
    ready = ready.to(device).eval()
    return ready if dtype == torch.float32 else MixedNetwork(ready, dtype)
