"""Record networks and training steps as CUDA graphs, to make small ones faster.

With small batches, the launch of the GPU kernels from Python takes longer than their computation. A CUDA graph launches
all recorded kernels with a single call; to launch them is called a *replay*. `record` records the forward and backward
passes of a network. `record_step` records a whole training step, including loss and optimizer. All batches must have
the same size. During the recording, cuDNN measures which of its convolution algorithms is fastest. `RecordedInference`
records predictions.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rotopath.nn import fuse
from rotopath.nn.features import is_being_recorded

WARM_UP_STEPS = 3  # steps before the recording, because optimizers allocate their buffers in the first step
CALLS_BEFORE_RECORDING = 3  # images of other shapes are too rare to be worth a recording, which takes time and memory
MAX_RECORDINGS = 2  # shapes of images; each recording keeps the memory that the network needs


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


class _Recording(NamedTuple):
    """A CUDA graph that computes `output` from `images`, always in the same memory."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    output: Tensor


class RecordedInference:
    """Calls a function of images without gradients and, on a GPU, replays it for shapes of images that repeat.

    `compute` must return a tensor that depends only on the images and on tensors that keep their memory. Several
    threads may use it at once.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        self._compute = compute
        self._calls: Counter[tuple[Any, ...]] = Counter()
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        self._lock = Lock()

    def __reduce__(self) -> tuple[type["RecordedInference"], tuple[Callable[[Tensor], Tensor]]]:
        return RecordedInference, (self._compute,)  # copies record again

    def __call__(self, images: Tensor) -> Tensor:
        if not _can_replay(images):
            return self._compute(images)
        key = (images.device, images.dtype, images.shape, images.stride())
        with self._lock:  # another thread must not replace the images before they are read
            self._calls[key] += 1
            if key not in self._recordings and self._calls[key] > CALLS_BEFORE_RECORDING:
                self._record(key, images)
            if key in self._recordings:
                graph, static_images, output = self._recordings[key]
                static_images.copy_(images)
                graph.replay()
                return output.clone()
        return self._compute(images)

    def _record(self, key: tuple[Any, ...], images: Tensor) -> None:
        """Record the function for images of this shape, if there is enough memory and if it can be recorded."""
        self._calls[key] -= CALLS_BEFORE_RECORDING  # so that it is not tried again at every call
        free, _ = torch.cuda.mem_get_info(images.device)
        if len(self._recordings) >= MAX_RECORDINGS or free < torch.cuda.max_memory_allocated(images.device):
            return
        graph = torch.cuda.CUDAGraph()
        # Tensors of inference mode could not be changed outside of it. Other threads may use the GPU meanwhile.
        with suppress(RuntimeError), torch.inference_mode(False), torch.no_grad(), fuse.allow_in_graphs():
            static_images = images.clone(memory_format=torch.preserve_format)
            with torch.cuda.device(images.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                output = fuse.finish(self._compute(static_images))
            self._recordings[key] = _Recording(graph, static_images, output)


def _can_replay(images: Tensor) -> bool:
    return (
        images.is_cuda
        and not torch.is_grad_enabled()
        and not is_being_recorded()
        and not torch.cuda.is_current_stream_capturing()
        # Replays of several threads must be in one stream, because all of them read the same images.
        and torch.cuda.current_stream(images.device) == torch.cuda.default_stream(images.device)
    )


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
