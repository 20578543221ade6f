"""The table of additions to the paper's design: runs of the same recipe, paired by seed, in a fixed order."""

import csv
import json
from pathlib import Path

import pytest
from additions import compare, main, read_networks, tabulate

from rotopath import runs
from rotopath.model_file import MODEL, WEIGHTS, RunError, pack_weights, write_model
from rotopath.recipe import format_recipe, make_recipe
from rotopath.studies.results import read_results
from rotopath.tasks import TUMOR
from rotopath.writing import write_bytes, write_json, write_text

pytestmark = pytest.mark.slow


def make_run(part: Path, seed: int, auc: float, wrong: int = 4, rotated: bool = True, **keys: object) -> None:
    recipe = make_recipe({"task": "tumor", "data": "d", "seed": seed, **keys})
    regime = "" if recipe.regime is None else f"-regime{recipe.regime:g}"
    folder = part / f"N{recipe.orientations}{regime}-seed{seed}"
    folder.mkdir(parents=True)
    scores = {"accuracy": 1 - wrong / 40, "auc": auc, "slides": None, "wrong": list(range(wrong)), "images": 40}
    rotation = {"rotation": {"fair": {"deviation": auc / 10, "changed": auc / 5}}} if rotated else {}
    (folder / "evaluation-test.json").write_text(json.dumps({"test": scores | rotation | {"rotations": 1}}))
    losses = [9.0] * 100 + [0.25] * 250 + [0.75] * 250  # only the last steps count
    lines = "".join(f"{step},{loss}\n" for step, loss in enumerate(losses))
    (folder / runs.LOG).write_text(f"step,loss\n{lines}")
    write_text(folder / runs.RECIPE, format_recipe(recipe))
    write_json(folder / runs.METRICS, {"valid": {"accuracy": auc, "auc": auc - 0.1}})
    network = runs.build(recipe)
    weights = pack_weights(network)
    write_model(folder, TUMOR, runs.describe_network(recipe, network), {"threshold": 0.5}, weights)
    write_bytes(folder / WEIGHTS, weights)


def make_study(folder: Path) -> Path:
    """Seeds with very different AUC, and an addition that increases it by 0.01, 0.02 and 0.03."""
    for seed, auc in enumerate((0.90, 0.80, 0.70, 0.10)):  # no other network has the last seed
        make_run(folder / "paper", seed, auc)
    for seed, auc in enumerate((0.91, 0.82, 0.73)):
        make_run(folder / "faithful", seed, auc, wrong=2, kernel="harmonic", pooling="rms-blur")
    make_run(folder / "attention", 1, 0.79, projection="attention")
    return folder


def test_rows_for_known_scores(tmp_path: Path) -> None:
    paper, faithful, attention = tabulate(read_networks(make_study(tmp_path / "study")))
    assert [row["part"] for row in (paper, faithful, attention)] == ["paper", "faithful", "attention"], "paper first"
    assert (paper["weights"], paper["seeds"], paper["AUC"]) == ("86727", "4", "0.6250 ± 0.3594")
    assert {paper[name] for name in paper if "minus" in name} == {"–"}
    assert (faithful["N"], faithful["accuracy"]) == ("8", "0.9500 ± 0.0000")
    assert faithful["deviation over angles"] == "0.0820 ± 0.0090"
    assert faithful["changed decisions, %"] == "16.4 ± 1.8"
    assert faithful["training loss"] == "0.500 ± 0.000"
    assert (attention["validation accuracy"], attention["validation AUC"]) == ("0.7900", "0.6900")
    assert paper["steps"] == "10000"
    assert faithful["accuracy minus paper"] == "+0.0500 [+0.0500, +0.0500]"
    assert faithful["with other patches"] != "[+0.0500, +0.0500]", "resampled patches give different differences"
    assert faithful["AUC minus paper"] == "+0.0200 [-0.0048, +0.0448]", "Student's t for pairs: 4.303 · 0.01 / √3"
    assert faithful["deviation minus paper"] == "+0.0020 [-0.0005, +0.0045]"
    assert faithful["changed minus paper"] == "+0.4 [-0.1, +0.9]"
    assert attention["AUC minus paper"] == "-0.0100", "there is no interval for one pair"
    assert attention["accuracy minus paper"] == "+0.0000"


def test_difference_needs_a_common_seed(tmp_path: Path) -> None:
    make_run(tmp_path / "paper", 0, 0.9)
    (result,) = read_results(tmp_path)
    assert set(compare([result], {7: result}).values()) == {"–"}


def test_runs_of_another_study_with_the_same_recipe_are_added(tmp_path: Path) -> None:
    study, part = make_study(tmp_path / "study"), tmp_path / "samples" / "tumor"
    make_run(study / "channels", 0, 0.9, orientations=16, widths_of=8)
    make_run(part, 0, 0.95, orientations=16, regime=1.0)
    make_run(part, 0, 0.5, orientations=16, regime=0.5)  # less training data
    make_run(part, 0, 0.5, orientations=4, regime=1.0)  # a number of orientations that the study does not have
    make_run(part.with_name("nuclei"), 0, 0.5, orientations=16)
    *_, wide, added = tabulate(read_networks(study, part))
    assert [wide["part"], wide["N"], wide["weights"]] == ["channels", "16", "172423"]
    assert [added[name] for name in ("part", "N", "weights", "seeds")] == ["equal weights", "16", "82411", "1"]
    assert added["AUC minus paper"] == "+0.0500"
    make_run(part, 1, 0.95, orientations=8, learning_rate=0.5)
    with pytest.raises(RunError, match="differ in 'learning_rate'"):
        read_networks(study, part)


def test_runs_that_cannot_be_compared_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, out = tmp_path / "study", tmp_path / "table.csv"
    make_run(study / "faithful", 0, 0.9)
    monkeypatch.setattr("sys.argv", ["additions.py", str(study), str(out)])
    with pytest.raises(SystemExit, match="has 0 networks in its part 'paper'"):
        main()
    make_run(study / "paper", 0, 0.9, rotated=False)
    with pytest.raises(SystemExit, match=r"evaluated without rotated inputs; run `rotopath evaluate .* --robustness`"):
        main()
    make_run(study / "harmonic", 1, 0.95, kernel="harmonic", epochs=3)
    with pytest.raises(SystemExit, match="differ in 'epochs'"):
        main()
    monkeypatch.setattr("sys.argv", ["additions.py", str(study)])
    with pytest.raises(SystemExit, match="Expected the folder of a study"):
        main()
    assert not out.exists()


def test_network_options_may_differ_but_not_the_network(tmp_path: Path) -> None:
    make_run(tmp_path / "paper", 0, 0.9)
    make_run(tmp_path / "smooth", 0, 0.95, network_options={"smoothing": True, "upsampling": "bilinear"})
    assert [row["part"] for row in tabulate(read_networks(tmp_path))] == ["paper", "smooth"]
    make_run(tmp_path / "other", 0, 0.95, network="mitosis")
    with pytest.raises(RunError, match="differ in 'network'"):
        read_networks(tmp_path)


def test_runs_of_rotopath_0_1_are_read(tmp_path: Path) -> None:
    """Their recipes have network options at the top level, and they have an operating point instead of a model file."""
    expected = tabulate(read_networks(make_study(tmp_path / "study")))
    for folder in (tmp_path / "study").glob("faithful/*"):
        (folder / MODEL).unlink()
        write_json(folder / runs.OLD_POINT, {"threshold": 0.5})
        keys = f'task = "tumor"\ndata = "d"\nseed = {folder.name[-1]}\n'
        (folder / runs.RECIPE).write_text(f'{keys}kernel = "harmonic"\npooling = "rms-blur"\n')
    assert tabulate(read_networks(tmp_path / "study")) == expected


def test_table_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "table.csv"
    monkeypatch.setattr("sys.argv", ["additions.py", str(make_study(tmp_path / "study")), str(out)])
    main()
    with out.open(newline="") as file:
        assert [row["part"] for row in csv.DictReader(file)] == ["paper", "faithful", "attention"]
