"""Writing data sets whole: a folder appears complete or not at all, and images carry their spacing.

In: pixels, outlines, rows of tables. Out: TIFF and PNG files, Aperio XML, CSV, and a finished folder.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rotopath.data.collection import SYNTHETIC
from rotopath.images.files import UM_PER_INCH


@contextmanager
def finished_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` once everything in it is written."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(f"{out} exists already and is not an empty folder; choose another place, or remove it.")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield unfinished
        (unfinished / SYNTHETIC).write_text("Tissue of no patient, made by rotopath.\n", encoding="utf-8")
        unfinished.chmod(0o755)  # mkdtemp keeps others out; a data set is for sharing
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_tiff(path: Path, image: NDArray[np.uint8], spacing_um_px: float) -> None:
    """An RGB TIFF that says how large its pixels are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    density = UM_PER_INCH / spacing_um_px
    Image.fromarray(image).save(path, "TIFF", compression="tiff_adobe_deflate", dpi=(density, density))


def write_labels(path: Path, labels: NDArray[np.int32]) -> None:
    """Object numbers as a grey PNG of 16 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(labels.astype(np.uint16)).save(path)


def write_table(path: Path, header: str, rows: Iterable[Iterable[object]]) -> None:
    """A CSV with a header; also where there are no rows. No cell may contain a comma."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_annotations(path: Path, outlines: list[NDArray[np.float64]], spacing_um_px: float) -> None:
    """Outlines (k, 2), x and y in pixels, as Aperio ImageScope stores them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f'<Annotations MicronsPerPixel="{spacing_um_px:.6f}">',
        '<Annotation Id="1" Name="" ReadOnly="0" NameReadOnly="0" LineColorReadOnly="0" Incremental="0" Type="4"'
        ' LineColor="65280" Visible="1" Selected="1" MarkupImagePath="" MacroName="">',
        "<Regions>",
        "<RegionAttributeHeaders>",
        '<AttributeHeader Id="9999" Name="Region" ColumnWidth="-1"/>',
        "</RegionAttributeHeaders>",
    ]
    for number, vertices in enumerate(outlines, start=1):
        lines.append(
            f'<Region Id="{number}" Type="0" Zoom="1" Selected="0" ImageLocation="" ImageFocus="0" Text=""'
            f' NegativeROA="0" InputRegionId="0" Analyze="1" DisplayId="{number}">'
        )
        lines.append("<Vertices>")
        lines += [f'<Vertex X="{x:.2f}" Y="{y:.2f}" Z="0"/>' for x, y in vertices]
        lines += ["</Vertices>", "</Region>"]
    lines += ["</Regions>", "</Annotation>", "</Annotations>"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
