"""List the age, the known vulnerabilities and the hashes of the pinned packages, from the JSON API of PyPI.

.venv/bin/python tools/dependencies.py [--index https://pypi.org/pypi] [--out results/dependencies.csv] [--hashes]
python3 tools/dependencies.py --check REPORT

The table has a row for each package in `constraints.txt`: its version, the day of its release, the latest version,
whether its authors have withdrawn (yanked) it, and the identifiers of its known vulnerabilities. PyPI takes these from
the Python advisory database. They are "unknown" if the index states them for the latest version only, as some mirrors
do. The exit code is 1 if a version is yanked, vulnerable, or listed in `INCIDENTS`.

With `--hashes`, the SHA-256 of all files of these versions for the platforms in `PLATFORMS` are written to
`hashes.txt`, which `pip install --require-hashes` checks. Those of torch and of the CUDA packages are written to
`hashes-torch.txt`, because a machine may have another file of torch: of another index, such as that of torch for the
CPU, or its own. `--check` compares the report of such an installation (`pip install --report`) with that file. It uses
no package, so that nothing unchecked is executed.
"""

import argparse
import csv
import functools
import io
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONSTRAINTS, HASHES, TORCH_HASHES = (ROOT / name for name in ("constraints.txt", "hashes.txt", "hashes-torch.txt"))
WITH_TORCH = re.compile(r"torch|nvidia-.*|cuda-.*")  # packages that depend on the machine
PYTHONS = ("py3", "cp311", "cp312", "cp313")
PLATFORMS = re.compile(r"any|manylinux\S*_(x86_64|aarch64)|macosx\S*")
LINUX_ONLY = ("triton",)
COLUMNS = ("package", "version", "released", "latest", "yanked", "vulnerabilities")
# Versions that contained malicious code, or were withdrawn for it.
INCIDENTS: Mapping[str, tuple[str, ...]] = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
TIMEOUT_S = 60
Page = Mapping[str, Any]


def read_pins(path: Path = CONSTRAINTS) -> dict[str, str]:
    """Return the pinned version of each package."""
    lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return dict(line.split("==") for line in lines if line)


def fetch(index: str, path: str) -> Page | None:
    """Return a page of the JSON API, or None if the index does not have it."""
    try:
        with urllib.request.urlopen(f"{index}/{path}/json", timeout=TIMEOUT_S) as answer:
            page: Page = json.load(answer)
            return page
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def describe(package: str, version: str, get: Callable[[str], Page | None]) -> dict[str, str]:
    """Return the row of a package. `get` returns the page of a package, such as "numpy", or of a version."""
    project = get(package)
    if project is None:
        raise SystemExit(f"The index has no package {package}.")
    latest = project["info"]["version"]
    page = project if latest == version else get(f"{package}/{version}")
    files = project.get("releases", {}).get(version, [])
    known = "unknown" if page is None else ";".join(sorted(found["id"] for found in page["vulnerabilities"])) or "none"
    if version in INCIDENTS.get(package, ()):
        known = "malicious"
    return {
        "package": package,
        "version": version,
        "released": min((file["upload_time"][:10] for file in files), default="unknown"),
        "latest": latest,
        "yanked": "yes" if files and all(file["yanked"] for file in files) else "no",
        "vulnerabilities": known,
    }


def fits(filename: str) -> bool:
    """Return whether a file is a wheel for one of `PYTHONS` and `PLATFORMS`.

    >>> fits("numpy-2.4.6-cp312-cp312-manylinux_2_27_aarch64.whl"), fits("numpy-2.4.6-cp312-cp312-win_amd64.whl")
    (True, False)
    >>> fits("ruff-0.17.5-py3-none-macosx_11_0_arm64.whl"), fits("psutil-7.2.2-cp36-abi3-manylinux2014_x86_64.whl")
    (True, True)
    >>> fits("rich-15.0.0.tar.gz"), fits("numpy-2.4.6-cp313-cp313t-macosx_14_0_arm64.whl")
    (False, False)
    """
    if not filename.endswith(".whl"):
        return False
    python, abi, platform = filename.removesuffix(".whl").split("-")[-3:]
    is_python = any(tag in PYTHONS for tag in python.split(".")) or abi == "abi3"
    return is_python and not abi.endswith("t") and PLATFORMS.fullmatch(platform) is not None


def list_hashes(package: str, version: str, get: Callable[[str], Page | None]) -> str:
    """Return the requirement of a package with the hashes of its files, as `pip install --require-hashes` reads it."""
    project = get(package) or {}
    files = project.get("releases", {}).get(version, [])
    hashes = sorted({file["digests"]["sha256"] for file in files if fits(file["filename"])})
    if not hashes:
        raise SystemExit(f"The index has no wheel of {package} {version}.")
    marker = ' ; sys_platform == "linux"' if package in LINUX_ONLY else ""
    return " \\\n    ".join([f"{package}=={version}{marker}", *(f"--hash=sha256:{digest}" for digest in hashes)])


def write_hashes(pins: Mapping[str, str], get: Callable[[str], Page | None]) -> None:
    """Write the hashes of all pinned packages to `HASHES` and `TORCH_HASHES`."""
    with ThreadPoolExecutor(8) as pool:
        lines = dict(zip(pins, pool.map(partial(list_hashes, get=get), pins.keys(), pins.values()), strict=True))
    for path, is_of_torch in ((HASHES, False), (TORCH_HASHES, True)):
        chosen = [line for name, line in lines.items() if bool(WITH_TORCH.fullmatch(name)) == is_of_torch]
        header = f"# Written by tools/{Path(__file__).name} --hashes, from {CONSTRAINTS.name}."
        path.write_text("\n".join([header, *chosen, ""]), encoding="utf-8")


def read_hashes(path: Path) -> dict[str, set[str]]:
    """Return the hashes of the files of each requirement, such as "numpy==2.4.6"."""
    text = re.sub(r"\\\n *|#.*", " ", path.read_text(encoding="utf-8"))  # a requirement on one line
    requirements = [line.split() for line in text.splitlines() if line.strip()]
    return {
        words[0]: {word.removeprefix("--hash=sha256:") for word in words if word.startswith("--hash=")}
        for words in requirements
    }


def check(report: Page, known: set[str]) -> tuple[list[str], list[str]]:
    """Return sentences about installed files without a known hash: those of the user's own choice, and all others.

    Own choices are files of this machine, and builds with a local version, such as 2.13.0+cpu, which PyPI does not
    have. pip has compared the other files with the hash that their index states, if it states one.
    """
    own: list[str] = []
    others: list[str] = []
    for package in report["install"]:
        about, source = package["metadata"], package["download_info"]
        if source.get("archive_info", {}).get("hashes", {}).get("sha256") not in known:
            is_own = source["url"].startswith("file:") or "+" in about["version"]
            name = f"{about['name']} {about['version']} ({source['url']})"
            (own if is_own else others).append(f"{name} has no hash in {TORCH_HASHES.name}.")
    return own, others


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--index", default="https://pypi.org/pypi")
    parser.add_argument("--out", type=Path, help="CSV file for the table")
    parser.add_argument("--hashes", action="store_true", help="write the files of hashes, too")
    parser.add_argument("--check", type=Path, help="only check the report of `pip install --report`")
    given = parser.parse_args()
    if given.check is not None:
        own, others = check(json.loads(given.check.read_bytes()), set().union(*read_hashes(TORCH_HASHES).values()))
        print("\n".join([*(f"Your own file: {line}" for line in own), *others]))
        raise SystemExit(1 if others else 0)
    pins = read_pins()
    if given.hashes:
        write_hashes(pins, functools.cache(partial(fetch, given.index)))
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(partial(describe, get=partial(fetch, given.index)), pins.keys(), pins.values()))
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if given.out is not None:
        given.out.write_text(text.getvalue(), encoding="utf-8")
    bad = [row for row in rows if row["yanked"] == "yes" or row["vulnerabilities"] not in ("none", "unknown")]
    for row in bad:
        print(f"{row['package']} {row['version']}: yanked: {row['yanked']}, vulnerabilities: {row['vulnerabilities']}")
    unknown = sum(row["vulnerabilities"] == "unknown" for row in rows)
    print(f"{len(rows)} packages, {len(bad)} with problems, {unknown} with unknown vulnerabilities.")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
