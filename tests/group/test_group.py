"""The package as a whole: all geometry is in rotopath.group."""

import re
from pathlib import Path

import rotopath


def test_only_group_computes_angles_and_rotations() -> None:
    source = Path(rotopath.__file__).parent
    pattern = re.compile(r"rot90|\.roll\(|math\.pi|np\.pi|\b(cos|sin|atan2|radians)\(|grid_sample|affine_grid")
    elsewhere = [
        f"{path.relative_to(source)}:{number}"
        for path in source.rglob("*.py")
        if path.parent.name != "group"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not elsewhere, f"move angles and rotations to rotopath.group: {elsewhere}"
