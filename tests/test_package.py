"""The package as an import: lazy, complete, and honest about what it lacks."""

import subprocess
import sys

import pytest

import rotopath as rp


def test_import_is_light() -> None:
    script = "import rotopath, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    for name in rp.__all__:
        assert getattr(rp, name) is not None
        assert name in dir(rp)
    for room in (rp.nn, rp.models, rp.evaluation):
        for name in room.__all__:
            assert getattr(room, name) is not None


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rotate_the_slide'"):
        _ = rp.rotate_the_slide
