"""Sampling: which windows of which images make up each training batch.

In: images, their labels or objects, a seed. Out: for any step, the places of its windows, as a function of seed and
step alone; so the number of workers does not matter, and a run that was interrupted goes on where it was.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rotopath.data.dataset import DataError

Ints = NDArray[np.int64]
ATTEMPTS = 200  # to find a position without an object near it


class Windows(NamedTuple):
    """Windows, by their upper left corners, which may lie outside of the image; and their labels."""

    images: Ints  # (B,)
    tops: Ints  # (B,)
    lefts: Ints  # (B,)
    labels: Ints  # (B,) numbers of classes; zeros where the target is a map

    def shard(self, rank: int, count: int) -> "Windows":
        """Every `count`-th window, from that of number `rank`."""
        return Windows(*(column[rank::count] for column in self))


class Sampler(Protocol):
    def places(self, step: int) -> Windows: ...


class Rounds:
    """An endless sequence of 0 ... count - 1 in which each round brings every number once, in a new order."""

    def __init__(self, count: int, seed: Sequence[int]) -> None:
        self._count, self._seed = count, list(seed)
        self._orders: dict[int, Ints] = {}

    def take(self, start: int, number: int) -> Ints:
        """`number` members of the sequence, from any place in it."""
        taken = []
        while number > 0:
            which, position = divmod(start, self._count)
            taken.append(self._order(which)[position : position + number])
            start, number = start + len(taken[-1]), number - len(taken[-1])
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def _order(self, which: int) -> Ints:
        if which not in self._orders:
            self._orders = {k: order for k, order in self._orders.items() if k == which - 1}
            self._orders[which] = np.random.default_rng([*self._seed, which]).permutation(self._count)
        return self._orders[which]


class ClassWindows:
    """As many windows of one class as of the next, each image as often as the next, at random positions within it.

    `mined` lists images that a first model found hard; they then fill half of the windows of their class.
    """

    def __init__(
        self,
        labels: Ints,
        names: Sequence[str],
        sizes_px: Ints,
        window_px: int,
        batch: int,
        seed: int,
        mined: Ints | None = None,
    ) -> None:
        self._labels, self._sizes, self._window, self._seed = labels, sizes_px, window_px, seed
        self._shares = Shares(batch, len(names))
        self._pools: list[_Pool] = []
        for label, name in enumerate(names):
            members = np.flatnonzero(labels == label)
            if not len(members):
                raise DataError(f"The training images have none of class {name!r}; every class is needed.")
            hard = np.empty(0, np.int64) if mined is None else mined[labels[mined] == label]
            self._pools.append(_Pool(members, hard, (seed, label)))

    def places(self, step: int) -> Windows:
        images = np.concatenate([pool.take(*self._shares.of(i, step)) for i, pool in enumerate(self._pools)])
        generator = np.random.default_rng([self._seed, 2, step])
        slack = self._sizes[images] - self._window  # (B, 2)
        # An image smaller than the window lies in its middle.
        corners = np.where(slack >= 0, generator.integers(np.maximum(slack, 0) + 1), slack // 2)
        return Windows(images, corners[:, 0], corners[:, 1], self._labels[images])


class ObjectWindows:
    """As many windows with an object in the middle as windows with none near it; of every class of object as many.

    Negatives are taken at random, all positions of all images alike; `mined` lists others (image, row, column), which a
    first model mistook for objects, and which then fill half of the negatives.
    """

    def __init__(
        self,
        points: Sequence[NDArray[np.float64]],  # (k, 2) of each image
        labels: Sequence[Ints],  # (k,): their classes
        names: Sequence[str],
        absent: int,  # the label of negatives
        sizes_px: Ints,
        window_px: int,
        batch: int,
        seed: int,
        beyond_px: float,  # from every object, for a position to be a negative
        mined: Ints | None = None,
        jitter_px: int = 4,
    ) -> None:
        if batch % 2:
            raise DataError(f"Half of a batch are negatives, so its size is even; got {batch}.")
        self._points, self._sizes, self._window = points, sizes_px, window_px
        self._seed, self._jitter, self._beyond, self._absent = seed, jitter_px, beyond_px, absent
        objects = np.concatenate([_with_image(i, found) for i, found in enumerate(points)])
        kinds = np.concatenate([np.empty(0, np.int64), *labels])
        label_of = [1] if len(names) == 1 else list(range(len(names)))  # a single class is yes or no
        self._objects = [objects[kinds == kind] for kind in range(len(names))]
        self._labels = label_of
        for name, members in zip(names, self._objects, strict=True):
            if not len(members):
                raise DataError(f"None of the {len(points)} images of a split has a {name}, but each split needs some.")
        self._mined = np.empty((0, 3)) if mined is None else mined
        hard = -(-batch // 4) if len(self._mined) else 0
        self._positives, self._negatives = batch // 2, (hard, batch // 2 - hard)
        self._shares = Shares(self._positives, len(names))
        seeds: list[tuple[int, ...]] = [(seed, 0)] if len(names) == 1 else [(seed, 0, kind) for kind in label_of]
        self._rounds = [Rounds(len(members), each) for members, each in zip(self._objects, seeds, strict=True)]
        self._hard = Rounds(len(self._mined), (seed, 1))
        self._areas = sizes_px.prod(axis=1) / sizes_px.prod(axis=1).sum()

    def places(self, step: int) -> Windows:
        generator = np.random.default_rng([self._seed, 2, step])
        hard, random = self._negatives
        drawn = [
            members[rounds.take(*self._shares.of(i, step))]
            for i, (members, rounds) in enumerate(zip(self._objects, self._rounds, strict=True))
        ]
        labels = np.repeat([*self._labels, self._absent], [*map(len, drawn), hard + random])
        middles = np.concatenate(
            [*drawn, self._mined[self._hard.take(step * hard, hard)], self._away_from_objects(random, generator)]
        )
        # The network answers every few pixels, so an object is rarely exactly in the middle of a window.
        jitter = generator.integers(-self._jitter, self._jitter + 1, (len(middles), 2))
        jitter[self._positives :] = 0
        corners = np.floor(middles[:, 1:] + jitter - (self._window - 1) / 2 + 0.5).astype(np.int64)
        return Windows(middles[:, 0].astype(np.int64), corners[:, 0], corners[:, 1], labels.astype(np.int64))

    def _away_from_objects(self, count: int, generator: np.random.Generator) -> NDArray[np.float64]:
        found: list[tuple[int, int, int]] = []
        for _ in range(ATTEMPTS):
            images = generator.choice(len(self._areas), count, p=self._areas)
            spots = generator.integers(self._sizes[images])  # (count, 2)
            found += [
                (int(image), int(row), int(column))
                for image, (row, column) in zip(images, spots, strict=True)
                if not (np.hypot(*(self._points[image] - (row, column)).T) <= self._beyond).any()
            ]
            if len(found) >= count:
                return np.array(found[:count], np.float64).reshape(-1, 3)
        raise DataError(
            f"The training images have next to no position over {self._beyond:g} px away from every object, where "
            f"negatives could be taken; give larger images, or some without objects."
        )


class GroupWindows:
    """Windows of every patient as often as of the next, their targets anywhere in the image, up to its edge."""

    def __init__(
        self, patients: Sequence[str], sizes_px: Ints, window_px: int, target_px: int, batch: int, seed: int
    ) -> None:
        self._sizes, self._window, self._batch, self._seed = sizes_px, window_px, batch, seed
        self._target = target_px
        names = sorted(set(patients))
        self._images = [np.array([i for i, patient in enumerate(patients) if patient == name]) for name in names]
        self._rounds = Rounds(len(names), (seed, 0))

    def places(self, step: int) -> Windows:
        generator = np.random.default_rng([self._seed, 2, step])
        chosen = self._rounds.take(step * self._batch, self._batch)
        images = np.array([generator.choice(self._images[patient]) for patient in chosen])
        margin = (self._window - self._target) // 2
        slack = self._sizes[images] - self._target
        corners = np.where(slack >= 0, generator.integers(np.maximum(slack, 0) + 1), slack // 2) - margin
        return Windows(images, corners[:, 0], corners[:, 1], np.zeros(self._batch, np.int64))


class MiddleWindows:
    """The middle of every image, in order, for validation and testing; the last batch may be smaller."""

    def __init__(self, labels: Ints, sizes_px: Ints, window_px: int, batch: int) -> None:
        self._labels, self._batch = labels, batch
        self._corners = (sizes_px - window_px) // 2

    def __len__(self) -> int:
        return -(-len(self._labels) // self._batch)

    def places(self, step: int) -> Windows:
        images = np.arange(step * self._batch, min((step + 1) * self._batch, len(self._labels)))
        tops, lefts = self._corners[images].T
        return Windows(images, tops, lefts, self._labels[images])


class Shares:
    """A batch divided among classes: equally, and what is left over goes to other classes at every step."""

    def __init__(self, batch: int, classes: int) -> None:
        if batch < classes:
            raise DataError(f"A batch needs at least one window of each of the {classes} classes; got {batch}.")
        self._each, self._over = divmod(batch, classes)
        self._classes = classes

    def of(self, which: int, step: int) -> tuple[int, int]:
        """How many windows of a class were used before a step, and how many the step has."""
        rounds, rest = divmod(step, self._classes)
        used = step * self._each + rounds * self._over + sum(self._gets_more(which, k) for k in range(rest))
        return used, self._each + self._gets_more(which, step)

    def _gets_more(self, which: int, step: int) -> bool:
        return (which + step) % self._classes < self._over


class _Pool:
    """The images of one class: all of them in rounds, and beside them the hard ones in rounds of their own."""

    def __init__(self, members: Ints, hard: Ints, seed: tuple[int, int]) -> None:
        self._members, self._hard = members, hard
        self._rounds = Rounds(len(members), (*seed, 0))
        self._hard_rounds = Rounds(len(hard), (*seed, 1))

    def take(self, used: int, count: int) -> Ints:
        """`count` images, where `used` were taken before; half of them hard ones, if there are any."""
        if not len(self._hard):
            return self._members[self._rounds.take(used, count)]
        used_hard, hard = -(-used // 2), -(-(used + count) // 2) - -(-used // 2)
        members = self._members[self._rounds.take(used - used_hard, count - hard)]
        return np.concatenate([members, self._hard[self._hard_rounds.take(used_hard, hard)]])


def _with_image(image: int, points: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.column_stack([np.full(len(points), float(image)), points]).reshape(-1, 3)
