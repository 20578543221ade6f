"""A recipe: everything that decides how a run turns out, in one frozen, checked description.

In: a TOML file, and single keys to change. Out: a `Recipe`; or one sentence about the key that is wrong.
"""

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rotopath.data.augmentation import Augmentation
from rotopath.data.batches import Cache
from rotopath.group import check_orientations
from rotopath.images.files import PLAUSIBLE_UM_PX, is_plausible
from rotopath.images.stain import Stain
from rotopath.models.registry import check_options, spell_out
from rotopath.tasks import PAPER, Overrides, Task, find_kind, make_task

HARDWARE = ("accelerator", "devices", "nodes", "cache", "workers")  # keys of where a run is computed, and not of what
# Options of networks that may stand among the keys of a recipe, as they did before networks had a table of their own.
SHORT_OPTIONS = ("preset", "kernel", "pooling", "upsampling", "smoothing", "projection", "reflections", "widths_of")


class RecipeError(ValueError):
    """A recipe that cannot be followed, said in one sentence."""


class NetworkOptions(dict[str, Any]):
    """Options of a network by name, which do not change."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted((name, repr(value)) for name, value in self.items())))


@dataclass(frozen=True)
class Mining:
    """Hard examples: a first baseline is trained without them, and its mistakes are sampled in the real training."""

    epochs: int = 4  # of the baseline
    examples: int = 2000  # at most, the worst first

    def __post_init__(self) -> None:
        for name in ("epochs", "examples"):
            _require(getattr(self, name) >= 1, f"mining.{name}", getattr(self, name), "1 or more")


@dataclass(frozen=True)
class Recipe:
    """How a network is trained. Defaults are the paper's, where it names them."""

    task: str  # "tumor", "mitosis" or "nuclei"; a kind: "classify", "detect" or "segment"; or "package.module:Class"
    data: str  # a folder or a manifest
    classes: tuple[str, ...] = ()  # names; the task's own, or those in the data, when left out
    colors: tuple[str, ...] = ()  # of the classes, such as "#e69f00"
    spacing_um_px: float | None = None  # at which the network sees images; the task's own when left out
    stain: Stain | None = None  # "none" or "macenko"; the task's own when left out
    data_spacing_um_px: float | None = None  # of images that do not say their own
    network: str | None = None  # its name, or "package.module:function"; the task's own when left out
    orientations: int = 8
    network_options: NetworkOptions = field(default_factory=NetworkOptions)
    stride_px: int | None = None  # between windows on a slide, of a network that answers for whole windows
    regime: float | None = None  # of the training data: cases, fields of an organ, or a fraction; all when left out
    seed: int = 0
    epochs: int = 20  # at most
    steps: int = 500  # in an epoch
    batch: int | None = None  # 64; for nuclei 16
    window_px: int | None = None  # the smallest that the network takes; larger ones have larger targets
    optimiser: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4  # decoupled: a fraction of the weights, times the learning rate, at every step
    schedule: Literal["halve", "cosine", "constant"] = "halve"  # halved from epoch to epoch, or down to 0 at the end
    keep: Literal["best", "last"] = "best"  # weights: those with the lowest validation loss, or the last
    patience: int = 3  # epochs without a better validation loss, after which training has converged
    validation_steps: int = 32  # batches of windows on which the validation loss is computed
    checkpoint_steps: int = 200  # between two points from which an interrupted run goes on
    precision: Literal["32", "bf16"] = "32"
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int = 1  # on each node; every batch is divided among all of them
    nodes: int = 1
    cache: Cache = "auto"
    workers: int = 0
    augmentation: Augmentation = field(default_factory=Augmentation)
    mining: Mining | None = None

    def __post_init__(self) -> None:
        check_orientations(self.orientations)
        kind = _ask(find_kind, self.task)
        _ask(check_options, self.network_name, self.network_options)
        options = _ask(spell_out, self.network_name, self.network_options)
        object.__setattr__(self, "network_options", NetworkOptions(options))
        if len(set(map(str.casefold, self.classes))) < len(self.classes) or not all(self.classes):
            raise RecipeError(f"the key 'classes' is {list(self.classes)!r}, where different names are expected.")
        for color in self.colors:
            _require(re.fullmatch("#[0-9a-fA-F]{6}", color) is not None, "colors", color, 'a colour such as "#e69f00"')
        low, high = PLAUSIBLE_UM_PX
        for name in ("spacing_um_px", "data_spacing_um_px"):
            value = getattr(self, name)
            _require(value is None or is_plausible(value), name, value, f"{low:g} to {high:g} µm/px")
        for name in ("epochs", "steps", "patience", "validation_steps", "checkpoint_steps", "devices", "nodes"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("seed", "workers", "momentum", "weight_decay"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(self.learning_rate > 0, "learning_rate", self.learning_rate, "a number above 0")
        for name in ("batch", "window_px", "stride_px"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "1 or more")
        if self.windows % (self.devices * self.nodes):
            raise RecipeError(
                f"a batch of {self.windows} cannot be divided among {self.devices * self.nodes} devices; "
                f"change 'batch' or 'devices'."
            )
        if self.regime is not None and (expected := kind.check_regime(self.regime)):
            raise RecipeError(f"the key 'regime' is {self.regime!r}, where {expected} is expected.")
        if self.mining is not None and not kind.can_mine:
            raise RecipeError(f"hard examples cannot be mined for the task {self.task!r}; leave 'mining' out.")

    @property
    def windows(self) -> int:
        """In a batch, over all devices."""
        return self.kind.default_batch if self.batch is None else self.batch

    @property
    def kind(self) -> type[Task]:
        """What sort of task it is."""
        return find_kind(self.task)

    @property
    def network_name(self) -> str:
        """The network that is named, or the usual one of the task."""
        return self.network or (self.task if self.task in PAPER else self.kind.default_network)

    def make_task(self, found: Sequence[str] = ()) -> Task:
        """The task, with classes that were `found` in the data where the recipe names none."""
        colors = tuple((int(c[1:3], 16), int(c[3:5], 16), int(c[5:7], 16)) for c in self.colors)
        return make_task(self.task, Overrides(self.classes, colors, self.spacing_um_px, self.stain), found)


def read_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe of a TOML file, with changes such as `orientations=4` or `augmentation.stain=0.1` applied to it."""
    values = read_values(path, changes)
    try:
        return make_recipe(values)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def read_values(path: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """What a TOML file says, with changes applied to it."""
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        raise RecipeError(f"{path} does not exist.") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read ({error.strerror}).") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is no TOML file ({error}).") from None
    for change in changes:
        _apply(values, change)
    return values


def make_recipe(values: Mapping[str, Any]) -> Recipe:
    """A recipe from the values of its keys; a key that no recipe has is an error.

    Options of networks may stand beside the other keys, as `kernel = "harmonic"`. What a `preset` chooses is written
    out, so that a run means the same after a preset has become a better one.
    """
    own = {name: value for name, value in values.items() if name not in SHORT_OPTIONS}
    short = {name: values[name] for name in SHORT_OPTIONS if name in values}
    # TOML has no word for nothing, and a change may have to take an option back.
    short = {
        name: value for name, value in short.items() if not (value is False and name in ("projection", "widths_of"))
    }
    if short and isinstance(given := own.get("network_options", {}), Mapping):
        own["network_options"] = {**given, **short}
    recipe: Recipe = _made(Recipe, own, "")
    return recipe


def changed_key(before: Recipe, now: Recipe) -> str | None:
    """The first key that is not the same, of those that decide how a run turns out.

    A run folder keeps the classes that were found in the data; a recipe that leaves them to the data means those.
    """
    found = ("classes",) if not now.classes else ()
    names = (each.name for each in dataclasses.fields(Recipe) if each.name not in (*HARDWARE, *found))
    return next((name for name in names if getattr(before, name) != getattr(now, name)), None)


def write_recipe(recipe: Recipe) -> str:
    """The recipe as TOML, which gives the same recipe when it is read."""
    plain = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    tables = {
        name: value for name, value in plain.items() if dataclasses.is_dataclass(value) or isinstance(value, dict)
    }
    lines = [f"{name} = {_toml(v)}" for name, v in plain.items() if v not in (None, ()) and name not in tables]
    for name, table in tables.items():
        values = (
            table if isinstance(table, dict) else {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
        )
        if values:
            lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _apply(values: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals:
        raise RecipeError(f"A change is written key=value; got {change!r}.")
    *tables, name = key.strip().split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise RecipeError(f"The key {table!r} is no table, so it has no {name!r} in it.")
    try:
        values[name] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        values[name] = text.strip()  # words need no quotes on the command line


def _made(kind: type, values: Mapping[str, Any], prefix: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = get_type_hints(kind)
    for name in values:
        if name not in fields:
            short = () if prefix else SHORT_OPTIONS
            near = difflib.get_close_matches(name, (*fields, *short), n=1)
            hint = f"did you mean {prefix + near[0]!r}?" if near else f"keys are {', '.join(fields)}."
            raise RecipeError(f"there is no key {prefix + name!r}; {hint}")
    for name, each in fields.items():
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING and name not in values:
            raise RecipeError(f"the key {prefix + name!r} is missing.")
    checked = {name: _checked(prefix + name, value, hints[name]) for name, value in values.items()}
    try:
        return kind(**checked)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(str(error)) from None


def _checked(name: str, value: Any, hint: Any) -> Any:
    """The value, if it is of the kind that the key wants; whole numbers do for others, and false for nothing."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is False and NoneType in options:
        return None  # TOML has no word for nothing, and a change may have to take a key back
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return _made(option, value, f"{name}.")  # type: ignore[arg-type]
        if get_origin(option) is Literal and (str(value) if option is not bool else value) in get_args(option):
            return str(value)
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if option in (int, float, str, bool) and type(value) is option:
            return value
        if option == tuple[str, ...] and isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
            return tuple(value)
        if option is NetworkOptions and isinstance(value, dict):
            return _check_options(name, value)
    raise RecipeError(f"the key {name!r} is {value!r}, where {' or '.join(map(_described, options))} is expected.")


def _check_options(name: str, values: Mapping[str, Any]) -> NetworkOptions:
    """Options that can be written to a recipe: texts, numbers, true or false, and lists of these."""
    options = NetworkOptions({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
    for key, value in options.items():
        for each in value if isinstance(value, tuple) else (value,):
            if not isinstance(each, str | int | float | bool):
                raise RecipeError(f"the key '{name}.{key}' is {value!r}, where a text or a number is expected.")
    return options


def _described(option: Any) -> str:
    if get_origin(option) is Literal:
        return "one of " + ", ".join(get_args(option))
    if dataclasses.is_dataclass(option) or option is NetworkOptions:
        return "a table"
    if option == tuple[str, ...]:
        return "a list of texts"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "nothing"}
    return names[option]


def _ask(question: Any, *arguments: Any) -> Any:
    """The answer of another room, whose refusal is one of the recipe."""
    try:
        return question(*arguments)
    except (ValueError, TypeError) as error:
        raise RecipeError(str(error)) from None


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise RecipeError(f"the key {name!r} is {value!r}, where {expected} is expected.")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + re.sub("[\x00-\x1f\x7f]", lambda found: f"\\u{ord(found[0]):04x}", escaped) + '"'
    return repr(value)
