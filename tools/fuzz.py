"""Run the commands on damaged inputs, and count what happens by format: nothing may end in a traceback, hang or lie.

.venv/bin/python tools/fuzz.py [--cases 20000] [--seed 0] [--formats png,hdf5] [--jobs 2] [--out results/fuzz.csv]

The tool first generates a small valid input of every format, such as an image, a run folder or a study. In each case,
it changes one of the files (flipped bits, missing or overwritten bytes, values of another type, huge numbers, deep
nesting), and runs the real command on it in a forked process with limits for time and memory. A process runs some
cases one after another; if one of them fails, it is run again in a process of its own. The outcomes are:

- ok: the command has finished, as it may: the change may be harmless.
- refused: the command has reported the problem in sentences, with exit code 2, or 1 if other results are whole.
- traceback, crash, hang, memory: a failure of rotopath. A traceback in the log of a slide counts, too.
- silently wrong: the command has finished, but should have refused the input, or should have replaced damaged results.
  This is known if a file was cut off or overwritten and has a checksum, or if a value has another type or is out of
  range.

Cases depend only on the seed and their number. Failures are printed with the name of their case, such as `hdf5:17`;
`--formats hdf5:17` runs only this case, and `--keep FOLDER` keeps its input.
"""

import argparse
import csv
import functools
import gzip
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

OUTCOMES = ("ok", "refused", "traceback", "crash", "hang", "memory", "silently wrong")
FAILURES = OUTCOMES[2:]
# Of one command: processor time, time, and memory on top of that of the modules
LIMIT_S, LONGEST_S, LIMIT_BYTES = 40, 200, 4 * 2**30
BATCH = 200  # number of cases that a process runs one after another
COUNTS, UNCHANGED = "counts.json", "unchanged"
TESTS = Path(__file__).parents[1] / "tests"  # contains functions that write slides of some formats
EXIT_TRACEBACK = 70
KEPT = "has changed since the prediction"  # printed of objects that a person may have corrected
HEADER_BYTES = 2048
MODEL = "tumor-pcam-n8"
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, -5, 0.5, 1.5, 1e300, -1e-300, 2**31, 2**63, 10**30, float("nan"), float("inf")),
    *("", "0.5", "x" * 5000, "é\u202e\x1b[31m", "../..", [], [[]], [1, "a"], {}, {"a": 1}, [None], "NaN"),
)
# Settings of recipes that must be refused, whatever else a recipe contains.
REFUSED_SETTINGS: tuple[tuple[str, object], ...] = tuple(
    (key, value)
    for key, values in {
        "window_px": (0, 1, -5, 89, 1_000_000, "64", 64.5, True),
        "orientations": (0, -1, 4096, 10**9, 1.5, "8", True),
        "seed": (-1, 10**30, 2**64, "a", 0.5),
        "steps": (0, -1, 10**12, 10**30, "1", True),
        "epochs": (0, 10**12, 1.5),
        "batch": (0, -1, 10**9, 10**30, "x"),
        "momentum": (2, 1, -0.1, float("nan"), float("inf"), "0.9"),
        "learning_rate": (0, -1, 1e9, float("nan"), float("inf")),
        "weight_decay": (-1, 1e9, float("nan")),
        "workers": (-1, 10**6),
        "devices": (0, 10**9),
        "regime": (0, -1, 2, float("nan")),
        "task": ("zebra", 3, "os:system", ()),
    }.items()
    for value in values
)
# Options of `rotopath predict` and `evaluate` that must be refused.
REFUSED_OPTIONS: tuple[tuple[str, str], ...] = tuple(
    (option, value)
    for option, values in {
        "--rotations": ("0", "-1", "1000000000", "1.5", "x"),
        "--threshold": ("-5", "1.1", "nan", "inf", "x"),
        "--spacing-um-px": ("0", "-1", "1e9", "nan", "inf", "x"),
        "--min-area-um2": ("-1", "nan", "inf"),
        "--device": ("meta", "mps", "xpu", "tpu", "cuda:99", "", "cpu:7x", "\x1b[31m"),
        "--precision": ("8", "16", "", "x"),
        "--backend": ("", "tensorflow"),
        "--classes": ("zebra", ",", "\x1b[2J"),
        "--workers": ("-1", "1000000"),
        "--roi": ("nowhere.geojson", "."),
    }.items()
    for value in values
)


@dataclass(frozen=True)
class Change:
    """A changed input: the new content of the file, and whether the command must refuse it."""

    content: bytes
    must_refuse: bool = False
    arguments: tuple[str, ...] = ()  # added to the command


@dataclass(frozen=True)
class Format:
    """An input format: a folder with a valid input, the file that is changed, and the command that reads it."""

    name: str
    folder: str  # template, in the folder of the corpus
    file: str  # relative to the template
    command: tuple[str, ...]  # FOLDER stands for the folder of the case, TRAINED for a small model
    change: Callable[[random.Random, bytes], Change]
    weight: float = 1.0  # fraction of the cases, relative to other formats: less for slow commands
    expected: tuple[int, ...] = field(default=(0,))  # exit codes of the valid input
    # File that a command must write again, exactly as it was, if it is changed. If it is the file that was changed, and
    # is still whole, the command may keep it, and say so.
    restored: str = ""


# Changes of bytes


def change_bytes(rng: random.Random, content: bytes) -> tuple[bytes, str, int]:
    """Return changed bytes, the name of the change, and the position of the first changed byte."""
    kind = rng.choice(("flip", "flip", "flips", "cut", "cut", "overwrite", "overwrite", "insert", "delete", "empty"))
    size, length = len(content), rng.randint(1, 64)
    near = rng.randrange(min(size, HEADER_BYTES))  # two thirds of the changes are in headers, at the start or the end
    at = rng.choice((rng.randrange(size), near, size - 1 - near))
    changed = bytearray(content)
    if kind == "flip":
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == "flips":
        positions = sorted(rng.randrange(max(0, at - 500), min(size, at + 500)) for _ in range(length))
        for position in positions:
            changed[position] ^= 1 << rng.randrange(8)
        at = positions[0]
    elif kind == "cut":
        del changed[at:]
    elif kind == "overwrite":
        fill = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))[: size - at]
        changed[at : at + len(fill)] = fill
    elif kind == "insert":
        changed[at:at] = rng.choice((rng.randbytes(length), content[:length], b"[" * 20_000, b"9" * 5_000))
    elif kind == "delete":
        del changed[at : at + length]
    else:
        changed, at = bytearray(rng.choice((b"", b"\0", b"PK", b"{}", b"\xef\xbb\xbf"))), 0
    return bytes(changed), kind, at


def change_any(rng: random.Random, content: bytes) -> Change:
    """Change bytes of a format without known answers."""
    return Change(change_bytes(rng, content)[0])


def change_cut(fraction: float) -> Callable[[random.Random, bytes], Change]:
    """Return a function that changes bytes; a file of which less than `fraction` remains must be refused."""

    def change(rng: random.Random, content: bytes) -> Change:
        changed, kind, at = change_bytes(rng, content)
        is_cut = kind == "cut" and at < fraction * len(content)
        return Change(changed, is_cut or (kind == "empty" and changed != b"{}"))

    return change


def change_sealed(rng: random.Random, content: bytes) -> Change:
    """Change bytes of a file with a checksum of all bytes."""
    changed = change_bytes(rng, content)[0]
    return Change(changed, changed != content)


def change_checkpoint(rng: random.Random, content: bytes) -> Change:
    """Change bytes of a checkpoint; its parts have checksums, but the bytes between them have none."""
    changed, kind, _ = change_bytes(rng, content)
    if kind in ("flip", "flips", "overwrite"):
        with zipfile.ZipFile(io.BytesIO(content)) as parts:
            spans = [(part.header_offset, part.compress_size) for part in parts.infolist()]
        for offset, size in spans:
            names = sum(int.from_bytes(content[offset + at : offset + at + 2], "little") for at in (26, 28))
            start = offset + 30 + names
            if changed[start : start + size] != content[start : start + size]:
                return Change(changed, must_refuse=True)
        return Change(changed)
    return Change(changed, must_refuse=kind in ("cut", "empty"))


# Changes of values


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a JSON value: names of keys and indices of lists."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from list_paths(child, (*path, key))


def change_json(is_wrong: Callable[[tuple[Any, ...], Any], bool]) -> Callable[[random.Random, bytes], Change]:
    """Return a function that changes a value in a JSON file, or its bytes.

    `is_wrong` states whether a value at a path must be refused.
    """

    def change(rng: random.Random, content: bytes) -> Change:
        if rng.random() < 0.4:
            return change_cut(0.9)(rng, content)
        value = json.loads(content)
        path = rng.choice(list(list_paths(value)))
        new = deepcopy(rng.choice(ODD_VALUES))
        depth = rng.choice((0, 0, 0, 0, 5, 100_000))
        for _ in range(depth if depth < 100 else 0):
            new = [new]
        if not path:
            return Change(json.dumps(new).encode(), must_refuse=not isinstance(new, dict))
        inside = value
        for key in path[:-1]:
            inside = inside[key]
        if isinstance(inside, dict) and rng.random() < 0.2:
            del inside[path[-1]]
            return Change(json.dumps(value).encode(), is_wrong(path, None))
        inside[path[-1]] = "HERE" if depth > 100 else new
        text = json.dumps(value)
        if depth > 100:
            return Change(text.replace('"HERE"', "[" * depth + "]" * depth).encode(), must_refuse=True)
        return Change(text.encode(), is_wrong(path, new) or (isinstance(new, float) and abs(new) == float("inf")))

    return change


def change_values(rng: random.Random, content: bytes) -> Change:
    """Change a value in a JSON file, or its bytes, of a format without known answers."""
    return Change(change_json(lambda *_: False)(rng, content).content)


def is_wrong_threshold(path: tuple[Any, ...], value: Any) -> bool:
    """Return whether a threshold of a model must be refused: it is no number from 0 to 1."""
    return path[-1] == "threshold" and (
        isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1
    )


def is_wrong_score(path: tuple[Any, ...], value: Any) -> bool:
    """Return whether the accuracy of an evaluation must be refused."""
    return path[1:] == ("accuracy",) and (
        isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1
    )


def change_recipe(rng: random.Random, content: bytes) -> Change:
    """Change bytes or a setting of a recipe."""
    choice = rng.random()
    if choice < 0.35:
        return change_any(rng, content)
    lines = content.decode().splitlines()
    if choice < 0.75:
        key, value = rng.choice(REFUSED_SETTINGS)
        must_refuse = True
    else:
        key, value = rng.choice(lines).partition(" =")[0], rng.choice(ODD_VALUES[1:])
        must_refuse = False
    text = json.dumps(value) if not isinstance(value, float) else repr(value)
    text = rng.choice((text, text, text, "[" * 5_000 + "]" * 5_000)) if not must_refuse else text
    kept = [line for line in lines if line.partition(" =")[0] != key]
    return Change("\n".join([*kept, f"{key} = {text}"]).encode(), must_refuse)


def change_option(rng: random.Random, content: bytes) -> Change:
    """Add an option that must be refused."""
    return Change(content, must_refuse=True, arguments=rng.choice(REFUSED_OPTIONS))


PCAM = "camelyonpatch_level_2_split"
PREDICT = ("predict", "TRAINED", "FOLDER/FILE", "--out", "FOLDER/out", "--spacing-um-px", "1", "--device", "cpu")
PREDICT_BY = ("predict", "FOLDER", "FOLDER/../image.png", "--out", "FOLDER/out", *PREDICT[5:])
TRAIN = ("train", "FOLDER/recipe.toml", "--out", "FOLDER/run")
CHECK = ("data", "check", "FOLDER/manifest.csv")
IMPORT = ("data", "import", "FOLDER", "--out", "FOLDER/out", "--spacing-um-px", "0.25")
SLIDE = (*PREDICT[:5], "--device", "cpu", "--everywhere")
AGAIN = ("predict", "TRAINED", "FOLDER/image.png", *PREDICT[3:])
REPORT = ("study", "report", "FOLDER")
RUN = "tumor/N1-seed0"
FORMATS = (
    Format("png", "png", "image.png", PREDICT, change_cut(0.9)),
    Format("jpeg", "jpeg", "image.jpg", PREDICT, change_cut(0.8)),
    Format("bmp", "bmp", "image.bmp", PREDICT, change_cut(0.8)),
    Format("tiff", "tiff", "image.tif", SLIDE[:-1], change_cut(0.8)),
    Format("tiff header", "tiff", "image.tif", ("slides", "FOLDER/FILE"), change_any),
    Format("slide", "slide", "slide.svs", SLIDE[:-1], change_cut(0.4)),
    Format("slide header", "slide", "slide.svs", ("slides", "FOLDER/FILE"), change_any),
    Format("ome-tiff", "ome", "slide.ome.tif", SLIDE[:-1], change_any),
    Format("ndpi", "ndpi", "slide.ndpi", SLIDE, change_any, weight=0.5),
    Format("ndpi header", "ndpi", "slide.ndpi", ("slides", "FOLDER/FILE"), change_any),
    Format("dicom", "dicom", "slide/1.2.4-0.dcm", SLIDE, change_any, weight=0.5),
    Format("dicom header", "dicom", "slide/1.2.4-0.dcm", ("slides", "FOLDER/FILE"), change_any),
    Format("mirax", "mirax", "slide/Slidedat.ini", ("slides", "FOLDER/slide.mrxs"), change_any, weight=0.5),
    Format(
        "mirax index",
        "mirax",
        "slide/Index.dat",
        ("predict", "TRAINED", "FOLDER/slide.mrxs", *SLIDE[3:]),
        change_any,
        weight=0.5,
    ),
    Format("ome-zarr", "zarr", "slide.zarr/zarr.json", ("slides", "FOLDER/slide.zarr"), change_values),
    Format(
        "ome-zarr array",
        "zarr",
        "slide.zarr/0/zarr.json",
        ("predict", "TRAINED", "FOLDER/slide.zarr", *SLIDE[3:]),
        change_values,
        weight=0.5,
    ),
    Format("hdf5", "pcam", f"{PCAM}_train_x.h5", ("data", "check", "FOLDER"), change_cut(0.9), expected=(0, 1)),
    Format("hdf5 labels", "pcam", f"{PCAM}_valid_y.h5", ("data", "check", "FOLDER"), change_cut(0.9), expected=(0, 1)),
    Format("hdf5 in training", "pcam", f"{PCAM}_train_x.h5", TRAIN, change_cut(0.9), weight=0.3),
    Format("recipe", "training", "recipe.toml", TRAIN, change_recipe, weight=0.7),
    Format("recipe of a run", "model", "recipe.toml", ("evaluate", "FOLDER"), change_any, weight=0.3),
    Format(
        "plan of a study",
        "study",
        "study.toml",
        ("study", "run", "FOLDER/FILE", "--out", "FOLDER"),
        change_any,
        weight=0.5,
    ),
    Format("model.json", "model", "model.json", PREDICT_BY, change_json(is_wrong_threshold)),
    Format(
        "model.json in export",
        "model",
        "model.json",
        ("export", "FOLDER", "--out", "FOLDER/out"),
        change_json(is_wrong_threshold),
        weight=0.3,
    ),
    Format("operating_point.json", "old", "operating_point.json", PREDICT_BY, change_json(is_wrong_threshold)),
    Format("weights", "model", "weights.safetensors", PREDICT_BY, change_sealed),
    Format("weights without checksum", "old", "weights.safetensors", PREDICT_BY, change_cut(1.0), weight=0.5),
    Format(
        "weights in fine-tuning",
        "model",
        "weights.safetensors",
        ("train", "FOLDER/../recipe.toml", "--from", "FOLDER", "--out", "FOLDER/out"),
        change_sealed,
        weight=0.3,
    ),
    Format("resume.ckpt", "unfinished", "run/resume.ckpt", TRAIN, change_checkpoint, weight=0.5),
    Format("kept.safetensors", "unfinished", "run/kept.safetensors", TRAIN, change_any, weight=0.3),
    Format("provenance.json", "unfinished", "run/provenance.json", TRAIN, change_json(lambda *_: False), weight=0.3),
    Format("manifest", "points", "manifest.csv", CHECK, change_any),
    Format("points in CSV", "points", "a.csv", CHECK, change_any),
    Format("outlines in XML", "outlines", "a.xml", CHECK, change_cut(0.9)),
    Format("objects in GeoJSON", "geojson", "a.geojson", CHECK, change_json(lambda *_: False)),
    Format("import of COCO", "coco", "objects.json", IMPORT, change_values),
    Format("import of GeoJSON", "compressed", "a.geojson.gz", IMPORT, change_any),
    Format("import of CSV", "table", "a.csv", IMPORT, change_any),
    Format("import of XML", "outlines", "a.xml", (*IMPORT[:2], "FOLDER/a.xml", *IMPORT[3:]), change_cut(0.9)),
    Format("import of a mask", "masked", "a_mask.png", IMPORT, change_cut(0.5)),
    Format("import of .mat", "mat", "a.mat", IMPORT, change_any),
    Format(
        "region in GeoJSON",
        "roi",
        "roi.geojson",
        ("predict", "TRAINED", "FOLDER/image.png", "--roi", "FOLDER/FILE", *PREDICT[3:]),
        change_json(lambda *_: False),
    ),
    Format(
        "results of a slide",
        "finished",
        "out/image.png/summary.json",
        AGAIN,
        change_values,
        weight=0.5,
        restored="out/image.png/objects.geojson",
    ),
    Format(
        "objects of a slide",
        "finished",
        "out/image.png/objects.geojson",
        AGAIN,
        change_any,
        weight=0.5,
        restored="out/image.png/objects.geojson",
    ),
    Format(
        "stored map",
        "finished",
        "out/image.png/map.zip",
        (*AGAIN, "--reuse", "--threshold", "0.7"),
        change_any,
        weight=0.5,
    ),
    Format(
        "scores in a study", "study", f"{RUN}/evaluation-test.json", REPORT, change_json(is_wrong_score), weight=0.3
    ),
    Format(
        "provenance in a study", "study", f"{RUN}/provenance.json", REPORT, change_json(lambda *_: False), weight=0.3
    ),
    Format("log in a study", "study", f"{RUN}/log.csv", REPORT, change_any, weight=0.15),
    Format(
        "scores in evaluate",
        "study",
        f"{RUN}/evaluation-test.json",
        ("evaluate", f"FOLDER/{RUN}"),
        change_values,
        weight=0.5,
        restored=f"{RUN}/evaluation-test.json",
    ),
    Format("options", "png", "image.png", ("predict", MODEL, "FOLDER/FILE", "--out", "FOLDER/out"), change_option),
)


# The corpus: a valid input of each format


def make_corpus(root: Path) -> None:
    """Write a folder with a valid input for each format."""
    import h5py
    import numpy as np
    import scipy.io
    import tifffile
    import torch
    from PIL import Image

    sys.path.append(str(TESTS))
    slides = import_module("scanner_files")

    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    pixels = np.clip(generator.normal((190, 110, 170), 35, (96, 96, 3)), 0, 255).astype(np.uint8)
    for name in sorted({entry.folder for entry in FORMATS} - {"model", "old", "training", "unfinished", "study"}):
        (root / name).mkdir()
    image = Image.fromarray(pixels)
    for path in (
        "image.png",
        "png/image.png",
        "jpeg/image.jpg",
        "bmp/image.bmp",
        "roi/image.png",
        "finished/image.png",
    ):
        image.save(root / path)
    for name in ("points", "outlines", "geojson", "coco", "compressed", "table", "masked", "mat"):
        image.save(root / name / "a.png")
    image.save(root / "tiff/image.tif", dpi=(25_400, 25_400), compression="tiff_lzw")
    large = np.tile(pixels, (2, 2, 1))
    with tifffile.TiffWriter(root / "slide/slide.svs") as tiff:
        for step in (1, 4):
            tiff.write(
                np.ascontiguousarray(large[::step, ::step]),
                photometric="rgb",
                tile=(64, 64),
                compression="adobe_deflate",
                description="Aperio Image Library v11.2.1\r\n|AppMag = 10|MPP = 1.0",
                metadata=None,
            )
    with tifffile.TiffWriter(root / "ome/slide.ome.tif", ome=True) as tiff:
        size = {"PhysicalSizeX": 1.0, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": 1.0, "PhysicalSizeYUnit": "µm"}
        tiff.write(large, photometric="rgb", tile=(64, 64), subifds=1, metadata={"axes": "YXS", **size})
        tiff.write(np.ascontiguousarray(large[::2, ::2]), photometric="rgb", tile=(64, 64), subfiletype=1)
    slides.write_ndpi(root / "ndpi/slide.ndpi", large, 1.0)
    slides.write_dicom(root / "dicom/slide", large)
    slides.write_mirax(root / "mirax/slide.mrxs", large, (1, 1), (0, 0), 1.0)
    slides.write_ome_zarr(root / "zarr/slide.zarr", large)

    manifest = "image,annotation,group,split,spacing\n"
    for name, file in (("points", "a.csv"), ("outlines", "a.xml"), ("geojson", "a.geojson")):
        (root / name / "manifest.csv").write_text(f"{manifest}a.png,{file},p1,train,0.25\n")
    (root / "points/a.csv").write_text("x,y,class\n10,20,mitosis\n30.5,40,mitosis\n")
    vertices = "".join(f'<Vertex X="{x}" Y="{y}" Z="0"/>' for x, y in ((5, 5), (20, 5), (20, 20), (5, 20)))
    region = f'<Region Id="1" NegativeROA="0"><Vertices>{vertices}</Vertices></Region>'
    regions = f"<Regions><RegionAttributeHeaders/>{region}</Regions>"
    (root / "outlines/a.xml").write_text(
        f'<Annotations MicronsPerPixel="0.25"><Annotation Id="1">{regions}</Annotation></Annotations>'
    )
    ring = [[5, 5], [80, 5], [80, 80], [5, 80], [5, 5]]
    properties = {
        "objectType": "annotation",
        "classification": {"name": "tumor", "color": [1, 2, 3]},
        "measurements": {"a": 1.5},
    }
    geometry = {"type": "Polygon", "coordinates": [ring]}
    features = [{"type": "Feature", "geometry": geometry, "properties": properties}]
    collection = json.dumps({"type": "FeatureCollection", "features": features})
    for path in ("geojson/a.geojson", "roi/roi.geojson"):
        (root / path).write_text(collection)
    (root / "compressed/a.geojson.gz").write_bytes(gzip.compress(collection.encode(), mtime=0))
    (root / "table/a.csv").write_text("x,y,class\n10,20,tumor\n30.5,40,stroma\n")
    labels = np.zeros((96, 96), np.uint16)
    labels[10:20, 10:30], labels[50:70, 40:60] = 1, 2
    Image.fromarray(labels).save(root / "masked/a_mask.png")
    scipy.io.savemat(root / "mat/a.mat", {"inst_map": labels.astype(np.int32), "inst_type": np.array([[1], [2]])})
    polygon = [float(number) for corner in ring[:-1] for number in corner]
    boxes = [{"id": 1, "segmentation": [polygon], "bbox": [5.0, 5.0, 75.0, 75.0]}]
    boxes.append({"id": 2, "segmentation": {"size": [96, 96], "counts": [100, 50, 9066]}, "bbox": [1, 4, 2, 50]})
    objects = [{"image_id": 7, "category_id": 3, "iscrowd": 0, "area": 50.0, **box} for box in boxes]
    pictures = [{"id": 7, "file_name": "a.png", "height": 96, "width": 96}]
    coco = {"images": pictures, "categories": [{"id": 3, "name": "tumor"}], "annotations": objects}
    (root / "coco/objects.json").write_text(json.dumps(coco))
    for split, count in (("train", 8), ("valid", 4), ("test", 12)):
        for key in "xy":
            shape = (count, 96, 96, 3) if key == "x" else (count, 1, 1, 1)
            values = generator.integers(0, 256, shape, np.uint8) if key == "x" else np.arange(count) % 2
            with h5py.File(root / "pcam" / f"camelyonpatch_level_2_split_{split}_{key}.h5", "w") as file:
                chunks = (1, *shape[1:])
                file.create_dataset(key, data=values.astype(np.uint8).reshape(shape), chunks=chunks, compression="gzip")
    _make_runs(root)
    code = run_command(fill_in((*AGAIN, "--keep-map"), root / "finished", "", root))
    assert code == 0, "the results of a slide cannot be generated"


def _make_runs(root: Path) -> None:
    """Write run folders: a finished run, one in the form of rotopath 0.1, an unfinished one, and a study."""
    from rotopath import runs
    from rotopath.model_file import read_json
    from rotopath.training.checkpoint import RunRecorder

    recipe = {
        "task": '"tumor"',
        "data": json.dumps(str(root / "pcam")),
        "orientations": 1,
        "widths_of": 1,
        "epochs": 2,
        "steps": 1,
        "batch": 2,
        "checkpoint_steps": 1,
        "validation_steps": 1,
        "accelerator": '"cpu"',
        "cache": '"memory"',
        "seed": 0,
        "window_px": 88,
        "momentum": 0.9,
        "learning_rate": 0.01,
    }
    text = "\n".join(f"{key} = {value}" for key, value in recipe.items())
    for name in ("training", "unfinished", "study"):
        (root / name).mkdir()
        (root / name / "recipe.toml").write_text(text)
    (root / "recipe.toml").write_text(text)
    plan = '[tumor]\nrecipe = "recipe.toml"\norientations = [1]\nseed = [0]\n'
    (root / "study/study.toml").write_text(plan)
    (root / "pcam" / "recipe.toml").write_text(text.replace(json.dumps(str(root / "pcam")), '"DATA"'))
    train = ["train", str(root / "training/recipe.toml"), "--out"]
    study = root / "study" / RUN
    assert run_command([*train, str(study)]) == 0, "the training failed"
    assert run_command(["evaluate", str(study)]) == 0, "the evaluation failed"
    shutil.copytree(study, root / "model")
    shutil.copytree(study, root / "old")
    model = read_json(root / "old" / "model.json")
    (root / "old/model.json").unlink()
    (root / "old" / runs.OLD_POINT).write_text(json.dumps(model["operating_point"]))
    written = RunRecorder._write_checkpoint

    def stop(self: RunRecorder, trainer: Any) -> None:
        written(self, trainer)
        if trainer.global_step == 1:
            raise KeyboardInterrupt

    RunRecorder._write_checkpoint = stop  # type: ignore[method-assign]
    run_command([*train, str(root / "unfinished/run")])
    RunRecorder._write_checkpoint = written  # type: ignore[method-assign]
    assert (root / "unfinished/run/resume.ckpt").exists(), "the interrupted training has no checkpoint"


# Run a case


def fill_in(command: Sequence[str], folder: Path, file: str, corpus: Path) -> list[str]:
    """Return the words of a command for a case: with its folder, the file that is changed, and the trained model."""
    names = {"FOLDER": str(folder), "FILE": file, "TRAINED": str(corpus / "model")}
    return [re.sub("|".join(names), lambda found: names[found[0]], word) for word in command]


def run_command(words: Sequence[str]) -> int:
    """Run a command of rotopath in this process, and return its exit code, or EXIT_TRACEBACK after a traceback."""
    try:
        make_program()(words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return EXIT_TRACEBACK
    return 0


@functools.cache
def make_program() -> Any:
    """Return the program `rotopath`, as a function of the words of a command. Its options are parsed only once."""
    from typer.main import get_command

    from rotopath.cli import app

    return get_command(app)


def spare_work(folder: Path) -> None:
    """Leave out what takes long, and reads no changed file.

    All commands of this process share one loaded model of `folder`, which no case changes. The jobs of a study fail at
    once: a changed plan may be valid, and contain trainings of hours.
    """
    from rotopath import runs
    from rotopath.studies.jobs import JobProcess

    load = runs.load
    JobProcess.run = lambda *_: "jobs are left out"  # type: ignore[method-assign]

    @functools.cache
    def load_once() -> runs.Run:
        model = load(folder)
        object.__setattr__(model, "prepare", functools.cache(model.prepare))
        return model

    runs.load = lambda run: load_once() if Path(run) == folder else load(run)


def limit_time() -> None:
    """End this process after LIMIT_S seconds of processor time from now on, or LONGEST_S seconds."""
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(LONGEST_S)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)


def fork(action: Callable[[], int], output: Path) -> int:
    """Run a function in a forked process with limits, and return the exit code, or minus the signal that ended it."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(file, stream)
        limit_time()
        import torch

        torch.set_num_threads(1)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES,) * 2)
        code = action()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        code = EXIT_TRACEBACK
    os._exit(code)


def judge(code: int, output: str, must_refuse: bool) -> str:
    """Return the outcome of a command from its exit code and what it printed."""
    if code in (-signal.SIGALRM, -signal.SIGPROF):
        return "hang"
    if code == -signal.SIGKILL or re.search(r"MemoryError|[Cc]an't allocate memory|not enough memory", output):
        return "memory"
    if code < 0:
        return "crash"
    if code == EXIT_TRACEBACK or "Traceback (most recent call last)" in output or "the traceback is in" in output:
        return "traceback"
    if code == 0:
        return "silently wrong" if must_refuse else "ok"
    return "refused"


@dataclass(frozen=True)
class Case:
    """One case: a format, and the number that decides the change; None: the input is not changed."""

    entry: Format
    number: int | None
    seed: int

    def run(self, corpus: Path, work: Path, change: Change | None = None) -> tuple[int, Callable[[int, str], str]]:
        """Change the input in the folder `work`, and run the command on it in this process.

        `change` is used in place of the one that depends on the number of the case.
        Returns the exit code, and a function that returns the outcome from the exit code and what was printed.
        """
        entry = self.entry
        folder = work / entry.folder
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(corpus / entry.folder, folder, copy_function=os.link)  # a template is never written to
        change = change or self.change(corpus)
        path = folder / entry.file
        path.unlink()
        path.write_bytes(change.content)
        words = fill_in(entry.command, folder, entry.file, corpus)
        if entry.folder == "pcam" and entry.command[0] == "train":
            recipe = (folder / "recipe.toml").read_text()
            (folder / "recipe.toml").unlink()
            (folder / "recipe.toml").write_text(recipe.replace("DATA", str(folder)))
        words += change.arguments
        if entry.name == "recipe" and not change.must_refuse:
            words += ["--set", "epochs=2", "--set", "steps=1"]  # a valid recipe could train for hours
        if entry.name == "options" and "--spacing-um-px" not in change.arguments:
            words += ["--spacing-um-px", "1"]
        return run_command(words), lambda code, text: self.judge(code, text, corpus, work)

    def change(self, corpus: Path) -> Change:
        """Return the changed content of the file."""
        content = (corpus / self.entry.folder / self.entry.file).read_bytes()
        rng = random.Random(f"{self.seed} {self.entry.name} {self.number}")
        return Change(content) if self.number is None else self.entry.change(rng, content)

    def judge(self, code: int, text: str, corpus: Path, work: Path) -> str:
        """Return the outcome from the exit code, from what the command printed, and from the files that it wrote."""
        if self.number is None:
            return UNCHANGED if code in self.entry.expected else f"exit code {code}: {text.strip()}"
        outcome = judge(code, text, self.change(corpus).must_refuse)
        if outcome == "ok" and self.entry.restored:
            paths = (root / self.entry.folder / self.entry.restored for root in (corpus, work))
            template, written = (path.read_bytes() for path in paths)
            is_kept = written == self.change(corpus).content and is_json(written) and KEPT in text
            return "ok" if written == template or is_kept else "silently wrong"
        return outcome


def is_json(content: bytes) -> bool:
    """Return whether a file is whole, so that a person may have saved it."""
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def run_case(case: Case, corpus: Path, work: Path) -> tuple[str, str]:
    """Run one case in a process of its own, and return its outcome and the last line of what the command printed."""
    output = work / "output.txt"
    code = fork(lambda: case.run(corpus, work)[0], output)
    text = output.read_text(errors="replace")
    folder = work / case.entry.folder
    frames = re.findall(r'File "[^"]*(rotopath/[^"]+)", line (\d+)', text)
    for log in folder.rglob("*.log"):
        frames += re.findall(r'File "[^"]*(rotopath/[^"]+)", line (\d+)', log.read_text(errors="replace"))
    where = ":".join(frames[-1]) if frames else ""
    last = (text.strip().splitlines() or [""])[-1]
    return case.judge(code, text, corpus, work), f"{where} {last}".strip()


def run_batch(cases: Sequence[Case], corpus: Path, work: Path) -> list[str]:
    """Run cases one after another in a forked process, and return the outcomes of those that the process has survived.

    The process starts afresh for the next call, so that a case that ends it, or disturbs later cases, is noticed.
    """
    output, outcomes = work / "output.txt", work / "outcomes.txt"
    outcomes.write_text("")

    def run_all() -> int:
        with outcomes.open("w", buffering=1) as written:
            for case in cases:
                limit_time()
                os.ftruncate(1, 0)
                os.lseek(1, 0, os.SEEK_SET)
                code, find_outcome = case.run(corpus, work)
                sys.stdout.flush()
                sys.stderr.flush()
                outcome = find_outcome(code, output.read_text(errors="replace"))
                written.write(json.dumps(outcome) + "\n")
        return 0

    fork(run_all, output)
    return [json.loads(line) for line in outcomes.read_text().splitlines()]


def run_cases(cases: Sequence[Case], corpus: Path, work: Path, keep: Path | None) -> dict[str, Counter[str]]:
    """Run cases, and return how often each outcome occurred by format. Failures are printed.

    A case that fails, or ends its process, is run again in a process of its own, and this outcome counts. Changed files
    of failures are copied to `keep`.
    """
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    left = list(cases)
    while left:
        batch = left[:BATCH]
        outcomes = run_batch(batch, corpus, work)
        if len(outcomes) < len(batch):
            outcomes.append("crash")  # of the next case
        left = left[len(outcomes) :]
        for case, outcome in zip(batch, outcomes, strict=False):
            detail = ""
            if outcome in FAILURES:
                outcome, detail = run_case(case, corpus, work)
            if outcome in FAILURES:
                name = f"{case.entry.name}:{case.number}"
                print(f"{name}: {outcome}: {detail:.300}", flush=True)
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    target = keep / f"{re.sub('[^a-z0-9.]+', '-', name)}-{Path(case.entry.file).name}"
                    target.write_bytes(case.change(corpus).content)
            if case.number is None:
                if outcome != UNCHANGED:
                    raise SystemExit(f"The unchanged input of the format {case.entry.name} is refused: {outcome}")
            else:
                counts[case.entry.name][outcome] += 1
    return counts


def fuzz(cases: int, seed: int, formats: Sequence[str], jobs: int, keep: Path | None = None) -> dict[str, Counter[str]]:
    """Run cases of all formats, or of those that are named, and return how often each outcome occurred by format.

    A name may end in the number of a single case, such as `hdf5:17`. Changed files of failures are copied to `keep`.
    `jobs` is the number of processes.
    """
    import_all()
    named = dict((name.partition(":")[::2]) for name in formats)
    chosen = [entry for entry in FORMATS if not named or entry.name in named]
    total = sum(entry.weight for entry in chosen)
    counts: dict[str, Counter[str]] = {entry.name: Counter() for entry in chosen}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        root = Path(name)
        corpus, works = root / "corpus", [root / "corpus" / f"work-{number}" for number in range(jobs)]
        for work in works:
            work.mkdir(parents=True)
        if fork(lambda: make_corpus(corpus) or 0, root / "corpus.txt"):  # type: ignore[func-returns-value]
            raise SystemExit((root / "corpus.txt").read_text())
        spare_work(corpus / "model")
        for work in works:
            for shared in ("image.png", "recipe.toml"):
                os.link(corpus / shared, work / shared)
        os.chdir(works[0])
        waiting: list[Case] = []
        started = time.perf_counter()
        for entry in chosen:
            numbers: Sequence[int] = range(max(1, round(cases * entry.weight / total)))
            if only := named.get(entry.name, ""):
                numbers = [int(only)]
            waiting += [Case(entry, number, seed) for number in (None, *numbers)]
            if len(waiting) < jobs * BATCH and entry is not chosen[-1]:
                continue  # a process runs cases of several formats if they are few
            children = [
                _start(partial(_run_part, waiting[number::jobs], corpus, work, keep))
                for number, work in enumerate(works)
            ]
            for child, work in zip(children, works, strict=True):
                if os.waitpid(child, 0)[1]:
                    raise SystemExit("A process of the fuzzer failed.")
                for format_name, outcomes in json.loads((work / COUNTS).read_text()).items():
                    counts[format_name].update(outcomes)
            for done in dict.fromkeys(case.entry.name for case in waiting):
                print(f"{done}: {dict(counts[done])}", file=sys.stderr)
            print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            waiting = []
        for format_name, only in named.items():
            if only:
                (entry,) = (entry for entry in chosen if entry.name == format_name)
                print(f"{format_name}:{only}:", *run_case(Case(entry, int(only), seed), corpus, works[0]))
        os.chdir("/")
    return counts


def _run_part(part: Sequence[Case], corpus: Path, work: Path, keep: Path | None) -> None:
    os.chdir(work)
    (work / COUNTS).write_text(json.dumps(run_cases(part, corpus, work, keep)))


def _start(action: Callable[[], None]) -> int:
    """Run a function in a forked process, and return the ID of the process, which ends with 0 unless it fails."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        action()
        sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def import_all() -> None:
    """Import what the commands import, so that forked processes start fast. No code of torch may run here."""
    import h5py  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import openslide  # noqa: F401
    import scipy.io  # noqa: F401
    import tiffslide  # noqa: F401
    import zarr  # noqa: F401
    from PIL import Image

    import rotopath.cli
    import rotopath.reports.study_report
    import rotopath.runs
    import rotopath.training  # noqa: F401

    Image.init()
    make_program()


def table(counts: dict[str, Counter[str]]) -> list[list[str]]:
    """Return the rows of a table with the number of cases by format and outcome, and a row with their sums."""
    rows = [["format", "cases", *OUTCOMES]]
    everything = sum(counts.values(), Counter[str]())
    for name, outcomes in [*counts.items(), ("all", everything)]:
        rows.append([name, str(outcomes.total()), *(str(outcomes[outcome]) for outcome in OUTCOMES)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", default="", help="names of formats, separated by commas; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--out", type=Path, help="CSV file for the table")
    parser.add_argument("--keep", type=Path, help="folder for the changed files of failures")
    given = parser.parse_args()
    out, keep = (path and path.absolute() for path in (given.out, given.keep))
    counts = fuzz(given.cases, given.seed, list(filter(None, given.formats.split(","))), given.jobs, keep)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table(counts))
    print(text.getvalue())
    if out is not None:
        out.write_text(text.getvalue())
    if any(outcomes[outcome] for outcomes in counts.values() for outcome in FAILURES):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
