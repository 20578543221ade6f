"""Training steps replayed as CUDA graphs: small batches otherwise wait for Python, which launches kernels one by one.

In: a network on a GPU and a batch of the size that all have, or a whole step. Out: the same, recorded once and then
replayed. All batches being alike, cuDNN looks for its fastest convolutions while it is recorded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

WARM_UP = 3  # steps; optimisers make their buffers in the first


def record(network: nn.Module, images: Tensor) -> None:
    """Record the passes of a training step; weights, statistics and random numbers stay as they are.

    In evaluation the network runs as ever.
    """
    before = [buffer.clone() for buffer in network.buffers()]
    # The precision is the caller's, but casts of weights must not be kept from one replay for the next.
    precision = (torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"))
    with _fastest_convolutions(), torch.autocast("cuda", *precision, cache_enabled=False):
        torch.cuda.make_graphed_callables(network, (images,))
    with torch.no_grad():
        for buffer, value in zip(network.buffers(), before, strict=True):
            buffer.copy_(value)  # recording takes a few steps to warm up


def forget(network: nn.Module) -> None:
    """Run the network as ever again."""
    vars(network).pop("forward", None)


def record_step(step: Callable[[], None]) -> Callable[[], None]:
    """A whole step (passes, loss, backward and optimiser), which nothing but the GPU then has a part in.

    It is taken a few times to warm up. What it reads, it reads where it was: the next batch is copied there. Numbers of
    Python's, such as the learning rate, stay what they were. Gradients are to be set to None in it before they are
    found.
    """
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # where graphs want to be warmed up
    aside.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with _fastest_convolutions():
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph):
            step()

    # A graph knows where tensors lie, but does not hold them: what the step refers to has to live as long as it does.
    def replay(_alive: object = step) -> None:
        graph.replay()

    return replay


@contextmanager
def _fastest_convolutions() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
