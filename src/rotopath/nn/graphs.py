"""Record training steps as CUDA graphs, to make training with small batches faster.

With small batches, the launch of the GPU kernels from Python takes longer than their computation. A CUDA graph launches
all recorded kernels with a single call; to launch them is called a *replay*. `record` records the forward and backward
passes of a network. `record_step` records a whole training step, including loss and optimizer. All batches must have
the same size. During the recording, cuDNN measures which of its convolution algorithms is fastest.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rotopath.nn import fuse

WARM_UP_STEPS = 3  # steps before the recording, because optimizers allocate their buffers in the first step


def record(network: nn.Module, images: Tensor) -> None:
    """Record the forward and backward passes of a network on a GPU. The network is changed in place.

    Afterwards, the network replays the recorded passes in training mode. In evaluation mode, the network runs as
    before, without CUDA graphs. `images` (B, 3, H, W) is an example batch; all later batches in training mode must have
    the same shape. The recording changes neither the weights nor the batch norm statistics.
    """
    before = [buffer.clone() for buffer in network.buffers()]
    # Keep the autocast settings of the caller, except for the cache of cast weights: every replay must cast the current
    # weights again.
    autocast = (torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"))
    compute = network.forward
    vars(network)["forward"] = lambda *args: fuse.finish_all(compute(*args))  # outputs are read after the recording
    with (
        _search_fastest_convolutions(),
        fuse.allow_in_graphs(),
        torch.autocast("cuda", *autocast, cache_enabled=False),
    ):
        torch.cuda.make_graphed_callables(network, (images,))
    with torch.no_grad():
        for buffer, value in zip(network.buffers(), before, strict=True):
            buffer.copy_(value)  # the warm-up steps of the recording have changed the batch norm statistics


def release(network: nn.Module) -> None:
    """Discard the CUDA graphs that `record` has recorded, so that the network runs without CUDA graphs again."""
    vars(network).pop("forward", None)  # `record` has replaced `forward` on the instance


def record_step(step: Callable[[], None]) -> Callable[[], None]:
    """Record a whole training step as a CUDA graph, and return a function that replays it.

    `step` is a function that computes one training step. It must set the old gradients to None before it computes new
    gradients. `record_step` first calls `step` a few times to warm up, which changes the weights. Before each replay,
    copy the next batch into the tensors that `step` reads, because the graph always reads the same memory. Python
    numbers, such as the learning rate, keep the values that they had during the recording.
    """
    warm_up_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # required: not the default stream
    warm_up_stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with _search_fastest_convolutions(), fuse.allow_in_graphs():
        with torch.cuda.stream(warm_up_stream):
            for _ in range(WARM_UP_STEPS):
                step()
        torch.cuda.current_stream().wait_stream(warm_up_stream)
        with torch.cuda.graph(graph):
            step()

    # A graph contains addresses of tensors, but no references to them. The default argument keeps `step` and
    # therefore its tensors alive.
    def replay(_alive: object = step) -> None:
        graph.replay()

    return replay


@contextmanager
def _search_fastest_convolutions() -> Iterator[None]:
    """Context manager: let cuDNN measure all algorithms of each convolution and select the fastest.

    Algorithms round differently, and which one is fastest depends on chance. So nothing is measured if results must be
    deterministic.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.deterministic
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
