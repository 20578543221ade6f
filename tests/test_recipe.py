"""Recipes: what is written is read, changes apply, and every wrong key is named."""

from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotopath import group
from rotopath.data import Augmentation
from rotopath.models.architecture import POOLINGS, UPSAMPLINGS
from rotopath.models.tables import ARCHITECTURES
from rotopath.nn.project import PROJECTIONS
from rotopath.recipe import Mining, Recipe, RecipeError, changed_key, make_recipe, read_recipe, write_recipe
from rotopath.runs import build


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(text)
    return path


MINIMAL = 'task = "tumor"\ndata = "pcam"\n'


def test_false_takes_a_key_back(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL + "regime = 0.5\n[mining]\nepochs = 2\n")
    assert read_recipe(path).mining == Mining(epochs=2)
    recipe = read_recipe(path, ["mining=false", "regime=false"])
    assert recipe.mining is None
    assert recipe.regime is None
    with pytest.raises(RecipeError, match="'epochs' is False"):
        read_recipe(path, ["epochs=false"])


def test_defaults_are_the_papers(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, MINIMAL))
    assert recipe == Recipe("tumor", "pcam")
    assert (recipe.optimiser, recipe.learning_rate, recipe.momentum, recipe.weight_decay) == ("sgd", 0.01, 0.9, 5e-4)
    assert recipe.schedule == "halve"
    assert recipe.augmentation == Augmentation()


def test_changes_apply_and_words_need_no_quotes(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL + "[augmentation]\nstain = 0.2\n")
    changes = ["orientations=4", "augmentation.brightness=0.05", "task=mitosis", "data=a b/c=d", "mining.epochs=2"]
    recipe = read_recipe(path, [*changes, "regime=3", "precision=32", "augmentation.free_rotation=true"])
    assert recipe == Recipe(
        "mitosis",
        "a b/c=d",
        orientations=4,
        regime=3.0,
        augmentation=Augmentation(stain=0.2, brightness=0.05, free_rotation=True),
        mining=Mining(epochs=2),
    )


@pytest.mark.parametrize(
    ("text", "changes", "sentence"),
    [
        (MINIMAL, ["orientation=4"], "there is no key 'orientation'; did you mean 'orientations'?"),
        (MINIMAL, ["augmentation.stains=0.1"], "there is no key 'augmentation.stains'; did you mean"),
        (MINIMAL, ["colour=red"], "there is no key 'colour'; keys are task, data, orientations"),
        ('data = "x"', [], "the key 'task' is missing."),
        (MINIMAL, ["task=kidney"], "the key 'task' is 'kidney', where one of mitosis, nuclei, tumor is expected."),
        (MINIMAL, ["epochs=many"], "the key 'epochs' is 'many', where a whole number is expected."),
        (MINIMAL, ["epochs=1.5"], "the key 'epochs' is 1.5, where a whole number is expected."),
        (MINIMAL, ["epochs=true"], "the key 'epochs' is True, where a whole number is expected."),
        (MINIMAL, ["epochs=0"], "the key 'epochs' is 0, where 1 or more is expected."),
        (MINIMAL, ["learning_rate=0"], "the key 'learning_rate' is 0.0, where a number above 0 is expected."),
        (MINIMAL, ["seed=-1"], "the key 'seed' is -1, where 0 or more is expected."),
        (MINIMAL, ["orientations=0"], "orientations must be a whole number, 1 or more"),
        (MINIMAL, ["augmentation.stain=2"], "The augmentation 'stain' is a fraction from 0 to below 1; got 2.0."),
        (MINIMAL, ["augmentation=none"], "the key 'augmentation' is 'none', where a table is expected."),
        (MINIMAL, ["regime=all"], "the key 'regime' is 'all', where a number or nothing is expected."),
        (MINIMAL, ["data.path=x"], "The key 'data' is no table"),
        (MINIMAL, ["task=nuclei", "mining.epochs=2"], "leave 'mining' out for nuclei"),
        (MINIMAL, ["epochs"], "A change is written key=value; got 'epochs'."),
        ("task = ", [], "is no TOML file"),
    ],
)
def test_wrong_keys_are_named(tmp_path: Path, text: str, changes: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe(written(tmp_path, text), changes)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"none.toml does not exist"):
        read_recipe(tmp_path / "none.toml")


texts = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)


@given(
    st.builds(
        Recipe,
        task=st.sampled_from(["mitosis", "tumor"]),
        data=texts,
        orientations=st.integers(1, 32),
        regime=st.none() | st.just(1.0),
        learning_rate=st.floats(1e-9, 10),
        augmentation=st.builds(Augmentation, stain=st.floats(0, 0.9), transpose=st.booleans()),
        mining=st.none() | st.builds(Mining, epochs=st.integers(1, 9)),
    )
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = tmp_path_factory.mktemp("recipe") / "r.toml"
    path.write_text(write_recipe(recipe), encoding="utf-8")
    assert read_recipe(path) == recipe


def test_values_may_be_plain() -> None:
    assert make_recipe({"task": "tumor", "data": "x", "learning_rate": 1}).learning_rate == 1.0


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "recipes").glob("*.toml")), ids=lambda p: p.stem
)
def test_the_published_recipes_are_good(path: Path) -> None:
    recipe = read_recipe(path)
    assert recipe.task == path.stem
    assert f"rotopath train recipes/{path.name}" in path.read_text(), "the command is at its top"
    assert (recipe.mining is None) == (recipe.task == "nuclei")


def test_a_recipe_knows_the_kernels_pools_and_upsampling_that_networks_know() -> None:
    hints = get_type_hints(Recipe)
    for key, options in (("kernel", group.KERNELS), ("pooling", POOLINGS), ("upsampling", UPSAMPLINGS)):
        assert get_args(hints[key]) == options


@pytest.mark.parametrize("task", ARCHITECTURES)
def test_a_preset_stands_for_the_keys_that_it_chooses(tmp_path: Path, task: str) -> None:
    values = {"task": task, "data": "d"}
    network = ARCHITECTURES[task]
    assert build(make_recipe(values)).architecture == network
    assert make_recipe(values | {"preset": "paper"}) == make_recipe(values)
    recipe = make_recipe(values | {"preset": "faithful"})
    assert build(recipe).architecture == network.choose("faithful")
    path = written(tmp_path, write_recipe(recipe))
    assert "preset" not in path.read_text(), "another version may understand it differently"
    assert read_recipe(path) == recipe
    assert make_recipe(values | {"preset": "faithful", "kernel": "gaussian"}) == replace(recipe, kernel="gaussian")
    for wrong in ("exact", ["faithful"]):
        with pytest.raises(RecipeError, match=r"'preset' is .*, where one of paper, faithful is expected"):
            make_recipe(values | {"preset": wrong})


def test_a_projection_is_a_key_that_may_be_left_out(tmp_path: Path) -> None:
    assert get_args(get_args(get_type_hints(Recipe)["projection"])[0]) == PROJECTIONS
    path = written(tmp_path, MINIMAL)
    recipe = read_recipe(path)
    assert recipe.projection is None
    assert "projection" not in write_recipe(recipe)
    assert [build(replace(recipe, task=task)).project.mode for task in ("mitosis", "nuclei", "tumor")] == [
        "max",
        "max",
        "mean",
    ]
    chosen = read_recipe(path, ["projection=fourier"])
    assert build(chosen).project.mode == "fourier"
    assert 'projection = "fourier"' in write_recipe(chosen)
    assert changed_key(recipe, chosen) == "projection"
    path.write_text(write_recipe(chosen))
    assert read_recipe(path) == chosen
    assert read_recipe(path, ["projection=false"]) == recipe
    with pytest.raises(RecipeError, match="'projection' is 'median', where one of max, mean, attention, fourier or no"):
        read_recipe(path, ["projection=median"])


def test_channels_may_be_those_of_other_orientations(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    network = build(read_recipe(path, ["orientations=16", "widths_of=8"]))
    assert network.architecture.channels(16) == build(read_recipe(path, ["orientations=8"])).architecture.channels(8)
    assert sum(weight.numel() for weight in network.parameters()) == sum(network.architecture.weights(16))
    with pytest.raises(RecipeError, match="orientations"):
        read_recipe(path, ["widths_of=0"])


def test_reflections_are_a_key(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    assert not build(read_recipe(path)).architecture.reflections
    recipe = read_recipe(path, ["reflections=true", "orientations=4"])
    assert recipe.reflections
    network = build(recipe)
    assert network.architecture.reflections
    assert network.architecture.channels(4) == build(read_recipe(path)).architecture.channels(8)
    with pytest.raises(RecipeError, match="'reflections' is 'mirror', where true or false is expected"):
        read_recipe(path, ["reflections=mirror"])
