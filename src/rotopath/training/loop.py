"""Train a network as a recipe specifies. The functions in this file are in the order in which `train` calls them.

`train` opens the data, checks the recipe, prepares the run folder, and mines hard examples if the recipe has a table
`[mining]`. Then it fits the network, chooses the operating point (decision thresholds), scores the model, and writes
the model file and the weights. `fit` runs Lightning's training loop, and resumes from the checkpoint in the run folder
if there is one. The module `checkpoint` writes the log and the checkpoints.
"""

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LRScheduler, StepLR

from rotopath import runs
from rotopath.data import Batches, DataError, Dataset, Sample, open_data, problems
from rotopath.data.sampling import Ints
from rotopath.environment import describe_machine, now
from rotopath.evaluation import gather_evidence, make_center_batches, make_sampled_batches
from rotopath.model_file import WEIGHTS, load_weights, pack_weights, read_json, write_model
from rotopath.models import DenseNetwork
from rotopath.models.protocols import unwrap
from rotopath.nn import graphs
from rotopath.recipe import PASS, Recipe, RecipeError, make_recipe, read_recipe
from rotopath.runs import Parent, Run, find_parent
from rotopath.tasks import PAPER, Task, TrainingWindow
from rotopath.tasks.task import Evidence, Loss
from rotopath.training.checkpoint import (
    BASELINE,
    KEPT,
    RESUME,
    Row,
    RunRecorder,
    can_resume,
    find_checkpoint,
    index_hard_examples,
    mine_hard_examples,
    prepare_folder,
    read_hard_examples,
    remove_checkpoints,
)
from rotopath.training.distributed import (
    EpochLoader,
    expect_processes,
    is_first_process,
    make_trainer,
    raise_keyboard_interrupt,
    run_on_first_process,
    synchronize_batch_norms,
)
from rotopath.writing import hold_lock, write_bytes, write_json, write_text

TRAINING, SCORING = "training", "scoring"  # stages; the first stage is BASELINE, which is also the name of a subfolder
OnProgress = Callable[[str, Row], None]  # receives the stage and a dictionary; see `train`
REGIME_SEED = 0  # the same training data of a regime in all runs
VALIDATION_SEED = 1_000_003  # the same validation windows in all runs, so that validation losses can be compared


@dataclass(frozen=True)
class TrainingPlan:
    """What `train` works on: a recipe, its task, its opened dataset and its training samples.

    A training plan belongs to one training. It is not the plan of a study (see `rotopath.studies.plan`).
    """

    recipe: Recipe  # includes the class names in the data if neither the user's recipe nor the task specifies classes
    task: Task
    dataset: Dataset
    samples: tuple[Sample, ...]  # the training samples; a random subset if the recipe has the key `regime`
    parent: Parent | None = None  # model whose weights the training starts from, if the recipe has the key `from`

    @property
    def validation(self) -> tuple[Sample, ...]:
        """The samples of the validation set."""
        return self.dataset.split("valid")


def train(
    recipe: Recipe | Mapping[str, Any] | Path | str,
    out: Path | str | None = None,
    changes: Sequence[str] = (),
    on_progress: OnProgress = lambda _stage, _row: None,
    on_message: Callable[[str], None] = lambda _line: None,
    hard_examples: Path | None = None,
) -> Run:
    """Train a network as a recipe specifies, or resume an interrupted training, and return the finished run.

    - `recipe`: a `Recipe`, a mapping of keys to values, or the path of a TOML file.
    - `out`: the run folder; default: the folder that `name_folder` returns. If the folder contains an interrupted
      training with the same recipe and data, this training is resumed.
    - `changes`: overrides of keys in the TOML file, such as "orientations=4".
    - `on_progress`: a function that is called with the stage and a dictionary. In the stages "baseline" and "training",
      the dictionary is a row of the log, and `steps` is the largest number of steps. In the stage "scoring", the
      dictionary has the keys `done` (number of scored samples) and `samples` (number of all samples).
    - `on_message`: a function that is called with lines for the user: which weights come from the model in `from`, and
      how many steps the training has.
    - `hard_examples`: the file that `find_hard_examples` has written for this recipe, if the recipe has a table
      `[mining]`. Default: they are found first, in the run folder.
    """
    recipe, name = _read_recipe(recipe, changes)
    folder = Path(out) if out else name_folder(name, recipe)
    expect_processes(recipe.devices * recipe.nodes)
    plan = make_plan(recipe)
    network = check_network(plan)
    plan = replace(plan, parent=find_parent(plan.recipe, plan.task, network))
    find_frozen_stages(plan, network)
    loss = make_loss(plan)
    with hold_lock(folder) if is_first_process() else nullcontext():  # only the first process writes
        if is_first_process():
            prepare_folder(folder, plan.recipe, plan.dataset, plan.parent)
        for line in plan.parent.describe_lines(plan.recipe) if plan.parent else ():
            on_message(line)
        on_message(_describe_steps(plan.recipe, can_resume(folder)))
        mined = None
        if plan.recipe.mining is not None:
            if hard_examples is not None and not (folder / runs.MINED).exists():
                run_on_first_process(lambda: write_text(folder / runs.MINED, hard_examples.read_text(encoding="utf-8")))
            examples = read_hard_examples(find_hard_examples(plan.recipe, folder, on_progress, plan))
            mined = index_hard_examples(examples, plan.task, plan.samples)
        network, device = fit(plan, loss, folder, mined, partial(on_progress, TRAINING))
        run_on_first_process(lambda: _finish(plan, network, folder, device, on_progress))
    return runs.load(folder)


def _describe_steps(recipe: Recipe, is_resumed: bool) -> str:
    """Return a line for the user that says how long the training is, and that it may be interrupted."""
    most = "at most " if recipe.can_stop_early else ""
    begun = "It resumes from its last checkpoint. " if is_resumed else ""
    between = f", and every {recipe.checkpoint_steps:,} steps" if recipe.checkpoint_steps < recipe.step_count else ""
    epochs = f"{most}{recipe.epochs:,} epoch{'s' if recipe.epochs > 1 else ''}"
    return (
        f"Training: {epochs} of {recipe.step_count:,} steps, each with {recipe.batch_size:,} windows. {begun}After "
        f"Ctrl-C, the same command resumes it from its last checkpoint. There is one after each epoch{between}."
    )


# Before the first file is written: read the recipe, open the data, check the network


def _read_recipe(recipe: Recipe | Mapping[str, Any] | Path | str, changes: Sequence[str]) -> tuple[Recipe, str]:
    """Return the recipe as a `Recipe`, and a name for its run folder.

    The name is the file name of the recipe without extension or, if the recipe is not a file, the name of the task.
    """
    if not isinstance(recipe, Recipe | Mapping):
        return read_recipe(Path(recipe), changes), Path(recipe).stem
    if changes:
        raise RecipeError(
            f"Overrides such as {changes[0]!r} apply to recipe files only; set the key in the recipe object or mapping."
        )
    recipe = recipe if isinstance(recipe, Recipe) else make_recipe(recipe)
    return recipe, recipe.task.rpartition(":")[2]


def name_folder(name: str, recipe: Recipe) -> Path:
    """Return the default run folder of a recipe: for the name "tumor", for example, `runs/tumor-N8-seed0`."""
    return Path("runs") / f"{name}-N{recipe.orientations}-seed{recipe.seed}"


def make_plan(recipe: Recipe) -> TrainingPlan:
    """Open the dataset of a recipe, select the training samples, and return the training plan.

    If neither the recipe nor its task specifies classes, the recipe in the plan gets the classes in the data. If the
    steps of an epoch are a pass over the training data, the recipe in the plan gets their number. Raises
    DataError in three cases: the data has problems such as missing files, the annotations do not fit the task, or there
    are no training samples or no validation samples.
    """
    dataset = open_data(Path(recipe.data), recipe.kind.annotated, recipe.data_spacing_um_px)
    _refuse_problems(recipe, problems(dataset.findings))
    if not recipe.classes and recipe.task not in PAPER:
        recipe = replace(recipe, classes=recipe.kind.find_classes(dataset))
    task = recipe.make_task()
    _refuse_problems(recipe, problems(task.check_data(dataset)))
    samples = dataset.split("train")
    dataset.split("valid")  # raises a DataError if the data has no validation samples
    if recipe.regime is not None:
        samples = task.select_training_subset(samples, recipe.regime, REGIME_SEED)
    if recipe.steps == PASS:
        recipe = replace(recipe, steps=recipe.count_steps(_count_pass_windows(recipe, task, samples)))
    return TrainingPlan(recipe, task, dataset, samples)


def _count_pass_windows(recipe: Recipe, task: Task, samples: Sequence[Sample]) -> int:
    """Return the number of windows that show the training samples once."""
    return task.count_windows(samples, find_training_window(recipe, runs.build(recipe, task)))


def _refuse_problems(recipe: Recipe, errors: Sequence[object]) -> None:
    """Raise a DataError that names the first of `errors`, the problems of the data. Do nothing if there are none."""
    if errors:
        more = f" Number of further problems: {len(errors) - 1}." if len(errors) > 1 else ""
        raise DataError(
            f"{recipe.data} has problems: {errors[0]}{more} Run `rotopath data check` to list all problems."
        )


def check_network(plan: TrainingPlan) -> DenseNetwork:
    """Build the network of a training plan's recipe, check that it can be trained, and return it.

    `train` calls this function before it writes any file, so that mistakes in the recipe are found early. Raises
    RecipeError if the network cannot be built or does not accept the training window, and DataError if the task cannot
    use the outputs of the network.
    """
    try:
        network = runs.build(plan.recipe, plan.task)
        plan.task.check_window(find_training_window(plan.recipe, network))
    except (DataError, RecipeError):
        raise
    except Exception as error:  # any type: the network may be built by a user's function
        reason = " ".join(str(error).split()) or type(error).__name__
        stop = "" if reason.endswith((".", "?")) else "."
        raise RecipeError(f"The network {plan.recipe.network_name!r} cannot be used: {reason}{stop}") from None
    return network


def measure_step_s(recipe: Recipe, network: DenseNetwork, steps: int = 2) -> tuple[float, torch.device]:
    """Return the time of a training step of a network in seconds, and the device on which it was measured."""
    device = torch.device("cuda" if torch.cuda.is_available() and recipe.accelerator != "cpu" else "cpu")
    window_px = find_training_window(recipe, network).window_px
    images = torch.rand(recipe.batch_size, 3, window_px, window_px, device=device)
    module = unwrap(network).to(device).train()
    for step in range(steps + 1):  # the first one is slower, and not counted
        if step == 1:
            begun = time.perf_counter()
        module(images).square().mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) / steps, device


def find_training_window(recipe: Recipe, network: DenseNetwork) -> TrainingWindow:
    """Return the sizes of a training window, in pixels.

    These are the side of the window, the side of the central area that the outputs of the network cover, and the
    distance between adjacent outputs. Raises RecipeError if the network does not accept images of the size of a window.
    """
    geometry = network.geometry
    window_px = runs.describe_network(recipe, network).window_px
    if not geometry.fits(window_px):
        nearest = " or ".join(map(str, geometry.nearest_sizes(window_px)))
        raise RecipeError(f"the key 'window_px' is {window_px}, which the network does not accept; use {nearest}.")
    return TrainingWindow(window_px, geometry.output_size(window_px) * geometry.stride_px, geometry.stride_px)


def find_frozen_stages(plan: TrainingPlan, network: DenseNetwork) -> list[nn.Module]:
    """Return the layers of a network whose weights are not trained: those of the first `frozen_stages` stages.

    A stage is a convolution with the layers that follow it, such as its batch norm, up to the next convolution. Raises
    RecipeError if the network has too few stages, or if a frozen weight does not come from the model in `from`.
    """
    count = plan.recipe.frozen_stages
    if not count or plan.parent is None:
        return []
    stages: list[list[tuple[str, nn.Module]]] = []
    for name, layer in _list_layers(network, runs.describe_network(plan.recipe, network).window_px):
        if any(weight.ndim > 1 for weight in layer.parameters(recurse=False)):
            stages.append([])
        if stages:
            stages[-1].append((name, layer))
    if count >= len(stages):
        raise RecipeError(
            f"the key 'frozen_stages' is {count}, but the network has {len(stages)} stages, and the last one must be "
            f"trained; choose at most {len(stages) - 1}."
        )
    frozen = [layer for stage in stages[:count] for layer in stage]
    for name, _ in frozen:
        if name in plan.parent.fresh_layers:
            raise RecipeError(
                f"the key 'frozen_stages' is {count}, but the layer {name} has random weights, because it does not fit "
                f"{plan.parent.name}; freeze fewer stages."
            )
    return [layer for _, layer in frozen]


def _list_layers(network: DenseNetwork, window_px: int) -> list[tuple[str, nn.Module]]:
    """Return the layers of a network that have weights, with their names, in the order in which they compute."""
    module = unwrap(network)
    layers = {name: layer for name, layer in module.named_modules() if [*layer.parameters(recurse=False)]}
    order: dict[str, nn.Module] = {}
    hooks = [
        layer.register_forward_hook(lambda layer, *_, name=name: order.setdefault(name, layer) and None)
        for name, layer in layers.items()
    ]
    was_training = module.training
    with torch.no_grad():
        module.eval()(torch.zeros(1, 3, window_px, window_px))
    module.train(was_training)
    for hook in hooks:
        hook.remove()
    return [*order.items()]


def make_loss(plan: TrainingPlan) -> Loss:
    """Return the loss function for the task and the training samples of a training plan.

    Raises DataError if the task cannot be learned from these samples, for example if no sample has a certain class.
    """
    plan.task.check_training(plan.samples)
    try:
        if plan.recipe.loss_weights is None:
            return plan.task.make_loss(plan.samples)  # tasks of users may not have the argument `weights`
        return plan.task.make_loss(plan.samples, weights=plan.recipe.loss_weights)
    except ValueError as error:
        raise DataError(str(error)) from None


# Hard examples


def find_hard_examples(
    recipe: Recipe, folder: Path, on_progress: OnProgress = lambda _stage, _row: None, plan: TrainingPlan | None = None
) -> Path:
    """Find the hard examples for a recipe with a table `[mining]`, and return the CSV file with them.

    The hard examples are the worst mistakes of a baseline network (`Recipe.baseline`) on the training samples. It
    is trained in the subfolder `baseline` of `folder`; its mistakes are written to `mined.csv` in `folder`. If this
    file exists, nothing is trained. `plan` is the training plan of the recipe, if it is known.
    """
    path = folder / runs.MINED
    if recipe.mining is None:
        return path
    if path.exists():
        (folder / BASELINE / RESUME).unlink(missing_ok=True)  # of a process that was killed after the mining
        return path
    plan = plan or make_plan(recipe)
    plan = replace(plan, recipe=plan.recipe.baseline, parent=None)
    if is_first_process():
        (folder / BASELINE).mkdir(parents=True, exist_ok=True)
    network, device = fit(plan, make_loss(plan), folder / BASELINE, None, partial(on_progress, BASELINE))
    mine = partial(mine_hard_examples, plan.task, network, plan.samples, device, recipe.mining.examples)
    run_on_first_process(partial(mine, path))
    (folder / BASELINE / RESUME).unlink(missing_ok=True)
    return path


# Fit the network


def fit(
    plan: TrainingPlan,
    loss: Loss,
    folder: Path,
    mined: Ints | None = None,
    on_row: Callable[[Row], None] = lambda _row: None,
) -> tuple[DenseNetwork, torch.device]:
    """Build and train the network that the recipe of a training plan specifies.

    The training ends after the number of epochs in the recipe, or earlier if `RunRecorder` stops it. If the run folder
    `folder` contains a checkpoint (`resume.ckpt`), the training resumes from this checkpoint. `mined` is the array of
    hard examples that `index_hard_examples` returns; None means no hard examples. `on_row` is a function that is called
    with the last row of the log, and the number of all steps as `steps`, whenever the log has new values.

    Returns the network with the weights that the key `keep` of the recipe selects, and the device on which the network
    was trained.
    """
    recipe = plan.recipe
    network = runs.build(recipe, plan.task)
    module = unwrap(network)
    checkpoint = find_checkpoint(folder, module)
    if plan.parent:
        plan.parent.load_into(network)
    frozen = find_frozen_stages(plan, network)
    steps = recipe.epochs * recipe.step_count
    recorder = RunRecorder(folder, recipe, lambda row: on_row({**row, "steps": steps}))
    trainer = make_trainer(recipe, folder, recorder)
    if recipe.devices * recipe.nodes > 1:
        synchronize_batch_norms(module)
    device = trainer.strategy.root_device
    training, validation, validation_steps = make_batches(plan, network, mined, device)

    def list_training_steps() -> range:
        done = trainer.global_step  # number of finished steps; a resumed epoch continues with the next step
        return range(done, (done // recipe.step_count + 1) * recipe.step_count)

    with warnings.catch_warnings(), raise_keyboard_interrupt(), _choose_algorithms(recipe.deterministic):
        warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)  # caused by Lightning
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")  # CUDA graphs use a side stream
        warnings.filterwarnings("ignore", r"Found \d+ module\(s\) in eval mode")  # frozen stages
        trainer.fit(
            TrainingModule(recipe, module, loss, plan.task.accuracy, plan.parent.taken if plan.parent else (), frozen),
            EpochLoader(training, list_training_steps, recipe.step_count, trainer, recipe.workers),
            EpochLoader(validation, lambda: range(validation_steps), validation_steps, trainer, recipe.workers),
            ckpt_path=checkpoint,  # resume an interrupted training
            weights_only=True,
        )
    if trainer.is_global_zero:
        recorder.write_log()
    load_weights(network, folder / KEPT)
    return network, device


@contextmanager
def _choose_algorithms(deterministic: bool) -> Iterator[None]:
    """Context manager: if `deterministic`, convolutions on a GPU use only algorithms that always round equally."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = deterministic or before
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


class TrainingModule(LightningModule):
    """Training step, validation step and optimizer of a network, for Lightning's training loop.

    `taken` are the names of the weights that come from another model, and have a lower learning rate. `frozen` are the
    modules of the network that are not trained, and whose batch norms keep their statistics.
    """

    def __init__(
        self,
        recipe: Recipe,
        network: nn.Module,
        loss: Loss,
        accuracy: Loss,
        taken: Collection[str] = (),
        frozen: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.recipe, self.network, self.loss, self.accuracy = recipe, network, loss, accuracy
        self._taken = taken
        self._frozen = list(frozen)  # not registered as modules again, because a list is no module
        for module in frozen:
            module.requires_grad_(False)
            module.eval()  # here too, because Lightning calls `train` only after a validation
        self._is_recorded = False  # whether the network is recorded as a CUDA graph
        self._validation: list[Tensor] = []  # for each batch: (loss, accuracy, 1), multiplied by the number of windows

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self._frozen:
            module.eval()
        return self

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, targets = batch
        if not self._is_recorded and images.is_cuda and self.trainer.world_size == 1:
            graphs.record(self.network, images)
            self._is_recorded = True
        return self.loss(self.network(images), targets)

    def on_train_end(self) -> None:
        graphs.release(self.network)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        images, targets = batch
        if len(images):  # some processes get no windows if the last batch has fewer windows than there are processes
            logits = self.network(images)
            values = torch.stack([self.loss(logits, targets), self.accuracy(logits, targets), targets.new_ones(())])
            self._validation.append(values.double() * len(images))

    def on_validation_epoch_end(self) -> None:
        own = torch.stack(self._validation).sum(dim=0) if self._validation else torch.zeros(3, device=self.device)
        self._validation.clear()
        loss, accuracy, windows = self.trainer.strategy.reduce(own.double(), reduce_op="sum")
        self.log("validation_loss", (loss / windows).float(), sync_dist=True)
        self.log("validation_accuracy", (accuracy / windows).float(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.network, self.recipe, self._taken)
        schedule = {"scheduler": make_schedule(optimizer, self.recipe), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def make_optimizer(network: nn.Module, recipe: Recipe, taken: Collection[str] = ()) -> Optimizer:
    """Return the optimizer that the recipe specifies, for all weights of a network that are not frozen.

    Weight decay applies to kernels, but not to biases and batch norm weights. `weight_decay_scale` of the recipe states
    whether a step multiplies it by the learning rate, or by the learning rate divided by the first one. `taken` are the
    names of the weights that come from another model: their learning rate is lower by the factor `from_rate` of the
    recipe.
    """
    trained = [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = []
    for rate, is_taken in ((1.0, False), (recipe.from_rate, True)):
        members = [parameter for name, parameter in trained if (name in taken) == is_taken]
        kernels = [parameter for parameter in members if parameter.ndim > 1]
        others = [parameter for parameter in members if parameter.ndim <= 1]
        if members:
            learning_rate = rate * recipe.learning_rate
            # A step multiplies kernels by 1 - lr · decay, with the learning rate of the step. So divided by the first
            # learning rate, the decay is multiplied by the schedule only.
            decay = recipe.weight_decay / (learning_rate if recipe.weight_decay_scale == "schedule" else 1.0)
            groups.append({"params": kernels, "weight_decay": decay, "lr": learning_rate})
            groups.append({"params": others, "weight_decay": 0.0, "lr": learning_rate})
    if recipe.optimiser == "adamw":
        return AdamW(groups, lr=recipe.learning_rate)
    return DecoupledSGD(groups, recipe.learning_rate, recipe.momentum)


def _multiply_each(weights: list[Tensor], factor: float) -> None:
    for weight in weights:
        weight.mul_(factor)


# torch's function `_foreach_mul_` multiplies all weights in a single GPU kernel. This function is private: if a version
# of torch does not have it, weights are multiplied one by one.
_multiply_all: Callable[[list[Tensor], float], object] = getattr(torch, "_foreach_mul_", _multiply_each)


class DecoupledSGD(SGD):
    """SGD with momentum and decoupled weight decay (Loshchilov and Hutter, 2019).

    Each step first computes w ← (1 - lr · decay) · w for each weight w. The decay is not part of the gradient, and
    therefore does not enter the momentum.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float) -> None:
        for group in groups:
            group["decay"] = group.pop("weight_decay")
        super().__init__(groups, lr=lr, momentum=momentum)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:  # computes the loss and the gradients, so it must run before the weights change
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["decay"] and group["params"]:
                _multiply_all(group["params"], 1 - group["lr"] * group["decay"])
        super().step()
        return loss


def make_schedule(optimizer: Optimizer, recipe: Recipe) -> LRScheduler:
    """Return the learning rate schedule that the recipe specifies. Call its method `step` after every training step."""
    if recipe.schedule == "halve":
        return StepLR(optimizer, step_size=recipe.step_count, gamma=0.5)
    if recipe.schedule == "cosine":
        return CosineAnnealingLR(optimizer, T_max=recipe.epochs * recipe.step_count)
    return ConstantLR(optimizer, factor=1.0, total_iters=0)


def make_batches(
    plan: TrainingPlan, network: DenseNetwork, mined: Ints | None, device: torch.device
) -> tuple[Batches, Batches, int]:
    """Return the training batches, the validation batches, and the number of batches of each validation.

    There is one validation after each epoch. `mined` is the array of hard examples that `index_hard_examples` returns;
    None means no hard examples.
    """
    recipe, task = plan.recipe, plan.task
    window = find_training_window(recipe, network)
    sampled = partial(
        make_sampled_batches,
        task,
        window=window,
        batch=recipe.batch_size,
        cache=recipe.cache,
        device=device,
        sampler=recipe.sampler,
    )
    training = sampled(samples=plan.samples, seed=recipe.seed, augmentation=recipe.augmentation, mined=mined)
    if task.prediction_type == "window":
        centers, steps = make_center_batches(task, plan.validation, window.window_px, cache=recipe.cache, device=device)
        return training, centers, len(steps)
    return training, sampled(samples=plan.validation, seed=VALIDATION_SEED), recipe.validation_steps


# Finish the run: operating point, scores, model file, weights


def _finish(
    plan: TrainingPlan, network: DenseNetwork, folder: Path, device: torch.device, on_progress: OnProgress
) -> None:
    """Score the model, write its scores, provenance, model file and weights, and remove the temporary files.

    The weights are written last, because a run counts as finished as soon as its weights exist.
    """
    point, scores = _score(plan, network, device, on_progress)
    write_json(folder / runs.METRICS, scores)
    provenance = read_json(folder / runs.PROVENANCE)
    hardware = describe_machine(device) | {"processes": plan.recipe.devices * plan.recipe.nodes}
    write_json(folder / runs.PROVENANCE, provenance | {"finished": now(), "hardware": hardware})
    weights = pack_weights(network)
    write_model(folder, plan.task, runs.describe_network(plan.recipe, network), point, weights)
    write_bytes(folder / WEIGHTS, weights)
    remove_checkpoints(folder)


def _score(
    plan: TrainingPlan, network: DenseNetwork, device: torch.device, on_progress: OnProgress
) -> tuple[dict[str, float], dict[str, object]]:
    """Choose the operating point on the validation set, and score the model at this operating point.

    Returns the operating point, and the scores by split: "valid", and "test" if the data has a test set.
    """
    task, dataset = plan.task, plan.dataset

    def gather(split: str) -> list[Evidence]:
        def report(done: int, samples: int) -> None:
            on_progress(SCORING, {"done": done, "samples": samples})

        return gather_evidence(task, network, dataset.split(split), device, on_progress=report)

    evidence = gather("valid")
    point = task.choose_operating_point(evidence)
    scores: dict[str, object] = {"valid": task.score(evidence, point)}
    if any(sample.split == "test" for sample in dataset.samples):
        scores["test"] = task.score(gather("test"), point)
    return point, scores
