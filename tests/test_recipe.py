"""Recipes: a written recipe is read back equal, changes apply, and every wrong key is named."""

import re
from dataclasses import replace
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
    LEAST_PASS_STEPS,
    NETWORK_OPTIONS,
    Mining,
    NetworkOptions,
    Recipe,
    RecipeError,
    find_changed_key,
    find_recipe,
    format_recipe,
    list_recipes,
    make_recipe,
    read_recipe,
)
from rotopath.runs import build
from rotopath.tasks import NUCLEI, PALETTE, Classify


def write_toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(text)
    return path


MINIMAL = 'task = "tumor"\ndata = "pcam"\n'


def test_false_resets_a_key(tmp_path: Path) -> None:
    path = write_toml(tmp_path, MINIMAL + "regime = 0.5\n[mining]\nepochs = 2\n")
    assert read_recipe(path).mining == Mining(epochs=2)
    recipe = read_recipe(path, ["mining=false", "regime=false"])
    assert recipe.mining is None
    assert recipe.regime is None
    with pytest.raises(RecipeError, match="the key 'epochs' must be a whole number; got False"):
        read_recipe(path, ["epochs=false"])


def test_the_defaults_are_those_of_the_paper(tmp_path: Path) -> None:
    recipe = read_recipe(write_toml(tmp_path, MINIMAL))
    assert recipe == Recipe("tumor", "pcam")
    assert (recipe.optimiser, recipe.learning_rate, recipe.momentum, recipe.weight_decay) == ("sgd", 0.01, 0.9, 5e-4)
    assert recipe.schedule == "halve"
    assert recipe.augmentation == Augmentation(stain=0.0)


def test_changes_apply_and_texts_need_no_quotes(tmp_path: Path) -> None:
    path = write_toml(tmp_path, MINIMAL + "[augmentation]\nstain = 0.2\n")
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
        (MINIMAL, ["orientation=4"], "the key 'orientation' is unknown; did you mean 'orientations'?"),
        (MINIMAL, ["augmentation.stains=0.1"], "the key 'augmentation.stains' is unknown; did you mean"),
        (MINIMAL, ["zebra=red"], "the key 'zebra' is unknown; choose from task, data, classes, colors, spacing_um_px"),
        ('data = "x"', [], "the required key 'task' is missing; add it."),
        (MINIMAL, ["task=kidney"], "There is no task 'kidney'; choose from mitosis, nuclei, tumor, classify"),
        (MINIMAL, ["task=tumour"], "There is no task 'tumour'; did you mean 'tumor'?"),
        (MINIMAL, ["task=3"], "the key 'task' must be a string; got 3."),
        (MINIMAL, ["task=none.such:Kind"], "'none.such:Kind' cannot be imported (No module named 'none')"),
        (MINIMAL, ["task=pathlib:Path"], "The task 'pathlib:Path' is not a subclass of rotopath.tasks.Task"),
        (MINIMAL, ["network=resnet81"], "There is no network 'resnet81'; did you mean 'resnet18'?"),
        (MINIMAL, ["network=zebra"], "There is no network 'zebra'; choose from mitosis, nuclei, tumor, resnet18"),
        (MINIMAL, ["network=os:getcwd"], "The function 'os:getcwd' has no parameter 'outputs'"),
        (MINIMAL, ["network=resnet18", "network_options.widht=4"], "'resnet18' has no option 'widht'; did you mean"),
        (MINIMAL, ["network=resnet18", "pooling=max"], "The network 'resnet18' has no option 'pooling'; options"),
        (MINIMAL, ["network=resnet18", "kernel=cubic"], "'kernel' of the network 'resnet18' is 'cubic'; choose from"),
        (MINIMAL, ["network_options=4"], "the key 'network_options' must be a table; got 4."),
        (MINIMAL, ["network_options.orientations=4"], "has no option 'orientations'"),
        (MINIMAL, ["network_options.outputs=4"], "The network 'tumor' has no option 'outputs'"),
        (MINIMAL, ["kernal=harmonic"], "the key 'kernal' is unknown; did you mean 'kernel'?"),
        (MINIMAL, ["reflections=1"], "reflections"),
        (MINIMAL, ["smoothing=0"], "smoothing"),
        (MINIMAL, ["widths_of=true"], "got True"),
        (MINIMAL, ["task=rotopath.tasks:Task"], "'rotopath.tasks:Task'"),
        (MINIMAL, ["mining.epochs=0"], "the key 'mining.epochs' must be a whole number from 1 to 100000; got 0."),
        (
            MINIMAL,
            ["mining.examples=-1"],
            "the key 'mining.examples' must be a whole number from 1 to 10000000; got -1.",
        ),
        (MINIMAL, ["classes=tumor"], "the key 'classes' must be a list of strings; got 'tumor'."),
        (MINIMAL, ["classes=['a', 'A']"], "the key 'classes' must be a list of different names; got ['a', 'A']."),
        (MINIMAL, ["classes=['a', '']"], "the key 'classes' must be a list of different names; got ['a', '']."),
        (MINIMAL, ["colors=['red']"], "the key 'colors' must be a color such as \"#e69f00\"; got 'red'."),
        (
            MINIMAL,
            ["spacing_um_px=0"],
            "the key 'spacing_um_px' must be a number from 0.05 to 5 µm/px; got 0.0.",
        ),
        (
            MINIMAL,
            ["spacing_um_px=nan"],
            "the key 'spacing_um_px' must be a number from 0.05 to 5 µm/px; got nan.",
        ),
        (
            MINIMAL,
            ["data_spacing_um_px=9"],
            "the key 'data_spacing_um_px' must be a number from 0.05 to 5 µm/px; got 9.0.",
        ),
        (
            MINIMAL,
            ["stain=reinhard"],
            "the key 'stain' must be one of none, macenko or false, for the default; got 'reinhard'.",
        ),
        (MINIMAL, ["window_px=0"], "the key 'window_px' must be a whole number from 1 to 4096; got 0."),
        (MINIMAL, ["stride_px=-1"], "the key 'stride_px' must be a whole number from 1 to 4096; got -1."),
        (MINIMAL, ["batch=6", "devices=4"], "a batch of 6 windows cannot be divided equally among 4 devices; change"),
        (MINIMAL, ["regime=2"], "the key 'regime' must be a fraction of each class, above 0 and up to 1; got 2.0."),
        (MINIMAL, ["task=mitosis", "regime=0.5"], "the key 'regime' must be a whole number of cases; got 0.5."),
        (MINIMAL, ["epochs=many"], "the key 'epochs' must be a whole number; got 'many'."),
        (MINIMAL, ["epochs=1.5"], "the key 'epochs' must be a whole number; got 1.5."),
        (MINIMAL, ["epochs=true"], "the key 'epochs' must be a whole number; got True."),
        (MINIMAL, ["epochs=0"], "the key 'epochs' must be a whole number from 1 to 100000; got 0."),
        (MINIMAL, ["learning_rate=0"], "the key 'learning_rate' must be a number above 0, up to 100; got 0.0."),
        (MINIMAL, ["seed=-1"], "the key 'seed' must be a whole number from 0 to 4294967295; got -1."),
        (MINIMAL, ["orientations=0"], "the key 'orientations' must be a whole number from 1 to 128; got 0."),
        (MINIMAL, ["augmentation.stain=2"], "The augmentation 'stain' is 2.0; expected a fraction from 0 to below 1."),
        (MINIMAL, ["augmentation=none"], "the key 'augmentation' must be a table; got 'none'."),
        (MINIMAL, ["regime=all"], "the key 'regime' must be a number or false, for the default; got 'all'."),
        (MINIMAL, ["data.path=x"], "The key 'data' has no subkeys; got the override 'data.path=x'."),
        (MINIMAL, ["task=nuclei", "mining.epochs=2"], "mined for the task 'nuclei'; set mining=false."),
        (MINIMAL, ["epochs"], "An override has the form key=value; got 'epochs'."),
        ("task = ", [], "is not valid TOML"),
        ("task = " + "[" * 5_000 + "]" * 5_000, [], "is not valid TOML"),
        ("seed = " + "9" * 5_000, [], "is not valid TOML"),
        ("seed = 0x" + "f" * 5_000, [], "the key 'seed' has a number of more than 19 digits; choose a smaller number."),
        (".".join("abcdefghij") + " = 1", [], "the key 'a' has more than 8 levels of tables or lists; use fewer."),
        (MINIMAL, ["seed=" + "9" * 5_000], "the key 'seed' must be a whole number"),
        (MINIMAL, ["learning_rate=" + "9" * 400], "the key 'learning_rate' has a number of more than 19 digits"),
        *(
            (MINIMAL, [f"{key}={value}"], f"the key {key!r} must be a")
            for key, values in {
                "orientations": (4096, 10**9),
                "seed": (2**32, 10**18),
                "steps": (10**9,),
                "batch": (10**9,),
                "window_px": (-5, 10**6),
                "momentum": (2, 1, "nan", "inf"),
                "learning_rate": (1e9, "nan", "inf"),
                "weight_decay": (2, "nan"),
                "workers": (10**6,),
                "regime": ("nan", "inf"),
            }.items()
            for value in values
        ),
    ],
)
def test_wrong_keys_are_named(tmp_path: Path, text: str, changes: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe(write_toml(tmp_path, text), changes)
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
def test_a_written_recipe_is_read_back_equal(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = tmp_path_factory.mktemp("recipe") / "r.toml"
    path.write_text(format_recipe(recipe), encoding="utf-8")
    assert read_recipe(path) == recipe


@pytest.mark.parametrize("name", ['"', "\\", "a\nb", "tab\t", "\x7f", "\x00", "é\u2028"])
def test_a_class_with_any_characters_is_read_back_equal(tmp_path: Path, name: str) -> None:
    """Class names may come from data files, and contain anything."""
    recipe = make_recipe({"task": "classify", "data": name, "classes": [name, "other"]})
    assert read_recipe(write_toml(tmp_path, format_recipe(recipe))) == recipe


def test_whole_numbers_are_accepted_for_numbers() -> None:
    assert make_recipe({"task": "tumor", "data": "x", "learning_rate": 1}).learning_rate == 1.0


def test_stain_jitter_is_on_by_default_except_for_tasks_of_the_paper() -> None:
    for task, expected in (("tumor", 0.0), ("nuclei", 0.0), ("classify", 0.1), ("detect", 0.1), ("segment", 0.1)):
        for recipe in (Recipe(task, "d"), make_recipe({"task": task, "data": "d", "augmentation": {"blur": 1}})):
            assert recipe.augmentation.stain == expected
        assert make_recipe({"task": task, "data": "d", "augmentation": {"stain": 0}}).augmentation.stain == 0.0
    with pytest.raises(RecipeError, match=r"'jpeg' is 5; expected a number from 10 to 100"):
        make_recipe({"task": "tumor", "data": "d", "augmentation": {"jpeg": 5}})


@pytest.mark.parametrize("name", ["mitosis", "nuclei", "tumor"])
def test_recipes_of_the_package_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()  # a folder of data is no recipe
    recipe = read_recipe(Path(name), ["seed=3"])
    assert (recipe.task, recipe.seed) == (name, 3)
    assert list_recipes()[name].endswith("with the settings of Lafarge et al. (2020), where they state them.")
    assert f"rotopath train {name} --set data=FOLDER" in find_recipe(Path(name)).read_text(), (
        "the command is at its top"
    )
    assert (recipe.mining is None) == (name == "nuclei")
    Path(f"{name}.toml").write_text(MINIMAL)
    assert read_recipe(Path(f"{name}.toml")).data == "pcam", "a file comes first"


def test_the_key_from_is_written_and_read_as_from(tmp_path: Path) -> None:
    recipe = make_recipe({"task": "tumor", "data": "pcam", "from": "tumor-pcam-n8", "frozen_stages": 1})
    assert recipe.from_ == "tumor-pcam-n8"
    text = format_recipe(recipe)
    assert 'from = "tumor-pcam-n8"' in text
    assert read_recipe(write_toml(tmp_path, text)) == recipe
    assert read_recipe(write_toml(tmp_path, text), ["from=false", "frozen_stages=0"]).from_ is None
    for changes, sentence in (
        ({"from_": "x"}, "the key 'from_' is unknown; did you mean 'from'?"),
        ({"frozen_stages": 1}, "random weights cannot be frozen"),
        ({"from": "x", "from_rate": 0}, "'from_rate' must be a number above 0, at most 1; got 0.0."),
    ):
        with pytest.raises(RecipeError, match=re.escape(sentence)):
            make_recipe({"task": "tumor", "data": "pcam", **changes})


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("kernel", group.KERNELS),
        ("pooling", get_args(Pooling)),
        ("upsampling", get_args(Upsampling)),
        ("projection", PROJECTIONS),
    ],
)
def test_a_recipe_accepts_every_option_that_networks_accept(key: str, options: tuple[str, ...]) -> None:
    assert len(options) > 1
    for option in options:
        recipe = make_recipe({"task": "nuclei", "data": "d", key: option})
        assert recipe.network_options[key] == option
        assert getattr(build(recipe).architecture, key) == option
    with pytest.raises(RecipeError, match=rf"'{key}' of nuclei must be {' or '.join(map(repr, options))}; got 'none'"):
        make_recipe({"task": "nuclei", "data": "d", key: "none"})


def test_network_options_may_be_among_the_keys_or_in_a_table(tmp_path: Path) -> None:
    """Among the keys as in recipes of rotopath 0.1, or in the table in which they are written now."""
    options = 'kernel = "harmonic"\npooling = "rms-blur"\nreflections = true\nwidths_of = 4\n'
    recipe = read_recipe(write_toml(tmp_path, MINIMAL + options))
    assert read_recipe(write_toml(tmp_path, f"{MINIMAL}[network_options]\n{options}")) == recipe
    assert "[network_options]" in format_recipe(recipe)
    chosen = {"kernel": "harmonic", "pooling": "rms-blur", "reflections": True, "widths_of": 4}
    rest = {"upsampling": "nearest", "smoothing": False, "projection": "mean"}
    assert recipe.network_options == chosen | rest, "with all defaults"
    assert recipe == Recipe("tumor", "pcam", network_options=NetworkOptions(chosen))
    assert not {*NETWORK_OPTIONS} & {*vars(recipe)}


def test_another_network_may_be_chosen_by_name(tmp_path: Path) -> None:
    path = write_toml(tmp_path, MINIMAL)
    assert read_recipe(path).network_name == "tumor"
    recipe = read_recipe(path, ["network=resnet18", "network_options.width=4", "kernel=harmonic"])
    assert (recipe.network, recipe.network_name) == ("resnet18", "resnet18")
    assert recipe.network_options == {"width": 4, "kernel": "harmonic"}
    path.write_text(format_recipe(recipe))
    assert read_recipe(path) == recipe
    for kind, network in (("classify", "tumor"), ("detect", "mitosis"), ("segment", "nuclei")):
        assert make_recipe({"task": kind, "data": "d"}).network_name == network


def test_a_recipe_makes_its_task() -> None:
    assert make_recipe({"task": "nuclei", "data": "d"}).make_task() == NUCLEI
    overrides = {"colors": ["#010203"], "spacing_um_px": 2, "stain": "macenko"}
    task = make_recipe({"task": "classify", "data": "d", "classes": ["b", "a"], **overrides}).make_task()
    assert isinstance(task, Classify)
    assert (task.class_names, task.spacing_um_px, task.stain) == (("b", "a"), 2.0, "macenko")
    assert task.colors == ((1, 2, 3), PALETTE[1])
    assert make_recipe({"task": "detect", "data": "d"}).make_task(["x", "y"]).class_names == ("x", "y")


def test_classes_that_the_data_defines_are_no_change() -> None:
    """The recipe in a run folder contains the classes of the data; the recipe of the user need not."""
    plain = make_recipe({"task": "classify", "data": "d"})
    in_folder = make_recipe({"task": "classify", "data": "d", "classes": ["a", "b"]})
    assert find_changed_key(in_folder, plain) is None
    assert (
        find_changed_key(in_folder, make_recipe({"task": "classify", "data": "d", "classes": ["a", "c"]})) == "classes"
    )
    assert find_changed_key(plain, make_recipe({"task": "classify", "data": "d", "devices": 2, "workers": 3})) is None
    assert find_changed_key(plain, make_recipe({"task": "classify", "data": "d", "stride_px": 2})) == "stride_px"


@pytest.mark.parametrize("task", ARCHITECTURES)
def test_a_preset_is_replaced_by_the_options_that_it_stands_for(tmp_path: Path, task: str) -> None:
    values = {"task": task, "data": "d"}
    network = ARCHITECTURES[task]
    assert build(make_recipe(values)).architecture == network
    assert make_recipe(values | {"preset": "paper"}) == make_recipe(values)
    recipe = make_recipe(values | {"preset": "faithful"})
    assert build(recipe).architecture == network.choose("faithful")
    path = write_toml(tmp_path, format_recipe(recipe))
    assert "preset" not in path.read_text(), "a later version may define it differently"
    assert read_recipe(path) == recipe
    assert make_recipe(values | {"network_options": {"preset": "faithful"}}) == recipe
    changed = make_recipe(values | {"preset": "faithful", "kernel": "gaussian"})
    assert changed.network_options == recipe.network_options | {"kernel": "gaussian"}
    for wrong in ("exact", ["faithful"]):
        with pytest.raises(
            RecipeError, match=rf"The preset of {task} must be 'paper' or 'faithful'; got .*(exact|faithful)"
        ):
            make_recipe(values | {"preset": wrong})


def test_the_projection_is_an_optional_key(tmp_path: Path) -> None:
    path = write_toml(tmp_path, MINIMAL)
    recipe = read_recipe(path)
    defaults = {"mitosis": "max", "nuclei": "max", "tumor": "mean"}
    for task, mode in defaults.items():
        made = make_recipe({"task": task, "data": "d"})
        assert (made.network_options["projection"], build(made).project.mode) == (mode, mode)
    chosen = read_recipe(path, ["projection=fourier"])
    assert build(chosen).project.mode == "fourier"
    assert 'projection = "fourier"' in format_recipe(chosen)
    assert find_changed_key(recipe, chosen) == "network_options"
    path.write_text(format_recipe(chosen))
    assert read_recipe(path) == chosen
    path.write_text(MINIMAL + 'projection = "fourier"\n')
    assert read_recipe(path) == chosen
    assert read_recipe(path, ["projection=false"]) == recipe
    with pytest.raises(
        RecipeError, match="'projection' of tumor must be 'max' or 'mean' or 'attention' or 'fourier'; got 'med"
    ):
        read_recipe(path, ["projection=median"])


def test_channels_may_be_those_of_another_number_of_orientations(tmp_path: Path) -> None:
    path = write_toml(tmp_path, MINIMAL)
    network = build(read_recipe(path, ["orientations=16", "widths_of=8"]))
    assert network.architecture.channels(16) == build(read_recipe(path, ["orientations=8"])).architecture.channels(8)
    assert sum(weight.numel() for weight in network.parameters()) == sum(network.architecture.weights(16))
    assert "widths_of" not in read_recipe(path).network_options
    assert read_recipe(path, ["widths_of=false"]) == read_recipe(path)
    with pytest.raises(RecipeError, match="orientations"):
        read_recipe(path, ["widths_of=0"])


def test_reflections_are_a_key(tmp_path: Path) -> None:
    path = write_toml(tmp_path, MINIMAL)
    assert not build(read_recipe(path)).architecture.reflections
    recipe = read_recipe(path, ["reflections=true", "orientations=4"])
    assert recipe.network_options["reflections"] is True
    network = build(recipe)
    assert network.architecture.reflections
    assert network.architecture.channels(4) == build(read_recipe(path)).architecture.channels(8)
    with pytest.raises(RecipeError, match="'reflections' of tumor must be False or True; got 'mirror'"):
        read_recipe(path, ["reflections=mirror"])


def test_a_pass_shows_the_training_data_once_but_has_a_least_number_of_steps() -> None:
    recipe = make_recipe({"task": "tumor", "data": "d", "steps": "pass"})
    assert recipe.count_steps(262_144) == 4096, "as for PCam in batches of 64"
    assert recipe.count_steps(262_145) == 4097
    assert recipe.count_steps(1000) == LEAST_PASS_STEPS
    with pytest.raises(ValueError, match="depends on the data"):
        recipe.step_count  # noqa: B018
    assert make_recipe({"task": "tumor", "data": "d", "steps": 7}).count_steps(262_144) == 7
    assert find_changed_key(replace(recipe, steps=4096), recipe) is None, "the run folder has the number of steps"
    assert find_changed_key(recipe, replace(recipe, steps=4096)) == "steps"
    for value in ("all", 0, True):
        with pytest.raises(RecipeError, match="'steps'"):
            make_recipe({"task": "tumor", "data": "d", "steps": value})
