"""Networks by name, as recipes and model files call them: the paper's, well-known ones, and anybody's own function.

In: a name such as "tumor", "resnet18" or "package.module:function", the number of outputs and orientations, options.
Out: a module with fresh weights; or one sentence about the name or the option that is wrong.
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
from rotopath.models.architecture import ARCHITECTURES, Architecture
from rotopath.models.convert import Keep, Strides, equivariant
from rotopath.models.network import Choices, Network
from rotopath.nn.project import PROJECTIONS

Build = Callable[..., nn.Module]  # outputs, perhaps orientations, and options by name
Options = Mapping[str, Any]
FAMILIES: Mapping[str, Build] = {
    "resnet18": backbones.resnet18,
    "resnet34": backbones.resnet34,
    "resnet50": backbones.resnet50,
    "unet": backbones.unet,
}
WINDOW_PX: Mapping[str, int] = {name: table.input_px for name, table in ARCHITECTURES.items()} | {
    "resnet18": 96,
    "resnet34": 96,
    "resnet50": 96,
    "unet": 128,
}
CONVERSION: Options = {
    "keep": get_args(Keep),
    "kernel": group.KERNELS,
    "projection": PROJECTIONS,
    "strides": get_args(Strides),
    "reflections": (False, True),
}
# Strides of well-known networks lie unevenly on even sizes; as pools they rotate exactly.
CONVERSION_DEFAULTS: Options = {"strides": "pool"}


def list_networks() -> list[str]:
    """The names of all networks that come with the package.

    >>> rp.models.list_networks()
    ['mitosis', 'nuclei', 'tumor', 'resnet18', 'resnet34', 'resnet50', 'unet']
    """
    return [*ARCHITECTURES, *FAMILIES]


def build_network(name: str, outputs: int, orientations: int = 8, options: Options | None = None) -> nn.Module:
    """The network of that name with so many outputs, as SE(2,N) network of N orientations, with fresh weights.

    A function that knows nothing of orientations gives a plain network, which is converted; with one orientation it
    stays as it is.
    """
    group.check_orientations(orientations)
    chosen = dict(options or {})
    check_options(name, chosen)
    if name in ARCHITECTURES:
        return Network(ARCHITECTURES[name].choose(outputs=outputs, **chosen), orientations)
    build = find_build(name)
    own = {key: value for key, value in chosen.items() if key in _parameters(build)}
    if "orientations" in _parameters(build):
        own["orientations"] = orientations
    module = build(outputs=outputs, **own)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"The network {name!r} has to be a torch.nn.Module; its function gave {type(module).__name__}."
        )
    if orientations == 1 or "orientations" in own or is_equivariant(module):
        return module
    conversion = {key: value for key, value in chosen.items() if key not in own}
    return equivariant(module, orientations, **{**CONVERSION_DEFAULTS, **conversion})


def find_build(name: str) -> Build:
    """The function behind a name: one of the package's, or `package.module:function`, which has to take `outputs`."""
    if name in FAMILIES:
        return FAMILIES[name]
    if name in ARCHITECTURES:
        return lambda outputs, orientations=8, **options: build_network(name, outputs, orientations, options)
    if ":" not in name:
        near = difflib.get_close_matches(name, list_networks(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(list_networks())}, or "
        more = "" if near else "name a function of yours as 'package.module:function'."
        raise ValueError(f"There is no network {name!r}; {hint}{more}")
    build = import_named(name)
    if not callable(build):
        raise ValueError(f"The network {name!r} is a {type(build).__name__}, where a function is expected.")
    # A model file of somebody else may name any function there is. One with a parameter of this name builds networks.
    if "outputs" not in _parameters(build):
        raise ValueError(
            f"The function {name!r} has no parameter 'outputs', the number of logits that its network has to give; "
            f"write it as `def {name.rpartition(':')[2]}(outputs, ...)`."
        )
    return build


def import_named(name: str) -> object:
    """What `package.module:name` names, of installed packages or of modules in the current folder."""
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.append(here)  # behind everything else, so that no installed package is hidden
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name!r} cannot be imported ({error}); put its module where Python finds it, such as in the folder that "
            f"you call rotopath from."
        ) from None
    finally:
        if added:
            sys.path.remove(here)
    if not hasattr(module, attribute):
        raise ValueError(f"The module {module_name} has no {attribute!r}, which {name!r} names.")
    found: object = getattr(module, attribute)
    return found


def check_options(name: str, options: Options) -> None:
    """Refuse options that a network does not have, before anything is built or written."""
    if name in ARCHITECTURES:
        known = ["preset", *(key for key in Choices.__annotations__ if key != "outputs")]
        own: list[str] = []
    else:
        build = find_build(name)
        own = [key for key in _parameters(build) if key not in ("outputs", "orientations")]
        known = own + ([] if "orientations" in _parameters(build) else [key for key in CONVERSION if key not in own])
    for key, value in options.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"options are {', '.join(known)}."
            raise ValueError(f"The network {name!r} has no option {key!r}; {hint}")
        if name not in ARCHITECTURES and key not in own and value not in CONVERSION[key]:
            choices = ", ".join(map(repr, CONVERSION[key]))
            raise ValueError(f"The option {key!r} of the network {name!r} is {value!r}; choose from {choices}.")
    if name in ARCHITECTURES:
        ARCHITECTURES[name].choose(**options)


def spell_out(name: str, options: Options) -> dict[str, Any]:
    """Options with everything that a preset chose written out, so that they mean the same when it changes."""
    if name not in ARCHITECTURES:
        return dict(options)
    table: Architecture = ARCHITECTURES[name].choose(**options)
    chosen = {key: getattr(table, key) for key in Choices.__annotations__ if key != "outputs"}
    return {key: value for key, value in chosen.items() if value is not None}


def find_window_px(name: str) -> int | None:
    """The side of the windows that a network is usually trained on; none for networks of one's own that do not say."""
    if name in WINDOW_PX:
        return WINDOW_PX[name]
    found = getattr(find_build(name), "window_px", None)
    return found if isinstance(found, int) else None


def is_equivariant(module: nn.Module) -> bool:
    """Whether a module has layers of SE(2) inside."""
    return any(type(layer).__module__.startswith("rotopath.nn") for layer in module.modules())


def _parameters(build: Build) -> list[str]:
    try:
        found = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in found if each.kind in named]
