"""Tiny datasets in the official layouts, for tests to read and to damage; and the messages of findings about them."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from rotopath.data import Check, Dataset, check, open_data, problems


def pixels(height: int, width: int, *seed: int) -> np.ndarray:
    """Return random pixels that depend on the seed only."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write_image(path: Path, image: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return path


def write_text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def amida13(root: Path, cases: Iterable[int] = range(1, 24), size: tuple[int, int] = (60, 80)) -> Path:
    """Write two fields for each case: the first with mitoses at (10, 20) and (30, 40), the second without a CSV."""
    for case in cases:
        part = f"mitoses_image_data_part_{1 if case <= 12 else 2}"
        for field in ("01", "02"):
            write_image(root / part / f"{case:02d}" / f"{field}.tif", pixels(*size, case, int(field)))
        write_csv(root / "mitoses_ground_truth" / f"{case:02d}" / "01.csv", [(10, 20), (30, 40, 0.9)])
    return root


def outline_xml(*polygons: Sequence[tuple[float, float]], spacing: float = 0.25) -> str:
    """Return Aperio XML of polygons, each a list of (x, y)."""
    regions = "".join(
        f'<Region Id="{i}" NegativeROA="0"><Vertices>'
        + "".join(f'<Vertex X="{x}" Y="{y}" Z="0"/>' for x, y in polygon)
        + "</Vertices></Region>"
        for i, polygon in enumerate(polygons, 1)
    )
    return (
        f'<Annotations MicronsPerPixel="{spacing}"><Annotation Id="1"><Regions><RegionAttributeHeaders/>{regions}'
        "</Regions></Annotation></Annotations>"
    )


def box(top: int, left: int, side: int) -> list[tuple[float, float]]:
    """Return the outline of a square of pixels, from row `top` and column `left`."""
    x, y = left - 0.5, top - 0.5
    return [(x, y), (x + side, y), (x + side, y + side), (x, y + side)]


def kumar(root: Path, names: Sequence[str], split_csv: bool = True, size: int = 40) -> Path:
    """Write fields with two nuclei of 6 × 6 px, outlined in XML."""
    for i, name in enumerate(names):
        write_image(root / "Tissue Images" / f"{name}.tif", pixels(size, size, i))
        write_text(root / "Annotations" / f"{name}.xml", outline_xml(box(5, 8, 6), box(20, 22, 6)))
    if split_csv:
        splits = ("train", "valid", "test")
        rows = [(name, "breast", splits[i % 3]) for i, name in enumerate(names)]
        write_csv(root / "split.csv", [("image", "organ", "split"), *rows])
    return root


def pcam(root: Path, counts: tuple[int, int, int] = (8, 4, 4), size: int = 96) -> Path:
    """Write HDF5 files with patches of alternating classes, `counts` for training, validation and testing."""
    root.mkdir(parents=True, exist_ok=True)
    for number, (split, count) in enumerate(zip(("train", "valid", "test"), counts, strict=True)):
        images = np.stack([pixels(size, size, number, i) for i in range(count)])
        write_hdf5(root / pcam_name(split, "x"), "x", images)
        write_hdf5(root / pcam_name(split, "y"), "y", (np.arange(count, dtype=np.uint8) % 2).reshape(-1, 1, 1, 1))
    return root


def kaggle(root: Path, count: int = 20) -> Path:
    """Write patches of alternating classes in the form of PCam on Kaggle."""
    for i in range(count):
        write_image(root / "train" / f"{i:04x}.tif", pixels(96, 96, i))
    write_csv(root / "train_labels.csv", [("id", "label"), *((f"{i:04x}", i % 2) for i in range(count))])
    return root


def pcam_name(split: str, key: str) -> str:
    return f"camelyonpatch_level_2_split_{split}_{key}.h5"


def write_hdf5(path: Path, key: str, values: np.ndarray) -> None:
    with h5py.File(path, "w") as file:
        storage = {"chunks": (1, *values.shape[1:]), "compression": "gzip"} if values.ndim else {}
        file.create_dataset(key, data=values, **storage)


def truncate(path: Path, keep: float = 0.5) -> Path:
    """Cut off the end of a file; `keep` is the fraction that remains."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    return path


def open_and_check(path: Path) -> Check:
    return check(open_data(path))


def problem_messages(result: Check | Dataset) -> list[str]:
    return [str(finding) for finding in problems(result.findings)]


def note_messages(result: Check | Dataset) -> list[str]:
    return [str(finding) for finding in result.findings if not finding.is_problem]
