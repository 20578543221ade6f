"""AMIDA13 and TUPAC16: high-power fields of breast cancer, with the places of mitoses in CSV files.

In: the folder with `mitoses_image_data_part_*/CASE/FIELD.tif` and `mitoses_ground_truth/CASE/FIELD.csv`, and perhaps a
`split.csv` (case,split) that replaces the published split. Out: a collection of fields.
"""

from pathlib import Path

from rotopath.data.collection import Collection, Finding, Picture
from rotopath.data.folders import IMAGE_SUFFIXES, files_in, listed, read_splits
from rotopath.data.splits import amida13_split

SPACING_UM_PX = 0.25
PUBLISHED = {
    "train": {"cases": 8, "mitoses": 458},
    "valid": {"cases": 4, "mitoses": 92},
    "test": {"cases": 11, "mitoses": 533},
}


def is_amida13(root: Path) -> bool:
    return any(root.glob("mitoses_image_data*/")) or (root / "mitoses_ground_truth").is_dir()


def open_amida13(root: Path) -> Collection:
    """Every field of every case that has a split; a field without a CSV has no mitoses."""
    splits, findings = read_splits(root, "case")
    pictures: dict[tuple[str, str], Picture] = {}
    beyond: set[str] = set()  # cases of TUPAC16 that AMIDA13 does not have
    for path in sorted(p for part in root.glob("mitoses_image_data*") for p in files_in(part, IMAGE_SUFFIXES)):
        name, case = path.relative_to(root).as_posix(), path.parent.name
        if splits is None and not case.isdecimal():
            findings.append(Finding(name, f"its folder {case!r} is no number of a case (01 to 23); it is left out."))
        elif (split := _split_of(case, splits)) is None:
            beyond.add(case)
        elif (twin := pictures.get((case, path.stem))) is not None:
            findings.append(Finding(name, f"case {case} has this field already, as {twin.name}; it is left out."))
        else:
            truth = root / "mitoses_ground_truth" / case / f"{path.stem}.csv"
            annotations = (truth,) if truth.is_file() else ()
            pictures[case, path.stem] = Picture(path, name, case, split, SPACING_UM_PX, annotations=annotations)

    for path in files_in(root / "mitoses_ground_truth", {".csv"}):
        case = path.parent.name
        if (case, path.stem) not in pictures and case not in beyond:
            findings.append(Finding(path.relative_to(root).as_posix(), "there is no image of this field."))
    if bare := [picture.name for picture in pictures.values() if not picture.annotations]:
        findings.append(
            Finding("mitoses_ground_truth", f"no CSV, so no mitoses, in {listed(bare, 'field')}.", is_problem=False)
        )
    if beyond:
        wish = "a split.csv (case,split) gives them a place"
        sentence = f"{listed(sorted(beyond), 'case')} without a split: left out; {wish}."
        findings.append(Finding("", sentence, is_problem=False))
    return Collection("mitosis", "AMIDA13", root, tuple(pictures.values()), tuple(findings), PUBLISHED)


def _split_of(case: str, splits: dict[str, dict[str, str]] | None) -> str | None:
    if splits is not None:
        row = splits.get(case) or splits.get(case.lstrip("0"))  # spreadsheets strip zeros
        return row["split"] if row else None
    return amida13_split(int(case)) if 1 <= int(case) <= 23 else None
