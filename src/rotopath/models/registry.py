"""Build networks by name, as recipes and model files specify them.

A name specifies a network of the paper ("tumor"), a well-known CNN ("resnet18"), or a function of the user that builds
a network ("package.module:function"). `build_network` takes such a name, a number of outputs, a number of orientations
and options, and returns a module with fresh weights. It raises ValueError if the name or an option is wrong.
"""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from torch import nn

from rotopath import group
from rotopath.models import backbones
from rotopath.models.architecture import ARCHITECTURES, CHOICES
from rotopath.models.convert import Keep, Strides, equivariant
from rotopath.models.network import Network
from rotopath.nn.project import PROJECTIONS

# Function that builds a network. Its parameters are `outputs`, optionally `orientations`, and the network's options.
Builder = Callable[..., nn.Module]
Options = Mapping[str, Any]
# Options of the paper's networks. `outputs` is not an option here, because the number of logits follows from the task.
NETWORK_OPTIONS = ("preset", *(name for name in CHOICES if name != "outputs"))
# Options of `equivariant`, which converts plain networks, and the possible values of each.
CONVERSION_OPTIONS: Options = {
    "keep": get_args(Keep),
    "kernel": group.KERNELS,
    "projection": PROJECTIONS,
    "strides": get_args(Strides),
    "reflections": (False, True),
}
# After conversion, the convolutions with stride 2 of well-known networks would accept odd heights and widths only. With
# "pool", mean pools replace these strides, so that even heights and widths are accepted.
CONVERSION_DEFAULTS: Options = {"strides": "pool"}
BACKBONES: Mapping[str, Builder] = {
    "resnet18": backbones.resnet18,
    "resnet34": backbones.resnet34,
    "resnet50": backbones.resnet50,
    "unet": backbones.unet,
}
# Default side of training windows, in px, for each network.
WINDOW_PX: Mapping[str, int] = {name: table.input_px for name, table in ARCHITECTURES.items()} | {
    "resnet18": 96,
    "resnet34": 96,
    "resnet50": 96,
    "unet": 128,
}


def list_networks() -> list[str]:
    """Return the names of all networks that come with the package.

    >>> rp.models.list_networks()
    ['mitosis', 'nuclei', 'tumor', 'resnet18', 'resnet34', 'resnet50', 'unet']
    """
    return [*ARCHITECTURES, *BACKBONES]


def build_network(name: str, outputs: int, orientations: int = 8, options: Options | None = None) -> nn.Module:
    """Build the network `name` for N = `orientations`, with `outputs` logits per output position and fresh weights.

    `options` maps names of options (`list_options`) to values.

    Networks of the paper, and functions with a parameter `orientations`, build the network for N directly. A function
    without this parameter returns a module that `equivariant` then converts. The module is not converted if N is 1, or
    if it already contains layers of `rp.nn`.

    >>> net = rp.models.build_network("unet", outputs=2, orientations=4, options={"width": 8, "depth": 2})
    >>> net(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 2, 32, 32])
    """
    group.check_orientations(orientations)
    chosen = dict(options or {})
    check_options(name, chosen)
    if name in ARCHITECTURES:
        return Network(ARCHITECTURES[name].choose(outputs=outputs, **chosen), orientations)
    build = find_builder(name)
    own = {key: value for key, value in chosen.items() if key in _parameter_names(build)}
    if "orientations" in _parameter_names(build):
        own["orientations"] = orientations
    module = build(outputs=outputs, **own)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"The function {name!r} returned an object of type {type(module).__name__}; it must return a "
            f"torch.nn.Module."
        )
    if orientations == 1 or "orientations" in own or is_equivariant(module):
        return module
    conversion = {key: value for key, value in chosen.items() if key not in own}
    return equivariant(module, orientations, **{**CONVERSION_DEFAULTS, **conversion})


def find_builder(name: str) -> Builder:
    """Return the function that builds the network `name`: a function of this package or of the user.

    Raises ValueError if there is no such function, or if the function has no parameter `outputs`.
    """
    if name in BACKBONES:
        return BACKBONES[name]
    if name in ARCHITECTURES:
        return lambda outputs, orientations=8, **options: build_network(name, outputs, orientations, options)
    if ":" not in name:
        similar = difflib.get_close_matches(name, list_networks(), n=1)
        known = f"choose from {', '.join(list_networks())}, or name your own function as 'package.module:function'."
        raise ValueError(f"There is no network {name!r}; {f'did you mean {similar[0]!r}?' if similar else known}")
    build = import_object(name)
    if not callable(build):
        raise ValueError(
            f"The network {name!r} is an object of type {type(build).__name__}; it must be a function that builds a "
            f"network."
        )
    # A model file from an unknown source may name a dangerous function, such as os.system. Therefore a function is
    # called only if it has a parameter `outputs`, as every function that builds a network has.
    if "outputs" not in _parameter_names(build):
        raise ValueError(
            f"The function {name!r} has no parameter 'outputs', the number of logits per output position; "
            f"define the function as `def {name.rpartition(':')[2]}(outputs, ...)`."
        )
    return build


def import_object(name: str) -> object:
    """Import the object with the name "package.module:object", and return it.

    The module may belong to an installed package, or be a file in the current folder. Raises ValueError if the object
    cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    current_folder = str(Path.cwd())
    is_missing = current_folder not in sys.path
    if is_missing:
        sys.path.append(current_folder)  # last, so that installed packages come first
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name!r} cannot be imported ({error}); install its package, or run rotopath in the folder that contains "
            f"the module."
        ) from None
    finally:
        if is_missing:
            sys.path.remove(current_folder)
    if not hasattr(module, attribute):
        raise ValueError(f"The module {module_name} has no {attribute!r}; check the name {name!r}.")
    imported: object = getattr(module, attribute)
    return imported


def check_options(name: str, options: Options) -> None:
    """Raise ValueError if the network `name` does not have one of the options, or if the value of an option is wrong.

    For the paper's networks, the values of all options are checked. For other networks, only the values of options of
    `equivariant`, such as `keep`, are checked here. Other options, such as `width` of "resnet18", are parameters of the
    function that builds the network; their values are not checked.
    """
    is_paper = name in ARCHITECTURES
    own = [] if is_paper else _own_options(name)
    known = list_options(name)
    for key, value in options.items():
        if key not in known:
            similar = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {similar[0]!r}?" if similar else f"options are {', '.join(known)}."
            raise ValueError(f"The network {name!r} has no option {key!r}; {hint}")
        if not is_paper and key not in own and value not in CONVERSION_OPTIONS[key]:
            choices = ", ".join(map(repr, CONVERSION_OPTIONS[key]))
            raise ValueError(f"The option {key!r} of the network {name!r} is {value!r}; choose from {choices}.")
    if is_paper:
        ARCHITECTURES[name].choose(**options)


def list_options(name: str) -> list[str]:
    """Return the names of the options of the network `name`.

    For networks of the paper, these are the preset and the options in `Choices`. For other networks, these are the
    parameters of the function that builds the network. If this function has no parameter `orientations`, as for
    "resnet18", the options of `equivariant` are added, because `build_network` can convert the network.
    """
    if name in ARCHITECTURES:
        return [*NETWORK_OPTIONS]
    own = _own_options(name)
    if "orientations" in _parameter_names(find_builder(name)):
        return own
    return own + [key for key in CONVERSION_OPTIONS if key not in own]


def expand_preset(name: str, options: Options) -> dict[str, Any]:
    """Return the options of one of the paper's networks, with the preset replaced by the options that it sets.

    `options` are the options in a recipe, such as the preset. The result contains the values of all options, except
    `preset` and options whose value is None. Thus stored options keep their meaning if a later version changes the
    preset. For other networks, `options` are returned unchanged.

    >>> from rotopath.models.registry import expand_preset
    >>> expand_preset("mitosis", {"preset": "faithful"})["kernel"]
    'harmonic'
    """
    if name not in ARCHITECTURES:
        return dict(options)
    table = ARCHITECTURES[name].choose(**options)
    chosen = {key: getattr(table, key) for key in NETWORK_OPTIONS if key != "preset"}
    return {key: value for key, value in chosen.items() if value is not None}


def find_window_px(name: str) -> int | None:
    """Return the default side, in px, of the training windows of the network `name`.

    For a function of the user, this is the attribute `window_px` of the function. Return None if the function has no
    such attribute, or if the attribute is not a whole number.
    """
    if name in WINDOW_PX:
        return WINDOW_PX[name]
    window_px = getattr(find_builder(name), "window_px", None)
    return window_px if isinstance(window_px, int) else None


def is_equivariant(module: nn.Module) -> bool:
    """Return whether a module is a layer of `rp.nn` or contains one."""
    return any(type(layer).__module__.startswith("rotopath.nn") for layer in module.modules())


def _own_options(name: str) -> list[str]:
    """Return the parameters of the function that builds a network, except `outputs` and `orientations`."""
    return [key for key in _parameter_names(find_builder(name)) if key not in ("outputs", "orientations")]


def _parameter_names(function: Builder) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_name]
