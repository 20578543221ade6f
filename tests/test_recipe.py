"""Recipes: what is written is read, changes apply, and every wrong key is named."""

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotopath import group
from rotopath.data import Augmentation
from rotopath.models.architecture import ARCHITECTURES, Pooling, Upsampling
from rotopath.nn.project import PROJECTIONS
from rotopath.recipe import (
    SHORT_OPTIONS,
    Mining,
    NetworkOptions,
    Recipe,
    RecipeError,
    changed_key,
    make_recipe,
    read_recipe,
    write_recipe,
)
from rotopath.runs import build
from rotopath.tasks import NUCLEI, Classify
from rotopath.tasks.task import PALETTE


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
        (MINIMAL, ["zebra=red"], "there is no key 'zebra'; keys are task, data, classes, colors, spacing_um_px"),
        ('data = "x"', [], "the key 'task' is missing."),
        (MINIMAL, ["task=kidney"], "There is no task 'kidney'; choose from mitosis, nuclei, tumor, classify"),
        (MINIMAL, ["task=tumour"], "There is no task 'tumour'; did you mean 'tumor'?"),
        (MINIMAL, ["task=3"], "the key 'task' is 3, where a text is expected."),
        (MINIMAL, ["task=none.such:Kind"], "'none.such:Kind' cannot be imported (No module named 'none')"),
        (MINIMAL, ["task=pathlib:Path"], "The task 'pathlib:Path' is no class of rotopath.tasks.Task."),
        (MINIMAL, ["network=resnet81"], "There is no network 'resnet81'; did you mean 'resnet18'?"),
        (MINIMAL, ["network=zebra"], "There is no network 'zebra'; choose from mitosis, nuclei, tumor, resnet18"),
        (MINIMAL, ["network=os:getcwd"], "The function 'os:getcwd' has no parameter 'outputs'"),
        (MINIMAL, ["network=resnet18", "network_options.widht=4"], "'resnet18' has no option 'widht'; did you mean"),
        (MINIMAL, ["network=resnet18", "pooling=max"], "The network 'resnet18' has no option 'pooling'; options"),
        (MINIMAL, ["network=resnet18", "kernel=cubic"], "'kernel' of the network 'resnet18' is 'cubic'; choose from"),
        (MINIMAL, ["network_options=4"], "the key 'network_options' is 4, where a table is expected."),
        (MINIMAL, ["network_options.orientations=4"], "has no option 'orientations'"),
        (MINIMAL, ["network_options.outputs=4"], "The network 'tumor' has no option 'outputs'"),
        (MINIMAL, ["kernal=harmonic"], "there is no key 'kernal'; did you mean 'kernel'?"),
        (MINIMAL, ["reflections=1"], "reflections"),
        (MINIMAL, ["smoothing=0"], "smoothing"),
        (MINIMAL, ["widths_of=true"], "got True"),
        (MINIMAL, ["task=rotopath.tasks:Task"], "'rotopath.tasks:Task'"),
        (MINIMAL, ["mining.epochs=0"], "'mining.epochs' is 0"),
        (MINIMAL, ["mining.examples=-1"], "'mining.examples' is -1"),
        (MINIMAL, ["classes=tumor"], "the key 'classes' is 'tumor', where a list of texts is expected."),
        (MINIMAL, ["classes=['a', 'A']"], "the key 'classes' is ['a', 'A'], where different names are expected."),
        (MINIMAL, ["classes=['a', '']"], "the key 'classes' is ['a', ''], where different names are expected."),
        (MINIMAL, ["colors=['red']"], "the key 'colors' is 'red', where a colour such as \"#e69f00\" is expected."),
        (MINIMAL, ["spacing_um_px=0"], "the key 'spacing_um_px' is 0.0, where 0.05 to 5 µm/px is expected."),
        (MINIMAL, ["spacing_um_px=nan"], "the key 'spacing_um_px' is nan, where 0.05 to 5 µm/px is expected."),
        (MINIMAL, ["data_spacing_um_px=9"], "the key 'data_spacing_um_px' is 9.0, where 0.05 to 5 µm/px is expected."),
        (MINIMAL, ["stain=reinhard"], "the key 'stain' is 'reinhard', where one of none, macenko or nothing is"),
        (MINIMAL, ["window_px=0"], "the key 'window_px' is 0, where 1 or more is expected."),
        (MINIMAL, ["stride_px=-1"], "the key 'stride_px' is -1, where 1 or more is expected."),
        (MINIMAL, ["batch=6", "devices=4"], "a batch of 6 cannot be divided among 4 devices; change"),
        (MINIMAL, ["regime=2"], "the key 'regime' is 2.0, where a fraction of each class, over 0 and up to 1,"),
        (MINIMAL, ["task=mitosis", "regime=0.5"], "the key 'regime' is 0.5, where a whole number of cases"),
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
        (MINIMAL, ["task=nuclei", "mining.epochs=2"], "mined for the task 'nuclei'; leave 'mining' out."),
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
        classes=st.lists(texts.filter(bool), max_size=3, unique_by=str.casefold).map(tuple),
        colors=st.sampled_from([(), ("#00ff7F",), ("#000000", "#ffffff")]),
        spacing_um_px=st.none() | st.floats(0.05, 5),
        stain=st.sampled_from([None, "none", "macenko"]),
        network=st.sampled_from([None, "nuclei"]),
        network_options=st.fixed_dictionaries(
            {}, optional={"kernel": st.sampled_from(group.KERNELS), "widths_of": st.integers(1, 9)}
        ).map(NetworkOptions),
        window_px=st.none() | st.integers(1, 500),
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


@pytest.mark.parametrize("name", ['"', "\\", "a\nb", "tab\t", "\x7f", "\x00", "é\u2028"])
def test_any_class_is_written_so_that_it_can_be_read(tmp_path: Path, name: str) -> None:
    """Classes may come from the cells of a table, and not only from keyboards."""
    recipe = make_recipe({"task": "classify", "data": name, "classes": [name, "other"]})
    assert read_recipe(written(tmp_path, write_recipe(recipe))) == recipe


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


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("kernel", group.KERNELS),
        ("pooling", get_args(Pooling)),
        ("upsampling", get_args(Upsampling)),
        ("projection", PROJECTIONS),
    ],
)
def test_a_recipe_knows_the_kernels_pools_and_upsampling_that_networks_know(key: str, options: tuple[str, ...]) -> None:
    assert len(options) > 1
    for option in options:
        recipe = make_recipe({"task": "nuclei", "data": "d", key: option})
        assert recipe.network_options[key] == option
        assert getattr(build(recipe).architecture, key) == option
    with pytest.raises(RecipeError, match=rf"nuclei knows {key} {' or '.join(map(repr, options))}; got 'none'"):
        make_recipe({"task": "nuclei", "data": "d", key: "none"})


def test_options_of_networks_may_stand_among_the_keys_or_in_a_table(tmp_path: Path) -> None:
    """As in the recipes of rotopath 0.1, or as they are written now."""
    options = 'kernel = "harmonic"\npooling = "rms-blur"\nreflections = true\nwidths_of = 4\n'
    recipe = read_recipe(written(tmp_path, MINIMAL + options))
    assert read_recipe(written(tmp_path, f"{MINIMAL}[network_options]\n{options}")) == recipe
    assert "[network_options]" in write_recipe(recipe)
    chosen = {"kernel": "harmonic", "pooling": "rms-blur", "reflections": True, "widths_of": 4}
    rest = {"upsampling": "nearest", "smoothing": False, "projection": "mean"}
    assert recipe.network_options == chosen | rest, "all of them are written out"
    assert recipe == Recipe("tumor", "pcam", network_options=NetworkOptions(chosen))
    assert not {*SHORT_OPTIONS} & {*vars(recipe)}


def test_a_network_of_another_name_may_be_chosen(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    assert read_recipe(path).network_name == "tumor"
    recipe = read_recipe(path, ["network=resnet18", "network_options.width=4", "kernel=harmonic"])
    assert (recipe.network, recipe.network_name) == ("resnet18", "resnet18")
    assert recipe.network_options == {"width": 4, "kernel": "harmonic"}
    path.write_text(write_recipe(recipe))
    assert read_recipe(path) == recipe
    for kind, network in (("classify", "tumor"), ("detect", "mitosis"), ("segment", "nuclei")):
        assert make_recipe({"task": kind, "data": "d"}).network_name == network


def test_a_recipe_makes_its_task() -> None:
    assert make_recipe({"task": "nuclei", "data": "d"}).make_task() == NUCLEI
    wishes = {"colors": ["#010203"], "spacing_um_px": 2, "stain": "macenko"}
    task = make_recipe({"task": "classify", "data": "d", "classes": ["b", "a"], **wishes}).make_task()
    assert isinstance(task, Classify)
    assert (task.class_names, task.spacing_um_px, task.stain) == (("b", "a"), 2.0, "macenko")
    assert task.colors == ((1, 2, 3), PALETTE[1])
    assert make_recipe({"task": "detect", "data": "d"}).make_task(["x", "y"]).class_names == ("x", "y")


def test_classes_that_were_found_are_no_change() -> None:
    """A run folder keeps the classes of its data; the recipe of the user need not name them."""
    plain = make_recipe({"task": "classify", "data": "d"})
    found = make_recipe({"task": "classify", "data": "d", "classes": ["a", "b"]})
    assert changed_key(found, plain) is None
    assert changed_key(found, make_recipe({"task": "classify", "data": "d", "classes": ["a", "c"]})) == "classes"
    assert changed_key(plain, make_recipe({"task": "classify", "data": "d", "devices": 2, "workers": 3})) is None
    assert changed_key(plain, make_recipe({"task": "classify", "data": "d", "stride_px": 2})) == "stride_px"


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
    assert make_recipe(values | {"network_options": {"preset": "faithful"}}) == recipe
    changed = make_recipe(values | {"preset": "faithful", "kernel": "gaussian"})
    assert changed.network_options == recipe.network_options | {"kernel": "gaussian"}
    for wrong in ("exact", ["faithful"]):
        with pytest.raises(RecipeError, match=rf"{task} knows preset 'paper' or 'faithful'; got .*(exact|faithful)"):
            make_recipe(values | {"preset": wrong})


def test_a_projection_is_a_key_that_may_be_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    recipe = read_recipe(path)
    usual = {"mitosis": "max", "nuclei": "max", "tumor": "mean"}
    for task, mode in usual.items():
        made = make_recipe({"task": task, "data": "d"})
        assert (made.network_options["projection"], build(made).project.mode) == (mode, mode)
    chosen = read_recipe(path, ["projection=fourier"])
    assert build(chosen).project.mode == "fourier"
    assert 'projection = "fourier"' in write_recipe(chosen)
    assert changed_key(recipe, chosen) == "network_options"
    path.write_text(write_recipe(chosen))
    assert read_recipe(path) == chosen
    path.write_text(MINIMAL + 'projection = "fourier"\n')
    assert read_recipe(path) == chosen
    assert read_recipe(path, ["projection=false"]) == recipe
    with pytest.raises(
        RecipeError, match="tumor knows projection 'max' or 'mean' or 'attention' or 'fourier'; got 'med"
    ):
        read_recipe(path, ["projection=median"])


def test_channels_may_be_those_of_other_orientations(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    network = build(read_recipe(path, ["orientations=16", "widths_of=8"]))
    assert network.architecture.channels(16) == build(read_recipe(path, ["orientations=8"])).architecture.channels(8)
    assert sum(weight.numel() for weight in network.parameters()) == sum(network.architecture.weights(16))
    assert "widths_of" not in read_recipe(path).network_options
    assert read_recipe(path, ["widths_of=false"]) == read_recipe(path)
    with pytest.raises(RecipeError, match="orientations"):
        read_recipe(path, ["widths_of=0"])


def test_reflections_are_a_key(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    assert not build(read_recipe(path)).architecture.reflections
    recipe = read_recipe(path, ["reflections=true", "orientations=4"])
    assert recipe.network_options["reflections"] is True
    network = build(recipe)
    assert network.architecture.reflections
    assert network.architecture.channels(4) == build(read_recipe(path)).architecture.channels(8)
    with pytest.raises(RecipeError, match="tumor knows reflections False or True; got 'mirror'"):
        read_recipe(path, ["reflections=mirror"])
