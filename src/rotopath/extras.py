"""What rotopath can do without, and how to install it.

In: the name of a module, or of an extra. Out: what is missing, and the command that brings it.
"""

from collections.abc import Mapping
from importlib.util import find_spec

EXTRAS: Mapping[str, Mapping[str, str]] = {  # modules of each extra, and the packages they come in
    "train": {
        "lightning": "lightning",
        "h5py": "h5py",
        "defusedxml": "defusedxml",
        "filelock": "filelock",
        "matplotlib": "matplotlib",
        "tensorboard": "tensorboard",
    },
    "slides": {"openslide": "openslide-python", "tiffslide": "tiffslide"},  # a library may come from the system, too
    "onnx": {"onnx": "onnx", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript"},
    "cluster": {"dask": "dask", "distributed": "distributed", "dask_jobqueue": "dask-jobqueue"},
}
PURPOSE: Mapping[str, str] = {
    "train": "training, the demonstration, PCam and Aperio files, figures",
    "slides": "whole slides",
    "onnx": "export to ONNX",
    "cluster": "studies and slides on a Dask cluster",
}


def extra_of(module: str) -> str | None:
    """The extra that brings a module; none where no extra does."""
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'rotopath[{extra}]'"


def list_missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed."""
    return [package for module, package in EXTRAS[extra].items() if find_spec(module) is None]
