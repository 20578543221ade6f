"""Hard examples: mined by a baseline, written to a file, and resumed like everything else."""

from dataclasses import replace
from pathlib import Path

import pytest
from short_runs import read_weights, short_recipe, train_until_killed

from rotopath.data import DataError, open_data
from rotopath.recipe import Mining
from rotopath.tasks import MITOSIS, TUMOR, HardExample
from rotopath.training import MINED, read_hard_examples, train
from rotopath.training.checkpoint import RESUME, index_hard_examples, write_hard_examples
from rotopath.training.loop import find_hard_examples

pytestmark = pytest.mark.slow


def test_a_run_killed_while_it_trains_the_baseline_resumes_to_identical_weights(
    data: dict[str, Path], tmp_path: Path
) -> None:
    recipe = short_recipe(data, epochs=1, mining=Mining(epochs=1, examples=4))
    train(recipe, tmp_path / "uninterrupted")
    train_until_killed(recipe, tmp_path / "killed", 3)
    assert (tmp_path / "killed/baseline" / RESUME).exists()
    train(recipe, tmp_path / "killed")
    assert read_weights(tmp_path / "killed") == read_weights(tmp_path / "uninterrupted")
    assert (tmp_path / "killed" / MINED).read_text() == (tmp_path / "uninterrupted" / MINED).read_text()
    assert not (tmp_path / "killed/baseline" / RESUME).exists()


def test_false_mitoses_are_mined_and_change_the_training(data: dict[str, Path], tmp_path: Path) -> None:
    rows = []
    recipe = short_recipe(data, "mitosis", epochs=1, mining=Mining(epochs=1, examples=6))
    train(recipe, tmp_path / "mined", on_progress=lambda stage, row: rows.append((stage, row)))
    examples = read_hard_examples(tmp_path / "mined" / MINED)
    assert 0 < len(examples) <= 6
    assert [example.score for example in examples] == sorted((example.score for example in examples), reverse=True)
    samples = open_data(data["mitosis"]).split("train")
    assert {example.image for example in examples} <= {sample.name for sample in samples}
    assert all(0 <= example.row < 100 and 0 <= example.column < 110 for example in examples)
    stages = list(dict.fromkeys(stage for stage, _ in rows))
    assert stages == ["baseline", "training", "scoring"]
    train(short_recipe(data, "mitosis", epochs=1), tmp_path / "plain")
    assert read_weights(tmp_path / "mined") != read_weights(tmp_path / "plain")


def test_networks_and_seeds_share_the_hard_examples_of_one_ordinary_cnn(data: dict[str, Path], tmp_path: Path) -> None:
    """Also if the file is made first, as a study does."""
    recipe = short_recipe(data, epochs=1, mining=Mining(epochs=1, examples=4))
    others = [replace(recipe, seed=1), replace(recipe, orientations=4, seed=2)]
    shared = find_hard_examples(recipe, tmp_path / "shared")
    texts = [shared.read_text()]
    for number, other in enumerate(others):
        train(other, tmp_path / str(number))
        train(other, tmp_path / f"{number} shared", hard_examples=shared)
        texts += [(tmp_path / name / MINED).read_text() for name in (str(number), f"{number} shared")]
        assert not (tmp_path / f"{number} shared/baseline").exists()
        assert read_weights(tmp_path / str(number)) == read_weights(tmp_path / f"{number} shared")
    assert len(set(texts)) == 1
    assert len(texts[0].splitlines()) > 1
    stages = []
    find_hard_examples(recipe, tmp_path / "shared", on_progress=lambda stage, _: stages.append(stage))
    assert not stages, "nothing is trained again"


def test_hard_examples_are_read_as_they_were_written(tmp_path: Path) -> None:
    examples = [HardExample("a, b.png", 3, 40, 0.75), HardExample("c.png", 0, 0, 0.5)]
    write_hard_examples(tmp_path / MINED, examples)
    assert read_hard_examples(tmp_path / MINED) == examples
    write_hard_examples(tmp_path / MINED, [])
    assert read_hard_examples(tmp_path / MINED) == []


def test_hard_examples_are_indexed_by_their_image(data: dict[str, Path]) -> None:
    samples = open_data(data["mitosis"]).split("train")
    examples = [HardExample(samples[2].name, 5, 6, 0.9), HardExample(samples[0].name, 7, 8, 0.8)]
    assert index_hard_examples(examples, MITOSIS, samples).tolist() == [[2, 5, 6], [0, 7, 8]]
    patches = open_data(data["tumor"]).split("train")
    assert index_hard_examples([HardExample(patches[3].name, 0, 0, 0.9)], TUMOR, patches).tolist() == [3]
    with pytest.raises(DataError, match=r"The image 'zebra' of a hard example in mined\.csv is not among"):
        index_hard_examples([HardExample("zebra", 5, 6, 0.9)], MITOSIS, samples)
