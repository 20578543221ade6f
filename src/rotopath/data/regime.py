"""Smaller training sets: so many cases, so many fields of an organ, or such a fraction of each class.

In: the training pictures of a task, an amount and a seed. Out: those that take part; less lies always inside of more.
"""

from collections.abc import Sequence

import numpy as np

from rotopath.data.collection import DataError, Picture, Task
from rotopath.data.splits import take_cases, take_fraction, take_of_each

AMOUNTS = {"mitosis": "a number of cases", "nuclei": "a number of fields of each organ"}


def take_regime(task: Task, pictures: Sequence[Picture], amount: float, seed: int) -> tuple[Picture, ...]:
    """The pictures of so many cases (mitosis), so many fields of each organ (nuclei), or a fraction of each class."""
    if task in AMOUNTS and not float(amount).is_integer():
        raise DataError(f"A regime of the task {task} is {AMOUNTS[task]}, a whole one; got {amount:g}.")
    try:
        if task == "mitosis":
            cases = set(take_cases((picture.case for picture in pictures), int(amount), seed))
            return tuple(picture for picture in pictures if picture.case in cases)
        if task == "nuclei":
            if bare := [picture.name for picture in pictures if not picture.stratum]:
                raise DataError(f"A regime takes fields of each organ, but that of {bare[0]} is not known; list it.")
            names = set(take_of_each({picture.name: picture.stratum for picture in pictures}, int(amount), seed))
            return tuple(picture for picture in pictures if picture.name in names)
        labels = np.array([picture.label for picture in pictures], np.int64)
        return tuple(pictures[i] for i in take_fraction(labels, amount, seed))
    except ValueError as error:
        raise DataError(str(error)) from None
