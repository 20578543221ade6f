"""Write the GeoJSON file of a million nuclei, and test each geometry with shapely, which is in the extra "tables".

    .venv/bin/python benchmarks/geojson.py [--count 1000000] [--fast]

Nuclei are areas of much hematoxylin in synthetic tissue, traced, smoothed and measured as on a slide, again and again
at other positions. The file is read three times: every feature must have the form that QuPath writes, and a geometry
that shapely calls valid; the objects that `read_geojson` returns must be those that were written; and so must those
that `rotopath data import` reads. "above the start" is what the memory of the process grows by while it writes.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import numpy as np
from record import record
from scipy import ndimage

from rotopath.data.import_objects import read_json_objects
from rotopath.environment import import_for_tables
from rotopath.images.geojson import SlideObject, read_geojson, write_geojson
from rotopath.images.outlines import DECIMALS, Point, Polygon, measure_objects, smooth_outlines, trace_outlines
from rotopath.images.stain import stain_densities
from rotopath.metrics.matching import remove_small
from rotopath.synthetic.organs import render_organ_field

FIELD_PX = 768
MIN_DENSITY = 0.8  # optical density of hematoxylin
CLASS, COLOR = "Nucleus", (0, 158, 115)


def make_nuclei() -> list[SlideObject]:
    """Return the nuclei of fields of synthetic tissue, as `rotopath predict` outlines and measures them."""
    nuclei = []
    for organ in ("breast", "kidney", "liver", "prostate"):
        image, _ = render_organ_field(0, organ, 1, FIELD_PX)
        numbers = remove_small(ndimage.label(stain_densities(image)[..., 0] > MIN_DENSITY)[0], 20)
        pixels = image.transpose(2, 0, 1).astype(np.float32)
        measured = measure_objects(numbers, (numbers > 0).astype(np.float32), None, pixels, 0.25)
        for number, polygons in smooth_outlines(trace_outlines(numbers, fill_holes=True)).items():
            measurements = {name: float(values[number - 1]) for name, values in measured.items()}
            nuclei.append(SlideObject(polygons, "detection", CLASS, COLOR, measurements))
    return nuclei


def place(nuclei: list[SlideObject], count: int) -> Iterator[SlideObject]:
    """Yield `count` objects: all nuclei, at one position after the other."""
    for index in range(count):
        field, number = divmod(index, len(nuclei))
        shift = FIELD_PX * np.array(divmod(field, 100))
        nucleus = nuclei[number]
        assert not isinstance(nucleus.shape, Point)
        rings = [[np.round(ring + shift, DECIMALS) for ring in part.rings] for part in nucleus.shape]
        shape = tuple(Polygon(outer, tuple(holes)) for outer, *holes in rings)
        yield SlideObject(shape, nucleus.kind, nucleus.class_name, nucleus.color, nucleus.measurements)


def check_features(path: Path) -> int:
    """Return the number of features of a file, all of which must have the form of QuPath and a valid geometry."""
    shapely = import_for_tables("shapely")
    shape = import_for_tables("shapely.geometry").shape
    count, identifiers = 0, set()
    with path.open() as file:
        assert file.readline() == '{"type": "FeatureCollection", "features": [\n'
        for line in file:
            if line == "]}\n":
                break
            feature = json.loads(line.removesuffix("\n").removesuffix(","))
            assert list(feature) == ["type", "id", "geometry", "properties"]
            assert list(feature["properties"]) == ["objectType", "classification", "measurements"]
            assert feature["properties"]["objectType"] == "detection"
            assert feature["properties"]["classification"] == {"name": CLASS, "color": list(COLOR)}
            assert all(isinstance(value, float) for value in feature["properties"]["measurements"].values())
            geometry = shape(feature["geometry"])
            if not geometry.is_valid or geometry.is_empty:
                raise SystemExit(f"A geometry is not valid: {shapely.is_valid_reason(geometry)}: {line}")
            rings = [feature["geometry"]["coordinates"]]
            for polygon in rings if feature["geometry"]["type"] == "Polygon" else rings[0]:
                for ring in polygon:
                    assert ring[0] == ring[-1]
                    assert len({tuple(position) for position in ring}) == len(ring) - 1, "a point is repeated"
            identifiers.add(UUID(feature["id"]).int)
            count += 1
    assert len(identifiers) == count, "identifiers are unique"
    return count


def is_same(expected: SlideObject, item: SlideObject) -> bool:
    return (item.shape, item.kind, item.class_name, item.color, item.measurements) == (
        expected.shape,
        expected.kind,
        expected.class_name,
        expected.color,
        expected.measurements,
    )


def read_peak() -> float:
    """Return the highest memory of this process so far, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--fast", action="store_true", help="write no file")
    options = parser.parse_args()
    nuclei = make_nuclei()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "objects.geojson"
        write_geojson(path, place(nuclei, 1000))
        before, start = read_peak(), time.perf_counter()
        assert write_geojson(path, place(nuclei, options.count)) == options.count
        seconds, above = time.perf_counter() - start, read_peak() - before
        assert check_features(path) == options.count
        objects = read_geojson(path)
        assert all(map(is_same, place(nuclei, options.count), objects))
        assert len(objects) == options.count
        del objects
        (annotation,) = read_json_objects(path) or []
        assert all(map(is_same, place(nuclei, options.count), annotation.objects))
        assert len(annotation.objects) == options.count
        rows = [
            {
                "objects": options.count,
                "different outlines": len(nuclei),
                "megabytes": round(path.stat().st_size / 1e6),
                "seconds to write": round(seconds),
                "above the start, MiB": round(above, 1),
                "valid": options.count,
                "read back": options.count,
                "imported": options.count,
            }
        ]
    record("geojson", rows, write=not options.fast)


if __name__ == "__main__":
    main()
