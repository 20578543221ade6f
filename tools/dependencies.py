"""List the age and the known vulnerabilities of the pinned packages, from the JSON API of PyPI.

.venv/bin/python tools/dependencies.py [--index https://pypi.org/pypi] [--out results/dependencies.csv]

The table has a row for each package in `constraints.txt`: its version, the day of its release, the latest version,
whether its authors have withdrawn (yanked) it, and the identifiers of its known vulnerabilities. PyPI takes these from
the Python advisory database. They are "unknown" if the index states them for the latest version only, as some mirrors
do. The exit code is 1 if a version is yanked, vulnerable, or listed in `INCIDENTS`.
"""

import argparse
import csv
import io
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--index", default="https://pypi.org/pypi")
    parser.add_argument("--out", type=Path, help="CSV file for the table")
    given = parser.parse_args()
    pins = read_pins()
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
