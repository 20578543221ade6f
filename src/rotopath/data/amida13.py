"""Open the datasets AMIDA13 and TUPAC16: images of breast cancer, with the positions of mitoses in CSV files.

The dataset folder contains `mitoses_image_data_part_*/CASE/FIELD.tif` and `mitoses_ground_truth/CASE/FIELD.csv`. A case
is a patient; a field (high-power field) is one image of the case. An optional `split.csv` with the columns `case` and
`split` replaces the published split.
"""

from collections.abc import Collection
from pathlib import Path

from rotopath.data.dataset import IMAGE_SUFFIXES, Dataset, Finding, Sample, count_and_list, find_files
from rotopath.data.splits import amida13_split, note_without_split, read_split_file

SPACING_UM_PX = 0.25
# Numbers in the publications, for comparison with the files of the user.
PUBLISHED = {
    "train": {"cases": 8, "mitoses": 458},
    "valid": {"cases": 4, "mitoses": 92},
    "test": {"cases": 11, "mitoses": 533},
}


def is_amida13(root: Path) -> bool:
    """Return whether a folder has a subfolder of AMIDA13: `mitoses_image_data*` or `mitoses_ground_truth`."""
    return any(root.glob("mitoses_image_data*/")) or (root / "mitoses_ground_truth").is_dir()


def open_amida13(root: Path) -> Dataset:
    """Open the images (fields) of all cases that have a split.

    Splits come from `split.csv`. Without this file, cases 1 to 23 have the published split of AMIDA13. Cases without a
    split are left out and reported in `findings` of the returned dataset. A field without a CSV file counts as a field
    without mitoses.
    """
    images = [path for part in sorted(root.glob("mitoses_image_data*")) for path in find_files(part, IMAGE_SUFFIXES)]
    annotations = {_case_and_field(path): path for path in find_files(root / "mitoses_ground_truth", {".csv"})}
    cases = {case for case, _ in map(_case_and_field, images)}
    table, findings = read_split_file(root, "case", cases, _normalize_case)
    if table is None:
        splits = {case: amida13_split(int(case)) for case in cases if case.isdecimal() and 1 <= int(case) <= 23}
        if beyond := sorted(cases - splits.keys()):  # cases of TUPAC16
            findings.append(note_without_split(beyond, "case"))
    else:
        splits = {case: row["split"] for case, row in table.items()}

    samples: dict[tuple[str, str], Sample] = {}
    for path in images:
        name, (case, field) = path.relative_to(root).as_posix(), _case_and_field(path)
        if (first := samples.get((case, field))) is not None:
            findings.append(Finding(name, f"is left out, because {first.name} is the same field; keep one of the two."))
        elif case in splits:
            annotation = (annotations[case, field],) if (case, field) in annotations else ()
            samples[case, field] = Sample(path, name, case, splits[case], SPACING_UM_PX, annotations=annotation)

    for field_key in sorted(annotations.keys() - set(map(_case_and_field, images))):
        name = annotations[field_key].relative_to(root).as_posix()
        findings.append(Finding(name, "there is no image of this field; add the image, or remove this file."))
    findings += _check_annotations(samples.values(), bool(annotations))
    published = PUBLISHED if table is None else {}
    return Dataset("points", "AMIDA13", root, tuple(samples.values()), tuple(findings), published, "mitoses")


def _check_annotations(samples: Collection[Sample], has_annotations: bool) -> list[Finding]:
    """Return a list with one finding if CSV files with positions are missing, otherwise an empty list.

    `has_annotations` states whether `mitoses_ground_truth` contains any CSV file. Without any CSV file, the finding is
    a problem. If only some samples have no CSV file, the finding is a note that lists these samples.
    """
    if samples and not has_annotations:
        message = "contains no CSV file; at least one file with positions of mitoses is needed."
        return [Finding("mitoses_ground_truth", message)]
    if without_csv := [sample.name for sample in samples if not sample.annotations]:
        message = (
            f"has no CSV file for {count_and_list(without_csv, 'field')}; a field without a file counts as a field "
            f"without mitoses."
        )
        return [Finding("mitoses_ground_truth", message, is_problem=False)]
    return []


def _case_and_field(path: Path) -> tuple[str, str]:
    """Return the case and the field of an image or CSV file, from the path CASE/FIELD.SUFFIX."""
    return _normalize_case(path.parent.name), path.stem


def _normalize_case(name: str) -> str:
    """Return the name of a case. A number gets two digits (`3` becomes `03`): spreadsheets remove leading zeros."""
    return name.zfill(2) if name.isdecimal() else name
