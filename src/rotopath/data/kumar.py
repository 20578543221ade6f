"""Kumar et al. (2017) and MoNuSeg: fields of several organs, with every nucleus outlined.

In: the folder with `Tissue Images`, and `Annotations` (Aperio XML) or `Label Maps` (16-bit images), and perhaps a
`split.csv` (image,split,organ). Out: a collection of fields. Where a field has both, the label map counts.
"""

import re
from pathlib import Path

from rotopath.data.aperio import read_spacing_um_px
from rotopath.data.collection import Collection, Finding, Picture
from rotopath.data.folders import IMAGE_SUFFIXES, files_in, listed, read_splits
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
    return _folder(root, "tissue images") is not None


def open_kumar(root: Path) -> Collection:
    """Every field that has a split and nuclei."""
    images = {path.stem: path for path in files_in(_folder(root, "tissue images"), IMAGE_SUFFIXES)}
    maps = {path.stem: path for path in files_in(_folder(root, "label maps"), IMAGE_SUFFIXES)}
    outlines = {path.stem: path for path in files_in(_folder(root, "annotations"), {".xml"})}
    splits, findings = _splits(root, images)

    pictures = []
    for stem, path in images.items():
        name = path.relative_to(root).as_posix()
        annotations = tuple(found[stem] for found in (maps, outlines) if stem in found)
        if stem not in splits:
            continue
        if not annotations:
            findings.append(Finding(name, "there is neither a label map nor an XML of its nuclei; it is left out."))
            continue
        split, organ = splits[stem]
        spacing = _spacing(path, outlines.get(stem))
        pictures.append(Picture(path, name, patient(stem), split, spacing, annotations=annotations, stratum=organ))

    for stem in sorted((maps.keys() | outlines.keys()) - images.keys()):
        path = maps.get(stem) or outlines[stem]
        findings.append(Finding(path.relative_to(root).as_posix(), "there is no image of this name."))
    return Collection("nuclei", "Kumar/MoNuSeg", root, tuple(pictures), tuple(findings), PUBLISHED)


def patient(stem: str) -> str:
    """The patient of a TCGA image; of any other, the image itself.

    >>> from rotopath.data.kumar import patient
    >>> patient("TCGA-A7-A13E-01Z-00-DX1"), patient("my-image")
    ('TCGA-A7-A13E', 'my-image')
    """
    found = re.match(r"TCGA-\w{2}-\w{4}", stem)
    return found[0] if found else stem


def _splits(root: Path, images: dict[str, Path]) -> tuple[dict[str, tuple[str, str]], list[Finding]]:
    """(split, organ) of each image that takes part: by split.csv, else so many of each organ, by a fixed seed."""
    table, findings = read_splits(root, "image")
    if table is None:
        organ_of = {code: organ for organ, codes in ORGANS.items() for code in codes}
        organs = {stem: organ for stem in images if (organ := organ_of.get(patient(stem).removeprefix("TCGA-")))}
        try:
            splits = split_strata(organs, KUMAR_FIELDS, SPLIT_SEED)
        except ValueError as error:
            findings.append(Finding("", f"{error} It goes into split.csv (image,split,organ)."))
            return {}, findings
        found = {stem: (split, organs[stem]) for stem, split in splits.items()}
    else:
        keys = {key: Path(key).stem if Path(key).suffix.lower() in IMAGE_SUFFIXES else key for key in table}
        found = {keys[key]: (row["split"], row.get("organ", "")) for key, row in table.items()}
        for stem in sorted(found.keys() - images.keys()):
            findings.append(Finding("split.csv", f"it lists {stem!r}, but there is no such image."))
    if unused := sorted(images.keys() - found.keys()):
        hint = "list them in split.csv (image,split,organ) to use them"
        sentence = f"{listed(unused, 'image')} without a split: left out; {hint}."
        findings.append(Finding("", sentence, is_problem=bool(not found)))
    return found, findings


def _spacing(image: Path, outlines: Path | None) -> float:
    """As the files themselves tell it, for fields of one's own may be put into this layout; else as published."""
    try:
        found = spacing_um_px(image)
    except UnreadableFileError:
        found = None  # a check of the contents will tell
    return found or (read_spacing_um_px(outlines) if outlines else None) or SPACING_UM_PX


def _folder(root: Path, name: str) -> Path | None:
    """A folder by its name, however it is capitalised: downloads differ."""
    return next((path for path in sorted(root.iterdir()) if path.is_dir() and path.name.lower() == name), None)
