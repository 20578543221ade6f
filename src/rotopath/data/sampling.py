"""Choose the windows of each training batch. A window is a square that is cut from an image.

Each random sampler balances one property of the windows: their labels, their annotated objects or their patients. For
any training step, `draw` returns the image, the position and the label of each window of the batch. For the same images
and settings, the windows depend only on the seed and the step. Therefore the number of workers does not matter, and an
interrupted training resumes with exactly the remaining batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rotopath.data.dataset import DataError

Ints = NDArray[np.int64]
Positions = NDArray[np.float64]  # (k, 2): row and column in pixels; or (k, 3): image number, row, column
Mask = NDArray[np.bool_]
# "balanced": every class equally often; "natural": as often as in the data
SamplerName = Literal["balanced", "natural"]
MAX_ATTEMPTS = 200  # largest number of attempts to draw enough positions away from objects


class Windows(NamedTuple):
    """Image number, upper left corner and label of each of B windows; a window may extend beyond the image."""

    images: Ints  # (B,) image numbers
    tops: Ints  # (B,) first row of each window, in pixels of the image; may be negative
    lefts: Ints  # (B,) first column of each window, in pixels of the image; may be negative
    labels: Ints  # (B,) class numbers; zeros if the targets are maps

    def shard(self, rank: int, count: int) -> "Windows":
        """Return the windows of one training process.

        There are `count` processes. Process `rank` (0 to count - 1) has windows rank, rank + count, and so on.
        """
        return Windows(*(column[rank::count] for column in self))


class Sampler(Protocol):
    """Object that chooses the windows of each step."""

    def draw(self, step: int) -> Windows:
        """Return the windows of a step. The result does not depend on earlier calls."""
        ...


@dataclass(frozen=True)
class SamplerSettings:
    """Settings that all random samplers have in common."""

    sizes_px: Ints  # (n, 2): height and width of each image
    window_px: int  # side of a window
    batch: int  # windows per step
    seed: int
    sampler: SamplerName | None = None  # how often each class is drawn; None: the default of the kind of task


@dataclass(frozen=True)
class ObjectPositions:
    """Annotated objects of all images, and the definition of windows without an object."""

    positions: Sequence[Positions]  # for each image (k, 2): row and column of each object, in pixels
    classes: Sequence[Ints]  # for each image (k,): class number of each object
    class_names: Sequence[str]
    absent_label: int  # label of windows without an object
    clearance_px: float  # windows without an object have centers farther than this from every object
    ignored: Sequence[Mask | None] = ()  # for each image (H, W): no window without an object has its center there


# Samplers


class ClassBalancedSampler:
    """Draw the same number of windows of every class, at random positions.

    `labels` (n,) contains the class number of each image. `mined` contains the image numbers of hard examples, called
    mined images: a baseline network classified them incorrectly. None means no mined images. If a class has mined
    images, half of its windows come from its mined images. All other windows come from all images of the class; these
    images are used equally often. Raises DataError if a class has no image.
    """

    def __init__(
        self, labels: Ints, class_names: Sequence[str], settings: SamplerSettings, mined: Ints | None = None
    ) -> None:
        self._labels, self._settings = labels, settings
        self._quotas = ClassQuotas(settings.batch, len(class_names))
        self._images: list[_ClassImages] = []
        for label, name in enumerate(class_names):
            members = np.flatnonzero(labels == label)
            if not len(members):
                raise DataError(f"No image of the training set has the class {name!r}; add images of this class.")
            mined_members = np.empty(0, np.int64) if mined is None else mined[labels[mined] == label]
            self._images.append(_ClassImages(members, mined_members, (settings.seed, label)))

    def draw(self, step: int) -> Windows:
        settings = self._settings
        images = np.concatenate([members.take(*self._quotas.at(k, step)) for k, members in enumerate(self._images)])
        slack = settings.sizes_px[images] - settings.window_px  # (B, 2)
        corners = _draw_corners(slack, _step_generator(settings.seed, step))
        return Windows(images, corners[:, 0], corners[:, 1], self._labels[images])


class ImageSampler:
    """Draw windows at random positions, from all images equally often. A class is drawn as often as it occurs.

    `labels` (n,) contains the class number of each image. `mined` contains the numbers of mined images, as in
    `ClassBalancedSampler`: half of the windows come from them, if there are any.
    """

    def __init__(self, labels: Ints, settings: SamplerSettings, mined: Ints | None = None) -> None:
        self._labels, self._settings = labels, settings
        none = np.empty(0, np.int64)
        self._images = _ClassImages(np.arange(len(labels)), none if mined is None else mined, (settings.seed, 0))

    def draw(self, step: int) -> Windows:
        settings = self._settings
        images = self._images.take(step * settings.batch, settings.batch)
        corners = _draw_corners(settings.sizes_px[images] - settings.window_px, _step_generator(settings.seed, step))
        return Windows(images, corners[:, 0], corners[:, 1], self._labels[images])


class ObjectBalancedSampler:
    """Draw half of the windows around objects, the same number of every class, and the other half without an object.

    With the sampler "natural", classes are drawn as often as they occur: all objects equally often.

    Windows around objects are centered on an object, and then shifted at random by up to `jitter_px` pixels along each
    axis. Windows without an object are centered on random pixels that are farther than `clearance_px` from every
    object; all such pixels of all images are equally likely.

    `mined` (k, 3) lists false detections of a baseline network: image number, row and column. If `mined` is neither
    None nor empty, half of the windows without an object are centered on these positions instead of random pixels.
    Raises DataError if a class has no object.
    """

    def __init__(
        self, objects: ObjectPositions, settings: SamplerSettings, mined: Ints | None = None, jitter_px: int = 4
    ) -> None:
        batch, seed, names = settings.batch, settings.seed, objects.class_names
        if batch % 2:
            raise DataError(
                f"The batch size (`batch`) is {batch}; expected an even number, because half of the windows of a "
                f"batch have no object."
            )
        self._objects, self._settings, self._jitter_px = objects, settings, jitter_px
        rows = np.concatenate([_prepend_image(i, positions) for i, positions in enumerate(objects.positions)])
        classes = np.concatenate([np.empty(0, np.int64), *objects.classes])
        self._rows_by_class = [rows[classes == number] for number in range(len(names))]
        for name, members in zip(names, self._rows_by_class, strict=True):
            if not len(members):
                count = len(objects.positions)
                raise DataError(
                    f"No {name} is annotated in the {count} images of a split, but training and validation need at "
                    f"least one object of every class; add annotated images (`rotopath data check` counts the objects "
                    f"of each split)."
                )
        # With a single class, label 1 means that an object is present, and label 0 that it is absent.
        labels = [1] if len(names) == 1 else list(range(len(names)))
        self._labels_by_class = [
            np.full(len(members), label, np.int64) for label, members in zip(labels, self._rows_by_class, strict=True)
        ]
        if settings.sampler == "natural" and len(names) > 1:  # all classes are drawn like one
            self._rows_by_class, self._labels_by_class = [rows], [classes]
        self._mined = np.empty((0, 3)) if mined is None else mined
        self._with_object = batch // 2
        self._from_mined = -(-batch // 4) if len(self._mined) else 0
        self._at_random = batch // 2 - self._from_mined
        self._quotas = ClassQuotas(self._with_object, len(self._rows_by_class))
        # A single class keeps the seed of earlier versions, so that its batches stay the same.
        seeds = [(seed, 0)] if len(self._rows_by_class) == 1 else [(seed, 0, label) for label in labels]
        self._orders = [
            EndlessShuffle(len(members), order_seed)
            for members, order_seed in zip(self._rows_by_class, seeds, strict=True)
        ]
        self._mined_order = EndlessShuffle(len(self._mined), (seed, 1))
        areas = settings.sizes_px.prod(axis=1)
        self._image_probabilities = areas / areas.sum()

    def draw(self, step: int) -> Windows:
        settings = self._settings
        generator = _step_generator(settings.seed, step)
        drawn = [order.take(*self._quotas.at(number, step)) for number, order in enumerate(self._orders)]
        of_classes = [rows[members] for rows, members in zip(self._rows_by_class, drawn, strict=True)]
        known = [labels[members] for labels, members in zip(self._labels_by_class, drawn, strict=True)]
        mined = self._mined[self._mined_order.take(step * self._from_mined, self._from_mined)]
        centers = np.concatenate([*of_classes, mined, self._draw_away_from_objects(self._at_random, generator)])
        absent = np.full(self._from_mined + self._at_random, self._objects.absent_label, np.int64)
        labels = np.concatenate([*known, absent])
        # Windows are shifted, because objects on a slide are rarely at the exact center of a window: the windows of a
        # slide are several pixels apart.
        jitter = generator.integers(-self._jitter_px, self._jitter_px + 1, (len(centers), 2))
        jitter[self._with_object :] = 0
        corners = np.floor(centers[:, 1:] + jitter - (settings.window_px - 1) / 2 + 0.5).astype(np.int64)
        return Windows(centers[:, 0].astype(np.int64), corners[:, 0], corners[:, 1], labels.astype(np.int64))

    def _draw_away_from_objects(self, count: int, generator: np.random.Generator) -> Positions:
        """Draw `count` random positions (image, row, column) farther than `clearance_px` from every object."""
        probabilities, clearance_px = self._image_probabilities, self._objects.clearance_px
        accepted: list[tuple[int, int, int]] = []
        for _ in range(MAX_ATTEMPTS):
            images = generator.choice(len(probabilities), count, p=probabilities)
            candidates = generator.integers(self._settings.sizes_px[images])  # (count, 2)
            accepted += [
                (int(image), int(row), int(column))
                for image, (row, column) in zip(images, candidates, strict=True)
                if not self._is_ignored(image, row, column)
                and not (np.hypot(*(self._objects.positions[image] - (row, column)).T) <= clearance_px).any()
            ]
            if len(accepted) >= count:
                return np.array(accepted[:count], np.float64).reshape(-1, 3)
        raise DataError(
            f"Windows without an object need a center more than {clearance_px:g} px away from every object, but the "
            f"images have almost no such pixel; add images with fewer objects."
        )

    def _is_ignored(self, image: int, row: int, column: int) -> bool:
        mask = self._objects.ignored[image] if self._objects.ignored else None
        return mask is not None and bool(mask[row, column])


class PatientBalancedSampler:
    """Draw the same number of windows of every patient, at random positions.

    `patients` contains the patient of each image. The network predicts only the target region of a window: the central
    square with a side of `target_px` pixels. The target region is inside the image, unless the image is smaller than
    the target region. The rest of the window may extend beyond the image.
    """

    def __init__(self, patients: Sequence[str], settings: SamplerSettings, target_px: int) -> None:
        self._settings, self._target_px = settings, target_px
        names = sorted(set(patients))
        self._images = [np.array([i for i, patient in enumerate(patients) if patient == name]) for name in names]
        self._order = EndlessShuffle(len(names), (settings.seed, 0))

    def draw(self, step: int) -> Windows:
        settings = self._settings
        generator = _step_generator(settings.seed, step)
        patients = self._order.take(step * settings.batch, settings.batch)
        images = np.array([generator.choice(self._images[patient]) for patient in patients])
        margin = (settings.window_px - self._target_px) // 2
        corners = _draw_corners(settings.sizes_px[images] - self._target_px, generator) - margin
        return Windows(images, corners[:, 0], corners[:, 1], np.zeros(settings.batch, np.int64))


class ObjectCenteredSampler:
    """Draw half of the windows around objects, the same number of every class, and the others by another sampler.

    `centers` (k, 3) contains the image number, row and column of each object, and `classes` (k,) its class number. An
    object is at a random position in the target region (see `PatientBalancedSampler`), which stays inside the image.
    Raises DataError if a class has no object.
    """

    def __init__(
        self,
        others: Sampler,
        centers: Positions,
        classes: Ints,
        class_names: Sequence[str],
        settings: SamplerSettings,
        target_px: int,
    ) -> None:
        self._others, self._settings, self._target_px = others, settings, target_px
        self._centers = [centers[classes == number] for number in range(len(class_names))]
        for name, members in zip(class_names, self._centers, strict=True):
            if not len(members):
                raise DataError(f"No {name} is annotated in the images; add images with this class.")
        self._count = settings.batch // 2
        self._quotas = ClassQuotas(self._count, len(class_names))
        self._orders = [EndlessShuffle(len(rows), (settings.seed, 4, k)) for k, rows in enumerate(self._centers)]

    def draw(self, step: int) -> Windows:
        settings, target_px = self._settings, self._target_px
        generator = np.random.default_rng([settings.seed, 5, step])
        centers = np.concatenate(
            [
                rows[order.take(*self._quotas.at(k, step))]
                for k, (rows, order) in enumerate(zip(self._centers, self._orders, strict=True))
            ]
        )
        images = centers[:, 0].astype(np.int64)
        corners = np.floor(centers[:, 1:] - generator.uniform(0, target_px, (self._count, 2)) + 0.5).astype(np.int64)
        slack = settings.sizes_px[images] - target_px
        corners = np.where(slack >= 0, np.clip(corners, 0, np.maximum(slack, 0)), slack // 2)
        corners -= (settings.window_px - target_px) // 2
        windows = self._others.draw(step)
        around = (images, corners[:, 0], corners[:, 1], np.zeros(len(images), np.int64))
        return Windows(*(np.concatenate([a, b[len(a) :]]) for a, b in zip(around, windows, strict=True)))


class CenterSampler:
    """Take the central window of every image, in the order of the images. The last batch may be smaller.

    This sampler is for validation and testing. Unlike the others, it is not random.
    """

    def __init__(self, labels: Ints, sizes_px: Ints, window_px: int, batch: int) -> None:
        self._labels, self._batch = labels, batch
        self._corners = (sizes_px - window_px) // 2

    def __len__(self) -> int:
        """Return the number of steps that together use every image exactly once."""
        return -(-len(self._labels) // self._batch)

    def draw(self, step: int) -> Windows:
        images = np.arange(step * self._batch, min((step + 1) * self._batch, len(self._labels)))
        tops, lefts = self._corners[images].T
        return Windows(images, tops, lefts, self._labels[images])


# Balance


class ClassQuotas:
    """Divide the `batch` windows of a step equally among classes.

    If this leaves a remainder, some classes receive one more window; these classes change from step to step. Raises
    DataError if there are fewer windows than classes.
    """

    def __init__(self, batch: int, classes: int) -> None:
        if batch < classes:
            raise DataError(
                f"A batch has only {batch} windows for {classes} classes; increase `batch`, so that every batch has a "
                f"window of each class (in detection, half of the windows of a batch are for objects)."
            )
        self._minimum, self._remainder = divmod(batch, classes)
        self._classes = classes

    def at(self, class_number: int, step: int) -> tuple[int, int]:
        """Return two numbers of windows of a class: in all steps before `step` together, and in `step` itself."""
        cycles, rest = divmod(step, self._classes)
        extra = sum(self._has_extra(class_number, k) for k in range(rest))
        earlier = step * self._minimum + cycles * self._remainder + extra
        return earlier, self._minimum + self._has_extra(class_number, step)

    def _has_extra(self, class_number: int, step: int) -> bool:
        return (class_number + step) % self._classes < self._remainder


class EndlessShuffle:
    """An endless random sequence of the numbers 0 to `count` - 1.

    The sequence consists of passes. Every pass contains each number once, in a new random order.

    >>> from rotopath.data.sampling import EndlessShuffle
    >>> sequence = EndlessShuffle(3, seed=(0,)).take(start=0, number=6)
    >>> sorted(sequence[:3].tolist()), sorted(sequence[3:].tolist())
    ([0, 1, 2], [0, 1, 2])
    """

    def __init__(self, count: int, seed: Sequence[int]) -> None:
        self._count, self._seed = count, list(seed)
        self._orders: dict[int, Ints] = {}  # by index of the pass; only the current and the previous pass

    def take(self, start: int, number: int) -> Ints:
        """Return `number` elements of the sequence, beginning with element `start`."""
        parts = []
        while number > 0:
            pass_index, position = divmod(start, self._count)
            parts.append(self._order(pass_index)[position : position + number])
            start, number = start + len(parts[-1]), number - len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _order(self, pass_index: int) -> Ints:
        if pass_index not in self._orders:
            self._orders = {k: order for k, order in self._orders.items() if k == pass_index - 1}
            generator = np.random.default_rng([*self._seed, pass_index])
            self._orders[pass_index] = generator.permutation(self._count)
        return self._orders[pass_index]


class _ClassImages:
    """Two endless random sequences of image numbers of one class: of all its images, and of its mined images.

    Mined images are images that a baseline network classified incorrectly (see `ClassBalancedSampler`).
    """

    def __init__(self, members: Ints, mined: Ints, seed: tuple[int, int]) -> None:
        self._members, self._mined = members, mined
        self._order = EndlessShuffle(len(members), (*seed, 0))
        self._mined_order = EndlessShuffle(len(mined), (*seed, 1))

    def take(self, start: int, count: int) -> Ints:
        """Return the image number of each window of this class in one training step.

        `count` is the number of windows of this class in the step. `start` is the number of windows of this class in
        all earlier steps together. If the class has mined images, every second window of the class is cut from the
        next mined image; the windows are counted over all steps. Each other window is cut from the next image of the
        whole class.
        """
        if not len(self._mined):
            return self._members[self._order.take(start, count)]
        mined_start = -(-start // 2)
        mined_count = -(-(start + count) // 2) - mined_start
        members = self._members[self._order.take(start - mined_start, count - mined_count)]
        return np.concatenate([members, self._mined[self._mined_order.take(mined_start, mined_count)]])


def _step_generator(seed: int, step: int) -> np.random.Generator:
    """Return the random generator of a sampler for a step.

    It is independent of the generator for augmentation, which has the number 3 in its seed instead of 2.
    """
    return np.random.default_rng([seed, 2, step])


def _draw_corners(slack: Ints, generator: np.random.Generator) -> Ints:
    """Draw the upper left corners (B, 2) of squares, as rows and columns in pixels, at random positions in images.

    `slack` (B, 2) is the height and width of each image minus the side of the square. Corners are from 0 to `slack`. If
    an image is smaller than the square along an axis (`slack` < 0), it is centered in the square along this axis.
    """
    return np.where(slack >= 0, generator.integers(np.maximum(slack, 0) + 1), slack // 2)


def _prepend_image(image: int, positions: Positions) -> Positions:
    """Convert positions (k, 2) in an image to positions (k, 3): image number, row and column."""
    return np.column_stack([np.full(len(positions), float(image)), positions]).reshape(-1, 3)
