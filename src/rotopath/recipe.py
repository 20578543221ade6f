"""A recipe: everything that decides how a run turns out, in one frozen, checked description.

In: a TOML file, and single keys to change. Out: a `Recipe`; or one sentence about the key that is wrong.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rotopath.data.augmentation import Augmentation
from rotopath.data.batches import BATCH
from rotopath.data.collection import Task
from rotopath.data.pixels import Cache
from rotopath.group import check_orientations
from rotopath.models.tables import ARCHITECTURES

HARDWARE = ("accelerator", "devices", "nodes", "cache", "workers")  # keys of where a run is computed, and not of what


class RecipeError(ValueError):
    """A recipe that cannot be followed, said in one sentence."""


@dataclass(frozen=True)
class Mining:
    """Hard examples: a first baseline is trained without them, and its mistakes are sampled in the real training."""

    epochs: int = 4  # of the baseline
    examples: int = 2000  # at most, the worst first


@dataclass(frozen=True)
class Recipe:
    """How a network is trained. Defaults are the paper's, where it names them."""

    task: Task
    data: str  # a folder or a manifest
    orientations: int = 8
    kernel: Literal["bilinear", "gaussian", "harmonic"] = "bilinear"
    pooling: Literal["max", "max-blur", "rms-blur"] = "max"
    upsampling: Literal["nearest", "bilinear"] = "nearest"
    smoothing: bool = False  # of images, before they are lifted
    projection: Literal["max", "mean", "attention", "fourier"] | None = None  # the paper's when left out
    reflections: bool = False  # besides orientations, in kernels
    widths_of: int | None = None  # channels as with so many orientations; as many weights as N = 1 when left out
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
        if self.widths_of is not None:
            check_orientations(self.widths_of)
        for name in ("epochs", "steps", "patience", "validation_steps", "checkpoint_steps", "devices", "nodes"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("seed", "workers", "momentum", "weight_decay"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(self.learning_rate > 0, "learning_rate", self.learning_rate, "a number above 0")
        _require(self.batch is None or self.batch >= 1, "batch", self.batch, "1 or more")
        if self.windows % (self.devices * self.nodes):
            raise RecipeError(
                f"a batch of {self.windows} cannot be divided among {self.devices * self.nodes} devices; "
                f"change 'batch' or 'devices'."
            )
        if self.regime is not None and self.task == "tumor":
            _require(0 < self.regime <= 1, "regime", self.regime, "a fraction of each class, over 0 and up to 1,")
        elif self.regime is not None:
            whole = self.regime >= 1 and float(self.regime).is_integer()
            what = "cases" if self.task == "mitosis" else "fields of each organ"
            _require(whole, "regime", self.regime, f"a whole number of {what}")
        if self.task == "nuclei" and self.mining is not None:
            raise RecipeError("hard examples are mined for mitosis and tumor; leave 'mining' out for nuclei.")

    @property
    def windows(self) -> int:
        """In a batch, over all devices."""
        return BATCH[self.task] if self.batch is None else self.batch


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

    Besides there is `preset`, for the keys that a preset of the network chooses. It is not kept: a run has to mean the
    same after a preset has become a better one.
    """
    own = {name: value for name, value in values.items() if name != "preset"}
    preset = values.get("preset", "paper")
    for network in ARCHITECTURES.values():
        if network.name == values.get("task"):
            _require(preset in list(network.presets), "preset", preset, f"one of {', '.join(network.presets)}")
            own = network.presets[preset] | own
    recipe: Recipe = _made(Recipe, own, "")
    return recipe


def changed_key(before: Recipe, now: Recipe) -> str | None:
    """The first key that is not the same, of those that decide how a run turns out."""
    names = (each.name for each in dataclasses.fields(Recipe) if each.name not in HARDWARE)
    return next((name for name in names if getattr(before, name) != getattr(now, name)), None)


def write_recipe(recipe: Recipe) -> str:
    """The recipe as TOML, which gives the same recipe when it is read."""
    plain = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    tables = {name: value for name, value in plain.items() if dataclasses.is_dataclass(value)}
    lines = [f"{name} = {_toml(v)}" for name, v in plain.items() if v is not None and name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{f.name} = {_toml(getattr(table, f.name))}" for f in dataclasses.fields(table)]
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
            near = difflib.get_close_matches(name, fields, n=1)
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
    raise RecipeError(f"the key {name!r} is {value!r}, where {' or '.join(map(_described, options))} is expected.")


def _described(option: Any) -> str:
    if get_origin(option) is Literal:
        return "one of " + ", ".join(get_args(option))
    if dataclasses.is_dataclass(option):
        return "a table"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "nothing"}
    return names[option]


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise RecipeError(f"the key {name!r} is {value!r}, where {expected} is expected.")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)
