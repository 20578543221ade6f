"""AMIDA13 and TUPAC16: high-power fields of breast cancer, with the places of mitoses in CSV files.

In: the folder with `mitoses_image_data_part_*/CASE/FIELD.tif` and `mitoses_ground_truth/CASE/FIELD.csv`, and perhaps a
`split.csv` (case,split) that replaces the published split. Out: a dataset of fields.
"""

from pathlib import Path

from rotopath.data.dataset import IMAGE_SUFFIXES, Dataset, Finding, Sample, files_in, left_out, listed, read_splits
from rotopath.data.splits import amida13_split

SPACING_UM_PX = 0.25
PUBLISHED = {
    "train": {"cases": 8, "mitoses": 458},
    "valid": {"cases": 4, "mitoses": 92},
    "test": {"cases": 11, "mitoses": 533},
}


def is_amida13(root: Path) -> bool:
    return any(root.glob("mitoses_image_data*/")) or (root / "mitoses_ground_truth").is_dir()


def open_amida13(root: Path) -> Dataset:
    """Every field of every case that has a split; a field without a CSV has no mitoses."""
    images = [path for part in sorted(root.glob("mitoses_image_data*")) for path in files_in(part, IMAGE_SUFFIXES)]
    truths = {_field(path): path for path in files_in(root / "mitoses_ground_truth", {".csv"})}
    cases = {case for case, _ in map(_field, images)}
    table, findings = read_splits(root, "case", cases, _case)
    if table is None:
        splits = {case: amida13_split(int(case)) for case in cases if case.isdecimal() and 1 <= int(case) <= 23}
        if beyond := sorted(cases - splits.keys()):  # of TUPAC16
            findings.append(left_out(beyond, "case"))
    else:
        splits = {case: row["split"] for case, row in table.items()}

    samples: dict[tuple[str, str], Sample] = {}
    for path in images:
        name, (case, field) = path.relative_to(root).as_posix(), _field(path)
        if (twin := samples.get((case, field))) is not None:
            findings.append(Finding(name, f"case {case} has this field already, as {twin.name}; it is left out."))
        elif case in splits:
            annotations = (truths[case, field],) if (case, field) in truths else ()
            samples[case, field] = Sample(path, name, case, splits[case], SPACING_UM_PX, annotations=annotations)

    for place in sorted(truths.keys() - set(map(_field, images))):
        findings.append(Finding(truths[place].relative_to(root).as_posix(), "there is no image of this field."))
    if samples and not truths:
        sentence = "there is no CSV at all, and without the places of mitoses there is nothing to learn."
        findings.append(Finding("mitoses_ground_truth", sentence))
    elif bare := [sample.name for sample in samples.values() if not sample.annotations]:
        sentence = f"no CSV, so no mitoses, in {listed(bare, 'field')}."
        findings.append(Finding("mitoses_ground_truth", sentence, is_problem=False))
    published = PUBLISHED if table is None else {}
    return Dataset("points", "AMIDA13", root, tuple(samples.values()), tuple(findings), published, "mitoses")


def _field(path: Path) -> tuple[str, str]:
    """The case and the field that a file belongs to."""
    return _case(path.parent.name), path.stem


def _case(name: str) -> str:
    """Cases have two digits; spreadsheets strip zeros."""
    return name.zfill(2) if name.isdecimal() else name
