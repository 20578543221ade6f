"""Describe the environment in which rotopath runs: versions, git commit, hardware, and missing optional packages.

This module is in the lowest layer of the package: it imports nothing from rotopath except the version number.
"""

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import forkserver, get_all_start_methods, get_context, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rotopath

if TYPE_CHECKING:
    import torch

PRELOADED = ["rotopath.tasks"]  # what other processes need; the server from which they are forked imports it once
GPU_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/kfd"))  # on Linux: of NVIDIA, of AMD
MAX_WINDOWS_PROCESSES = 61  # more cannot be waited for, as in concurrent.futures
# For each extra (a group of optional packages in pyproject.toml): the names of its modules, as in `import`, and the
# names of the packages that contain the modules, as in `pip install`.
EXTRAS: Mapping[str, Mapping[str, str]] = {
    "train": {
        "lightning": "lightning",
        "h5py": "h5py",
        "defusedxml": "defusedxml",
        "matplotlib": "matplotlib",
        "psutil": "psutil",
        "tensorboard": "tensorboard",
        "tomli_w": "tomli-w",
    },
    # The extra "slides" also installs the package openslide-bin. It is not listed here, because it is not needed on
    # systems that have the OpenSlide library.
    "slides": {"openslide": "openslide-python", "tiffslide": "tiffslide", "zarr": "zarr"},
    "onnx": {"onnx": "onnx", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript"},
    "cluster": {"dask": "dask", "distributed": "distributed", "dask_jobqueue": "dask-jobqueue"},
    "tables": {"pandas": "pandas", "pyarrow": "pyarrow", "geopandas": "geopandas", "spatialdata": "spatialdata"},
}
PURPOSE: Mapping[str, str] = {  # for each extra: the features that need its packages
    "train": "training, the demo, PCam and Aperio files, figures",
    "slides": "whole slides",
    "onnx": "export to ONNX",
    "cluster": "studies and slides on a Dask cluster",
    "tables": "results as pandas tables, Parquet and SpatialData",
}
# Packages whose versions are saved with every run, prediction and export.
PACKAGES = ("torch", "numpy", "scipy", "scikit-image", "lightning", "safetensors")
GIT_TIMEOUT_S = 10  # maximum duration of a git command, in seconds


# Optional packages


def find_extra(module: str) -> str | None:
    """Return the name of the extra that installs a module, or None if no extra of rotopath installs it.

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


def import_for_tables(module: str) -> Any:
    """Import a module of the extra "tables". If it is not installed, the error says how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"This table needs the package {error.name}; install it with: {install_command('tables')}.", name=error.name
        ) from None


def list_missing(extra: str) -> list[str]:
    """Return the names of the packages of an extra that are not installed, as in `pip install`."""
    return [package for module, package in EXTRAS[extra].items() if find_spec(module) is None]


# Provenance: facts that are saved with every run, prediction and export, such as versions and hardware


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


def describe_machine(device: "torch.device") -> dict[str, object]:
    """Return the name of a device (GPU or processor), and the number of CPU threads that torch uses."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "threads": torch.get_num_threads()}


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_processes(count: int) -> int:
    """Return how many of `count` processes one process can wait for, which Windows limits."""
    return min(count, MAX_WINDOWS_PROCESSES) if sys.platform == "win32" else count


def worker_context() -> BaseContext:
    """Return the context in which other processes are started.

    Processes that are forked from a process with threads or with a GPU can hang. So they are forked from a server.
    """
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start_fork_server() -> None:
    """Start the server from which other processes are forked, where there is one, and do not wait for it.

    It imports packages while this process does the same, or loads a model. This function therefore does not import
    torch, and is called as early as possible.
    """
    if worker_context().get_start_method() != "forkserver":
        return
    resource_tracker.ensure_running()  # `forkserver` starts it otherwise, which would change the mask below
    # The server inherits that Ctrl-C, which a terminal sends to all processes, is left to this process.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def has_gpu_driver() -> bool:
    """Return whether this computer seems to have a GPU that torch can use, without importing torch. Only on Linux."""
    return any(path.exists() for path in GPU_DRIVERS)


def now() -> str:
    """Return the current time (UTC) in ISO 8601 format, with whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _find_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _find_commit() -> str | None:
    """Return the git commit of the source code as text, or None if git is missing or does not track this file.

    The text is the output of `git describe`: the hash of the commit or, if the repository has annotated tags, text such
    as "v0.2.0-3-g0123456789ab", which starts with the nearest tag. It ends in "-dirty" if tracked files differ from the
    commit.
    """
    if not _run_git("ls-files", Path(__file__).name):
        return None  # rotopath may be installed in a folder of another repository, which has different commits
    return _run_git("describe", "--always", "--dirty", "--abbrev=12")


def _run_git(*arguments: str) -> str | None:
    """Run a git command in the folder of this file. Return the printed text, or None if git fails or prints nothing."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
