"""The small synthetic datasets, made once for all tests of this folder."""

from pathlib import Path

import pytest
from sharing import make_once
from synthetic_datasets import MAKERS


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the datasets `mitosis`, `nuclei` and `tumor`, from seed 0."""

    def make_all(folder: Path) -> None:
        for task, make in MAKERS.items():
            make(folder / task, 0)

    return make_once(tmp_path_factory, "synthetic", make_all)
