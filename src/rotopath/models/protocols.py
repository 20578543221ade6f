"""Interface of networks that can be trained, evaluated and applied to slides.

A `DenseNetwork` accepts images (B, 3, H, W) of many sizes and returns a map of logits (B, K, h, w). An *output* of the
network is one of the h × w positions of this map, with its K logits. Exception: arguments and fields named `outputs`
contain the number K.

The `Geometry` of a dense network states which image sizes are valid, and which pixels each output depends on.

A `WindowNetwork` accepts images of one fixed size only, and returns one prediction per image: logits (B, K).

`make_dense` turns a torch module into a dense network. If the module returns maps, `make_dense` measures its geometry.
If the module returns one prediction per image, `make_dense` applies the module as a sliding window.
"""

import copy
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

IMAGE_CHANNELS = 3
# Differences between two successive valid image sides that `measure_geometry` tries.
STEP_CANDIDATES_PX = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
# To measure the receptive field, the width of the test image is doubled until it exceeds this number of px. If one
# column of pixels still affects all outputs, the network is assumed to read the whole image.
LARGEST_PROBE_PX = 1536
WINDOW_BATCH_PX = 2**20  # pixels per batch of sliding windows
PROBE_TOLERANCE = 1e-6  # float64 outputs with at most this difference count as equal


@dataclass(frozen=True)
class Geometry:
    """Geometry of a dense network: its valid image sizes, and the positions of its outputs on the image.

    Valid image sides are `smallest_px` + k · `step_px` for k = 0, 1, 2 … Neighboring outputs are `stride_px` apart. The
    map of outputs is centered on the image. All numbers apply to the height and to the width.

    >>> from rotopath.models import Geometry
    >>> tumor = Geometry(outputs=1, smallest_px=88, step_px=12, stride_px=12)
    >>> tumor.output_size(100), tumor.nearest_sizes(200)
    (2, (196, 208))
    """

    outputs: int  # logits per output position
    smallest_px: int  # smallest valid image side
    step_px: int  # difference between two successive valid image sides
    stride_px: int  # distance between neighboring outputs
    rim: int = 0  # width, in outputs, of the border of the map that padding affects

    def __post_init__(self) -> None:
        for name in ("outputs", "smallest_px", "step_px", "stride_px"):
            if getattr(self, name) < 1:
                raise ValueError(f"A network's {name} must be 1 or more; got {getattr(self, name)}.")
        if self.rim < 0:
            raise ValueError(
                f"A network's rim, in outputs, must be 0 or more; got {self.rim}. Set it to the width of the border of "
                f"the map that padding affects."
            )
        if self.step_px % self.stride_px:
            raise ValueError(
                f"A network's step_px must be a multiple of its stride_px; got {self.step_px} px and "
                f"{self.stride_px} px."
            )

    @property
    def block(self) -> int:
        """Number of outputs along a side of `smallest_px` px. Every further `step_px` px add the same number again."""
        return self.step_px // self.stride_px

    @property
    def margins_px(self) -> int:
        """Sum of the two margins along one axis of an image, in px: the two ends of the axis that no output covers.

        An output covers the square of `stride_px` × `stride_px` px at its position.
        """
        return self.smallest_px - self.step_px

    @property
    def context_px(self) -> int:
        """Side, in px, that a window needs so that padding does not affect its central outputs.

        This side is the smallest valid image side plus twice the rim in px.
        """
        return self.smallest_px + 2 * self.rim * self.stride_px

    def fits(self, size: int) -> bool:
        """Return whether an image side, in px, is valid."""
        return size >= self.smallest_px and (size - self.smallest_px) % self.step_px == 0

    def nearest_sizes(self, size: int) -> tuple[int, ...]:
        """Return the valid image sides nearest to `size`, in px: only `size` if it is valid, otherwise two sides.

        The two sides are the next smaller and the next larger valid side. If no smaller side is valid, only the larger
        one is returned.
        """
        if self.fits(size):
            return (size,)
        below = (size - self.smallest_px) // self.step_px
        return tuple([self.smallest_px + k * self.step_px for k in range(max(below, 0), max(below + 2, 1))])

    def output_size(self, size: int) -> int:
        """Return the number of outputs along an image side of `size` px. Raises ValueError if `size` is not valid."""
        if not self.fits(size):
            nearest = " or ".join(map(str, self.nearest_sizes(size)))
            raise ValueError(
                f"An image side of {size} px does not fit the network, which accepts {self.smallest_px} + "
                f"{self.step_px}·k px (k = 0, 1, 2 …); use {nearest} px."
            )
        return ((size - self.smallest_px) // self.step_px + 1) * self.block


@runtime_checkable
class DenseNetwork(Protocol):
    """Network that maps images (B, 3, H, W) of any valid size, floats from 0 to 1 or bytes, to logits (B, K, h, w)."""

    training: bool

    @property
    def geometry(self) -> Geometry: ...
    def __call__(self, x: Tensor, /) -> Tensor: ...
    def to(self, device: torch.device, /) -> Self: ...
    def eval(self) -> Self: ...


@runtime_checkable
class WindowNetwork(Protocol):
    """Network that maps images (B, 3, S, S) of the fixed size S = `window_px`, floats from 0 to 1, to logits (B, K)."""

    training: bool

    @property
    def window_px(self) -> int: ...
    def __call__(self, x: Tensor, /) -> Tensor: ...


def make_dense(
    module: nn.Module, outputs: int, window_px: int | None = None, stride_px: int | None = None
) -> DenseNetwork:
    """Return a dense network that applies a module to images of many sizes.

    A module that has an attribute `geometry` (a `Geometry`) is returned unchanged. Any other module must accept square
    images with a side of `window_px` px (None: the module's attribute `window_px`). If the module returns maps, its
    geometry is measured. If the module returns one prediction per image, it is applied to windows of `window_px` px,
    `stride_px` px apart (None: half a window).

    Raises ValueError if the module raises an error, if it does not return `outputs` logits per output position, or if
    it returns maps that cannot be computed tile by tile, for example because each output depends on the whole image.

    >>> net = rp.models.make_dense(torch.nn.Conv2d(3, 2, kernel_size=5), outputs=2, window_px=16)
    >>> net.geometry
    Geometry(outputs=2, smallest_px=5, step_px=1, stride_px=1, rim=0)
    """
    if isinstance(getattr(module, "geometry", None), Geometry):
        geometry: Geometry = module.geometry  # type: ignore[assignment]
        _expect_outputs(module, geometry.outputs, outputs)
        return module  # type: ignore[return-value]
    window_px = window_px or getattr(module, "window_px", None)
    if window_px is None:
        raise ValueError(
            f"{_name(module)} does not specify the size of its windows; set 'window_px', the side of a window in px, "
            f"as an argument or as a key of the recipe."
        )
    shape = _Probe(module).output_shape(window_px)
    _expect_outputs(module, shape[1], outputs)
    if len(shape) == 4:
        if shape[2] != shape[3]:
            raise ValueError(
                f"{_name(module)} returns logits of shape {tuple(shape)} for a square window; use a network whose "
                f"output is square too."
            )
        if (measured := measure_geometry(module, window_px)) is not None:
            return DenseModule(module, measured)
        if shape[2] > 1:
            raise ValueError(
                f"{_name(module)} returns a map that cannot be computed tile by tile; use layers that accept images "
                f"of several sizes and compute each output in the same way, from pixels near the output only."
            )
    stride_px = stride_px or max(1, window_px // 2)
    return SlidingModule(module, Geometry(outputs, window_px, stride_px, stride_px))


def replace_module(network: DenseNetwork, module: nn.Module) -> DenseNetwork:
    """Return a dense network that applies `module`, for example a frozen module, instead of the module of `network`.

    `module` must have the geometry of `network`. It gets the same wrapper that `make_dense` added to `network`. If
    `network` has no wrapper, `module` is returned unchanged.
    """
    if isinstance(network, WrappedModule):
        return type(network)(module, network.geometry)
    return module  # type: ignore[return-value]


def unwrap(network: DenseNetwork | nn.Module) -> nn.Module:
    """Return the module inside the wrapper that `make_dense` added, or `network` itself if it has no wrapper."""
    module: nn.Module = network.module if isinstance(network, WrappedModule) else network  # type: ignore[assignment]
    return module


class WrappedModule(nn.Module):
    """Base class of the dense networks that `make_dense` builds: a module together with its geometry."""

    def __init__(self, module: nn.Module, geometry: Geometry) -> None:
        super().__init__()
        self.module = module
        self.geometry = geometry
        self.training = module.training  # set directly: train() would also change the mode of each layer


class DenseModule(WrappedModule):
    """Dense network made from a module that returns maps (B, K, h, w) for images of many sizes."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(as_floats(x, self.module))
        return logits


class SlidingModule(WrappedModule):
    """Dense network made from a module for windows of one size, with a side of `geometry.smallest_px` px.

    For images (B, 3, H, W), the module is applied to windows that are `geometry.stride_px` px apart. The predictions
    are returned as a map (B, K, h, w).
    """

    def forward(self, x: Tensor) -> Tensor:
        window, stride = self.geometry.smallest_px, self.geometry.stride_px
        views = x.unfold(2, window, stride).unfold(3, window, stride)  # (B, 3, h, w, S, S)
        batch, _, rows, columns = views.shape[:4]
        windows = views.permute(0, 2, 3, 1, 4, 5)  # (B, h, w, 3, S, S), a view
        batch_size = max(1, WINDOW_BATCH_PX // window**2)
        positions = torch.cartesian_prod(torch.arange(batch), torch.arange(rows), torch.arange(columns))
        parts = []
        for start in range(0, len(positions), batch_size):
            b, row, column = positions[start : start + batch_size].unbind(dim=1)
            parts.append(self.module(as_floats(windows[b, row, column], self.module)).flatten(1))
        logits = torch.cat(parts).view(batch, rows, columns, -1)
        return logits.permute(0, 3, 1, 2)


def as_floats(x: Tensor, module: nn.Module) -> Tensor:
    """Scale images of bytes (uint8) to floats from 0 to 1, in the dtype of the module. Return floats unchanged."""
    if x.dtype != torch.uint8:
        return x
    return x.to(_float_dtype(module)) / 255


def has_geometry(module: nn.Module, geometry: Geometry, window_px: int, slides: bool) -> bool:
    """Return whether the shapes of a module's logits agree with a stored geometry.

    `slides` states whether the module is applied as a sliding window. To find the shapes, the module is applied to
    square images with a side of `window_px` px and, if `slides` is False, also to images that are larger by `step_px`.
    This check is faster than measuring the geometry again, but it does not find out which pixels each output depends
    on.
    """
    probe = _Probe(module)
    try:
        shape = probe.output_shape(window_px)
    except ValueError:
        return False
    if shape[1] != geometry.outputs:
        return False
    if slides:
        steps = geometry.step_px == geometry.stride_px
        return shape[2:].numel() == 1 and geometry.smallest_px == window_px and steps and geometry.rim == 0
    sizes = (window_px, window_px + geometry.step_px)
    return geometry.fits(window_px) and all(probe.output_side(size) == geometry.output_size(size) for size in sizes)


def measure_geometry(module: nn.Module, window_px: int) -> Geometry | None:
    """Measure the geometry of a module that returns maps of logits and accepts images of `window_px` px per side.

    Return None if the maps have no geometry, which happens in three cases:

    - An output depends on the whole image.
    - The same pixels give different logits at different positions in the image.
    - No number of px in `STEP_CANDIDATES_PX` is the step between valid image sides: each increase of the image side by
      one step must add the same number of outputs.

    To find which outputs depend on a pixel, the pixel is set to NaN: the outputs that depend on it become NaN too.
    """
    probe = _Probe(module)
    outputs, side = probe.output_shape(window_px)[1], probe.output_side(window_px)
    for step in STEP_CANDIDATES_PX:
        next_side, third_side = (probe.output_side(window_px + k * step) for k in (1, 2))
        if side is None or next_side is None or third_side is None:
            continue
        block = next_side - side
        if block < 1 or third_side - next_side != block or step % block:
            continue
        stride = step // block
        if (side * stride) % step:
            continue
        smallest = window_px - (side * stride // step - 1) * step
        # A pool of torch ignores the pixels that do not fill a window, so several image sides give the same number of
        # outputs. The outputs are centered on the image only for the smallest of these sides.
        while smallest > 1 and probe.output_side(smallest - 1) == step // stride:
            smallest -= 1
        if smallest < 1:
            continue
        geometry = Geometry(outputs, smallest, step, stride)
        reach = probe.measure_reach(geometry, window_px)
        if reach is None:
            return None
        geometry = Geometry(outputs, smallest, step, stride, probe.find_rim(geometry, reach))
        if probe.is_translation_equivariant(geometry, window_px):
            return geometry
    return None


class _Probe:
    """Copy of a module, used to measure the shapes of its logits and the pixels that its outputs depend on."""

    def __init__(self, module: nn.Module) -> None:
        self._name = _name(module)
        self._module = copy.deepcopy(module).eval()
        self._shapes: dict[int, torch.Size | None] = {}
        self._double: nn.Module | None = None
        try:
            self._meta: nn.Module | None = copy.deepcopy(self._module).to("meta")  # fast: computes shapes only
        except (RuntimeError, NotImplementedError):
            self._meta = None

    def output_shape(self, size: int) -> torch.Size:
        """Return the shape of the logits, (2, K) or (2, K, h, w), for a batch of two images of `size` × `size` px.

        Raises ValueError if the module raises an error or returns anything else.
        """
        reason: Exception | None = None
        for module, device in ((self._meta, "meta"), (self._module, None)):
            if module is None:
                continue
            weight = next(iter(module.parameters()), None)
            image_device = device or ("cpu" if weight is None else weight.device)
            images = torch.zeros(2, IMAGE_CHANNELS, size, size, device=image_device, dtype=_float_dtype(module))
            try:
                with torch.no_grad():
                    logits = module(images)
            except Exception as error:  # any kind of error: the module is user code
                reason = error
                continue
            if not isinstance(logits, Tensor) or logits.ndim not in (2, 4) or len(logits) != 2:
                result = (
                    f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
                )
                raise ValueError(
                    f"{self._name} returns {result}; it must return logits of shape (B, K) or (B, K, h, w)."
                )
            return logits.shape
        raise ValueError(f"{self._name} does not accept windows of {size} × {size} px: {in_one_line(reason)}.")

    def output_side(self, size: int) -> int | None:
        """Return the number of outputs along an image side of `size` px.

        Return None if the module raises an error or does not return maps.
        """
        if size not in self._shapes:
            try:
                self._shapes[size] = self.output_shape(size)
            except ValueError:
                self._shapes[size] = None
        shape = self._shapes[size]
        return None if shape is None or len(shape) != 4 else shape[2]

    def measure_reach(self, geometry: Geometry, window_px: int) -> tuple[float, float] | None:
        """Return two distances in px: from an output to the farthest pixels that it reads on its left and on its right.

        Return None if an output reads the whole image width. `window_px` is an image side that the module accepts.
        """
        size = window_px
        while size <= LARGEST_PROBE_PX:
            size = geometry.nearest_sizes(2 * size)[-1]
            columns = (size // 2 + k for k in range(geometry.step_px))
            reaches = [self._measure_column(geometry, size, column) for column in columns]
            if None not in reaches:
                left, right = zip(*(reach for reach in reaches if reach is not None), strict=True)
                return max(left), max(right)
        return None

    def _measure_column(self, geometry: Geometry, width: int, column: int) -> tuple[float, float] | None:
        """Return the two distances of `measure_reach` (left, right), measured with a single column of pixels.

        In an image with a width of `width` px, only the pixels in the column with the index `column` are NaN. So the
        outputs that read this column are NaN. The distance from the rightmost of these outputs to the column is the
        distance to the left. The distance from the leftmost of them is the distance to the right. Return None if all
        outputs of the map read the column, or zeros if none reads it.
        """
        images = torch.zeros(1, IMAGE_CHANNELS, geometry.smallest_px, width, dtype=torch.float64)
        images[..., column] = float("nan")
        is_affected = self._predict(images).isnan().any(dim=1)[0].any(dim=0)  # (w,)
        if is_affected.all():
            return None
        affected = is_affected.nonzero().flatten()
        if not len(affected):
            return 0.0, 0.0
        first = (width - 1 - (len(is_affected) - 1) * geometry.stride_px) / 2  # image coordinate of the first output
        leftmost, rightmost = (first + geometry.stride_px * int(affected[k]) for k in (0, -1))
        return rightmost - column, column - leftmost

    def find_rim(self, geometry: Geometry, reach: tuple[float, float]) -> int:
        """Return the rim: the width, in outputs, of the border of the map in which outputs read beyond an image edge.

        `reach` is the result of `measure_reach`: the largest distances, in px, at which outputs read pixels.
        """
        # Distance, in px, from the first pixel of an image to its first output.
        first = (geometry.smallest_px - 1 - (geometry.block - 1) * geometry.stride_px) / 2
        beyond = max(reach) - first
        return max(0, -int(-beyond // geometry.stride_px))

    def is_translation_equivariant(self, geometry: Geometry, window_px: int) -> bool:
        """Return whether outputs stay the same if the first `step_px` rows and columns of an image are cropped.

        Outputs in the rim are not compared. The cropped image has `window_px` px per side, or more if otherwise too few
        outputs would be left.
        """
        rim, block = geometry.rim, geometry.block
        size = max(window_px, geometry.smallest_px + (-(-2 * rim // block) + 2) * geometry.step_px)
        size = geometry.nearest_sizes(size)[-1]
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(1, IMAGE_CHANNELS, size + geometry.step_px, size + geometry.step_px, generator=generator)
        images = images.double()
        step = geometry.step_px
        whole, part = self._predict(images), self._predict(images[..., step:, step:])
        if whole.shape[-1] != part.shape[-1] + block:
            return False
        inner = slice(rim, part.shape[-1] - rim)
        shifted = slice(block + rim, whole.shape[-1] - rim)
        return torch.allclose(
            whole[..., shifted, shifted], part[..., inner, inner], rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE
        )

    def _predict(self, images: Tensor) -> Tensor:
        if self._double is None:
            # In float64, torch convolves with matrix products. Other algorithms would also return NaN for outputs that
            # do not depend on a NaN pixel.
            self._double = copy.deepcopy(self._module).to("cpu").double()
        try:
            with torch.no_grad():
                logits: Tensor = self._double(images)
        except Exception as error:  # any kind of error: the module is user code
            size = " × ".join(map(str, images.shape[-2:]))
            raise ValueError(
                f"{self._name} does not accept a test image of {size} px with float64 values: {in_one_line(error)}."
            ) from None
        return logits


def in_one_line(error: Exception | None) -> str:
    """Return the whole message of an error in one line, or the name of the error's class if the message is empty."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _float_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's first floating-point parameter; float32 if there is no such parameter."""
    return next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), torch.float32)


def _expect_outputs(module: nn.Module, returned: int, expected: int) -> None:
    if returned != expected:
        raise ValueError(
            f"{_name(module)} returns {returned} logits, but the task needs {expected}; build it with "
            f"outputs={expected}."
        )


def _name(module: nn.Module) -> str:
    name: str = module._get_name()  # type: ignore[no-untyped-call]  # the name that repr uses
    return name
