"""Describe the environment of rotopath: versions, git commit, hardware, and installed optional packages.

This module is in the lowest layer of the package: it imports only the version of rotopath.
"""

import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

import rotopath

EXTRAS: Mapping[str, Mapping[str, str]] = {  # for each extra of pyproject.toml: module name → package name
    "train": {
        "lightning": "lightning",
        "h5py": "h5py",
        "defusedxml": "defusedxml",
        "filelock": "filelock",
        "matplotlib": "matplotlib",
        "psutil": "psutil",
        "tensorboard": "tensorboard",
        "tomli_w": "tomli-w",
    },
    # The extra "slides" also installs openslide-bin. It is not listed here, because the system may have that library.
    "slides": {"openslide": "openslide-python", "tiffslide": "tiffslide"},
    "onnx": {"onnx": "onnx", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript"},
    "cluster": {"dask": "dask", "distributed": "distributed", "dask_jobqueue": "dask-jobqueue"},
}
PURPOSE: Mapping[str, str] = {  # for each extra: what it is needed for
    "train": "training, the demonstration, PCam and Aperio files, figures",
    "slides": "whole slides",
    "onnx": "export to ONNX",
    "cluster": "studies and slides on a Dask cluster",
}
PACKAGES = ("torch", "numpy", "scipy", "scikit-image", "lightning", "safetensors")  # their versions are recorded
GIT_TIMEOUT_S = 10


# Optional packages


def find_extra(module: str) -> str | None:
    """Return the extra (group of optional packages) of rotopath that installs a module, or None if there is none.

    >>> from rotopath.environment import find_extra
    >>> find_extra("openslide")
    'slides'
    """
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra.

    >>> from rotopath.environment import install_command
    >>> install_command("slides")
    "pip install 'rotopath[slides]'"
    """
    return f"pip install 'rotopath[{extra}]'"


def list_missing(extra: str) -> list[str]:
    """Return the names of the packages of an extra that are not installed."""
    return [package for module, package in EXTRAS[extra].items() if find_spec(module) is None]


# Provenance: recorded with every run, prediction and export


def describe_software(packages: Sequence[str] = PACKAGES) -> dict[str, object]:
    """Return the versions of rotopath, Python and `packages`, and the git commit of rotopath.

    Packages that are not installed are omitted. The commit is None if git is missing or does not track rotopath.
    """
    versions = {name: _find_version(name) for name in packages}
    return {
        "rotopath": rotopath.__version__,
        "commit": _find_commit(),
        "python": platform.python_version(),
        "packages": {name: number for name, number in versions.items() if number},
    }


def describe_machine(device: torch.device) -> dict[str, object]:
    """Return the name of a device (GPU or processor), and the number of CPU threads that torch uses."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "threads": torch.get_num_threads()}


def now() -> str:
    """Return the current UTC time in ISO 8601 format, with a resolution of one second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _find_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _find_commit() -> str | None:
    """Return the git commit of the source tree, with "-dirty" if files were changed.

    If the repository has annotated tags, the result starts with the nearest tag, as in the output of `git describe`.
    Returns None if git is missing or does not track this file.
    """
    if not _run_git("ls-files", Path(__file__).name):
        return None  # rotopath may be installed inside another repository, which does not track this file
    return _run_git("describe", "--always", "--dirty", "--abbrev=12")


def _run_git(*arguments: str) -> str | None:
    """Run a git command in the folder of this file. Return its output, or None if git fails or prints nothing."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
