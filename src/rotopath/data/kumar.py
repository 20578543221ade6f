"""Open the datasets of Kumar et al. (2017) and MoNuSeg: images of several organs, with an outline of every nucleus.

An image is called a field. The dataset folder contains the folder `Tissue Images`, and `Annotations` (Aperio XML) or
`Label Maps` (gray images of 8, 16 or 32 bits). The dataset may also be a flat folder, such as MoNuSeg's test set:
images and XML files of the same names, without subfolders. If a field has both an XML file and a label map, training
uses the label map. An optional `split.csv` has the columns `image`, `split` and, optionally, `organ`.

In the comments, "the paper" is that of Lafarge et al. (arXiv:2002.08725). It uses 24 images of Kumar et al. (2017).
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from rotopath.data.annotations import read_aperio_spacing_um_px
from rotopath.data.dataset import IMAGE_SUFFIXES, Dataset, Finding, Sample, find_files, index_by_stem
from rotopath.data.splits import KUMAR_FIELDS, SPLIT_FILE, note_without_split, read_split_file, split_strata
from rotopath.images.files import UnreadableFileError, spacing_um_px

SPACING_UM_PX = 0.25
SPLIT_SEED = 0  # for random splits if there is no split.csv, because the paper does not list the fields of its splits
ORGANS = {  # TCGA codes of the patients of the paper's 24 fields
    "breast": ("A7-A13E", "A7-A13F", "AR-A1AK", "AR-A1AS", "E2-A14V", "E2-A1B5"),
    "kidney": ("B0-5698", "B0-5710", "B0-5711", "HE-7128", "HE-7129", "HE-7130"),
    "liver": ("18-5592", "21-5784", "21-5786", "38-6178", "49-4488", "50-5931"),
    "prostate": ("CH-5767", "G9-6336", "G9-6348", "G9-6356", "G9-6362", "G9-6363"),
}
# Numbers in the paper, for comparison with the files of the user.
PUBLISHED = {
    "train": {"images": 12, "nuclei": 7337},
    "valid": {"images": 4, "nuclei": 1474},
    "test": {"images": 8, "nuclei": 4130},
}


def is_kumar(root: Path) -> bool:
    """Return whether a folder contains `Tissue Images`, or is a flat folder of images and XML files."""
    return _find_folder(root, "tissue images") is not None or is_flat(root)


def is_flat(root: Path) -> bool:
    """Return whether a folder itself, without its subfolders, contains an image and an XML file of the same name."""
    stems = {path.stem for path in root.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES}
    return any(path.stem in stems for path in root.iterdir() if path.suffix.lower() == ".xml")


def open_kumar(root: Path) -> Dataset:
    """Open all images (fields) that have a split and an annotation file.

    The other fields are left out; `findings` of the returned dataset states the reasons.
    """
    image_folder = _find_folder(root, "tissue images")
    flat = image_folder is None
    image_files = _list_files(root, IMAGE_SUFFIXES) if flat else find_files(image_folder, IMAGE_SUFFIXES)
    xml_files = _list_files(root, {".xml"}) if flat else find_files(_find_folder(root, "annotations"), {".xml"})
    images, findings = index_by_stem(root, image_files)
    label_maps, map_findings = index_by_stem(root, find_files(_find_folder(root, "label maps"), IMAGE_SUFFIXES))
    outlines, outline_findings = index_by_stem(root, xml_files)
    splits, split_findings = _assign_splits(root, images, flat)
    findings += [*map_findings, *outline_findings, *split_findings]

    samples = []
    for stem, (split, organ) in splits.items():
        path = images[stem]
        name = path.relative_to(root).as_posix()
        annotations = tuple(files[stem] for files in (label_maps, outlines) if stem in files)
        if not annotations:
            findings.append(
                Finding(name, "is left out, because it has neither a label map nor an XML file; add one of them.")
            )
            continue
        spacing = _find_spacing(path, outlines.get(stem))
        patient = find_patient(stem)
        samples.append(Sample(path, name, patient, split, spacing, annotations=annotations, stratum=organ))

    for stem in sorted((label_maps.keys() | outlines.keys()) - images.keys()):
        path = label_maps.get(stem) or outlines[stem]
        message = "there is no image with this name; add the image, or remove this file."
        findings.append(Finding(path.relative_to(root).as_posix(), message))
    # Published counts apply to the published split only.
    published = {} if flat or (root / SPLIT_FILE).is_file() else PUBLISHED
    return Dataset("objects", "Kumar/MoNuSeg", root, tuple(samples), tuple(findings), published, "nuclei")


def find_patient(stem: str) -> str:
    """Return the patient of an image: the first three parts of a TCGA file name, or any other name unchanged.

    >>> from rotopath.data.kumar import find_patient
    >>> find_patient("TCGA-A7-A13E-01Z-00-DX1"), find_patient("my-image")
    ('TCGA-A7-A13E', 'my-image')
    """
    match = re.match(r"TCGA-\w{2}-\w{4}", stem)
    return match[0] if match else stem


class _SplitAndOrgan(NamedTuple):
    split: str
    organ: str


def _assign_splits(root: Path, images: dict[str, Path], flat: bool) -> tuple[dict[str, _SplitAndOrgan], list[Finding]]:
    """Return the split and the organ of each image that has a split, and findings about the splits.

    `images` maps file names without suffix to paths. The keys of the returned dictionary are such names, too.

    Splits come from `split.csv`. Without this file, all images of a flat folder (`flat` is True) are in the split
    "test". If the folder is not flat, the images of the patients in ORGANS are divided at random within each organ, and
    images of other patients have no split. If an organ has such images, but not exactly 6, no image of the dataset has
    a split, and the findings contain a problem.
    """
    organ_of = {code: organ for organ, codes in ORGANS.items() for code in codes}
    organs = {stem: organ_of.get(find_patient(stem).removeprefix("TCGA-"), "") for stem in images}
    table, findings = read_split_file(root, "image", images, _remove_suffix)
    if table is not None:
        rows = sorted(table.items())
        return {stem: _SplitAndOrgan(row["split"], row.get("organ") or organs[stem]) for stem, row in rows}, findings
    if flat:
        message = (
            "images and XML files are in one folder, as in MoNuSeg's test set: all images have the split 'test'; for "
            "other splits, add a split.csv (image,split,organ)."
        )
        note = Finding("", message, is_problem=False)
        return {stem: _SplitAndOrgan("test", organs[stem]) for stem in sorted(images)}, [note]
    known = {stem: organ for stem, organ in organs.items() if organ}
    try:
        splits = split_strata(known, KUMAR_FIELDS, SPLIT_SEED)
    except ValueError as error:
        return {}, [Finding("", f"{error} List the split of each image in a split.csv (image,split,organ).")]
    if unknown := sorted(images.keys() - known.keys()):
        findings.append(note_without_split(unknown, "image"))
    return {stem: _SplitAndOrgan(splits[stem], known[stem]) for stem in sorted(splits)}, findings


def _remove_suffix(name: str) -> str:
    """Remove the suffix of an image file from a name; return any other name unchanged."""
    return Path(name).stem if Path(name).suffix.lower() in IMAGE_SUFFIXES else name


def _find_spacing(image: Path, outlines: Path | None) -> float:
    """Return the pixel spacing of an image, in µm/px.

    The pixel spacing comes from the image file or, if it is missing there, from the XML file `outlines`. If neither
    file specifies a pixel spacing, 0.25 µm/px is returned. `outlines` is None if there is no XML file.
    """
    try:
        spacing = spacing_um_px(image)
    except UnreadableFileError:
        spacing = None  # `check` reports the file
    return spacing or (read_aperio_spacing_um_px(outlines) if outlines else None) or SPACING_UM_PX


def _list_files(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the files with one of the suffixes that are directly in a folder, not in its subfolders."""
    return [path for path in find_files(folder, suffixes) if path.parent == folder]


def _find_folder(root: Path, name: str) -> Path | None:
    """Return the subfolder whose name, converted to lower case, is `name`, or None if there is no such subfolder."""
    return next((path for path in sorted(root.iterdir()) if path.is_dir() and path.name.lower() == name), None)
