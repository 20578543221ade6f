"""Datasets and a run that several files of tests read. No test may change them."""

from pathlib import Path

import pytest
import torch
from layouts import amida13, kumar, pcam
from short_runs import converted_recipe, write_patches

from rotopath.runs import Run
from rotopath.training import train


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny dataset for each task of the paper, by the name of the task."""
    root = tmp_path_factory.mktemp("training")
    return {
        "mitosis": amida13(root / "mitosis", cases=[1, 2, 3, 13], size=(100, 110)),
        "nuclei": kumar(root / "nuclei", [f"n{i}" for i in range(6)], size=70),
        "tumor": pcam(root / "tumor", (16, 8, 8)),
    }


@pytest.fixture(scope="session")
def patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Patches of three classes, in folders by split and class."""
    return write_patches(tmp_path_factory.mktemp("patches"))


@pytest.fixture(scope="session")
def converted_run(patches: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A converted ResNet, trained on patches of three classes without interruption."""
    torch.set_num_threads(1)
    return train(converted_recipe(patches), tmp_path_factory.mktemp("converted") / "run")
