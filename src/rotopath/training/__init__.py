"""Hard examples: what a first network gets wrong, for a second one to see more often.

In: examples that a task mined, the worst first. Out: a CSV file with the run, and numbers that its sampler takes.

One run: data opened, a network fitted, its folder filled; or resumed where it was interrupted.

In: a recipe and a folder. Out: the folder, finished once it holds the weights.

Training: one run from a recipe to a folder that holds everything about it.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rotopath import runs
from rotopath.data import Batches, DataError, Dataset, Sample, open_data, problems
from rotopath.data.dataset import read_table
from rotopath.data.sampling import Ints
from rotopath.evaluation import gather_evidence, make_middle_batches, make_sampled_batches
from rotopath.model_file import WEIGHTS, RunError, pack_weights, read_json, write_model
from rotopath.models import DenseNetwork
from rotopath.recipe import Recipe, RecipeError, changed_key, make_recipe, read_recipe, write_recipe
from rotopath.runs import FINGERPRINT, Run, describe_machine, describe_training, fingerprint, now
from rotopath.tasks import PAPER, Example, Frame, Task
from rotopath.tasks.task import Evidence, Loss
from rotopath.training.distributed import expect_processes, first_alone, is_first
from rotopath.training.loop import Row, fit
from rotopath.writing import write_bytes, write_json, write_text

MINED = "mined.csv"
COLUMNS = ("image", "row", "column", "score")


def write_examples(path: Path, examples: Sequence[Example]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((each.image, each.row, each.column, f"{each.score:.6f}") for each in examples)
    write_text(path, text.getvalue())


def read_examples(path: Path) -> list[Example]:
    """Examples as they were written, the worst first."""
    return [
        Example(row["image"], int(row["row"]), int(row["column"]), float(row["score"]))
        for _, row in read_table(path, COLUMNS)
    ]


def number_examples(examples: Sequence[Example], task: Task, samples: Sequence[Sample]) -> Ints:
    """Examples as the task's sampler takes them."""
    number_of = {sample.name: i for i, sample in enumerate(samples)}
    if unknown := [each.image for each in examples if each.image not in number_of]:
        raise DataError(f"The hard example {unknown[0]!r} is not among the training images.")
    places = [(number_of[each.image], each.row, each.column) for each in examples]
    return task.number_examples(np.array(places, np.int64).reshape(-1, 3))


# The stages; the first one, which finds hard examples, has a folder.
BASELINE, TRAINING, SCORING = "baseline", "training", "scoring"
OnProgress = Callable[[str, Row], None]  # given the stage, and a row of its log; or how many samples are done
VALIDATION_SEED = 1_000_003  # windows of validation are the same in every run


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained on what: a recipe with its data opened and its classes known."""

    recipe: Recipe
    task: Task
    dataset: Dataset
    samples: tuple[Sample, ...]  # of training, as many as the regime takes

    @property
    def validation(self) -> tuple[Sample, ...]:
        return self.dataset.split("valid")


def train(
    recipe: Recipe | Mapping[str, Any] | Path | str,
    out: Path | str | None = None,
    changes: Sequence[str] = (),
    on_progress: OnProgress = lambda _stage, _row: None,
) -> Run:
    """Train a network by a recipe, or resume a training that was interrupted; gives the finished run.

    The recipe is a `Recipe`, its keys, or a TOML file, to which `changes` such as "orientations=4" are applied. The
    run folder `out` is named after the recipe when left out.
    """
    made, name = _read(recipe, changes)
    folder = Path(out) if out else name_folder(name, made)
    expect_processes(made.devices * made.nodes)
    plan = make_plan(made)
    check_network(plan)
    loss = make_loss(plan)
    if is_first():
        prepare(folder, plan)
    mined = None
    if made.mining is not None:
        _mine_examples(plan, loss, folder, on_progress)
        mined = number_examples(read_examples(folder / MINED), plan.task, plan.samples)
    network, device = _fitted(plan, loss, folder, partial(on_progress, TRAINING), mined)
    first_alone(lambda: _finish(plan, network, folder, device, on_progress))
    return runs.load(folder)


def name_folder(name: str, recipe: Recipe) -> Path:
    """The run folder of a recipe of that name, unless another is given."""
    return Path("runs") / f"{name}-N{recipe.orientations}-seed{recipe.seed}"


def _read(recipe: Recipe | Mapping[str, Any] | Path | str, changes: Sequence[str]) -> tuple[Recipe, str]:
    """The recipe, and a name for its run."""
    if isinstance(recipe, Recipe | Mapping):
        if changes:
            raise RecipeError("Changes are for recipes in files; change the keys themselves.")
        made = recipe if isinstance(recipe, Recipe) else make_recipe(recipe)
        return made, made.task.rpartition(":")[2]
    return read_recipe(Path(recipe), changes), Path(recipe).stem


def make_plan(recipe: Recipe) -> TrainingPlan:
    """The recipe with its data opened; refused while anything is wrong with the layout or the labels of the data."""
    dataset = open_data(Path(recipe.data), recipe.kind.annotated, recipe.data_spacing_um_px)
    _refuse(recipe, problems(dataset.findings))
    if not recipe.classes and recipe.task not in PAPER:
        recipe = replace(recipe, classes=recipe.kind.find_classes(dataset))
    task = recipe.make_task()
    _refuse(recipe, problems(task.check_data(dataset)))
    samples = dataset.split("train")
    dataset.split("valid")
    if recipe.regime is not None:
        samples = task.take_regime(samples, recipe.regime, recipe.seed)
    return TrainingPlan(recipe, task, dataset, samples)


def _refuse(recipe: Recipe, found: Sequence[object]) -> None:
    if found:
        more = f" There are {len(found) - 1} more." if len(found) > 1 else ""
        raise DataError(f"{recipe.data} has problems: {found[0]}{more} Run `rotopath data check` on it.")


def check_network(plan: TrainingPlan) -> DenseNetwork:
    """The network of a plan, if it can be built and answers what the task asks, before anything is written."""
    try:
        network = runs.build(plan.recipe, plan.task)
        plan.task.check_frame(find_frame(plan.recipe, network))
    except (DataError, RecipeError):
        raise
    except Exception as error:  # of any kind: it may be a user's function that builds it
        reason = " ".join(str(error).split()) or type(error).__name__
        stop = "" if reason.endswith((".", "?")) else "."
        raise RecipeError(f"The network {plan.recipe.network_name!r} cannot be used: {reason}{stop}") from None
    return network


def find_frame(recipe: Recipe, network: DenseNetwork) -> Frame:
    """The windows of a training: as large as the recipe says, and what the network answers for in them."""
    geometry = network.geometry
    window_px = runs.describe_network(recipe, network).window_px
    if not geometry.fits(window_px):
        nearest = " or ".join(map(str, geometry.nearest_sizes(window_px)))
        raise RecipeError(f"the key 'window_px' is {window_px}, which is off the network's grid; use {nearest}.")
    return Frame(window_px, geometry.output_size(window_px) * geometry.stride_px, geometry.stride_px)


def prepare(folder: Path, plan: TrainingPlan) -> None:
    """Make the folder of a new run, or see that the one that is there belongs to this recipe and this data."""
    recipe, dataset = plan.recipe, plan.dataset
    if (folder / WEIGHTS).exists() and (folder / runs.RECIPE).exists():
        raise RunError(f"{folder} holds a finished run; evaluate it, or choose another folder.")
    if (folder / runs.RECIPE).exists() and not _is_untouched(folder):
        begun = runs.read_run_recipe(folder)
        if key := changed_key(begun, recipe):
            old, new = (getattr(each, key) for each in (begun, recipe))
            raise RunError(f"{folder} was begun with {key} = {old!r}, and now it is {new!r}; choose another folder.")
        before = _read_fingerprint(folder)
        if not before.startswith(FINGERPRINT):
            raise RunError(
                f"{folder} was begun by an older rotopath, which cannot say whether the data has changed since; finish "
                f"it with that version, or choose another folder."
            )
        if fingerprint(dataset) != before:
            raise RunError(f"{recipe.data} has changed since {folder} was begun; restore it, or choose another folder.")
        return
    if folder.exists() and not _is_untouched(folder):
        raise RunError(f"{folder} exists and is no run of rotopath; choose another folder.")
    about = describe_training(recipe.seed, dataset)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / runs.PROVENANCE, about)
    write_text(folder / runs.RECIPE, write_recipe(recipe))


def _is_untouched(folder: Path) -> bool:
    """Whether a folder holds nothing but what is written before a training begins, such as by one that was killed."""
    names = (runs.PROVENANCE, runs.RECIPE)
    harmless = {*names, *(f".{name}.unfinished" for name in names)}
    return folder.is_dir() and harmless.issuperset(path.name for path in folder.iterdir())


def _read_fingerprint(folder: Path) -> str:
    about = read_json(folder / runs.PROVENANCE).get("data")
    found = about.get("fingerprint") if isinstance(about, dict) else None
    if not isinstance(found, str):
        raise RunError(f"{folder / runs.PROVENANCE} is damaged: it has no fingerprint of the data.")
    return found


def make_loss(plan: TrainingPlan) -> Loss:
    """The loss of a plan, for which every class has to be among the training images."""
    plan.task.check_training(plan.samples)
    try:
        return plan.task.make_loss(plan.samples)
    except ValueError as error:
        raise DataError(str(error)) from None


def _mine_examples(plan: TrainingPlan, loss: Loss, folder: Path, on_progress: OnProgress) -> None:
    """The first stage: a baseline on the plain sampling, and its worst mistakes in a file."""
    mining = plan.recipe.mining
    if (folder / MINED).exists() or mining is None:
        return
    first = replace(plan, recipe=replace(plan.recipe, mining=None, epochs=mining.epochs))
    if is_first():
        (folder / BASELINE).mkdir(exist_ok=True)
    network, device = _fitted(first, loss, folder / BASELINE, partial(on_progress, BASELINE), None)

    def write() -> None:
        evidence = gather_evidence(plan.task, network, plan.samples, device)
        write_examples(folder / MINED, plan.task.mine(evidence, mining.examples))

    first_alone(write)
    (folder / BASELINE / runs.RESUME).unlink(missing_ok=True)


def _fitted(
    plan: TrainingPlan, loss: Loss, folder: Path, on_row: Callable[[Row], None], mined: Ints | None
) -> tuple[DenseNetwork, torch.device]:
    network = runs.build(plan.recipe, plan.task)
    batches = partial(make_batches, plan, network, mined)
    device = fit(plan.recipe, network, plan.task, loss, batches, folder, on_row)
    return network, device


def _finish(
    plan: TrainingPlan, network: DenseNetwork, folder: Path, device: torch.device, on_progress: OnProgress
) -> None:
    """The operating point, all scores and the model file; the weights last: with them the run is finished."""
    point = _assess(plan, network, folder, device, on_progress)
    about = read_json(folder / runs.PROVENANCE)
    about |= {"finished": now(), "hardware": describe_machine(device)}
    about["hardware"]["processes"] = plan.recipe.devices * plan.recipe.nodes
    write_json(folder / runs.PROVENANCE, about)
    weights = pack_weights(network)
    write_model(folder, plan.task, runs.describe_network(plan.recipe, network), point, weights)
    write_bytes(folder / WEIGHTS, weights)
    for leftover in (runs.RESUME, runs.KEPT):
        (folder / leftover).unlink(missing_ok=True)


def _assess(
    plan: TrainingPlan, network: DenseNetwork, folder: Path, device: torch.device, on_progress: OnProgress
) -> dict[str, float]:
    """The operating point of the validation set; the scores of it, and of the test set if there is one, in a file."""
    task, dataset = plan.task, plan.dataset

    def look_at(split: str) -> list[Evidence]:
        def report(done: int, samples: int) -> None:
            on_progress(SCORING, {"done": done, "samples": samples})

        return gather_evidence(task, network, dataset.split(split), device, on_progress=report)

    evidence = look_at("valid")
    point = task.choose_point(evidence)
    metrics = {"valid": task.score(evidence, point)}
    if any(sample.split == "test" for sample in dataset.samples):
        metrics["test"] = task.score(look_at("test"), point)
    write_json(folder / runs.METRICS, metrics)
    return point


def make_batches(
    plan: TrainingPlan, network: DenseNetwork, mined: Ints | None, device: torch.device
) -> tuple[Batches, Batches, int]:
    """Batches of training and of validation, and how many of the latter there are."""
    recipe, task = plan.recipe, plan.task
    frame = find_frame(recipe, network)
    sampled = partial(make_sampled_batches, task, frame=frame, batch=recipe.windows, cache=recipe.cache, device=device)
    training = sampled(samples=plan.samples, seed=recipe.seed, augmentation=recipe.augmentation, mined=mined)
    if task.answers == "window":
        middle, steps = make_middle_batches(task, plan.validation, frame.window_px, cache=recipe.cache, device=device)
        return training, middle, len(steps)
    return training, sampled(samples=plan.validation, seed=VALIDATION_SEED), recipe.validation_steps


__all__ = ["is_first", "name_folder", "train"]
