"""Import annotated images from the formats of other software, and export a dataset to COCO or GeoJSON.

`import_data` writes a manifest and, for each image, a GeoJSON file with its objects. Images stay where they are; the
manifest refers to them by relative paths. An annotation file and an image belong together if they have the same name
without suffixes and without words such as "_mask"; folders decide between several images of one name.
"""

import csv
import io
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

import numpy as np
from PIL import Image
from skimage.measure import points_in_poly

from rotopath.data.annotations import GEOJSON_SUFFIXES, is_rectangle, parse_points
from rotopath.data.dataset import (
    IMAGE_SUFFIXES,
    Annotated,
    DataError,
    Dataset,
    Finding,
    Sample,
    annotated_size_px,
    count_and_list,
    image_spacing_um_px,
    problems,
    read_table,
)
from rotopath.data.formats import open_data
from rotopath.data.import_masks import MASK_KINDS, MAX_CLASSES, MaskKind, read_mask, read_mat
from rotopath.data.import_objects import (
    JSON_SUFFIXES,
    RESULTS,
    Annotation,
    Classes,
    describe_corrections,
    expect_known_classes,
    make_coco,
    parse_classes,
    read_json_objects,
    read_table_objects,
    read_xml_objects,
    rename_classes,
)
from rotopath.data.kumar import find_patient
from rotopath.data.manifest import FRACTIONS, MANIFEST_FILE, SPLIT_SEED, is_class_folders
from rotopath.data.splits import SPLITS, find_split, split_fractions
from rotopath.images.containers import SLIDE_SUFFIXES
from rotopath.images.files import UnreadableFileError, is_plausible
from rotopath.images.geojson import (
    ACCEPTED,
    IGNORED_CLASS,
    REGION_CLASS,
    SlideObject,
    format_geojson,
    read_geojson,
    read_json,
)
from rotopath.images.outlines import Point, make_polygon
from rotopath.images.slides import expect_equal_spacing, open_slide
from rotopath.writing import atomic_folder, hold_lock, remove_leftovers, write_json, write_text

ImportAs = Literal["points", "outlines", "regions"]
Column = Literal["label", "points", "outlines", "regions"]  # of the manifest
TABLE_SUFFIXES = (".csv", ".tsv", ".txt")
PICTURE_SUFFIXES = IMAGE_SUFFIXES | SLIDE_SUFFIXES
# Folders and endings of file names that state what a file is, and not to which image it belongs.
MASK_WORDS = ("mask", "label", "instance", "annotation", "gt", "groundtruth", "ground_truth", "seg", "segmentation")
MASK_FOLDERS = {*MASK_WORDS, *(f"{word}s" for word in MASK_WORDS), "label maps", "labelmaps", "ground truth"}
KIND_FOLDERS = MASK_FOLDERS | {
    "image",
    "images",
    "img",
    "imgs",
    "tissue images",
    "point",
    "points",
    "xml",
    "geojson",
    "json",
    "mat",
}
MASK_ENDING = re.compile(rf"[ _.-]({'|'.join(MASK_WORDS)})s?$", re.IGNORECASE)
FILE_OF_FOLDER = {
    "objects",
    "annotations",
    "annotation",
}  # files of these names belong to the image named as the folder
IGNORED_NAMES = {"ignore", "ignore*", "ignored", "ambiguous"}
TABLE_COLUMNS = {  # columns of a table about images, and the column of the manifest
    **dict.fromkeys(("group", "patient", "case", "patient_id", "case_id"), "group"),
    **dict.fromkeys(("split", "set"), "split"),
    **dict.fromkeys(("spacing", "spacing_um_px", "mpp"), "spacing"),
    "organ": "organ",
}
LABEL_COLUMNS = ("label", "class")  # columns of such a table with the class of each image, if there are no objects
ANNOTATION_FOLDER = "annotations"
CONTACT_SHEET = "contact-sheet.png"  # `rotopath data import` draws it
VALID_OF_TRAIN = {"train": 0.8, "valid": 0.2}  # if the source has training images, but no images for validation
MIN_CONTAINED = 3  # an outline without a class that contains so many objects is not an object
SPLIT_TRIES = 50  # random splits of which the one that shows most classes is proposed
MIN_PATIENTS = 3  # with fewer patients, no split into training, validation and test sets is possible


@dataclass(frozen=True)
class _File:
    """A file of a source, with the names of its folders from the source on, in lower case without KIND_FOLDERS."""

    path: Path
    root: Path

    @property
    def folders(self) -> tuple[str, ...]:
        parts = (self.root.name, *self.path.relative_to(self.root).parent.parts)
        return tuple(part.casefold() for part in parts if part.casefold() not in KIND_FOLDERS)

    @property
    def is_named_as_mask(self) -> bool:
        parts = (self.root.name, *self.path.relative_to(self.root).parent.parts)
        return bool(MASK_ENDING.search(_stem(self.path))) or any(part.casefold() in MASK_FOLDERS for part in parts)


@dataclass
class _Item:
    """An image with everything that is known about it: one row of the manifest.

    `known` is the row of an image in an earlier manifest, with its split; it is empty for a new image.
    """

    file: _File
    annotation: Annotation | None = None
    objects: list[SlideObject] = field(default_factory=list)
    label: str = ""
    row: dict[str, str] = field(default_factory=dict)  # group, split, spacing, organ
    known: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.file.path.name


def import_data(
    sources: Sequence[Path | str],
    out: Path | str,
    classes: str | None = None,
    read_as: ImportAs | None = None,
    columns: str | None = None,
    masks: MaskKind | None = None,
    patient: str | None = None,
    table: Path | str | None = None,
    label: str | None = None,
    spacing_um_px: float | None = None,
    override_spacing: bool = False,
    overwrite: bool = False,
    finish: Callable[[Dataset, Path], None] = lambda _dataset, _folder: None,
) -> Dataset:
    """Import annotated images: write a manifest and GeoJSON files to the folder `out`, and return the dataset.

    - `sources`: files and folders with images and their annotations: GeoJSON (of QuPath, or written by this package),
      COCO JSON, CSV tables of positions, Aperio XML, `.mat` files of HoVer-Net, label maps and masks; a folder of
      patches with a subfolder for each class; or the `out` of an earlier import. If there are no images among them,
      images are searched beside the annotations.
    - `out`: a new or empty folder. With `overwrite`, it may also be the folder of an earlier import, which is replaced.
    - `classes`: new names of classes, such as "1=tumor,2=stroma,other=": an empty name leaves a class out. The name
      "Ignore*" makes the outlines of a class ignored areas. "=tumor" is for objects that have no class.
    - `read_as`: "points", "outlines" or "regions": what the objects are used for. By default, outlines if all objects
      have an outline, and points if all of them are points or bounding boxes. "regions" are areas with a class, such as
      tumor and stroma, from which squares with labels are taken.
    - `columns`: order of the columns of tables without a header, such as "row,column" or "x,y,class".
    - `masks`: what a number in a gray mask is: "objects", "binary" or "classes" (see `import_masks.read_mask`).
    - `patient`: a regular expression that finds the patient in the path of an image. If it has a group, the patient is
      the first group.
    - `table`: CSV file with a row for each image: its name in the column `image` or in the first column, and the
      columns `group` (or `patient`, `case`), `split`, `spacing` and `organ`, all optional. Other images are left out.
    - `label`: column of the table with the class of each image; annotations of objects are then not read. If there are
      none, and the table has a column `label` or `class`, this column is used.
    - `spacing_um_px`: pixel spacing of images that have none in `table` or an earlier import. If an image or its
      annotation file specifies one that differs by more than 1 %, `override_spacing` is required, too.
    - `finish`: function that may write more files. It is called with the dataset and its folder, which has a temporary
      name until all files are written.

    Splits are those of the table or of folders; otherwise, patients are divided at random. If a source is a folder that
    an earlier import has written, its images keep their patients and splits, annotations in other sources replace its
    own, and images of new patients are for training. Notes in `findings` of the returned dataset state how the sources
    were understood. Raises DataError or UnreadableFileError before anything is written if a source cannot be
    understood.
    """
    out = Path(out)
    _expect_options(out, sources, read_as, masks, overwrite)
    _expect_spacing_options(spacing_um_px, override_spacing)
    if label is not None and (table is None or read_as is not None):
        raise DataError(f"--label {label} is a column of --table with a class for each image; use it without --as.")
    renamed = parse_classes(classes)
    notes: list[Finding] = []
    earlier = [source for source in map(Path, sources) if (source / MANIFEST_FILE).is_file()]
    others = [source for source in map(Path, sources) if source not in earlier]
    items, earlier_column = _read_earlier(earlier)
    files = [file for file in _collect(others) if not file.path.resolve().is_relative_to(out.resolve())]
    if table is not None:
        files = [file for file in files if file.path.resolve() != Path(table).resolve()]
    known = {item.file.path.resolve() for item in items}
    pictures = [file for file in files if _has_suffix(file.path, PICTURE_SUFFIXES)] or _find_beside(files)
    are_class_folders = all(source.is_dir() and is_class_folders(source) for source in others)
    mask_of = {} if are_class_folders or label else _find_masks(pictures)
    items += [_Item(file) for file in pictures if file.path not in mask_of and file.path.resolve() not in known]
    if not items:
        raise DataError(f"No images were found in {_list_sources(sources)}; give the folder with the images as well.")
    order = [name.strip() for name in columns.split(",")] if columns else None
    annotations = [] if label else _read_annotations(files, mask_of, order, masks, notes, given=set(others))
    if annotations or earlier_column not in (None, "label"):
        if earlier_column == "label":
            raise DataError(
                f"{_list_sources(earlier)} has a class for each image, but the other sources describe objects; import "
                f"them to another folder."
            )
        _pair(items, annotations, notes)
        kind = read_as or earlier_column
        items, column = _finish_objects(items, renamed, kind, spacing_um_px, override_spacing, notes)
        rows = _read_image_table(table, items, (), notes)
    else:
        rows = _read_image_table(table, items, (label,) if label else LABEL_COLUMNS, notes)
        if rows and any("label" in row for row in rows.values()):
            labels = [item.label or rows.get(id(item), {}).get("label", "") for item in items]
        elif are_class_folders:
            labels = [item.label or item.file.path.parent.name for item in items]
        else:
            raise DataError(
                f"No annotations were found in {_list_sources(sources)}; expected GeoJSON, COCO, CSV, XML or .mat "
                f"files or masks with the names of the images, a folder of images for each class, or a --table with "
                f"the column `class`."
            )
        items, column = _label_images(items, labels, renamed, notes), "label"
    items = _describe_images(items, rows, table, patient, notes)
    _find_spacings(items, spacing_um_px, override_spacing)
    _assign_splits(items, column == "label", notes)
    with hold_lock(out):
        _expect_free(out, overwrite)  # another process may have written to it
        with atomic_folder(out) as folder:
            _write_manifest(folder, out, items, column)
            finish(open_data(folder), folder)
    dataset = open_data(out)
    return replace(dataset, findings=(*dataset.findings, *notes))


def _expect_options(
    out: Path, sources: Sequence[Path | str], read_as: str | None, masks: str | None, overwrite: bool
) -> None:
    """Raise DataError if an option has an invalid value, or if `out` contains files that must be kept."""
    _expect_free(out, overwrite)
    for source in map(Path, sources):
        if source.exists() and source.resolve().is_relative_to(out.resolve()):
            raise DataError(f"--out {out} contains the source {source}; choose a new folder.")
    if read_as not in (None, *get_args(ImportAs)):
        raise DataError(f"--as is {read_as!r}; choose {', '.join(get_args(ImportAs))}.")
    if masks not in (None, *MASK_KINDS):
        raise DataError(f"--masks is {masks!r}; choose {', '.join(MASK_KINDS)}.")


def _expect_spacing_options(spacing_um_px: float | None, override_spacing: bool) -> None:
    """Raise DataError if a pixel spacing is implausible or missing."""
    if override_spacing and spacing_um_px is None:
        raise DataError("--override-spacing needs the spacing to use; add --spacing-um-px.")
    if spacing_um_px is not None and not is_plausible(spacing_um_px):
        raise DataError(f"--spacing-um-px is {spacing_um_px:g} µm/px; expected 0.05 to 5 µm/px.")


def _expect_empty(out: Path, remedy: str, fault: str = "") -> None:
    """Raise DataError if `out` is a file, or a folder that contains files. `fault` may name another reason."""
    remove_leftovers(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out {out} {fault or 'exists and is not empty'}; {remedy}.")


def _expect_free(out: Path, overwrite: bool) -> None:
    """Raise DataError if `out` is not a new or empty folder, or with `overwrite`, the folder of an earlier import."""
    remove_leftovers(out)
    if not _is_import(out):
        fault = "is not a folder that `rotopath data import` has written" if overwrite else ""
        _expect_empty(out, "choose a new folder", fault)
    elif not overwrite:
        _expect_empty(out, "choose a new folder, or add --overwrite to replace this earlier import")


def _is_import(out: Path) -> bool:
    """Return whether a folder has the files that an import writes, and no others."""
    if not (out / MANIFEST_FILE).is_file():
        return False
    files = (path.relative_to(out) for path in out.rglob("*") if not path.is_dir())
    return all(
        path.suffix == ".geojson" if path.parts[0] == ANNOTATION_FOLDER else str(path) in (MANIFEST_FILE, CONTACT_SHEET)
        for path in files
    )


def _list_sources(sources: Iterable[Path | str]) -> str:
    return " and ".join(str(source) for source in sources)


# Files


def _collect(sources: Sequence[Path]) -> list[_File]:
    """Return all files of the sources, each once. Hidden files are left out."""
    files: dict[Path, _File] = {}
    for source in sources:
        if not source.exists():
            raise DataError(f"{source} does not exist.")
        if source.is_file():
            files.setdefault(_locate(source), _File(source, source.parent))
            continue
        seen: set[Path] = set()
        for parent, folders, names in os.walk(source, followlinks=True):
            resolved = Path(parent).resolve()
            if resolved in seen:  # a link to a folder above it would otherwise be followed without end
                folders.clear()
                continue
            seen.add(resolved)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if set(RESULTS) <= set(names):  # the other files, such as images of the objects, are not annotated
                names = RESULTS[:1]
            for name in sorted(names):
                if not name.startswith("."):
                    path = Path(parent) / name
                    files.setdefault(_locate(path), _File(path, source))
    return list(files.values())


def _locate(path: Path) -> Path:
    """Return the absolute path of a file. Links to folders are resolved, but not a link to a file.

    The target of such a link may have another name, without the suffix, and several links may have the same target.
    """
    return path.parent.resolve() / path.name


def _has_suffix(path: Path, suffixes: Collection[str]) -> bool:
    return path.name.lower().endswith(tuple(suffixes))


def _stem(path: Path) -> str:
    """Return the name of a file without suffixes that state its type: `a` for `a.geojson.gz`."""
    name = path.name.removesuffix(".gz")
    return PurePosixPath(name).stem.removesuffix(".ome")


def _find_masks(pictures: Sequence[_File]) -> dict[Path, _File]:
    """Return the image files that are masks of other image files.

    A mask has the name of an image, with an ending such as "_mask", or in a folder such as `masks`, or with a content
    that is not that of a photograph: one channel, or few colors.
    """
    by_stem: defaultdict[str, list[_File]] = defaultdict(list)
    for file in pictures:
        by_stem[MASK_ENDING.sub("", _stem(file.path)).casefold()].append(file)
    masks: dict[Path, _File] = {}
    for group in by_stem.values():
        named = [file for file in group if file.is_named_as_mask]
        if not named and len(group) == 2:
            named = [file for file in group if _looks_like_mask(file.path)]
        if len(named) < len(group):
            masks |= {file.path: file for file in named}
    return masks


def _looks_like_mask(path: Path) -> bool:
    """Return whether an image file has one channel, or few colors."""
    if not _has_suffix(path, IMAGE_SUFFIXES - {".jpg", ".jpeg"}):
        return False
    try:
        with Image.open(path) as image:
            return len(image.getbands()) == 1 or image.convert("RGB").getcolors(MAX_CLASSES) is not None
    except Exception:  # decoders raise errors of any type; `check` reports the file
        return False


def _find_beside(files: Sequence[_File]) -> list[_File]:
    """Return the images beside annotation files, or beside a folder of results: those with the name of the file."""
    found: dict[Path, _File] = {}
    for file in files:
        is_result = file.path.name in RESULTS
        stem = file.path.parent.name if is_result else _stem(file.path)
        folder = file.path.resolve().parents[2 if is_result else 0]
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if stem in (path.name, _stem(path)) and _has_suffix(path, PICTURE_SUFFIXES) and path.is_file():
                found[path.resolve()] = _File(path, folder)
    return list(found.values())


def _read_earlier(folders: Sequence[Path]) -> tuple[list[_Item], Column | None]:
    """Return the images of earlier imports with their annotations, and the column of their manifests."""
    datasets = [open_data(folder) for folder in folders]
    for dataset in datasets:
        if faulty := problems(dataset.findings):
            raise DataError(f"{dataset.root / MANIFEST_FILE}: {faulty[0]}")
        if _find_column(dataset) != _find_column(datasets[0]):
            raise DataError(f"{_list_sources(folders)} have different types of annotations; import them one by one.")
    items = []
    for dataset in datasets:
        for sample in _list_images(dataset):
            item = _Item(_File(sample.path, sample.path.parent), label=sample.label or "")
            item.known = {"split": sample.split, "spacing": f"{sample.spacing_um_px:.6g}", "organ": sample.stratum}
            named = [
                sample.path,
                *([sample.path.relative_to(dataset.root)] if sample.path.is_relative_to(dataset.root) else []),
            ]
            if sample.case not in map(os.path.normpath, named):  # otherwise, the patient is unknown
                item.known["group"] = sample.case
            if _find_column(dataset) != "label":
                objects = tuple(_read_objects(dataset.annotated, sample))
                item.annotation = Annotation(sample.annotations[0] if sample.annotations else sample.path, "", objects)
            items.append(item)
    return items, _find_column(datasets[0]) if datasets else None


def _find_column(dataset: Dataset) -> Column:
    """Return the column of a manifest with the annotations of a dataset."""
    if dataset.annotated == "labels":
        return "regions" if any(sample.box for sample in dataset.samples) else "label"
    return "points" if dataset.annotated == "points" else "outlines"


def _list_images(dataset: Dataset) -> list[Sample]:
    """Return a sample for each image file of a dataset: the first, if there are several parts of an image."""
    return list({sample.path: sample for sample in reversed(dataset.samples)}.values())[::-1]


# Annotations


def _read_annotations(
    files: Sequence[_File],
    mask_of: Mapping[Path, _File],
    columns: Sequence[str] | None,
    masks: MaskKind | None,
    notes: list[Finding],
    given: Collection[Path],
) -> list[tuple[_File, Annotation]]:
    """Read all annotation files. `given` are the sources; a file that is a source must be understood."""
    annotations: list[tuple[_File, Annotation]] = []
    tables: list[Classes] = []
    skipped = []
    kinds: Counter[str] = Counter()
    stems = {MASK_ENDING.sub("", _stem(path)) for path in mask_of} | {
        _stem(file.path) for file in files if _has_suffix(file.path, PICTURE_SUFFIXES)
    }
    json_files = {(file.path.parent, _stem(file.path)) for file in files if _has_suffix(file.path, JSON_SUFFIXES)}
    for file in files:
        path = file.path
        found: Sequence[Annotation] | Classes | None = None
        if _has_suffix(path, JSON_SUFFIXES):
            kind, found = "JSON file", read_json_objects(path)
            if found is not None:
                kind = "COCO file" if found and not found[0].counts_from_origin else "GeoJSON file"
                if path.name == RESULTS[0] and (spacing := _read_spacing_of_results(path.with_name(RESULTS[1]))):
                    found = [replace(annotation, spacing_um_px=spacing) for annotation in found]
        elif path.suffix.lower() == ".xml":
            kind, found = "Aperio XML file", [read_xml_objects(path)]
        elif path.suffix.lower() == ".mat":
            objects, size_px = read_mat(path)
            kind, found = "MATLAB file of HoVer-Net", [Annotation(path, "", tuple(objects), size_px=size_px)]
        elif _has_suffix(path, TABLE_SUFFIXES):
            if (path.parent, _stem(path)) in json_files:
                continue  # a table of the same objects
            if path.suffix.lower() == ".txt" and path not in given and _stem(path) not in stems:
                continue  # such as README.txt
            kind, found = "table of positions", read_table_objects(path, columns)
        else:
            continue
        if found is None:
            if path in given:
                raise UnreadableFileError(
                    path, "is not understood; expected GeoJSON, COCO, or a table with the columns row and column."
                )
            skipped.append(path.name)
        elif isinstance(found, Classes):
            tables.append(found)
        else:
            kinds[kind] += 1
            annotations += [(file, annotation) for annotation in found]
    for path, file in mask_of.items():
        objects, size_px = read_mask(path, masks, _find_classes(path, tables))
        kinds["mask"] += 1
        annotations.append((file, Annotation(path, "", tuple(objects), size_px=size_px)))
    for kind, count in sorted(kinds.items()):
        first, *rest = kind.split(" of ")
        plural = " of ".join([first + ("s" if count > 1 else ""), *rest])
        notes.append(Finding("", f"read {count} {plural}.", is_problem=False))
    if skipped:
        notes.append(
            Finding("", f"left out {count_and_list(skipped, 'file')}, which describe no objects.", is_problem=False)
        )
    notes += [note for _, annotation in annotations for note in annotation.notes]
    results = [file.path for file, _ in annotations if file.path.name == RESULTS[0]]
    notes += describe_corrections([path for path in results if path.with_name(RESULTS[1]).is_file()])
    return annotations


def _read_spacing_of_results(summary: Path) -> float | None:
    """Return the pixel spacing with which an image was predicted, from the summary in its folder of results."""
    try:
        spacing = read_json(summary)["slide"]["spacing_um_px"]
    except (UnreadableFileError, KeyError, TypeError):
        return None
    return float(spacing) if isinstance(spacing, int | float) and is_plausible(spacing) else None


def _find_classes(mask: Path, tables: Sequence[Classes]) -> dict[int, str] | None:
    """Return the class of each object of a label map, from a table of the same name or a table that names the image."""
    stem = MASK_ENDING.sub("", _stem(mask))
    for table in tables:
        if "" in table.names and _stem(table.path) in (stem, _stem(mask)):
            return table.names[""]
        for image, names in table.names.items():
            if image and PurePosixPath(image.replace("\\", "/")).name in (stem, mask.name, _stem(mask)):
                return names
    return None


# Pairs of images and annotations


def _pair(items: Sequence[_Item], annotations: Sequence[tuple[_File, Annotation]], notes: list[Finding]) -> None:
    """Assign each annotation to its image. Raises DataError if this is not possible without a guess."""
    by_name: defaultdict[str, list[_Item]] = defaultdict(list)
    for item in items:
        for key in {item.name.casefold(), _stem(item.file.path).casefold(), item.file.path.stem.casefold()}:
            by_name[key].append(item)
    missing: list[str] = []
    corrected: set[int] = set()  # images of an earlier import
    for file, annotation in annotations:
        if len(items) == len(annotations) == 1 and not annotation.image:
            found = list(items)
        else:
            found = _find_images(by_name, file, annotation)
        if len(found) > 1:
            names = count_and_list([str(item.file.path) for item in found], "image")
            raise DataError(
                f"{annotation.path} belongs to {annotation.image or _stem(annotation.path)!r}, but the sources have "
                f"{names} of this name; rename images, or import the folders one by one."
            )
        if not found:
            missing.append(annotation.image or annotation.path.name)
            continue
        if (earlier := found[0].annotation) is not None and not (found[0].known and id(found[0]) not in corrected):
            raise DataError(
                f"{found[0].file.path} has annotations in {earlier.path} and in {annotation.path}; give only one of "
                f"the two as a source."
            )
        found[0].annotation = annotation
        if found[0].known:
            corrected.add(id(found[0]))
    if corrected:
        message = f"the annotations of {len(corrected)} images of the earlier import are replaced."
        notes.append(Finding("", message, is_problem=False))
    if annotations and len(missing) == len(annotations):
        raise DataError(
            f"No image was found for {count_and_list(missing, 'annotation')}; give the folder with the images as "
            f"another source; an image needs the name of its annotations."
        )
    if missing:
        message = (
            f"there is no image for {count_and_list(missing, 'annotation')}; give the folder with these images as "
            f"another source."
        )
        notes.append(Finding("", message))


def _find_images(by_name: Mapping[str, list[_Item]], file: _File, annotation: Annotation) -> list[_Item]:
    """Return the images to which an annotation may belong: those of its name whose folders agree best."""
    if annotation.image:
        path = PurePosixPath(annotation.image.replace("\\", "/"))
        names, folders = [path.name, _stem(Path(path.name))], [part.casefold() for part in path.parent.parts]
    else:
        stem = _stem(file.path)
        names, folders = (
            [stem, _stem(Path(stem)) if _has_suffix(Path(stem), PICTURE_SUFFIXES) else stem],
            list(file.folders),
        )
        names.append(MASK_ENDING.sub("", stem))
        if stem.casefold() in FILE_OF_FOLDER:
            names += [file.path.parent.name, Path(file.path.parent.name).stem]
    for name in names:
        if found := by_name.get(name.casefold()):
            scores = [_count_common(item.file.folders, folders) for item in found]
            return [item for item, score in zip(found, scores, strict=True) if score == max(scores)]
    return []


def _count_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many of the last names of two lists of folders are equal."""
    count = 0
    for ours, theirs in zip(reversed(first), reversed(second), strict=False):
        if ours != theirs:
            break
        count += 1
    return count


# Objects and labels


def _finish_objects(
    items: Sequence[_Item],
    renamed: Mapping[str, str],
    read_as: ImportAs | None,
    spacing_um_px: float | None,
    override_spacing: bool,
    notes: list[Finding],
) -> tuple[list[_Item], str]:
    """Convert objects to pixels, rename their classes, and return the annotated images and the manifest's column."""
    annotated = [item for item in items if item.annotation is not None]
    unused = [item for item in items if item.annotation is None]
    if masks := [item.name for item in unused if item.file.is_named_as_mask]:
        message = f"left out {count_and_list(masks, 'mask')} without an image of the same name."
        notes.append(Finding("", message, is_problem=False))
    if without := [item.name for item in unused if not item.file.is_named_as_mask]:
        message = (
            f"left out {count_and_list(without, 'image')} without annotations; to use an image as one without "
            f"objects, give it an empty annotation file."
        )
        notes.append(Finding("", message, is_problem=False))
    present = Counter(shape.class_name for item in annotated if item.annotation for shape in item.annotation.objects)
    expect_known_classes(renamed, present)
    ignored = {name: IGNORED_CLASS for name in present if name.casefold() in IGNORED_NAMES and name not in renamed}
    if names := [name for name in ignored if name != IGNORED_CLASS]:
        message = (
            f"outlines of the class {names[0]!r} are ignored areas; --classes {names[0]}={names[0]} makes them objects."
        )
        notes.append(Finding("", message, is_problem=False))
    boxes = points = outlines = regions = rejected = accepted = 0
    for item in annotated:
        annotation = item.annotation
        assert annotation is not None
        size_px = annotated_size_px(item.file.path)
        if annotation.size_px not in (None, size_px):
            raise DataError(
                f"{annotation.path} is for an image of {annotation.size_px[0]} × {annotation.size_px[1]} px (height × "
                f"width), but {item.file.path} has {size_px[0]} × {size_px[1]} px; give the image that was annotated."
            )
        objects = _to_pixels(item, annotation, spacing_um_px, override_spacing)
        marked, count = _mark_regions(objects)
        item.objects = rename_classes(marked, {**renamed, **ignored})
        regions += count
        rejected += sum(shape.is_rejected for shape in item.objects)
        accepted += sum(shape.measurements.get(ACCEPTED, 0) > 0 for shape in item.objects)
        shapes = [shape for shape in item.objects if shape.is_object]
        found = sum(isinstance(shape.shape, Point) for shape in shapes)
        rectangles = sum(not isinstance(shape.shape, Point) and is_rectangle(shape.shape) for shape in shapes)
        new_boxes = min(annotation.boxes, rectangles)
        points, boxes, outlines = points + found, boxes + new_boxes, outlines + len(shapes) - found - new_boxes
    if rejected or accepted:
        message = f"objects that a person has marked: {accepted} accepted, {rejected} rejected, which are not used."
        notes.append(Finding("", message, is_problem=False))
    if regions:
        message = (
            f"outlines without a class that contain other objects ({regions}) are regions (Region*), not objects; only "
            f"objects inside are used."
        )
        notes.append(Finding("", message, is_problem=False))
    if read_as == "regions" and points:
        message = f"{points} points are left out, because regions are outlines."
        notes.append(Finding("", message, is_problem=False))
    if read_as == "outlines" and points:
        annotated = _leave_out_points(annotated, notes)
    if not points + boxes + outlines:
        raise DataError("The sources contain no objects; check that the annotation files are complete.")
    if read_as is None and outlines and points + boxes:
        raise DataError(
            f"The sources contain both points or boxes ({points + boxes}) and outlines ({outlines}); choose --as "
            f"points (the centers of all) or --as outlines (points are left out), or leave classes out with --classes "
            f"NAME=."
        )
    if boxes and read_as is None:
        message = "the objects have bounding boxes only; their centers are used as points."
        notes.append(Finding("", message, is_problem=False))
    return annotated, read_as or ("outlines" if outlines else "points")


def _leave_out_points(items: Sequence[_Item], notes: list[Finding]) -> list[_Item]:
    """Remove all points from images, and return the images. Images with points only are left out.

    Objects are there: as images without objects, they would be wrong.
    """
    kept, left_out, points = [], [], 0
    for item in items:
        objects = [shape for shape in item.objects if not isinstance(shape.shape, Point)]
        points += len(item.objects) - len(objects)
        had_objects = any(shape.is_object for shape in item.objects)
        item.objects = objects
        if had_objects and not any(shape.is_object for shape in objects):
            left_out.append(item.name)
        else:
            kept.append(item)
    if not kept:
        raise DataError("All images have points only, but --as outlines needs outlines; choose --as points.")
    message = f"points are left out, because --as is outlines: {points}."
    notes.append(Finding("", message, is_problem=False))
    if left_out:
        message = f"left out {count_and_list(left_out, 'image')} with points only, because --as is outlines."
        notes.append(Finding("", message, is_problem=False))
    return kept


def _mark_regions(objects: Sequence[SlideObject]) -> tuple[list[SlideObject], int]:
    """Give the class of regions to annotations without a class that contain several other objects.

    These are the areas in which QuPath has detected objects. Returns all objects, and the number of regions.
    """
    centers = np.array([item.center for item in objects]).reshape(-1, 2)
    sides = np.array([np.subtract(item.bounds_px[2:], item.bounds_px[:2]) for item in objects]).reshape(-1, 2)
    is_large = sides.prod(axis=1) > MIN_CONTAINED * np.median(sides.prod(axis=1)) if len(sides) else sides
    marked = list(objects)
    for i, item in enumerate(objects):
        if isinstance(item.shape, Point) or item.class_name or item.kind != "annotation" or not is_large[i]:
            continue
        top, left, bottom, right = item.bounds_px
        others = np.delete(centers, i, axis=0)
        others = others[np.all((others > (top, left)) & (others < (bottom, right)), axis=1)]
        if len(others) < MIN_CONTAINED:
            continue
        inside = sum(
            points_in_poly(others, polygon.outer).sum()  # type: ignore[no-untyped-call]
            for polygon in item.shape
        )
        if inside >= MIN_CONTAINED:
            marked[i] = replace(item, class_name=REGION_CLASS)
    return marked, sum(new is not old for new, old in zip(marked, objects, strict=True))


def _to_pixels(
    item: _Item, annotation: Annotation, spacing_um_px: float | None, override_spacing: bool
) -> list[SlideObject]:
    """Return the objects of an annotation in pixels of level 0 of its image."""
    if annotation.counts_from_origin and item.file.path.suffix.lower() in SLIDE_SUFFIXES:
        with open_slide(item.file.path, 1.0, override_spacing=True) as slide:
            return [_move(shape, 1.0, slide.origin_px) for shape in annotation.objects]
    if annotation.is_in_um:
        if override_spacing:  # they may have been computed with the pixel spacing of the file, or with the given one
            raise DataError(
                f"{annotation.path} states positions in µm, which --override-spacing makes ambiguous; export positions "
                f"in pixels."
            )
        spacing = image_spacing_um_px(item.file.path) or spacing_um_px
        if spacing is None:
            raise DataError(
                f"{annotation.path} states positions in µm, but {item.file.path} does not specify its pixel spacing; "
                f"give it with --spacing-um-px."
            )
        return [_move(shape, 1 / spacing, (0, 0)) for shape in annotation.objects]
    return list(annotation.objects)


def _move(item: SlideObject, factor: float, offset: tuple[float, float]) -> SlideObject:
    """Multiply the positions of an object by a factor, and then add an offset (row, column)."""
    if factor == 1 and offset == (0, 0):
        return item
    if isinstance(item.shape, Point):
        return replace(item, shape=Point(item.shape.row * factor + offset[0], item.shape.column * factor + offset[1]))
    polygons = tuple(
        make_polygon(polygon.outer * factor + offset, [hole * factor + offset for hole in polygon.holes])
        for polygon in item.shape
    )
    return replace(item, shape=polygons)


def _label_images(
    items: Sequence[_Item], labels: Sequence[str], renamed: Mapping[str, str], notes: list[Finding]
) -> list[_Item]:
    """Rename the labels of images, and return the images that have one."""
    expect_known_classes(renamed, labels)
    if without := [item.name for item, name in zip(items, labels, strict=True) if not name and not renamed.get("")]:
        notes.append(Finding("", f"left out {count_and_list(without, 'image')} without a class.", is_problem=False))
    for item, name in zip(items, labels, strict=True):
        item.label = renamed.get(name, name)
    if not any(item.label for item in items):
        raise DataError("--classes leaves out all images; keep at least one class.")
    return [item for item in items if item.label]


# Patients, pixel spacings and splits


def _describe_images(
    items: Sequence[_Item],
    rows: Mapping[int, Mapping[str, str]] | None,
    table: Path | str | None,
    patient: str | None,
    notes: list[Finding],
) -> list[_Item]:
    """Find the patient, the split, and other properties of each image. Return the images that are used.

    `rows` is the content of `table`, as `_read_image_table` returns it.
    """
    try:
        pattern = re.compile(patient) if patient else None
    except re.error as error:
        raise DataError(f"--patient {patient!r} is not a regular expression ({error}).") from None
    used = [item for item in items if rows is None or item.known or id(item) in rows]
    row_of = rows or {}
    unsettled = [item for item in used if not item.known and not row_of.get(id(item), {}).get("split")]
    named = _find_named_splits(used, notes) if unsettled else {}
    for item in used:
        path = item.file.path
        item.row = {"split": named[id(item)]} if id(item) in named else {}
        if item.annotation is not None:
            item.row |= item.annotation.row
        item.row |= item.known
        item.row |= {key: value for key, value in row_of.get(id(item), {}).items() if key != "label"}
        if pattern is not None:
            match = pattern.search(path.as_posix())
            if match is None:
                raise DataError(f"--patient {patient!r} does not match the path {path.as_posix()!r}; correct it.")
            group = match[1] if pattern.groups else match[0]
            if not group:
                raise DataError(
                    f"--patient {patient!r} matches the path {path.as_posix()!r}, but its first group is empty there; "
                    f"correct it."
                )
            item.row["group"] = group
        elif "group" not in item.row and (code := find_patient(path.stem)) != path.stem:
            item.row["group"] = code
        if (word := item.row.get("split")) and not find_split(word):
            raise DataError(f"The split of {item.name} is {word!r}; choose from {', '.join(SPLITS)}.")
        if word:
            item.row["split"] = find_split(word) or ""
    if len(used) < len(items):
        left_out = [item.name for item in items if item not in used]
        message = f"left out {count_and_list(left_out, 'image')} without a row in {table}."
        notes.append(Finding("", message, is_problem=False))
    if not used:
        raise DataError(f"{table} lists none of the images; its first column must contain the names of the images.")
    return used


def _find_named_splits(items: Sequence[_Item], notes: list[Finding]) -> dict[int, str]:
    """Return the word for the split in the names of folders or of the COCO file of an image, by the id of the item.

    A word counts only if there are others: the name of the only folder, such as `test`, may mean anything. The names
    of other images count, and those of files and folders beside it.
    """
    found = {id(item): place for item in items if (place := _find_split_place(item))}
    splits = {find_split(word) for word, _ in found.values()}
    beside = {word for path in {path for _, path in found.values()} for word in _find_words_beside(path)}
    if len(splits | {find_split(word) for word in beside}) > 1:
        return {key: word for key, (word, _) in found.items()}
    if found:
        _, path = next(iter(found.values()))
        message = (
            f"the name {path.name!r} is not used as a split, because nothing beside it is named as another split; for "
            f"one split only, give a table with the column `split` (--table), or edit the manifest."
        )
        notes.append(Finding("", message, is_problem=False))
    return {}


def _find_split_place(item: _Item) -> tuple[str, Path] | None:
    """Return a word for a split, and the folder or the COCO file of an image with the word in its name."""
    file = item.file
    for folder in file.path.parents[: len(file.path.relative_to(file.root).parts)]:
        if find_split(folder.name):
            return folder.name, folder
    if item.annotation is not None and item.annotation.image:
        words = _find_words(item.annotation.path)
        return (words[0], item.annotation.path) if words else None
    return None


def _find_words(path: Path) -> list[str]:
    """Return the words for splits in the name of a file, such as `val` in `instances_val2017.json`."""
    return [word for word in re.split(r"[ _.-]|\d+", _stem(path)) if find_split(word)]


def _find_words_beside(path: Path) -> list[str]:
    """Return the words for splits in the names of folders beside a folder, or of JSON files beside a file."""
    try:
        others = list(_locate(path).parent.iterdir())
    except OSError:
        return []
    if path.is_dir():
        return [other.name for other in others if find_split(other.name) and other.is_dir()]
    return [word for other in others if _has_suffix(other, JSON_SUFFIXES) for word in _find_words(other)]


def _read_image_table(
    path: Path | str | None, items: Sequence[_Item], labels: Sequence[str], notes: list[Finding]
) -> dict[int, dict[str, str]] | None:
    """Return the known columns of a table about images, by the id of each item that the table lists.

    `labels` are names of columns with the class of each image. Without a table, None is returned. Raises DataError if
    two columns have the same content, if none of `labels` is found, unless there are several, or if two lines about
    one image differ.
    """
    if path is None:
        return None
    table = read_table(Path(path), ())
    header = list(table[0][1]) if table else []
    columns = {key: TABLE_COLUMNS.get(re.sub(r"[ -]+", "_", key)) for key in header}
    columns |= dict.fromkeys((key for key in map(str.casefold, labels) if key in header), "label")
    if len(labels) == 1 and labels[0].casefold() not in header:
        raise DataError(f"{path} has no column {labels[0]!r} for --label; it has {count_and_list(header, 'column')}.")
    for column, count in Counter(filter(None, columns.values())).items():
        if count > 1:
            names = " and ".join(repr(key) for key in header if columns[key] == column)
            raise DataError(f"{path} has several columns for the {column} of an image, {names}; keep one of them.")
    first = "image" if "image" in header else next(iter(header), "")
    if unused := [key for key in header if key != first and not columns[key]]:
        message = f"did not use {count_and_list(unused, 'column')} of {path}."
        notes.append(Finding("", message, is_problem=False))
    by_name: defaultdict[str, list[_Item]] = defaultdict(list)
    for item in items:
        by_name[_stem(item.file.path).casefold()].append(item)
    rows: dict[int, dict[str, str]] = {}
    for line, row in table:
        name = PurePosixPath((row.get("image") or next(iter(row.values()))).replace("\\", "/"))
        found = by_name.get(_stem(Path(name.name)).casefold()) or by_name.get(name.name.casefold(), [])
        folders = [part.casefold() for part in name.parent.parts if part.casefold() not in KIND_FOLDERS]
        scores = [_count_common(item.file.folders, folders) for item in found]
        best = [item for item, score in zip(found, scores, strict=True) if score == max(scores)]
        if len(best) > 1:
            raise DataError(
                f"{path} names {str(name)!r} in line {line}, but several images have this name; add folders."
            )
        for item in best:
            values = {column: row[key] for key, column in columns.items() if column and row[key]}
            if rows.setdefault(id(item), values) != values:
                raise DataError(
                    f"{path} lists the image {item.name} again in line {line}, with other values; keep one line."
                )
    return rows


def _find_spacings(items: Sequence[_Item], spacing_um_px: float | None, override_spacing: bool) -> None:
    """Add the pixel spacing to the row of each image.

    Raises DataError if it is unknown or implausible for an image, or if the given one contradicts a file and
    `override_spacing` is False.
    """
    unknown = []
    for item in items:
        if "spacing" not in item.row:
            path, stated = item.file.path, image_spacing_um_px(item.file.path)
            if stated is None and item.annotation is not None and item.annotation.spacing_um_px:
                path, stated = item.annotation.path, item.annotation.spacing_um_px
                if not is_plausible(stated):
                    raise DataError(f"{path} states a pixel spacing of {stated:g} µm/px; expected 0.05 to 5 µm/px.")
            if stated is not None and spacing_um_px is not None and not override_spacing:
                expect_equal_spacing(path, stated, spacing_um_px)
            spacing = spacing_um_px if override_spacing else stated or spacing_um_px
            if spacing is None:
                unknown.append(item.name)
            else:
                item.row["spacing"] = f"{spacing:.6g}"
        elif not _is_spacing(item.row["spacing"]):
            raise DataError(
                f"The pixel spacing of {item.name} is {item.row['spacing']!r} in its table; expected a number "
                f" from 0.05 to 5 (µm/px)."
            )
    if unknown:
        raise DataError(
            f"The pixel spacing of {count_and_list(unknown, 'image')} is not known, because the files do not specify "
            f"it; give it with --spacing-um-px, such as 0.25 for images at 40x, or 0.5 for images at 20x."
        )


def _is_spacing(text: str) -> bool:
    try:
        return is_plausible(float(text))
    except ValueError:
        return False


def _assign_splits(items: Sequence[_Item], has_labels: bool, notes: list[Finding]) -> None:
    """Add a split to the row of each image: the known splits, or a random split of the patients."""
    labels: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for item in items:
        labels[_find_group(item)][item.label] += 1
    if not any(item.row.get("group") for item in items):
        message = (
            "the patients are not known, so each image counts as its own patient; if patients have several images, "
            "state them with --patient or --table, because scores are too high if a patient is in two splits."
        )
        notes.append(Finding("", message, is_problem=False))
    if any(item.known for item in items):
        _keep_splits(items, notes)
        return
    known = [item for item in items if item.row.get("split")]
    splits_known = {item.row["split"] for item in known}
    if len(known) == len(items) and ("valid" in splits_known or "train" not in splits_known):
        notes.append(Finding("", "the splits are those of the sources.", is_problem=False))
        return
    if len(known) == len(items):
        divided, fractions = [item for item in items if item.row["split"] == "train"], VALID_OF_TRAIN
        message = (
            "the sources have no images for validation: 20 % of the training patients are proposed (split 'valid')."
        )
    else:
        divided, fractions = list(items), FRACTIONS
        message = "a random split by patient is proposed: 60 % train, 20 % valid, 20 % test."
        if known:
            message += f" The splits of {len(known)} images in the sources are not used, because others have none."
    groups = sorted({_find_group(item) for item in divided})
    strata = {group: labels[group].most_common(1)[0][0] if has_labels else "" for group in groups}
    if min(Counter(strata.values()).values()) < MIN_PATIENTS:
        strata = dict.fromkeys(groups, "")
    splits = _divide_patients(divided, strata, fractions)
    for item in divided:
        item.row["split"] = splits[_find_group(item)]
    if len(groups) < len(fractions):
        message = (
            f"there are too few patients ({len(groups)}) for {len(fractions)} splits; all of them are in 'train'; add "
            f"images of other patients before training."
        )
    else:
        message += " To change it, edit the column `split` of the manifest."
    notes.append(Finding("", message, is_problem=False))


def _divide_patients(
    items: Sequence[_Item], strata: Mapping[str, str], fractions: Mapping[str, float]
) -> dict[str, str]:
    """Return a random split for each patient. Of several, it is the first that shows most classes in each split.

    A network cannot be trained if no training image shows a class, and classes without objects have no score.
    """
    classes: defaultdict[str, set[str]] = defaultdict(set)
    for item in items:
        classes[_find_group(item)] |= {item.label, *(shape.class_name for shape in item.objects if shape.is_object)}
    every_class = set[str]().union(*classes.values())

    def count_shown(splits: Mapping[str, str]) -> list[int]:
        return [
            len(set[str]().union(*(classes[group] for group, split in splits.items() if split == name)))
            for name in fractions
        ]

    best = split_fractions(strata, fractions, SPLIT_SEED)
    for seed in range(SPLIT_SEED + 1, SPLIT_SEED + SPLIT_TRIES):
        if min(count_shown(best)) == len(every_class):
            break
        best = max(best, split_fractions(strata, fractions, seed), key=count_shown)  # the first, if both are equal
    return best


def _keep_splits(items: Sequence[_Item], notes: list[Finding]) -> None:
    """Keep the splits of an earlier import. New images have the split of their patient, or else are for training."""
    of_group = {_find_group(item): item.row["split"] for item in items if item.known}
    new: Counter[str] = Counter()
    for item in items:
        if not item.known:
            item.row["split"] = of_group.get(_find_group(item)) or item.row.get("split") or "train"
            new[item.row["split"]] += 1
    message = "images of the earlier import keep their splits, so that the scores of both can be compared"
    counts = ", ".join(f"{new[split]} {split}" for split in SPLITS if new[split])
    notes.append(Finding("", message + (f"; new images: {counts}." if new else "."), is_problem=False))


def _find_group(item: _Item) -> str:
    return item.row.get("group") or str(item.file.path)


# Writing the dataset


def _write_manifest(folder: Path, out: Path, items: Sequence[_Item], column: str) -> None:
    """Write a manifest and GeoJSON files to `folder`, a temporary folder that will be at `out`."""
    optional = [name for name in ("group", "organ") if any(item.row.get(name) for item in items)]
    header = ["image", column, *optional, "split", "spacing"]
    rows = []
    names = _short_names([item.file.path for item in items])
    for item, name in zip(items, names, strict=True):
        cell = item.label
        if column != "label":
            cell = f"{ANNOTATION_FOLDER}/{name}.geojson"
            path = folder / cell
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(format_geojson(item.objects), encoding="utf-8", newline="\n")
        values = {**item.row, "image": _relative_path(item.file.path, out), column: cell}
        rows.append([values.get(key, "") for key in header])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([header, *rows])
    write_text(folder / MANIFEST_FILE, text.getvalue())


def _relative_path(path: Path, folder: Path) -> str:
    """Return the path of a file relative to a folder, or its absolute path if they are on different drives."""
    try:
        return Path(os.path.relpath(_locate(path), folder.resolve())).as_posix()
    except ValueError:
        return _locate(path).as_posix()


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Return the paths of files relative to their common folder, which does not depend on where they are read from."""
    located = [_locate(path) for path in paths]
    common = os.path.commonpath([path.parent for path in located])
    return [path.relative_to(common).as_posix() for path in located]


# Export


def export_data(dataset: Dataset, out: Path | str) -> Path:
    """Write the annotated objects of a dataset for other software, and return `out`.

    If the name of `out` ends in .json, it becomes a COCO file, otherwise a new folder with a GeoJSON file for each
    image. Names of images are relative to the common folder of all images. Images are not copied. Raises DataError if
    the dataset has no annotated objects, or UnreadableFileError if a file cannot be read.
    """
    out = Path(out)
    if _find_column(dataset) == "label":
        raise DataError(f"{dataset.root} has a class for each image and no objects; COCO and GeoJSON describe objects.")
    if any(sample.row is not None for sample in dataset.samples) or not dataset.samples:
        raise DataError(f"{dataset.root} contains no image files that can be exported.")
    remedy = "choose a new folder, or a file that ends in .json"
    if out.suffix.lower() != ".json":
        _expect_empty(out, remedy)
    samples = _list_images(dataset)
    names = _short_names([sample.path for sample in samples])
    contents = [
        (name, sample, _read_objects(dataset.annotated, sample)) for name, sample in zip(names, samples, strict=True)
    ]
    if out.suffix.lower() == ".json":
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, make_coco(contents, dataset.annotated == "points"))
        return out
    with hold_lock(out):
        _expect_empty(out, remedy)  # another process may have written to it
        with atomic_folder(out) as folder:
            for name, _, objects in contents:
                path = folder / f"{name}.geojson"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(format_geojson(objects), encoding="utf-8", newline="\n")
    return out


def _read_objects(annotated: Annotated, sample: Sample) -> list[SlideObject]:
    """Return the annotated objects of a sample, in any form that a dataset may have."""
    if not sample.annotations:
        return []
    path = sample.annotations[0]
    if _has_suffix(path, GEOJSON_SUFFIXES):
        return read_geojson(path)
    if path.suffix.lower() == ".xml":
        return list(read_xml_objects(path).objects)
    if annotated == "points":
        points, faults = parse_points(sample)
        if faults:
            raise UnreadableFileError(path, f"cannot be used: {faults[0]}")
        return [
            SlideObject(Point(float(row) + 0.5, float(column) + 0.5), "annotation", name)
            for (row, column), name in zip(points.positions, points.classes, strict=True)
        ]
    tables = [found] if isinstance(found := _read_class_table_of(path), Classes) else []
    return read_mask(path, "objects", _find_classes(path, tables)).objects


def _read_class_table_of(label_map: Path) -> object:
    """Return the table with the classes of a label map, if there is one beside it."""
    path = label_map.with_suffix(".csv")
    return read_table_objects(path, None) if path.is_file() else None
