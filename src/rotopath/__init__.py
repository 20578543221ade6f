"""Rotation-equivariant networks for computational pathology: SE(2,N) layers, models, training and prediction.

An SE(2,N) layer computes features for N orientations. Layers are in `nn`, the geometry of rotated kernels in `group`,
networks in `models`, image files and slides in `images`, datasets in `data`, scores in `metrics`, the kinds of tasks in
`tasks`, prediction in `inference`, training in `training`, studies in `studies`, and report pages and figures in
`reports`. `equivariant` converts a plain CNN to an SE(2,N) network; `freeze` converts an SE(2,N) network to a plain CNN
with the same outputs.

The main commands of `rotopath` are also functions: `train`, `evaluate`, `predict`, `export`, `study` and `report`.
Modules are imported at their first use, so that `import rotopath` and `rotopath --help` are fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rotopath import (
        auditing,
        data,
        evaluation,
        exporting,
        group,
        images,
        inference,
        metrics,
        models,
        nn,
        recipe,
        runs,
        studies,
        tasks,
        training,
    )
    from rotopath.auditing import audit
    from rotopath.evaluation import evaluate
    from rotopath.exporting import export
    from rotopath.metrics import equivariance_error, equivariance_report
    from rotopath.models.convert import equivariant
    from rotopath.models.convert.cost import conversion_report
    from rotopath.models.freeze import freeze
    from rotopath.models.symmetrize import symmetrize
    from rotopath.recipe import Recipe
    from rotopath.reports.study_report import report
    from rotopath.runs import load, predict
    from rotopath.studies.jobs import study
    from rotopath.training import train

__version__ = "0.2.0"
__all__ = [
    "Recipe",
    "audit",
    "auditing",
    "conversion_report",
    "data",
    "equivariance_error",
    "equivariance_report",
    "equivariant",
    "evaluate",
    "evaluation",
    "export",
    "exporting",
    "freeze",
    "group",
    "images",
    "inference",
    "load",
    "metrics",
    "models",
    "nn",
    "predict",
    "recipe",
    "report",
    "runs",
    "studies",
    "study",
    "symmetrize",
    "tasks",
    "train",
    "training",
]

_HOMES = {  # for each public function and class: the module that defines it
    "Recipe": "rotopath.recipe",
    "audit": "rotopath.auditing",
    "conversion_report": "rotopath.models.convert.cost",
    "equivariance_error": "rotopath.metrics",
    "equivariance_report": "rotopath.metrics",
    "equivariant": "rotopath.models.convert",
    "evaluate": "rotopath.evaluation",
    "export": "rotopath.exporting",
    "freeze": "rotopath.models.freeze",
    "load": "rotopath.runs",
    "predict": "rotopath.runs",
    "report": "rotopath.reports.study_report",
    "study": "rotopath.studies.jobs",
    "symmetrize": "rotopath.models.symmetrize",
    "train": "rotopath.training",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rotopath' has no attribute {name!r}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    return import_module(f"rotopath.{name}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
