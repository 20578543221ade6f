"""Answers to turned inputs: what an equivariant network must not change, and an ordinary one does."""

from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import amida13, kumar, pcam

import rotopath as rp
from rotopath.rotation import summarise, turn_inputs

pytestmark = pytest.mark.filterwarnings("ignore:stain normalisation left an image unchanged")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("rotation")
    return {
        "mitosis": amida13(root / "mitosis", cases=[13], size=(100, 110)),
        "nuclei": kumar(root / "nuclei", ["a", "b", "c"], size=60),
        "tumor": pcam(root / "tumor", (4, 4, 4)),
    }


@pytest.mark.parametrize("task", ["mitosis", "nuclei", "tumor"])
def test_quarter_turns_change_nothing_for_n_4_and_something_for_n_1(
    data: dict[str, Path], task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rotopath.rotation.FIELD_PX", 20)
    pictures = rp.data.open_data(data[task]).split("test")
    spreads = {}
    for n in (1, 4):
        turned = turn_inputs(task, getattr(rp.models, task)(n), pictures, CPU, most=8)  # type: ignore[arg-type]
        assert turned.plain_degrees[::4] == [0, 90, 180, 270]
        assert turned.fair.shape == turned.plain.shape
        assert len(turned.fair) == 16
        spreads[n] = np.ptp(turned.plain[::4], axis=0).max()
    assert spreads[4] < 1e-5
    assert spreads[1] > 100 * spreads[4]


def test_two_numbers_and_where_they_come_from(data: dict[str, Path]) -> None:
    pictures = rp.data.open_data(data["tumor"]).split("test")
    turned = turn_inputs("tumor", rp.models.tumor(1), pictures, CPU)
    middle = float(np.median(turned.fair))
    found = summarise("tumor", turned, {"threshold": middle})
    assert found["inputs"] == "windows"
    assert found["count"] == 4
    assert found["fair"] == {
        "deviation": pytest.approx(turned.fair.std(axis=0).mean(), rel=1e-5),
        "changed": ((turned.fair >= middle).any(axis=0) & (turned.fair < middle).any(axis=0)).mean(),
    }
    assert turned.labels.tolist() == [picture.label for picture in pictures]
