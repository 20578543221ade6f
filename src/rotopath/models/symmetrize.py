"""Average any model over rotations and flips of its input: `symmetrize`.

The rotations are 0°, 360°/N, 2·360°/N, … The average of the outputs over these does not change if the input is rotated
by one of these angles that is also a multiple of 90°, whatever the model is. Maps are rotated back before they are
averaged, and then rotate with the input.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rotopath import group
from rotopath.models.foreign import load_onnx, read_model_file
from rotopath.models.protocols import Geometry

How = Literal["mean", "probabilities", "max"]


def symmetrize(
    model: nn.Module | Callable[[Tensor], Any] | Path | str,
    orientations: int = 8,
    how: How = "mean",
    *,
    flips: bool = False,
    maps: bool | None = None,
    batched: bool = True,
) -> "Symmetrized":
    """Return a module that averages a model over `orientations` rotations of its images.

    - `model`: a module of torch (also TorchScript), a function of images, or the path of an ONNX file. It takes images
      (B, C, H, W) in floating point, and returns a tensor, or a tuple, a list or a dictionary of tensors.
    - `how`: "mean" averages the outputs as they are; "max" takes the maximum. With "probabilities", the outputs must be
      logits: their probabilities are averaged (sigmoid for a single channel, softmax over several), and the result is
      the logits of this average.
    - `flips`: average over left-right flips, too.
    - `maps`: whether outputs are maps, which are rotated back, or vectors, which rotations do not change. None: outputs
      (B, K, h, w) are maps, and outputs (B, K) are vectors. Say which for outputs (B, h, w) or tokens (B, T, C).
    - `batched`: rotated images are stacked along the batch, and the model is called once. With False, there is a call
      for each rotation, which needs less memory.

    Rotations by multiples of 90° only move pixels. If `orientations` is a multiple of 4, the result is exactly
    invariant (vectors) or equivariant (maps) under these, up to rounding. All other rotations interpolate with cubic
    splines, and fill the corners of the image by reflection: for these, the result is not exact. Corners of maps are
    averaged over the rotations that cover them.

    The module trains like any other: gradients flow to the weights of the model, and batch norm in training mode reads
    the statistics of all rotations. To score a trained model, or to find objects, use the option `rotations` of
    `rp.predict` and `rp.evaluate` instead, which average the probabilities at every angle with real surroundings.

    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 5), torch.nn.Flatten(), torch.nn.LazyLinear(2))
    >>> images = torch.rand(4, 3, 32, 32)
    >>> average = rp.symmetrize(net, orientations=4)
    >>> torch.allclose(average(images), average(rp.group.rotate(images, 90)), atol=1e-5)
    True
    """
    return Symmetrized(model, orientations, how, flips=flips, maps=maps, batched=batched)


class Symmetrized(nn.Module):
    """The average of a model over rotations, and optionally flips. See `symmetrize` for the arguments."""

    def __init__(
        self,
        model: nn.Module | Callable[[Tensor], Any] | Path | str,
        orientations: int = 8,
        how: How = "mean",
        *,
        flips: bool = False,
        maps: bool | None = None,
        batched: bool = True,
    ) -> None:
        super().__init__()
        group.check_orientations(orientations)
        if how not in get_args(How):
            raise ValueError(f"symmetrize() has no way {how!r} to average; choose from {', '.join(get_args(How))}.")
        if isinstance(model, Path | str):
            model = _open_file(Path(model))
        if not callable(model):
            raise ValueError(
                f"symmetrize() takes a module, a function of images or the path of an ONNX file; got "
                f"{type(model).__name__}."
            )
        self.model = model
        self.orientations, self.how, self.flips, self.maps, self.batched = orientations, how, flips, maps, batched
        # (angle in degrees, whether the image is flipped before it is rotated)
        self.views = [(angle, flip) for flip in (False, True)[: 1 + flips] for angle in group.angles(orientations)]
        if isinstance(model, nn.Module):
            self.training = model.training

    @property
    def geometry(self) -> Geometry:
        """The geometry of the model, if it has one, and if no rotation interpolates.

        Other rotations fill the corners of tiles by reflection, so that outputs would depend on the tiles.
        """
        geometry = getattr(self.model, "geometry", None)
        if not isinstance(geometry, Geometry) or 4 % self.orientations:
            raise AttributeError("geometry")
        return geometry

    def extra_repr(self) -> str:
        return f"orientations={self.orientations}, how={self.how!r}, flips={self.flips}"

    def forward(self, x: Tensor) -> Any:
        if x.ndim != 4:
            raise ValueError(f"A symmetrized model takes images (B, C, H, W); got {tuple(x.shape)}.")
        images = [group.rotate_reflected(group.flip(x) if flip else x, angle) for angle, flip in self.views]
        outputs: list[Any] = [None] * len(images)
        for shape in dict.fromkeys(image.shape for image in images):  # of oblong images, some rotations are upright
            alike = [i for i, image in enumerate(images) if image.shape == shape]
            if self.batched:
                together = self.model(torch.cat([images[i] for i in alike]))
                parts = [_select(together, k, len(alike)) for k in range(len(alike))]
            else:
                parts = [self.model(images[i]) for i in alike]
            for i, part in zip(alike, parts, strict=True):
                outputs[i] = part
        return self._combine(outputs)

    def _combine(self, outputs: Sequence[Any]) -> Any:
        """Average one output for each view: tensors, or the tensors in tuples, lists and dictionaries."""
        first = outputs[0]
        if isinstance(first, Mapping):
            return {key: self._combine([output[key] for output in outputs]) for key in first}
        if isinstance(first, list | tuple):
            members = [self._combine([output[i] for output in outputs]) for i in range(len(first))]
            return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
        if not isinstance(first, Tensor):
            raise ValueError(
                f"symmetrize() averages tensors, and tuples, lists and dictionaries of tensors; the model returned "
                f"{type(first).__name__}."
            )
        is_map = first.ndim == 4 if self.maps is None else self.maps
        if first.ndim < 2 or (self.maps is None and first.ndim not in (2, 4)) or (is_map and first.ndim < 3):
            raise ValueError(
                f"The model returned an output of shape {tuple(first.shape)}, and it is not known whether rotations "
                f"move its values; give symmetrize() maps=True for maps (..., h, w), or maps=False for vectors."
            )
        values = list(outputs)
        if self.how == "probabilities":
            values = [value.sigmoid() if value.shape[1] == 1 else value.softmax(dim=1) for value in values]
        covered = [torch.ones((), dtype=torch.bool, device=first.device)] * len(values)
        if is_map:
            values, covered = (list(pair) for pair in zip(*map(self._align, values, self.views), strict=True))
        return self._average(values, covered)

    def _align(self, maps: Tensor, view: tuple[float, bool]) -> tuple[Tensor, Tensor]:
        """Rotate and flip the maps of a view back. Also return which positions they cover, as a mask (h, w)."""
        angle, flip = view
        between = angle % 90
        upright = group.rotate(maps, between - angle)
        covered = torch.ones(upright.shape[-2:], dtype=torch.bool, device=maps.device)
        if between:
            ones = torch.ones(upright.shape[-2:], device=maps.device)
            upright, covered = group.rotate(upright, -between), group.rotate(ones, -between) > 0.5
        return (group.flip(upright), group.flip(covered)) if flip else (upright, covered)

    def _average(self, values: Sequence[Tensor], covered: Sequence[Tensor]) -> Tensor:
        """Average tensors of equal shape, at each position over those that cover it."""
        stack, masks = torch.stack(list(values)), torch.stack(list(covered))
        masks = masks.view(len(values), *[1] * (stack.ndim - masks.ndim), *masks.shape[1:])
        if self.how == "max":
            return stack.masked_fill(~masks, -torch.inf).amax(dim=0)
        mean = (stack * masks).sum(dim=0) / masks.sum(dim=0)
        if self.how == "mean":
            return mean
        tiny = torch.finfo(mean.dtype).eps  # splines may overshoot, and probabilities may be rounded to 0
        return mean.logit(tiny) if mean.shape[1] == 1 else mean.clamp(min=tiny).log()


def _select(outputs: Any, index: int, count: int) -> Any:
    """Return part `index` of `count` equal parts of the batch of outputs, which may be nested as in `_combine`."""
    if isinstance(outputs, Mapping):
        return {key: _select(value, index, count) for key, value in outputs.items()}
    if isinstance(outputs, list | tuple):
        members = [_select(value, index, count) for value in outputs]
        return type(outputs)(*members) if hasattr(outputs, "_fields") else type(outputs)(members)
    if not isinstance(outputs, Tensor):
        return outputs
    if outputs.ndim == 0 or len(outputs) % count:
        raise ValueError(
            f"The model returned an output of shape {tuple(outputs.shape)} for {count} rotations in one batch; give "
            f"symmetrize() batched=False, if it does not return one output for each image of a batch."
        )
    size = len(outputs) // count
    return outputs[index * size : (index + 1) * size]


def _open_file(path: Path) -> nn.Module:
    if path.suffix.lower() != ".onnx":
        raise ValueError(
            f"{path} is not an ONNX file; load other models first, for example with torch.jit.load, and give them to "
            f"symmetrize()."
        )
    return load_onnx(read_model_file(path))
