"""Tables of the three networks of the paper by Lafarge et al. (arXiv:2002.08725).

An `Architecture` is one such table. It computes the channels and the number of weights of each stage for N
orientations, and the receptive field, the stride and the valid image sizes of the network. An image side is *valid* if
the receptive field fits into it and every pool divides the side of its input without a remainder. This module contains
no tensors; the module `network` builds torch modules from the tables.
"""

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import log, prod, sqrt
from typing import Literal, TypedDict, get_args

from rotopath import group
from rotopath.models.protocols import IMAGE_CHANNELS, Geometry
from rotopath.nn.pool import Smooth2d
from rotopath.nn.project import PROJECTIONS, Projection, weights_per_channel

Pooling = Literal["max", "max-blur", "rms-blur"]
Upsampling = Literal["nearest", "bilinear"]
Preset = Literal["paper", "faithful"]
UPSAMPLING_FACTOR = 2  # of the input of each stage with a skip connection
# Allowed relative difference between the number of weights for N orientations and the number for N = 1, for each N that
# is not in the paper.
WEIGHTS_TOLERANCE = 0.05


class Choices(TypedDict, total=False):
    """Options of the paper's networks, which override the options of the preset.

    The fields of `Architecture` with the same names explain the options.
    """

    outputs: int  # logits per output position
    kernel: group.Kernel
    pooling: Pooling
    upsampling: Upsampling
    smoothing: bool
    projection: Projection
    reflections: bool
    widths_of: int | None


CHOICES = tuple(Choices.__annotations__)


@dataclass(frozen=True)
class Stage:
    """One stage of a network: convolution, batch norm, ReLU and pool.

    If `skip` is set, the stage has a skip connection: before the convolution, the input of the stage is up-sampled and
    concatenated with the features of an earlier stage.
    """

    channels: str | int  # output channels: a number, or "body" or "wide" for a number that depends on N
    kernel: int = 5  # side of the kernel, in px
    pool: int = 1  # side and stride of the pool, in px; 1 means no pool
    skip: int | None = None  # index of the earlier stage, whose features before its pool are used; None: no skip


@dataclass(frozen=True)
class Architecture:
    """Table of one of the paper's networks: its stages, its options, and its channels for each number of orientations.

    After the last stage, the projection removes the orientation axis. Then the head, a 1 × 1 convolution, returns
    logits. A preset is a set of options. "paper" gives the network of the paper. "faithful" gives a network with
    smaller equivariance errors for rotations by angles that are not multiples of 90°.

    >>> from rotopath.models import ARCHITECTURES
    >>> tumor = ARCHITECTURES["tumor"]
    >>> tumor.channels(orientations=8), sum(tumor.weights(orientations=8))
    ((14, 14, 14, 8, 16), 86727)
    >>> tumor.choose("faithful", projection="max").kernel
    'harmonic'
    """

    name: str
    task: str  # description, such as "detects mitotic figures"
    stages: tuple[Stage, ...]
    projection: Projection  # mode of `rp.nn.Project`
    outputs: int  # logits per output position
    head_norm: bool  # whether the head has a batch norm instead of a bias
    input_px: int  # side of the training images in the paper
    published: dict[int, tuple[int, int]]  # N → channels in the paper: (of stages "body", of stages "wide")
    faithful: dict[str, str | bool]  # options that the preset "faithful" sets
    kernel: group.Kernel = "bilinear"  # kernel family of `rp.nn.GroupConv2d`
    pooling: Pooling = "max"  # "max", "max-blur" (maximum and blur), or "rms-blur" (root mean square and blur)
    upsampling: Upsampling = "nearest"  # interpolation before each skip connection
    smoothing: bool = False  # whether the image is blurred before the first convolution
    reflections: bool = False  # whether the network is equivariant to flips too; its channels are those for 2N
    widths_of: int | None = None  # use the channels for this number of orientations; None: for the network's own N
    # The next two fields are computed only once, because every forward pass reads them.
    receptive_field: int = field(init=False, repr=False, compare=False)  # in px; equals the smallest valid image side
    size_step: int = field(init=False, repr=False, compare=False)  # px between two successive valid image sides

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
                raise ValueError(
                    f"The option {name!r} of {self.name} must be {' or '.join(map(repr, options))}; got {value!r}."
                )
        if type(self.outputs) is not int or self.outputs < 1:
            raise ValueError(
                f"The option 'outputs' of {self.name} must be a whole number, 1 or more; got {self.outputs!r}."
            )
        if self.widths_of is not None:
            if isinstance(self.widths_of, bool):
                raise ValueError(
                    f"The option 'widths_of' of {self.name} must be a whole number, 1 or more; got {self.widths_of}."
                )
            group.check_orientations(self.widths_of)
        object.__setattr__(self, "receptive_field", self._compute_receptive_field())
        object.__setattr__(self, "size_step", prod([stage.pool for stage in self.stages]))

    def choose(self, preset: str = "paper", **choices: str | bool | int | None) -> "Architecture":
        """Return a copy of this table with the options of `preset`, "paper" or "faithful".

        `choices` are single options, such as `projection="max"`; they override the options of the preset.
        """
        if preset not in self.presets:
            raise ValueError(
                f"The preset of {self.name} must be {' or '.join(map(repr, self.presets))}; got {preset!r}."
            )
        if unknown := [name for name in choices if name not in CHOICES]:
            raise TypeError(f"The network {self.name} has no option {unknown[0]!r}; {_suggest_option(unknown[0])}.")
        return replace(self, **(self.presets[preset] | choices))  # type: ignore[arg-type]

    @property
    def presets(self) -> dict[str, dict[str, str | bool]]:
        """Options that each preset sets: name of the preset → options. "paper" sets no options."""
        return {"paper": {}, "faithful": self.faithful}

    # Channels and weights

    def channels(self, orientations: int) -> tuple[int, ...]:
        """Return the number of output channels C of each stage for N = `orientations`.

        The stage returns features (B, C, N, H, W), or (B, C, 2N, H, W) with reflections.
        """
        return self._stage_channels(*self._find_widths(group.order(self.widths_of or orientations, self.reflections)))

    def weights(self, orientations: int) -> tuple[int, ...]:
        """Return the number of learned weights of each stage, including its batch norm, for N = `orientations`.

        The last entry of the tuple is not for a stage: it is the number of weights of the projection and the head.
        """
        channels = self.channels(orientations)
        *stages, head = self._count_weights(group.order(orientations, self.reflections), channels)
        return *stages, channels[-1] * weights_per_channel(self.projection, orientations) + head

    def in_channels(self, stage: int, channels: tuple[int, ...]) -> int:
        """Return the number of input channels of the stage with index `stage`.

        These are the channels of the previous stage plus the channels of the skip connection, if there is one.
        `channels` are the output channels of all stages, as the method `channels` returns them.
        """
        if stage == 0:
            return IMAGE_CHANNELS
        skip = self.stages[stage].skip
        return channels[stage - 1] + (0 if skip is None else channels[skip])

    def _find_widths(self, orientations: int) -> tuple[int, int]:
        """Return two numbers of channels: the number for stages "body", and the number for stages "wide".

        `orientations` is the length of the orientation axis: N, or 2N with reflections. For the lengths in `published`,
        the numbers are those of the paper. For other lengths, the numbers are chosen so that the network has about as
        many weights as for N = 1. Raises ValueError if this is not possible within `WEIGHTS_TOLERANCE`.
        """
        if orientations in self.published:
            return self.published[orientations]
        target = sum(self._count_weights(1, self._stage_channels(*self.published[1])))

        def deviation(widths: tuple[int, int]) -> float:
            return abs(sum(self._count_weights(orientations, self._stage_channels(*widths))) / target - 1)

        body, wide = self.published[1]
        candidates = [(b, w) for b in range(1, body + 1) for w in range(1, wide + 1)]
        good = [widths for widths in candidates if deviation(widths) <= WEIGHTS_TOLERANCE]
        if not good:
            raise ValueError(
                f"{self.name} cannot have {orientations} orientations, because no choice of channels gives the "
                f"network about {target} weights, as it has for one orientation; use fewer orientations."
            )
        # Choose the numbers as in the paper: wide · N and body² · N stay close to their values at N = 1.
        return min(
            good, key=lambda w: abs(log(w[0] * sqrt(orientations) / body)) + abs(log(w[1] * orientations / wide))
        )

    def _stage_channels(self, body: int, wide: int) -> tuple[int, ...]:
        named = {"body": body, "wide": wide}
        return tuple(named[c] if isinstance(c := stage.channels, str) else c for stage in self.stages)

    def _count_weights(self, orientations: int, channels: tuple[int, ...]) -> tuple[int, ...]:
        counts = []
        for i, stage in enumerate(self.stages):
            axes = orientations if i else 1  # the first stage reads an image, which has no orientations
            counts.append(
                channels[i] * (self.in_channels(i, channels) * axes * _count_taps(stage.kernel, self.kernel) + 2)
            )
        counts.append(self.outputs * (channels[-1] + (2 if self.head_norm else 1)))
        return tuple(counts)

    # Sizes and positions

    @cached_property
    def geometry(self) -> Geometry:
        """Receptive field, stride, rim and valid image sizes of the network, for code that accepts any network."""
        return Geometry(self.outputs, self.receptive_field, self.size_step, self.stride, self.rim)

    @property
    def stride(self) -> int:
        """Distance between neighboring output positions, in image px."""
        factors = [UPSAMPLING_FACTOR for stage in self.stages if stage.skip is not None]
        return self.size_step // prod(factors)

    @property
    def rim(self) -> int:
        """Width, in output positions, of the border of the output map that padding affects.

        Smoothing, blurred pools and bilinear up-sampling read some pixels outside the window of an output position. At
        the edges of the image, these pixels are padding. In a larger image they would be real pixels, so the outputs in
        the border would be different.
        """
        # For the output of each stage before its pool: rim, and image coordinate (px) of the center of pixel 0.
        before_pool: list[tuple[int, float]] = []
        rim, first, step = Smooth2d.REACH if self.smoothing else 0, 0.0, 1.0
        for stage in self.stages:
            if stage.skip is not None:
                up = UPSAMPLING_FACTOR
                rim = up * rim + (self.upsampling == "bilinear")
                first, step = first - step * (up - 1) / (2 * up), step / up
                skip_rim, skip_first = before_pool[stage.skip]
                rim = max(rim, skip_rim - round((first - skip_first) / step))
            first += step * (stage.kernel - 1) / 2
            before_pool.append((rim, first))
            rim = -(-(rim + self.blur_taps(stage) // 2) // stage.pool)
            first, step = first + step * (stage.pool - 1) / 2, step * stage.pool
        return rim

    def blur_taps(self, stage: Stage) -> int:
        """Return the side, in px, of the blur filter in the pool of a stage: 2 · (stride of the pool) + 1.

        Return 1 if the stage has no pool, or its pool does not blur.
        """
        return 1 if self.pooling == "max" or stage.pool == 1 else 2 * stage.pool + 1

    def sizes(self, size: int) -> tuple[int, ...]:
        """Return the side of the output of each stage after its pool, in px of the feature map.

        `size` is the side of the image, in px. Raises ValueError if `size` is not valid.
        """
        before_pool: list[int] = []
        sizes: list[int] = []
        for stage in self.stages:
            if stage.skip is not None:
                size *= UPSAMPLING_FACTOR
                if before_pool[stage.skip] < size or (before_pool[stage.skip] - size) % 2:
                    raise ValueError(
                        f"{self.name} cannot crop its skip connection evenly from {before_pool[stage.skip]} px to "
                        f"{size} px; use an image side of {self.receptive_field} + {self.size_step}·k px (k = 0, 1 …)."
                    )
            before_pool.append(group.output_size(size, stage.kernel))
            size = group.output_size(before_pool[-1], stage.pool, stage.pool)
            sizes.append(size)
        return tuple(sizes)

    def fits(self, size: int) -> bool:
        """Return whether an image side, in px, is valid: receptive field + k · `size_step` for a k = 0, 1, 2 …"""
        return size >= self.receptive_field and (size - self.receptive_field) % self.size_step == 0

    def nearest_sizes(self, size: int) -> tuple[int, ...]:
        """Return the valid image sides nearest to `size`, in px: only `size` if it is valid, otherwise two sides.

        The two sides are the next smaller and the next larger valid side. If no smaller side is valid, only the larger
        one is returned.
        """
        if self.fits(size):
            return (size,)
        below = (size - self.receptive_field) // self.size_step
        return tuple([self.receptive_field + k * self.size_step for k in range(max(below, 0), max(below + 2, 1))])

    def output_size(self, size: int) -> int:
        """Return the side of the output map, in output positions, for an image side of `size` px.

        Raises ValueError if `size` is not valid.
        """
        self.expect_size(size)
        return self.sizes(size)[-1]

    def expect_size(self, size: int) -> None:
        """Raise ValueError, with a message that states valid sides, if an image side of `size` px is not valid."""
        if self.fits(size):
            return
        grid = f"{self.receptive_field} + {self.size_step}·k px (k = 0, 1, 2 …)"
        if size < self.receptive_field:
            raise ValueError(
                f"{self.name} accepts image sides of {self.receptive_field} px or more, but got {size} px; "
                f"use larger images, or pad them to sides of {grid}."
            )
        nearest = " or ".join(map(str, self.nearest_sizes(size)))
        raise ValueError(f"{self.name} accepts image sides of {grid}, but got {size} px; crop or pad to {nearest} px.")

    def _compute_receptive_field(self) -> int:
        side = 1
        for stage in reversed(self.stages):
            side = side * stage.pool + stage.kernel - 1
            if stage.skip is not None:
                # A window of `side` px after up-sampling is computed from at most this many px before up-sampling.
                side = (side + UPSAMPLING_FACTOR - 2) // UPSAMPLING_FACTOR + 1
        return side


@cache
def _count_taps(size: int, kernel: group.Kernel) -> int:
    """Return the number of learned weights of a kernel, for one input channel, one orientation and one output channel.

    `size` is the side of the kernel in px, and `kernel` its family. This function is called often.
    """
    return group.count_taps(size, kernel)


def _suggest_option(unknown: str) -> str:
    """Return the end of the error message for an unknown option, which says what to use instead."""
    if unknown in ("classes", "num_classes", "n_classes"):
        return "use 'outputs'"
    if "channels" in unknown:
        return (
            f"images have {IMAGE_CHANNELS} channels, and the channels of layers follow from the number of "
            f"orientations, so remove this option"
        )
    return f"options are {', '.join(CHOICES)}"


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
    task="classifies tumor and other tissue",
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
