"""Figures of the demonstration: networks side by side, with the same field at the same scale."""

from pathlib import Path

import numpy as np
import pytest
from layouts import pixels
from matplotlib.figure import Figure

from rotopath.reports import demo_report

pytestmark = pytest.mark.slow


def test_markers_do_not_change_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(demo_report, "save_figure", lambda figure, path: (drawn.append(figure), path)[1])
    truth = np.array([[5.0, 5.0], [50.0, 70.0]])
    detections = {"N=1": np.empty((0, 2)), "N=8": np.array([[6.0, 5.0], [0.0, 79.0]])}
    demo_report.draw_detections(pixels(60, 80), truth, detections, 30, tmp_path / "d.png")
    assert [axes.get_xlim() for axes in drawn[0].axes] == [(-0.5, 79.5)] * 2
    assert [axes.get_ylim() for axes in drawn[0].axes] == [(59.5, -0.5)] * 2
    assert [axes.get_title() for axes in drawn[0].axes] == ["N=1: 0 of 2 detected", "N=8: 1 of 2 detected"]
