"""The recipe of a training: a frozen dataclass with the task, the data, the network and all settings.

`read_recipe` reads a recipe from a TOML file and applies overrides such as "orientations=4". The file may be one of the
package, in the folder `recipes`, which is found by its name. `format_recipe` converts a recipe to TOML. All values are
checked. If a value is wrong, a RecipeError is raised that states the key, the value and the expected value.
"""

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rotopath.data.augmentation import OWN_STAIN, Augmentation
from rotopath.data.batches import Cache
from rotopath.data.sampling import SamplerName
from rotopath.images.files import PLAUSIBLE_UM_PX, UnreadableFileError, expect_file, is_plausible
from rotopath.images.stain import Stain
from rotopath.models.registry import NETWORK_OPTIONS, check_options, expand_preset
from rotopath.tasks import PAPER, Overrides, Task, find_kind, make_task
from rotopath.tasks.task import LossWeights

HARDWARE = ("accelerator", "devices", "nodes", "cache", "workers")  # keys that do not change the result of a training
RECIPES = Path(__file__).parent / "recipes"  # recipes of the package
MAX_EPOCHS, MAX_ORIENTATIONS, MAX_WINDOW_PX = 10**5, 128, 4096
PASS = "pass"  # value of the key `steps`: an epoch is a pass over the training data
BASELINE_SEED = 0  # of the baseline network that finds hard examples, in all runs
LEAST_PASS_STEPS = 500  # of a pass; otherwise the learning rate of small datasets would be halved after a few steps
# The lowest and the highest value of keys with whole numbers. Higher values are mistakes: a training would need years,
# or more memory than computers have.
BOUNDS = {
    "orientations": (1, MAX_ORIENTATIONS),
    "seed": (0, 2**32 - 1),
    **dict.fromkeys(("epochs", "patience"), (1, MAX_EPOCHS)),
    **dict.fromkeys(("steps", "validation_steps", "checkpoint_steps"), (1, 10**7)),  # `steps` may also be "pass"
    "batch": (1, 2**16),
    **dict.fromkeys(("window_px", "stride_px"), (1, MAX_WINDOW_PX)),
    "workers": (0, 256),
    "frozen_stages": (0, 1000),
    **dict.fromkeys(("devices", "nodes"), (1, 1024)),
}
MAX_DEPTH = 8  # of tables and lists in a TOML file
MAX_NUMBER = 2**64
RESETTABLE_OPTIONS = ("projection", "widths_of")  # network options that can be set to false, which means the default


class RecipeError(ValueError):
    """Raised if a recipe has a mistake. The message states the wrong key and the expected value."""


class NetworkOptions(dict[str, Any]):
    """Options of a network, by name. Do not modify the dictionary, because its hash depends on its content."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted((name, repr(value)) for name, value in self.items())))


@dataclass(frozen=True)
class Mining:
    """Settings of hard example mining.

    A baseline network is trained first: an ordinary CNN (N = 1), with the seed 0. Its worst mistakes on the training
    images are the hard examples. The main training then draws windows at the hard examples more often. So networks that
    differ only in N, in options or in the seed have the same hard examples.
    """

    epochs: int = 4  # number of epochs for which the baseline network is trained
    examples: int = 2000  # largest number of hard examples; of more mistakes, the worst are kept

    def __post_init__(self) -> None:
        for name, highest in (("epochs", MAX_EPOCHS), ("examples", 10**7)):
            value = getattr(self, name)
            _require(1 <= value <= highest, f"mining.{name}", value, f"a whole number from 1 to {highest}")


@dataclass(frozen=True)
class Recipe:
    """All settings of a training.

    The defaults are those of the paper (Lafarge et al., 2020), where the paper states them. If the value of a key is
    None or an empty tuple, the default in the comment of the key is used. In TOML files and in overrides, None is
    written as `false`.
    """

    task: str  # "tumor", "mitosis" or "nuclei"; a kind: "classify", "detect" or "segment"; or "package.module:Class"
    data: str  # path of a dataset: a folder or a manifest
    classes: tuple[str, ...] = ()  # class names; default: those of the task of the paper, or else those in the data
    # Colors of the classes, such as "#e69f00". Default: colors of the task. For a task of the paper, this key is
    # ignored if `classes` is empty.
    colors: tuple[str, ...] = ()
    spacing_um_px: float | None = None  # pixel spacing at which the network reads images; default: that of the task
    stain: Stain | None = None  # stain normalization, "none" or "macenko"; default: that of the task
    data_spacing_um_px: float | None = None  # pixel spacing of images that specify none; default: an error
    network: str | None = None  # registered name, or "package.module:function"; default: the network of the task
    orientations: int = 8  # number of orientations N; 1 is an ordinary CNN
    network_options: NetworkOptions = field(default_factory=NetworkOptions)  # options of the network, by name
    # Distance between neighboring windows on a slide, for networks that return one prediction for each window.
    # Default: half a window.
    stride_px: int | None = None
    # Amount of training data, if it is reduced: number of cases ("detect"), number of fields (images) of each organ
    # ("segment"), or fraction of the patches of each class ("classify"). Default: all training data.
    regime: float | None = None
    # Model whose weights the training starts from: a run folder, or the name of a pretrained model. Default: random
    # weights. In TOML files and mappings, the key is `from`, which is a reserved word in Python.
    from_: str | None = None
    from_rate: float = 0.1  # learning rate of the weights that come from this model, as a fraction of `learning_rate`
    frozen_stages: int = 0  # number of stages of the network, from the first one, whose weights are not trained
    # Of initial weights, sampling and augmentation. The training data of a regime, and the baseline network that finds
    # hard examples, do not depend on the seed.
    seed: int = 0
    epochs: int = 20  # largest number of epochs; the training may stop earlier, see `patience`
    # Batches per epoch. "pass": as many as show the training data once, but at least LEAST_PASS_STEPS.
    steps: int | Literal["pass"] = 500
    batch: int | None = None  # windows per batch, over all devices; default: 16 for "segment", otherwise 64
    window_px: int | None = None  # side of training windows; default: that of the network
    optimiser: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 0.01  # at the start of the training
    momentum: float = 0.9  # of SGD
    weight_decay: float = 5e-4  # decoupled: each step multiplies kernels by 1 - scale · weight_decay
    # The scale of weight decay in a step: the learning rate of the step, as in torch, or the learning rate divided by
    # the first learning rate ("schedule"), as Loshchilov and Hutter write it. At a rate of 0.01, 100 times more.
    weight_decay_scale: Literal["learning-rate", "schedule"] = "learning-rate"
    # Learning rate: halved after each epoch, decreased to 0 along a cosine, or constant.
    schedule: Literal["halve", "cosine", "constant"] = "halve"
    # Weights to keep: those after the epoch with the lowest validation loss ("best"), or after the last epoch ("last").
    keep: Literal["best", "last"] = "best"
    # Stop after this number of epochs without a lower validation loss. Ignored if schedule = "cosine" or keep = "last".
    patience: int = 3
    validation_steps: int = 32  # batches for each validation loss; "classify" always uses all validation patches
    checkpoint_steps: int = 200  # steps between two checkpoints
    precision: Literal["32", "bf16"] = "32"  # float32, or mixed precision with bfloat16
    # Whether the same recipe gives the same weights again on the same GPU: convolutions use only algorithms that always
    # round in the same way, which may be slower. On the CPU, this is always so.
    deterministic: bool = False
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int = 1  # per node; every batch is divided among all devices of all nodes
    nodes: int = 1  # number of machines
    cache: Cache = "auto"  # where decoded images are kept: "device", "memory", "none" (only in files), or "auto"
    workers: int = 0  # processes that read images if `cache` is "none"; 0: the training process reads them
    # How often windows show each class: all classes equally often, or as often as in the data. Default: "balanced", and
    # "natural" for "segment".
    sampler: SamplerName | None = None
    # Weights of the classes in the loss: higher for rare classes, or equal. Default: "equal", and "balanced" for
    # "segment".
    loss_weights: LossWeights | None = None
    augmentation: Augmentation = field(default_factory=Augmentation)
    mining: Mining | None = None  # default: no hard example mining

    def __post_init__(self) -> None:
        kind = _call(find_kind, self.task)
        _call(check_options, self.network_name, self.network_options)
        options = _call(expand_preset, self.network_name, self.network_options)
        object.__setattr__(self, "network_options", NetworkOptions(options))
        if len(set(map(str.casefold, self.classes))) < len(self.classes) or not all(self.classes):
            raise RecipeError(f"the key 'classes' must be a list of different names; got {list(self.classes)!r}.")
        for color in self.colors:
            _require(re.fullmatch("#[0-9a-fA-F]{6}", color) is not None, "colors", color, 'a color such as "#e69f00"')
        if self.augmentation.stain is None:
            stain = 0.0 if self.task in PAPER else OWN_STAIN
            object.__setattr__(self, "augmentation", replace(self.augmentation, stain=stain))
        low, high = PLAUSIBLE_UM_PX
        for name in ("spacing_um_px", "data_spacing_um_px"):
            value = getattr(self, name)
            _require(value is None or is_plausible(value), name, value, f"a number from {low:g} to {high:g} µm/px")
        _require(0 < self.from_rate <= 1, "from_rate", self.from_rate, "a number above 0, at most 1")
        if self.frozen_stages and self.from_ is None:
            raise RecipeError(
                f"the key 'frozen_stages' is {self.frozen_stages}, but random weights cannot be frozen; name a model "
                f"in the key 'from', or remove 'frozen_stages'."
            )
        for name, (lowest, highest) in BOUNDS.items():
            value = getattr(self, name)
            is_valid = value is None or value == PASS or lowest <= value <= highest
            _require(is_valid, name, value, f"a whole number from {lowest} to {highest}")
        _require(0 <= self.momentum < 1, "momentum", self.momentum, "a number from 0 to below 1")
        _require(0 <= self.weight_decay <= 1, "weight_decay", self.weight_decay, "a number from 0 to 1")
        _require(0 < self.learning_rate <= 100, "learning_rate", self.learning_rate, "a number above 0, up to 100")
        if self.batch_size % (self.devices * self.nodes):
            raise RecipeError(
                f"a batch of {self.batch_size} windows cannot be divided equally among "
                f"{self.devices * self.nodes} devices; change 'batch', 'devices' or 'nodes'."
            )
        if self.regime is not None and (expected := kind.check_regime(self.regime)):
            raise RecipeError(f"the key 'regime' must be {expected}; got {self.regime!r}.")
        if self.mining is not None and not kind.can_mine:
            raise RecipeError(f"hard examples cannot be mined for the task {self.task!r}; set mining=false.")

    @property
    def batch_size(self) -> int:
        """The number of windows per batch, over all devices: the key `batch`, or the default of the kind of task."""
        return self.kind.default_batch if self.batch is None else self.batch

    @property
    def step_count(self) -> int:
        """The number of steps per epoch. Raises ValueError if it is not known without the data, see `count_steps`."""
        if isinstance(self.steps, str):
            raise ValueError("The number of steps of a pass depends on the data; call count_steps.")
        return self.steps

    def count_steps(self, windows: int) -> int:
        """Return the number of steps per epoch. `windows` is the number of windows that show the training data once."""
        return max(LEAST_PASS_STEPS, -(-windows // self.batch_size)) if self.steps == PASS else self.step_count

    @property
    def can_stop_early(self) -> bool:
        """Whether the training may end before `epochs`, without a lower validation loss for `patience` epochs.

        With a cosine schedule, the validation loss often falls only in the last epochs, at low learning rates.
        """
        return self.keep == "best" and self.schedule != "cosine"

    @property
    def baseline(self) -> "Recipe":
        """The recipe of the baseline network that finds the hard examples, if the recipe has a table `[mining]`.

        The baseline network is an ordinary CNN (N = 1) with random weights, the seed BASELINE_SEED and the other
        settings of the recipe; the paper's networks have their default options. So recipes that differ only in
        orientations, options of the paper's networks and seed have the same baseline.
        """
        assert self.mining is not None
        return replace(
            self,
            orientations=1,
            seed=BASELINE_SEED,
            epochs=self.mining.epochs,
            network_options=NetworkOptions() if self.network_name in PAPER else self.network_options,
            mining=None,
            from_=None,
            frozen_stages=0,
        )

    @property
    def kind(self) -> type[Task]:
        """The kind of task that the key `task` names: a subclass of `Task`."""
        return find_kind(self.task)

    @property
    def network_name(self) -> str:
        """The name of the network: the key `network`, or the default network of the task."""
        return self.network or (self.task if self.task in PAPER else self.kind.default_network)

    def make_task(self, class_names: Sequence[str] = ()) -> Task:
        """Return the task of the recipe.

        `class_names` are the class names in the data. They become the classes of the task, unless the recipe sets
        `classes` or names a task of the paper, which has its own classes.
        """
        colors = tuple((int(c[1:3], 16), int(c[3:5], 16), int(c[5:7], 16)) for c in self.colors)
        return make_task(self.task, Overrides(self.classes, colors, self.spacing_um_px, self.stain), class_names)


# Read and write recipes


def list_recipes() -> dict[str, str]:
    """Return the first line of each recipe of the package, which describes it, by its name.

    >>> list(rp.recipe.list_recipes())
    ['mitosis', 'nuclei', 'tumor']
    """
    paths = sorted(RECIPES.glob("*.toml"))
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in paths}


def find_recipe(path: Path) -> Path:
    """Return the path of a recipe of the package if `path` is its name and not a file, otherwise `path`."""
    named = RECIPES / f"{path}.toml"
    return named if path.name == str(path) and named.is_file() and not path.is_file() else path


def read_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a TOML file, and apply the overrides in `changes`, such as "augmentation.stain=0.1".

    `path` may be the name of a recipe of the package (`list_recipes`). Raises RecipeError if the file cannot be read,
    or if a key is unknown or has a wrong value.
    """
    values = read_values(path, changes)
    try:
        return make_recipe(values)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def read_values(path: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys and values of a TOML file, with the overrides in `changes`. The values are not checked.

    `path` may be the name of a recipe of the package.
    """
    try:
        path = find_recipe(path)
        expect_file(path)
        with path.open("rb") as file:
            values = tomllib.load(file)
    except UnreadableFileError as error:
        raise RecipeError(str(error)) from None
    except FileNotFoundError:
        names = ", ".join(list_recipes())
        raise RecipeError(f"{path} does not exist; check the path, or name a recipe of the package: {names}.") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read ({error.strerror}); check the path.") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number of 5,000 digits, or deep nesting
        raise RecipeError(f"{path} is not valid TOML ({error}); correct the file.") from None
    for override in changes:
        _apply_override(values, override)
    _check_limits(path, values)
    return values


def _check_limits(path: Path, values: dict[str, Any]) -> None:
    """Raise RecipeError if the values of a TOML file are nested too deeply, or if a whole number is too large."""
    remaining: list[tuple[Any, int, str]] = [(values, 0, "")]
    while remaining:
        value, depth, key = remaining.pop()
        if depth > MAX_DEPTH:
            raise RecipeError(
                f"{path}: the key {key!r} has more than {MAX_DEPTH} levels of tables or lists; use fewer."
            )
        if isinstance(value, int) and abs(value) >= MAX_NUMBER:
            raise RecipeError(f"{path}: the key {key!r} has a number of more than 19 digits; choose a smaller number.")
        if isinstance(value, dict):
            remaining += [(child, depth + 1, key or name) for name, child in value.items()]
        elif isinstance(value, list):
            remaining += [(child, depth + 1, key) for child in value]


def make_recipe(values: Mapping[str, Any]) -> Recipe:
    """Make a recipe from a mapping of its keys to their values. Raises RecipeError if a key or a value is wrong.

    Options of the paper's networks, such as `kernel = "harmonic"`, may be written beside the other keys or in the table
    `network_options`. The option `preset` is replaced by the options that this preset sets, so that the recipe keeps
    its meaning if a later version of rotopath changes the preset.

    >>> make_recipe = rp.recipe.make_recipe
    >>> make_recipe({"task": "tumor", "data": "pcam", "kernel": "harmonic"}).network_options["kernel"]
    'harmonic'
    """
    own = {name: value for name, value in values.items() if name not in NETWORK_OPTIONS}
    options = {
        name: values[name]
        for name in NETWORK_OPTIONS
        if name in values and not (values[name] is False and name in RESETTABLE_OPTIONS)  # false means: the default
    }
    if options and isinstance(table := own.get("network_options", {}), Mapping):
        own["network_options"] = {**table, **options}
    recipe: Recipe = _make_dataclass(Recipe, own, "")
    return recipe


def find_changed_key(before: Recipe, now: Recipe) -> str | None:
    """Return the first key with different values in two recipes, or None if there is no difference.

    `before` is the recipe in a run folder; `now` is the recipe of the user. Keys in HARDWARE are not compared, because
    they do not change the result of a training. The key `classes` is not compared if it is empty in `now`, because
    `before` then contains the class names of the data. Nor is `steps` if it is "pass" in `now`: `before` then contains
    the number of steps.
    """
    ignored = (*HARDWARE, *(() if now.classes else ("classes",)), *(("steps",) if now.steps == PASS else ()))
    names = (key.name for key in dataclasses.fields(Recipe) if key.name not in ignored)  # with "from_" for `from`
    return next((name for name in names if getattr(before, name) != getattr(now, name)), None)


def format_recipe(recipe: Recipe) -> str:
    """Return a recipe as TOML text. `read_recipe` converts a file with this text to an equal recipe."""
    import tomli_w

    tables = {_key(name): value for name, value in dataclasses.asdict(recipe).items()}
    return tomli_w.dumps({name: value for name, value in tables.items() if value not in (None, (), {})})


def _key(name: str) -> str:
    """Return the key of a field of a recipe: `from` for the field `from_`, whose name Python does not allow."""
    return name.removesuffix("_")


def _apply_override(values: dict[str, Any], override: str) -> None:
    """Apply an override such as "orientations=4" or "augmentation.stain=0.1" to the values of a recipe, in place."""
    key, equals, text = override.partition("=")
    if not equals:
        raise RecipeError(f"An override has the form key=value; got {override!r}.")
    *tables, name = key.strip().split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise RecipeError(f"The key {table!r} has no subkeys; got the override {override!r}.")
    try:
        values[name] = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        values[name] = text.strip()  # strings need no quotes on the command line


# Check values against the types of a dataclass


def _make_dataclass(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    """Make a dataclass instance from a mapping of names to values. Raises RecipeError if a name or a value is wrong.

    `prefix` is written before names in error messages: a TOML table with a dot, such as "mining.", or an empty string.
    """
    fields = {_key(f.name): f for f in dataclasses.fields(cls)}
    hints = {_key(name): hint for name, hint in get_type_hints(cls).items()}
    for name in values:
        if name not in fields:
            options = () if prefix else NETWORK_OPTIONS
            near = difflib.get_close_matches(name, (*fields, *options), n=1)
            hint = f"did you mean {prefix + near[0]!r}?" if near else f"choose from {', '.join(fields)}."
            raise RecipeError(f"the key {prefix + name!r} is unknown; {hint}")
    for name, f in fields.items():
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and name not in values:
            raise RecipeError(f"the required key {prefix + name!r} is missing; add it.")
    converted = {fields[name].name: _convert(prefix + name, value, hints[name]) for name, value in values.items()}
    try:
        return cls(**converted)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(str(error)) from None


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Convert the value of the key `name` from TOML to the type `hint`. Raises RecipeError if this is not possible.

    Whole numbers are accepted for floats. False is converted to None if None is allowed, because TOML has no null.
    """
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is False and NoneType in types:
        return None
    for type_ in types:
        if dataclasses.is_dataclass(type_) and isinstance(value, dict):
            return _make_dataclass(type_, value, f"{name}.")  # type: ignore[arg-type]
        if get_origin(type_) is Literal and (str(value) if type_ is not bool else value) in get_args(type_):
            return str(value)
        if type_ is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type_ in (int, float, str, bool) and type(value) is type_:
            return value
        if type_ == tuple[str, ...] and isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
            return tuple(value)
        if type_ is NetworkOptions and isinstance(value, dict):
            return _convert_options(name, value)
    raise RecipeError(f"the key {name!r} must be {' or '.join(map(_describe_type, types))}; got {value!r}.")


def _convert_options(name: str, values: Mapping[str, Any]) -> NetworkOptions:
    """Convert the TOML table `name` to network options. Raises RecipeError if it contains nested tables or dates."""
    options = NetworkOptions({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
    for key, value in options.items():
        for item in value if isinstance(value, tuple) else (value,):
            if not isinstance(item, str | int | float | bool):
                raise RecipeError(
                    f"the key '{name}.{key}' must be a string, a number, true, false or a list of these; got {value!r}."
                )
    return options


def _describe_type(type_: Any) -> str:
    """Describe a type in words, for error messages."""
    if get_origin(type_) is Literal:
        return "one of " + ", ".join(get_args(type_))
    if dataclasses.is_dataclass(type_) or type_ is NetworkOptions:
        return "a table"
    if type_ == tuple[str, ...]:
        return "a list of strings"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return (names | {NoneType: "false, for the default"})[type_]


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function and return the result. A ValueError or TypeError becomes a RecipeError with the same message."""
    try:
        return function(*arguments)
    except (ValueError, TypeError) as error:
        raise RecipeError(str(error)) from None


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise RecipeError unless `holds` is True. `name` is the key, and `expected` describes its valid values."""
    if not holds:
        raise RecipeError(f"the key {name!r} must be {expected}; got {value!r}.")
