"""Where a run comes from: versions, commit, data, hardware, time.

In: a recipe's seed, a collection, a device. Out: what goes into `provenance.json`; and a fingerprint of data, by which
a change of it is noticed.
"""

import hashlib
import platform
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import rotopath
from rotopath.data.annotations import class_table
from rotopath.data.collection import Collection
from rotopath.images.files import UnreadableFileError

PACKAGES = ("torch", "numpy", "scipy", "scikit-image", "lightning", "safetensors")
FINGERPRINT = "content:"  # what fingerprints begin with that look at the content of files
BLOCK_BYTES = 2**20


def fingerprint(collection: Collection) -> str:
    """A short text that changes when the bytes of images or annotations, labels or splits do."""
    tables = {table for picture in collection.pictures for table in map(class_table, picture.annotations)}
    tables = {table for table in tables if table.is_file()}
    files = {
        picture: [
            picture.path,
            *picture.annotations,
            *(t for t in map(class_table, picture.annotations) if t in tables),
        ]
        for picture in collection.pictures
    }
    paths = sorted({path for found in files.values() for path in found})
    with ThreadPoolExecutor() as pool:
        contents = dict(zip(paths, pool.map(_hash_file, paths), strict=True))
    digest = hashlib.sha256(collection.annotated.encode())
    for picture, found in files.items():
        about = (picture.name, picture.case, picture.split, picture.row, picture.label, picture.spacing_um_px)
        digest.update(repr((*about, picture.stratum, [contents[path] for path in found])).encode())
    return FINGERPRINT + digest.hexdigest()[:16]


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise UnreadableFileError(path, f"cannot be read ({error.strerror}).") from None
    return digest.hexdigest()


def describe_training(seed: int, collection: Collection) -> dict[str, object]:
    """Where a training begins: versions, commit, seed, data."""
    return {
        "begun": now(),
        **describe_software(),
        "seed": seed,
        "data": {
            "source": collection.source,
            "path": str(collection.root),
            "fingerprint": fingerprint(collection),
            "images": len(collection.pictures),
        },
    }


def describe_software(packages: Sequence[str] = PACKAGES) -> dict[str, object]:
    """Versions of what computes, and its commit."""
    return {
        "rotopath": rotopath.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: found for name in packages if (found := _version(name))},
    }


def describe_machine(device: torch.device) -> dict[str, object]:
    """What a run was computed on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "threads": torch.get_num_threads()}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source that runs, marked where it was changed; none for an installed package."""
    if not _git("ls-files", Path(__file__).name):
        return None  # whatever repository an environment lies in, this file is not of it
    return _git("describe", "--always", "--dirty", "--abbrev=12")


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
