"""Networks that do not care how a slide lies on the table: SE(2,N) layers and models for computational pathology.

Rooms open on first use, so that `import rotopath` and `rotopath --help` cost nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rotopath import (
        data,
        evaluation,
        exporting,
        group,
        images,
        inference,
        models,
        nn,
        recipe,
        runs,
        tasks,
        training,
    )
    from rotopath.evaluation import equivariance_error
    from rotopath.models import equivariant, freeze
    from rotopath.runs import load

__version__ = "0.1.0"
__all__ = [
    "data",
    "equivariance_error",
    "equivariant",
    "evaluation",
    "exporting",
    "freeze",
    "group",
    "images",
    "inference",
    "load",
    "models",
    "nn",
    "recipe",
    "runs",
    "tasks",
    "training",
]

_HOMES = {
    "equivariance_error": "rotopath.evaluation",
    "equivariant": "rotopath.models",
    "freeze": "rotopath.models",
    "load": "rotopath.runs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rotopath' has no attribute {name!r}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    return import_module(f"rotopath.{name}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
