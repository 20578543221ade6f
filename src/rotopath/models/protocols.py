"""What a network has to promise to be trained, evaluated and run over slides, and how that is found out.

In: any module from images (B, 3, H, W) to logits. Out: a `DenseNetwork`, which answers all over an image and says where
its outputs lie. A module that answers for windows of one size, a `WindowNetwork`, is slid over the image.
"""

import copy
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

IMAGE_CHANNELS = 3
STEPS_TRIED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)  # pixels, from one image size to the next
LARGEST_PROBE_PX = 1536  # outputs that still see all of such an image see all of any image
WINDOWS_AT_ONCE_PX = 2**20  # pixels of windows that go through a network together
PROBE_TOLERANCE = 1e-6  # by which answers in float64 may differ and still be the same


@dataclass(frozen=True)
class Geometry:
    """Where the outputs of a dense network lie on an image; the same along rows and columns.

    Image sides are `smallest_px` + k · `step_px`. Outputs lie `stride_px` apart, symmetric about the middle.

    >>> from rotopath.models import Geometry
    >>> tumor = Geometry(outputs=1, smallest_px=88, step_px=12, stride_px=12)
    >>> tumor.output_size(100), tumor.nearest_sizes(200)
    (2, (196, 208))
    """

    outputs: int  # logits at each position
    smallest_px: int  # side of the smallest image
    step_px: int  # from one image size to the next
    stride_px: int  # from one output to the next
    rim: int = 0  # outputs along an edge that would differ if the image continued beyond it

    def __post_init__(self) -> None:
        for name in ("outputs", "smallest_px", "step_px", "stride_px"):
            if getattr(self, name) < 1:
                raise ValueError(f"A network's {name} is 1 or more; got {getattr(self, name)}.")
        if self.rim < 0:
            raise ValueError(f"A network's rim is 0 or more; got {self.rim}.")
        if self.step_px % self.stride_px:
            raise ValueError(
                f"A network's step between image sizes is a multiple of its stride; got {self.step_px} px and "
                f"{self.stride_px} px."
            )

    @property
    def block(self) -> int:
        """Outputs along a side of the smallest image, and for each further step."""
        return self.step_px // self.stride_px

    @property
    def lost_px(self) -> int:
        """By how much the pixels that outputs stand for are fewer than those of the image, along a side."""
        return self.smallest_px - self.step_px

    @property
    def surrounded_px(self) -> int:
        """Side of the window that decides on the answers in its middle: the smallest image, and its rim around it."""
        return self.smallest_px + 2 * self.rim * self.stride_px

    def fits(self, size: int) -> bool:
        """Whether an image of that side, in pixels, lies exactly on the grid."""
        return size >= self.smallest_px and (size - self.smallest_px) % self.step_px == 0

    def nearest_sizes(self, size: int) -> tuple[int, ...]:
        """The good sizes next to `size`: itself, or the ones below and above; the smallest for what is too small."""
        if self.fits(size):
            return (size,)
        below = (size - self.smallest_px) // self.step_px
        return tuple([self.smallest_px + k * self.step_px for k in range(max(below, 0), max(below + 2, 1))])

    def output_size(self, size: int) -> int:
        """Outputs along a side of that many pixels."""
        if not self.fits(size):
            nearest = " or ".join(map(str, self.nearest_sizes(size)))
            raise ValueError(f"An image side of {size} px is off the network's grid; use {nearest} px.")
        return ((size - self.smallest_px) // self.step_px + 1) * self.block


@runtime_checkable
class DenseNetwork(Protocol):
    """Fully convolutional: images (B, 3, H, W), floats from 0 to 1 or bytes, to logits (B, K, h, w)."""

    training: bool

    @property
    def geometry(self) -> Geometry: ...
    def __call__(self, x: Tensor, /) -> Tensor: ...
    def to(self, device: torch.device, /) -> Self: ...
    def eval(self) -> Self: ...


@runtime_checkable
class WindowNetwork(Protocol):
    """An answer for windows of one size: images (B, 3, S, S), floats from 0 to 1, to logits (B, K)."""

    training: bool

    @property
    def window_px(self) -> int: ...
    def __call__(self, x: Tensor, /) -> Tensor: ...


class WrappedModule(nn.Module):
    """A module of somebody else's with the geometry that was measured."""

    def __init__(self, module: nn.Module, geometry: Geometry) -> None:
        super().__init__()
        self.module = module
        self.geometry = geometry
        self.training = module.training  # its layers keep the mode that each is in


class DenseModule(WrappedModule):
    """A module that maps images to maps, as a dense network."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(as_floats(x, self.module))
        return logits


class SlidingModule(WrappedModule):
    """A module that answers for windows of one size, slid over larger images at a stride."""

    def forward(self, x: Tensor) -> Tensor:
        window, stride = self.geometry.smallest_px, self.geometry.stride_px
        views = x.unfold(2, window, stride).unfold(3, window, stride)  # (B, 3, h, w, S, S)
        batch, _, rows, columns = views.shape[:4]
        windows = views.permute(0, 2, 3, 1, 4, 5)  # (B, h, w, 3, S, S), a view
        at_once = max(1, WINDOWS_AT_ONCE_PX // window**2)
        positions = torch.cartesian_prod(torch.arange(batch), torch.arange(rows), torch.arange(columns))
        parts = []
        for start in range(0, len(positions), at_once):
            part = positions[start : start + at_once]
            chosen = windows[part[:, 0], part[:, 1], part[:, 2]]
            parts.append(self.module(as_floats(chosen, self.module)).flatten(1))
        logits = torch.cat(parts).view(batch, rows, columns, -1)
        return logits.permute(0, 3, 1, 2)


def as_floats(x: Tensor, module: nn.Module) -> Tensor:
    """Images as floats of the module's precision; bytes are scaled to 0 … 1."""
    if x.dtype != torch.uint8:
        return x
    weight = next((each for each in module.parameters() if each.is_floating_point()), None)
    return x.to(torch.float32 if weight is None else weight.dtype) / 255


def make_dense(
    module: nn.Module, outputs: int, window_px: int | None = None, stride_px: int | None = None
) -> DenseNetwork:
    """The module as a network that answers all over an image.

    One that says its `geometry` is taken at its word. Of any other, the geometry is measured on windows of `window_px`;
    a module with one answer for a window is slid over the image, by `stride_px` (half a window when left out).
    """
    if isinstance(getattr(module, "geometry", None), Geometry):
        geometry: Geometry = module.geometry  # type: ignore[assignment]
        _expect_outputs(module, geometry.outputs, outputs)
        return module  # type: ignore[return-value]
    window_px = window_px or getattr(module, "window_px", None)
    if window_px is None:
        raise ValueError(f"{_name(module)} does not say the side of its windows; give it as 'window_px'.")
    probe = _Probe(module)
    shape = probe.shape(window_px)
    _expect_outputs(module, shape[1], outputs)
    if len(shape) == 4:
        if shape[2] != shape[3]:
            raise ValueError(f"{_name(module)} answers to a square window with logits of shape {tuple(shape)}.")
        if (measured := measure_geometry(module, window_px)) is not None:
            return DenseModule(module, measured)
        if shape[2] > 1:
            raise ValueError(
                f"{_name(module)} gives a map whose every output depends on the whole image, so it cannot be computed "
                f"tile by tile; use layers that look at a neighbourhood only."
            )
    stride_px = stride_px or max(1, window_px // 2)
    return SlidingModule(module, Geometry(outputs, window_px, stride_px, stride_px))


def replace_module(network: DenseNetwork, module: nn.Module) -> DenseNetwork:
    """The same network with another module inside, such as a frozen one."""
    if isinstance(network, WrappedModule):
        return type(network)(module, network.geometry)
    return module  # type: ignore[return-value]


def unwrap(network: DenseNetwork | nn.Module) -> nn.Module:
    """The module that was trained, without what makes it a dense network."""
    module: nn.Module = network.module if isinstance(network, WrappedModule) else network  # type: ignore[assignment]
    return module


def measure_geometry(module: nn.Module, window_px: int) -> Geometry | None:
    """The geometry of a module that maps images to maps; none where its outputs depend on the whole image.

    Sizes come from shapes. What an output depends on is found by pixels that are not a number, which spoil every
    output that reads them.
    """
    probe = _Probe(module)
    outputs, found = probe.shape(window_px)[1], probe.side(window_px)
    for step in STEPS_TRIED:
        sides = [probe.side(window_px + k * step) for k in (1, 2)]
        if None in sides or found is None or sides[0] is None or sides[1] is None:
            continue
        more = sides[0] - found
        if more < 1 or sides[1] - sides[0] != more or step % more:
            continue
        stride = step // more
        if (found * stride) % step:
            continue
        smallest = window_px - (found * stride // step - 1) * step
        # Pools leave pixels over where they do not divide a size; such a size would not lie symmetrically.
        while smallest > 1 and probe.side(smallest - 1) == step // stride:
            smallest -= 1
        if smallest < 1:
            continue
        geometry = Geometry(outputs, smallest, step, stride)
        reach = probe.measure_reach(geometry, window_px)
        if reach is None:
            return None
        rim = probe.find_rim(geometry, reach)
        geometry = Geometry(outputs, smallest, step, stride, rim)
        if probe.moves_with_image(geometry, window_px):
            return geometry
    return None


def has_geometry(module: nn.Module, geometry: Geometry, window_px: int, slides: bool) -> bool:
    """Whether the shapes that a module gives are those of a geometry; what outputs depend on is not looked at."""
    probe = _Probe(module)
    try:
        shape = probe.shape(window_px)
    except ValueError:
        return False
    if shape[1] != geometry.outputs:
        return False
    if slides:
        steps = geometry.step_px == geometry.stride_px
        return shape[2:].numel() == 1 and geometry.smallest_px == window_px and steps and geometry.rim == 0
    sizes = (window_px, window_px + geometry.step_px)
    return geometry.fits(window_px) and all(probe.side(size) == geometry.output_size(size) for size in sizes)


class _Probe:
    """A copy of a module, of which shapes and dependencies are found; the module itself is left alone."""

    def __init__(self, module: nn.Module) -> None:
        self._name = _name(module)
        self._module = copy.deepcopy(module).eval()
        self._shapes: dict[int, torch.Size | None] = {}
        self._exact: nn.Module | None = None
        try:
            self._meta: nn.Module | None = copy.deepcopy(self._module).to("meta")
        except (RuntimeError, NotImplementedError):
            self._meta = None

    def shape(self, size: int) -> torch.Size:
        """The shape of the logits of an image; a sentence where the module does not take that size."""
        reason: Exception | None = None
        for module, device in ((self._meta, "meta"), (self._module, None)):
            if module is None:
                continue
            weight = next(iter(module.parameters()), None)
            where = device or ("cpu" if weight is None else weight.device)
            images = torch.zeros(2, IMAGE_CHANNELS, size, size, device=where, dtype=_dtype(module))
            try:
                with torch.no_grad():
                    logits = module(images)
            except Exception as error:  # of any kind: it is a user's module
                reason = error
                continue
            if not isinstance(logits, Tensor) or logits.ndim not in (2, 4) or len(logits) != 2:
                got = (
                    f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
                )
                raise ValueError(f"{self._name} has to give logits (B, K) or (B, K, h, w); it gave {got}.")
            return logits.shape
        raise ValueError(f"{self._name} does not take windows of {size} × {size} px: {_reason(reason)}.")

    def side(self, size: int) -> int | None:
        """Outputs along a side of an image; none for sizes that the module does not take."""
        if size not in self._shapes:
            try:
                self._shapes[size] = self.shape(size)
            except ValueError:
                self._shapes[size] = None
        shape = self._shapes[size]
        return None if shape is None or len(shape) != 4 else shape[2]

    def measure_reach(self, geometry: Geometry, window_px: int) -> tuple[float, float] | None:
        """How many pixels before and behind its position an output depends on; none where that is the whole image."""
        size = window_px
        while size <= LARGEST_PROBE_PX:
            size = geometry.nearest_sizes(2 * size)[-1]
            low = geometry.smallest_px  # rows, as few as will do: columns are what is looked at
            reaches = [self._reach_of(geometry, low, size, size // 2 + k) for k in range(geometry.step_px)]
            if None not in reaches:
                before, behind = zip(*(reach for reach in reaches if reach is not None), strict=True)
                return max(before), max(behind)
        return None

    def _reach_of(self, geometry: Geometry, height: int, width: int, column: int) -> tuple[float, float] | None:
        """How far from a column of pixels the outputs lie, behind and before it, that read it."""
        images = torch.zeros(1, IMAGE_CHANNELS, height, width, dtype=torch.float64)
        images[..., column] = float("nan")
        spoiled = self._answer(images).isnan().any(dim=1)[0].any(dim=0)  # along columns
        if spoiled.all():
            return None
        where = spoiled.nonzero().flatten()
        if not len(where):
            return 0.0, 0.0
        first = (width - 1 - (len(spoiled) - 1) * geometry.stride_px) / 2
        low, high = (first + geometry.stride_px * int(where[k]) for k in (0, -1))
        return high - column, column - low

    def find_rim(self, geometry: Geometry, reach: tuple[float, float]) -> int:
        """Outputs along an edge that see pixels beyond it."""
        first = (geometry.smallest_px - 1 - (geometry.block - 1) * geometry.stride_px) / 2
        beyond = max(reach) - first
        return max(0, -int(-beyond // geometry.stride_px))

    def moves_with_image(self, geometry: Geometry, window_px: int) -> bool:
        """Whether the answers to an image without its first rows and columns are the rest of the answers."""
        rim, block = geometry.rim, geometry.block
        size = max(window_px, geometry.smallest_px + (-(-2 * rim // block) + 2) * geometry.step_px)
        size = geometry.nearest_sizes(size)[-1]
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(1, IMAGE_CHANNELS, size + geometry.step_px, size + geometry.step_px, generator=generator)
        images = images.double()
        step = geometry.step_px
        whole, part = self._answer(images), self._answer(images[..., step:, step:])
        if whole.shape[-1] != part.shape[-1] + block:
            return False
        inner = slice(rim, part.shape[-1] - rim)
        moved = slice(block + rim, whole.shape[-1] - rim)
        return torch.allclose(
            whole[..., moved, moved], part[..., inner, inner], rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE
        )

    def _answer(self, images: Tensor) -> Tensor:
        if self._exact is None:
            # In float64 torch multiplies matrices, where other convolutions would mix neighbouring windows.
            self._exact = copy.deepcopy(self._module).to("cpu").double()
        try:
            with torch.no_grad():
                logits: Tensor = self._exact(images)
        except Exception as error:  # of any kind: it is a user's module
            size = " × ".join(map(str, images.shape[-2:]))
            raise ValueError(f"{self._name} does not take images of {size} px in float64: {_reason(error)}.") from None
        return logits


def _reason(error: Exception | None) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _dtype(module: nn.Module) -> torch.dtype:
    return next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)


def _expect_outputs(module: nn.Module, found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(
            f"{_name(module)} gives {found} logits, where the task needs {wanted}; build it with outputs={wanted}."
        )


def _name(module: nn.Module) -> str:
    name: str = module._get_name()  # type: ignore[no-untyped-call]
    return name
