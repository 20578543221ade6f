"""Kumar et al. (2017) and MoNuSeg: fields of several organs, with every nucleus outlined.

In: the folder with `Tissue Images`, and `Annotations` (Aperio XML) or `Label Maps` (16-bit images); or a flat folder of
images with an XML file of the same name each, as MoNuSeg's test set; and perhaps a `split.csv` (image,split,organ).
Out: a dataset of fields. Where a field has both, the label map counts.
"""

import re
from collections.abc import Collection as AbstractCollection
from pathlib import Path
from typing import NamedTuple

from rotopath.data.annotations import read_spacing_um_px
from rotopath.data.dataset import (
    IMAGE_SUFFIXES,
    SPLIT_FILE,
    Dataset,
    Finding,
    Sample,
    by_stem,
    files_in,
    left_out,
    read_splits,
)
from rotopath.data.splits import KUMAR_FIELDS, split_strata
from rotopath.images.files import UnreadableFileError, spacing_um_px

SPACING_UM_PX = 0.25
SPLIT_SEED = 0  # where no split.csv tells; the paper's choice of fields is not published
ORGANS = {  # of the 24 fields of the paper, as Kumar et al. list them
    "breast": ("A7-A13E", "A7-A13F", "AR-A1AK", "AR-A1AS", "E2-A14V", "E2-A1B5"),
    "kidney": ("B0-5698", "B0-5710", "B0-5711", "HE-7128", "HE-7129", "HE-7130"),
    "liver": ("18-5592", "21-5784", "21-5786", "38-6178", "49-4488", "50-5931"),
    "prostate": ("CH-5767", "G9-6336", "G9-6348", "G9-6356", "G9-6362", "G9-6363"),
}
PUBLISHED = {
    "train": {"images": 12, "nuclei": 7337},
    "valid": {"images": 4, "nuclei": 1474},
    "test": {"images": 8, "nuclei": 4130},
}


def is_kumar(root: Path) -> bool:
    return _folder(root, "tissue images") is not None or is_flat(root)


def is_flat(root: Path) -> bool:
    """Whether images and XML files of the same names lie in the folder itself."""
    stems = {path.stem for path in root.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES}
    return any(path.stem in stems for path in root.iterdir() if path.suffix.lower() == ".xml")


def open_kumar(root: Path) -> Dataset:
    """Every field that has a split and nuclei."""
    flat = _folder(root, "tissue images") is None
    found = _files_of(root, IMAGE_SUFFIXES) if flat else files_in(_folder(root, "tissue images"), IMAGE_SUFFIXES)
    images, findings = by_stem(root, found)
    maps, twin_maps = by_stem(root, files_in(_folder(root, "label maps"), IMAGE_SUFFIXES))
    found = _files_of(root, {".xml"}) if flat else files_in(_folder(root, "annotations"), {".xml"})
    outlines, twin_outlines = by_stem(root, found)
    splits, findings_of_splits = _splits(root, images, flat)
    findings += [*twin_maps, *twin_outlines, *findings_of_splits]

    samples = []
    for stem, split in splits.items():
        path = images[stem]
        name = path.relative_to(root).as_posix()
        annotations = tuple(found[stem] for found in (maps, outlines) if stem in found)
        if not annotations:
            findings.append(Finding(name, "there is neither a label map nor an XML of its nuclei; it is left out."))
            continue
        spacing, organ = _spacing(path, outlines.get(stem)), split.organ
        samples.append(Sample(path, name, patient(stem), split.name, spacing, annotations=annotations, stratum=organ))

    for stem in sorted((maps.keys() | outlines.keys()) - images.keys()):
        path = maps.get(stem) or outlines[stem]
        findings.append(Finding(path.relative_to(root).as_posix(), "there is no image of this name."))
    # The published counts are those of the published split; any other has other ones.
    published = {} if flat or (root / SPLIT_FILE).is_file() else PUBLISHED
    return Dataset("objects", "Kumar/MoNuSeg", root, tuple(samples), tuple(findings), published, "nuclei")


def patient(stem: str) -> str:
    """The patient of a TCGA image; of any other, the image itself.

    >>> from rotopath.data.kumar import patient
    >>> patient("TCGA-A7-A13E-01Z-00-DX1"), patient("my-image")
    ('TCGA-A7-A13E', 'my-image')
    """
    found = re.match(r"TCGA-\w{2}-\w{4}", stem)
    return found[0] if found else stem


class _Split(NamedTuple):
    name: str
    organ: str


def _splits(root: Path, images: dict[str, Path], flat: bool) -> tuple[dict[str, _Split], list[Finding]]:
    """The split and organ of each image that takes part: by split.csv, else so many of each organ, by a fixed seed.

    A flat folder is how test sets come: without a split.csv, all of its images are for testing.
    """
    organ_of = {code: organ for organ, codes in ORGANS.items() for code in codes}
    organs = {stem: organ_of.get(patient(stem).removeprefix("TCGA-"), "") for stem in images}
    table, findings = read_splits(root, "image", images, _stem)
    if table is not None:
        return {s: _Split(row["split"], row.get("organ") or organs[s]) for s, row in sorted(table.items())}, findings
    if flat:
        sentence = "images and XML files are in one folder, as in MoNuSeg's test set: all are in the split 'test'."
        return {stem: _Split("test", organs[stem]) for stem in sorted(images)}, [Finding("", sentence, False)]
    known = {stem: organ for stem, organ in organs.items() if organ}
    try:
        splits = split_strata(known, KUMAR_FIELDS, SPLIT_SEED)
    except ValueError as error:
        return {}, [Finding("", f"{error} It goes into a split.csv (image,split,organ).")]
    if unknown := sorted(images.keys() - known.keys()):
        findings.append(left_out(unknown, "image"))
    return {stem: _Split(splits[stem], known[stem]) for stem in sorted(splits)}, findings


def _stem(name: str) -> str:
    return Path(name).stem if Path(name).suffix.lower() in IMAGE_SUFFIXES else name


def _spacing(image: Path, outlines: Path | None) -> float:
    """As the files themselves tell it, for fields of one's own may be put into this layout; else as published."""
    try:
        found = spacing_um_px(image)
    except UnreadableFileError:
        found = None  # a check of the contents will tell
    return found or (read_spacing_um_px(outlines) if outlines else None) or SPACING_UM_PX


def _files_of(folder: Path, suffixes: AbstractCollection[str]) -> list[Path]:
    """Files of the folder itself, and not of those in it."""
    return [path for path in files_in(folder, suffixes) if path.parent == folder]


def _folder(root: Path, name: str) -> Path | None:
    """A folder by its name, however it is capitalised: downloads differ."""
    return next((path for path in sorted(root.iterdir()) if path.is_dir() and path.name.lower() == name), None)
