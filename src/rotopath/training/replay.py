"""Training steps replayed as CUDA graphs: small batches otherwise wait for Python, which launches kernels one by one.

In: a network on a GPU, and a batch of the size that all have. Out: the same network, whose forward and backward passes
in training are recorded once and then replayed; in evaluation it runs as ever.
"""

import torch
from torch import Tensor, nn


def record(network: nn.Module, images: Tensor) -> None:
    """Record the passes of a training step; weights, statistics and random numbers stay as they are."""
    before = [buffer.clone() for buffer in network.buffers()]
    # The precision is the caller's, but casts of weights must not be kept from one replay for the next.
    precision = (torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"))
    with torch.autocast("cuda", *precision, cache_enabled=False):
        torch.cuda.make_graphed_callables(network, (images,))
    with torch.no_grad():
        for buffer, value in zip(network.buffers(), before, strict=True):
            buffer.copy_(value)  # recording takes a few steps to warm up


def forget(network: nn.Module) -> None:
    """Run the network as ever again."""
    vars(network).pop("forward", None)
