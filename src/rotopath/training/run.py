"""One run: data opened, a network fitted, its folder filled; or taken up again where it was interrupted.

In: a recipe and a folder. Out: the folder, finished once it holds the weights.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rotopath import runs
from rotopath.assessment import Evidence, choose_point, gather, score
from rotopath.data import (
    Batches,
    Collection,
    DataError,
    Picture,
    middle_batches,
    open_data,
    problems,
    sampled_batches,
    take_regime,
)
from rotopath.data.annotations import read_nuclei
from rotopath.data.collection import MODEL_SPACING_UM_PX
from rotopath.data.nuclei import class_map, class_weights
from rotopath.data.sampling import Ints
from rotopath.models import Network
from rotopath.recipe import Recipe, changed_key, read_recipe, write_recipe
from rotopath.runs import RunError
from rotopath.tasks import TASKS
from rotopath.training.fitting import Loss, Row, fit
from rotopath.training.mining import MINED, mine, number_examples, read_examples, write_examples
from rotopath.training.processes import expect_processes, first_alone, is_first

# The stages; the first one, which finds hard examples, has a folder.
BASELINE, TRAINING, SCORING = "baseline", "training", "scoring"
Seen = Callable[[str, Row], None]  # told the stage, and a row of its log; or how many pictures are done
VALIDATION_SEED = 1_000_003  # windows of validation are the same in every run


def train(recipe: Recipe, folder: Path, seen: Seen = lambda _stage, _row: None) -> None:
    """Train a network by the recipe, or go on with a training that was interrupted; `seen` is told how it goes."""
    expect_processes(recipe.devices * recipe.nodes)
    collection = open_training_data(recipe)
    if is_first():
        prepare(folder, recipe, collection)
    pictures = collection.split("train")
    if recipe.regime is not None:
        pictures = take_regime(recipe.task, pictures, recipe.regime, recipe.seed)
    mined = None
    if recipe.mining is not None:
        _mine_examples(recipe, pictures, collection, folder, seen)
        mined = number_examples(read_examples(folder / MINED), recipe.task, pictures)
    network, device = _fitted(recipe, pictures, collection, folder, partial(seen, TRAINING), mined)
    if not is_first():
        return
    _assess(recipe, network, collection, folder, device, seen)
    about = json.loads((folder / runs.PROVENANCE).read_text(encoding="utf-8"))
    about |= {"finished": runs.now(), "hardware": runs.describe_machine(device)}
    about["hardware"]["processes"] = recipe.devices * recipe.nodes
    runs.write_json(folder / runs.PROVENANCE, about)
    runs.save_weights(network, folder / runs.WEIGHTS)  # the last file: with it the run is finished
    for leftover in (runs.RESUME, runs.KEPT):
        (folder / leftover).unlink(missing_ok=True)


def _mine_examples(
    recipe: Recipe, pictures: tuple[Picture, ...], collection: Collection, folder: Path, seen: Seen
) -> None:
    """The first stage: a baseline on the plain sampling, and its worst mistakes in a file."""
    if (folder / MINED).exists() or recipe.mining is None:
        return
    first = replace(recipe, mining=None, epochs=recipe.mining.epochs)
    if is_first():
        (folder / BASELINE).mkdir(exist_ok=True)
    network, device = _fitted(first, pictures, collection, folder / BASELINE, partial(seen, BASELINE), None)
    most = recipe.mining.examples
    write = partial(write_examples, folder / MINED)
    first_alone(lambda: write(mine(recipe.task, network, pictures, most, device)))
    (folder / BASELINE / runs.RESUME).unlink(missing_ok=True)


def _fitted(
    recipe: Recipe,
    pictures: tuple[Picture, ...],
    collection: Collection,
    folder: Path,
    seen: Callable[[Row], None],
    mined: Ints | None,
) -> tuple[Network, torch.device]:
    network = runs.build(recipe)
    batches = partial(make_batches, recipe, network, pictures, collection.split("valid"), mined)
    device = fit(recipe, network, make_loss(recipe, pictures), batches, folder, seen)
    return network, device


def _assess(
    recipe: Recipe, network: Network, collection: Collection, folder: Path, device: torch.device, seen: Seen
) -> None:
    """The operating point of the validation set, and the scores of it and of the test set, if there is one."""

    def look_at(split: str) -> list[Evidence]:
        def told(done: int, pictures: int) -> None:
            seen(SCORING, {"done": done, "pictures": pictures})

        return gather(recipe.task, network, collection.split(split), device, seen=told)

    evidence = look_at("valid")
    point = choose_point(recipe.task, evidence)
    metrics = {"valid": score(recipe.task, evidence, point)}
    if any(picture.split == "test" for picture in collection.pictures):
        metrics["test"] = score(recipe.task, look_at("test"), point)
    runs.write_json(folder / runs.POINT, point)
    runs.write_json(folder / runs.METRICS, metrics)


def open_training_data(recipe: Recipe) -> Collection:
    """The data of a recipe, refused while anything is wrong with its layout."""
    collection = open_data(Path(recipe.data), recipe.task)
    if found := problems(collection.findings):
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise DataError(f"{recipe.data} has problems: {found[0]}{more} Run `rotopath data check` on it.")
    return collection


def prepare(folder: Path, recipe: Recipe, collection: Collection) -> None:
    """Make the folder of a new run, or see that the one that is there belongs to this recipe and this data."""
    if (folder / runs.RECIPE).exists():
        if (folder / runs.WEIGHTS).exists():
            raise RunError(f"{folder} holds a finished run; evaluate it, or choose another folder.")
        begun = read_recipe(folder / runs.RECIPE)
        if key := changed_key(begun, recipe):
            old, new = (getattr(one, key) for one in (begun, recipe))
            raise RunError(f"{folder} was begun with {key} = {old!r}, and now it is {new!r}; choose another folder.")
        before = json.loads((folder / runs.PROVENANCE).read_text(encoding="utf-8"))["data"]["fingerprint"]
        if runs.fingerprint(collection) != before:
            raise RunError(f"{recipe.data} has changed since {folder} was begun; restore it, or choose another folder.")
        return
    # One that was killed while it made the folder may have left these.
    harmless = {runs.PROVENANCE, *(f".{name}.unfinished" for name in (runs.PROVENANCE, runs.RECIPE))}
    if folder.exists() and not (folder.is_dir() and harmless.issuperset(path.name for path in folder.iterdir())):
        raise RunError(f"{folder} exists and is no run of rotopath; choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    runs.write_json(folder / runs.PROVENANCE, runs.describe(recipe, collection))
    runs.write_text(folder / runs.RECIPE, write_recipe(recipe))


def make_loss(recipe: Recipe, pictures: tuple[Picture, ...]) -> Loss:
    """The task's loss; for nuclei with the weights that make the three classes count alike in these pictures."""
    loss: Callable[..., Tensor] = TASKS[recipe.task].loss
    if recipe.task != "nuclei":
        return loss
    maps = (class_map(read_nuclei(picture, MODEL_SPACING_UM_PX["nuclei"])) for picture in pictures)
    weights = torch.from_numpy(class_weights(maps))
    return lambda logits, targets: loss(logits, targets, weights.to(logits.device))


def make_batches(
    recipe: Recipe,
    network: Network,
    pictures: tuple[Picture, ...],
    validation: tuple[Picture, ...],
    mined: Ints | None,
    device: torch.device,
) -> tuple[Batches, Batches, int]:
    """Batches of training and of validation, and how many of the latter there are."""
    window_px = recipe.window_px or network.architecture.input_px
    target_px = network.output_size(window_px) if recipe.task == "nuclei" else None
    sampled = partial(
        sampled_batches,
        recipe.task,
        window_px=window_px,
        target_px=target_px,
        batch=recipe.batch,
        cache=recipe.cache,
        device=device,
    )
    training = sampled(pictures, augmentation=recipe.augmentation, seed=recipe.seed, mined=mined)
    if recipe.task == "tumor":
        middle, steps = middle_batches(validation, window_px, cache=recipe.cache, device=device)
        return training, middle, len(steps)
    return training, sampled(validation, seed=VALIDATION_SEED), recipe.validation_steps
