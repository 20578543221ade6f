"""Networks as tables: stages, channels, weights, and what follows from them about sizes.

In: a number of orientations or an image size. Out: channels and weights of every layer, receptive field,
stride, and the image sizes that lie on the pooling grid. No tensors here; `network` builds from the same rows.

The paper's three networks, and what turns more faithfully in each of them than the paper's choices.
"""

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import log, prod, sqrt
from typing import Literal, get_args

from rotopath import group
from rotopath.models.protocols import IMAGE_CHANNELS, Geometry
from rotopath.nn.pool import Smooth2d
from rotopath.nn.project import PROJECTIONS, Projection, learned_weights

Pooling = Literal["max", "max-blur", "rms-blur"]
Upsampling = Literal["nearest", "bilinear"]
Preset = Literal["paper", "faithful"]
CHOICES = ("outputs", "kernel", "pooling", "upsampling", "smoothing", "projection", "reflections", "widths_of")
UP = 2  # a stage with a skip first enlarges its input by this factor
TOLERANCE = 0.05  # how far the weights at an unpublished N may lie from those at N = 1


@dataclass(frozen=True)
class Stage:
    """A convolution with batch norm and ReLU; before it perhaps up-sampling and a skip, behind it perhaps a pool."""

    channels: str | int  # "body" or "wide" vary with N
    kernel: int = 5
    pool: int = 1
    skip: int | None = None  # the stage whose output, before its pool, is cropped and concatenated


@dataclass(frozen=True)
class Architecture:
    name: str
    task: str
    stages: tuple[Stage, ...]
    projection: Projection
    outputs: int
    head_norm: bool  # batch norm on the logits instead of a bias
    input_px: int  # the image size of the paper's table
    published: dict[int, tuple[int, int]]  # N to the channels of (body, wide)
    faithful: dict[str, str | bool]  # what turns with the image off the pixel grid as well, for the paper's choices
    kernel: group.Kernel = "bilinear"
    pooling: Pooling = "max"
    upsampling: Upsampling = "nearest"
    smoothing: bool = False  # of the image, before it is lifted
    reflections: bool = False  # channels are then those of 2N orientations, which have as many weights
    widths_of: int | None = None  # orientations that have these channels at equal weights, if not its own
    # Found once, as every call of a network looks at them: the side of the window, in pixels, that one output sees,
    # which is also the smallest image; and the pixels between two neighbouring image sizes on the pooling grid.
    receptive_field: int = field(init=False, repr=False, compare=False)
    size_step: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, options in (
            ("kernel", group.KERNELS),
            ("pooling", get_args(Pooling)),
            ("upsampling", get_args(Upsampling)),
            ("projection", PROJECTIONS),
            ("smoothing", (False, True)),
            ("reflections", (False, True)),
        ):
            value = getattr(self, name)
            if value not in options or (options == (False, True) and not isinstance(value, bool)):
                known = " or ".join(map(repr, options))
                raise ValueError(f"{self.name} knows {name} {known}; got {getattr(self, name)!r}.")
        if type(self.outputs) is not int or self.outputs < 1:
            raise ValueError(f"{self.name} needs outputs as one whole number, 1 or more; got {self.outputs!r}.")
        if self.widths_of is not None:
            if isinstance(self.widths_of, bool):
                raise ValueError(f"{self.name} needs widths_of as a number of orientations; got {self.widths_of}.")
            group.check_orientations(self.widths_of)
        object.__setattr__(self, "receptive_field", self._find_receptive_field())
        object.__setattr__(self, "size_step", prod([stage.pool for stage in self.stages]))

    def choose(self, preset: str = "paper", **choices: str | bool | int | None) -> "Architecture":
        """The same table with the choices of a preset, or with single ones in their place."""
        if preset not in self.presets:
            raise ValueError(f"{self.name} knows preset {' or '.join(map(repr, self.presets))}; got {preset!r}.")
        if unknown := [name for name in choices if name not in CHOICES]:
            hints = {"classes": "outputs", "num_classes": "outputs", "n_classes": "outputs"}
            hint = f"; use {hints[unknown[0]]!r}" if unknown[0] in hints else f"; options are {', '.join(CHOICES)}"
            if "channels" in unknown[0]:
                hint = f"; it reads images of {IMAGE_CHANNELS} channels, and its own follow from the orientations"
            raise TypeError(f"The network {self.name} has no option {unknown[0]!r}{hint}.")
        return replace(self, **(self.presets[preset] | choices))  # type: ignore[arg-type]

    @property
    def presets(self) -> dict[str, dict[str, str | bool]]:
        """What they choose in place of the table's own choices, which are the paper's."""
        return {"paper": {}, "faithful": self.faithful}

    def channels(self, orientations: int) -> tuple[int, ...]:
        """Output channels of each stage."""
        return self._channels(*self._widths(group.order(self.widths_of or orientations, self.reflections)))

    def weights(self, orientations: int) -> tuple[int, ...]:
        """Learned weights of each stage, batch norm counted in, and last those of projection and head."""
        channels = self.channels(orientations)  # the same for all projections
        *stages, head = self._weights(group.order(orientations, self.reflections), channels)
        return *stages, channels[-1] * learned_weights(self.projection, orientations) + head

    def in_channels(self, stage: int, channels: tuple[int, ...]) -> int:
        """Channels that a stage reads: those of the stage before, and of its skip."""
        if stage == 0:
            return IMAGE_CHANNELS
        skip = self.stages[stage].skip
        return channels[stage - 1] + (0 if skip is None else channels[skip])

    @cached_property
    def geometry(self) -> Geometry:
        """Where outputs lie on an image."""
        return Geometry(self.outputs, self.receptive_field, self.size_step, self.stride, self.rim)

    def _find_receptive_field(self) -> int:
        side = 1
        for stage in reversed(self.stages):
            side = side * stage.pool + stage.kernel - 1
            if stage.skip is not None:
                side = (side + UP - 2) // UP + 1  # what a window of that side reads, wherever it lies
        return side

    @property
    def stride(self) -> int:
        """Pixels between two neighbouring outputs."""
        ups = [UP for stage in self.stages if stage.skip is not None]
        return self.size_step // prod(ups)

    def sizes(self, size: int) -> tuple[int, ...]:
        """Side of each stage's output, behind its pool, for an image of that side. Raises off the grid."""
        before_pool: list[int] = []
        sizes: list[int] = []
        for stage in self.stages:
            if stage.skip is not None:
                size *= UP
                if before_pool[stage.skip] < size or (before_pool[stage.skip] - size) % 2:
                    raise ValueError(f"a skip of {before_pool[stage.skip]} px has no centre of {size} px.")
            before_pool.append(group.windows(size, stage.kernel))
            size = group.windows(before_pool[-1], stage.pool, stage.pool)
            sizes.append(size)
        return tuple(sizes)

    def blur(self, stage: Stage) -> int:
        """Taps of the filter behind the pool of a stage, in proportion to its stride."""
        return 1 if self.pooling == "max" or stage.pool == 1 else 2 * stage.pool + 1

    @property
    def rim(self) -> int:
        """How many outputs along an edge of the image are not what they would be if the image went on beyond it.

        Filters of images and behind pools, and up-sampling between pixels, read what lies next to a window, or do
        without at an edge.
        """
        before_pool: list[tuple[int, float]] = []  # pixels along the edge, and where the first lies in the image
        rim, first, step = Smooth2d.REACH if self.smoothing else 0, 0.0, 1.0
        for stage in self.stages:
            if stage.skip is not None:
                rim = UP * rim + (self.upsampling == "bilinear")
                first, step = first - step * (UP - 1) / (2 * UP), step / UP
                skip_rim, skip_first = before_pool[stage.skip]
                rim = max(rim, skip_rim - round((first - skip_first) / step))
            first += step * (stage.kernel - 1) / 2
            before_pool.append((rim, first))
            rim = -(-(rim + self.blur(stage) // 2) // stage.pool)
            first, step = first + step * (stage.pool - 1) / 2, step * stage.pool
        return rim

    def fits(self, size: int) -> bool:
        """Whether an image of that side lies exactly on the pooling grid."""
        return size >= self.receptive_field and (size - self.receptive_field) % self.size_step == 0

    def nearest_sizes(self, size: int) -> tuple[int, ...]:
        """The good sizes next to `size`: itself, or the ones below and above; the smallest for what is too small."""
        if self.fits(size):
            return (size,)
        below = (size - self.receptive_field) // self.size_step
        return tuple([self.receptive_field + k * self.size_step for k in range(max(below, 0), max(below + 2, 1))])

    def output_size(self, size: int) -> int:
        """Side of the output for an image of that side; off the grid, a ValueError that names the nearest sizes."""
        self.expect_size(size)
        return self.sizes(size)[-1]

    def expect_size(self, size: int) -> None:
        """Refuse an image of a side off the grid with a sentence."""
        if self.fits(size):
            return
        grid = f"{self.receptive_field} + {self.size_step}·k px"
        if size < self.receptive_field:
            raise ValueError(
                f"{self.name} sees windows of {self.receptive_field} px, but got {size} px; "
                f"give it larger images or pad them ({grid})."
            )
        nearest = " or ".join([str(s) for s in self.nearest_sizes(size)])
        raise ValueError(
            f"{self.name} pools on a grid that {size} px does not lie on, and would lose exact rotations; "
            f"crop or pad to {nearest} px ({grid})."
        )

    def _widths(self, orientations: int) -> tuple[int, int]:
        """Channels of (body, wide): the paper's, or for another N those that keep its number of weights at N = 1."""
        if orientations in self.published:
            return self.published[orientations]
        target = sum(self._weights(1, self._channels(*self.published[1])))

        def distance(widths: tuple[int, int]) -> float:
            return abs(sum(self._weights(orientations, self._channels(*widths))) / target - 1)

        body, wide = self.published[1]
        candidates = [(b, w) for b in range(1, body + 1) for w in range(1, wide + 1)]
        good = [widths for widths in candidates if distance(widths) <= TOLERANCE]
        if not good:
            raise ValueError(
                f"{self.name} has no channels for {orientations} orientations that keep its {target} weights; "
                f"use fewer orientations."
            )
        # Both widths follow the paper's: channels × orientations of the wide layer, and channels² × orientations of
        # the body, stay what they are at N = 1.
        return min(
            good, key=lambda w: abs(log(w[0] * sqrt(orientations) / body)) + abs(log(w[1] * orientations / wide))
        )

    def _channels(self, body: int, wide: int) -> tuple[int, ...]:
        named = {"body": body, "wide": wide}
        return tuple(named[c] if isinstance(c := stage.channels, str) else c for stage in self.stages)

    def _weights(self, orientations: int, channels: tuple[int, ...]) -> tuple[int, ...]:
        counts = []
        for i, stage in enumerate(self.stages):
            axes = orientations if i else 1  # the first stage lifts, the others read all orientations
            counts.append(channels[i] * (self.in_channels(i, channels) * axes * _taps(stage.kernel) + 2))
        counts.append(self.outputs * (channels[-1] + (2 if self.head_norm else 1)))
        return tuple(counts)


@cache
def _taps(kernel: int) -> int:
    return int(group.disc(kernel).sum())


FAITHFUL: dict[str, str | bool] = {
    "kernel": "harmonic",
    "pooling": "rms-blur",
    "upsampling": "bilinear",
    "projection": "mean",
}

MITOSIS = Architecture(
    name="mitosis",
    task="detects mitotic figures",
    stages=(
        Stage("body", pool=2),
        Stage("body", pool=2),
        Stage("body", pool=2),
        Stage("wide"),
        Stage(16, kernel=1),
    ),
    projection="max",
    outputs=1,
    head_norm=False,
    input_px=68,
    published={1: (16, 64), 4: (10, 16), 8: (8, 8), 16: (6, 4)},
    faithful=FAITHFUL,
)

NUCLEI = Architecture(
    name="nuclei",
    task="segments nuclei (inside, border, background)",
    stages=(
        Stage("body", pool=2),
        Stage("body", pool=2),
        Stage("body"),
        Stage("body", skip=1),
        Stage("wide", skip=0),
        Stage(16, kernel=1),
    ),
    projection="max",
    outputs=3,
    head_norm=True,
    input_px=60,
    published={1: (16, 64), 4: (10, 16), 8: (8, 8), 16: (6, 4)},
    faithful=FAITHFUL,
)

TUMOR = Architecture(
    name="tumor",
    task="tells tumor from other tissue",
    stages=(
        Stage("body", pool=2),
        Stage("body", pool=2),
        Stage("body", pool=3),
        Stage("wide"),
        Stage(16, kernel=1),
    ),
    projection="mean",
    outputs=1,
    head_norm=False,
    input_px=88,
    published={1: (32, 64), 4: (19, 16), 8: (14, 8), 16: (10, 4)},
    faithful=FAITHFUL | {"smoothing": True},
)

ARCHITECTURES = {architecture.name: architecture for architecture in (MITOSIS, NUCLEI, TUMOR)}
