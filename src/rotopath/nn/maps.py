"""Fixed maps of layers, such as those that turn kernels: buffers that follow from arguments, and are not saved."""

from collections.abc import Callable
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn


class MappedModule(nn.Module):
    """A layer whose fixed maps are on the device and in the dtype of its weights.

    Where these change, a map is made from scratch, since a cast one would keep its rounding. Otherwise it stays where
    it lies in memory: a step that was recorded as a CUDA graph goes on reading it there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._makers: dict[str, Callable[[], Tensor]] = {}

    def register_map(self, name: str, make: Callable[[], Tensor]) -> None:
        """Register a map under a name, once there are weights; its maker gives it on the CPU, in float64."""
        self._makers[name] = make
        self.register_buffer(name, self._make(name), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self._maps()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._place(before)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # may assign weights on another device or of another dtype
        self._place(self._maps())

    def _maps(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._makers}

    def _place(self, maps: dict[str, Tensor]) -> None:
        for name, known in maps.items():
            weight = self._weight()
            stays = (known.device, known.dtype) == (weight.device, weight.dtype)
            setattr(self, name, known if stays else self._make(name))

    def _make(self, name: str) -> Tensor:
        with torch.inference_mode(False):  # for one that is made there gradients could never be found
            return self._makers[name]().to(self._weight())

    def _weight(self) -> Tensor:
        """A parameter; or a buffer, if someone made buffers of all parameters."""
        buffers = (buffer for name, buffer in self.named_buffers() if name not in self._makers)
        return next(chain(self.parameters(), buffers))
