"""Search for inputs that end in a traceback, guided by the lines of rotopath that an input reaches (with atheris).

.venv/bin/python tools/fuzz_guided.py [--seconds 60] [--seed 1] [--formats recipe,manifest] [--keep FOLDER]

`tools/fuzz.py` changes files at random. Here, libFuzzer changes them, and continues with those changes that reach new
lines of rotopath or of the libraries in `INSTRUMENTED`. Each format has `--seconds`, in a process of its own; the input
is read by the same command as in `tools/fuzz.py`. Only formats that Python code reads, in milliseconds, are included.

A table lists the number of inputs of each format, and how the process ended: "ok", or "traceback", "hang" or "memory".
The input that ended it is copied to `--keep`. Such an input becomes a test of the module that has to refuse it. The
exit code is 1 if there is one. atheris must be installed: `make fuzz-guided` does it.
"""

import argparse
import io
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import fuzz

# Formats whose command takes milliseconds, and whose parser is written in Python
GUIDED = (
    *("recipe", "plan of a study", "model.json", "operating_point.json", "provenance.json", "resume.ckpt"),
    *("manifest", "points in CSV", "outlines in XML", "objects in GeoJSON", "region in GeoJSON", "results of a slide"),
    *("import of COCO", "import of GeoJSON", "import of CSV", "import of XML", "import of .mat", "ome-zarr"),
    *("tiff header", "ndpi header", "dicom header", "mirax", "hdf5 labels", "stored map", "weights without checksum"),
)
INSTRUMENTED = ["rotopath", "tifffile", "tiffslide", "defusedxml", "tomllib", "json", "csv", "zipfile", "configparser"]
SEEDS = 30  # inputs of `tools/fuzz.py` to begin with
LONGEST_S, LIMIT_MB = 20, 4096
MAX_BYTES = 100_000


def search(entry: fuzz.Format, corpus: Path, work: Path, seconds: int, seed: int) -> None:
    """Search for `seconds` in this process, which ends then. libFuzzer writes the input that ends it to `work`."""
    import atheris
    import torch

    torch.set_num_threads(1)
    seeds = work / "seeds"
    seeds.mkdir()
    (seeds / "valid").write_bytes((corpus / entry.folder / entry.file).read_bytes())
    for number in range(SEEDS):
        (seeds / str(number)).write_bytes(fuzz.Case(entry, number, seed).change(corpus).content)
    sys.stdout = sys.stderr = printed = io.StringIO()  # libFuzzer writes to the descriptor

    def run(content: bytes) -> None:
        printed.seek(0)
        printed.truncate()
        code = fuzz.Case(entry, 0, seed).run(corpus, work, fuzz.Change(content))[0]
        if code == fuzz.EXIT_TRACEBACK:
            os.write(2, printed.getvalue().encode(errors="replace"))
            raise AssertionError("traceback")

    options = [f"-max_total_time={seconds}", f"-timeout={LONGEST_S}", f"-rss_limit_mb={LIMIT_MB}", f"-seed={seed}"]
    options += [f"-artifact_prefix={work}/", f"-max_len={MAX_BYTES}", "-print_final_stats=1", str(seeds)]
    atheris.Setup([entry.name, *options], run)
    atheris.Fuzz()


def describe(code: int, work: Path) -> tuple[str, Path | None]:
    """Return how a process ended, from its exit code and its files, and the file with the input that ended it."""
    for prefix, outcome in (("crash", "traceback"), ("timeout", "hang"), ("oom", "memory"), ("leak", "memory")):
        if found := sorted(work.glob(f"{prefix}-*")):
            return outcome, found[0]
    return ("ok" if code == 0 else f"exit code {code}"), None


def search_all(formats: Sequence[str], seconds: int, seed: int, keep: Path) -> list[list[str]]:
    """Search in all formats, one after another, and return the rows of a table: format, inputs and outcome."""
    parent, root = os.getpid(), Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        return _search_all(formats, seconds, seed, keep, root)
    finally:
        if os.getpid() == parent:  # libFuzzer ends a process in its own way
            shutil.rmtree(root)


def _search_all(formats: Sequence[str], seconds: int, seed: int, keep: Path, root: Path) -> list[list[str]]:
    rows, corpus, output = [["format", "inputs", "outcome"]], root / "corpus", root / "output.txt"
    corpus.mkdir()
    if fuzz.fork(lambda: fuzz.make_corpus(corpus) or 0, output):  # type: ignore[func-returns-value]
        raise SystemExit(output.read_text())
    fuzz.spare_work(corpus / "model")
    for number, entry in enumerate(entry for entry in fuzz.FORMATS if entry.name in formats):
        work = corpus / f"work-{number}"
        work.mkdir()
        for shared in ("image.png", "recipe.toml"):
            os.link(corpus / shared, work / shared)
        if (child := os.fork()) == 0:
            try:
                os.chdir(work)
                os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
                search(entry, corpus, work, seconds, seed)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcome, found = describe(code, work)
        text = output.read_text(errors="replace")
        inputs = re.findall(r"number_of_executed_units: *(\d+)", text)
        rows.append([entry.name, inputs[-1] if inputs else "unknown", outcome])
        print(*rows[-1], file=sys.stderr, flush=True)
        if found is not None:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{re.sub('[^a-z0-9.]+', '-', entry.name)}-{found.name}").write_bytes(found.read_bytes())
        if outcome != "ok":
            print(text[-3000:], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60, help="time of each format")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--formats", default=",".join(GUIDED), help="names of formats, separated by commas")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-guided"), help="folder for inputs that are not refused")
    given = parser.parse_args()
    import atheris

    random.seed(given.seed)
    with atheris.instrument_imports(include=INSTRUMENTED):  # commands import some modules when they run
        fuzz.import_all()
        rows = search_all(given.formats.split(","), given.seconds, given.seed, given.keep.absolute())
    print("\n".join(",".join(row) for row in rows))
    raise SystemExit(any(row[2] != "ok" for row in rows[1:]))


if __name__ == "__main__":
    main()
