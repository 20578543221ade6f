"""Plans of studies: the jobs they expand to, and errors in one sentence."""

import json
from pathlib import Path

import pytest
from layouts import pcam

import rotopath as rp
from rotopath.recipe import RecipeError
from rotopath.studies import Study, read_study
from rotopath.studies.plan import LEAST_STEP_S, estimate_gpu_hours

STUDIES = Path(__file__).parents[2] / "studies"


def write(folder: Path, study: str, recipe: str = 'task = "tumor"\ndata = "d"\nsteps = 7\n') -> Path:
    (folder / "r.toml").write_text(recipe)
    (folder / "s.toml").write_text(study)
    return folder / "s.toml"


def test_a_plan_expands_to_jobs_seed_by_seed(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[a]\nrecipe = "r.toml"\norientations = [1, 8]\nregime = [1, 0.5]\nseed = [3, 4]\ntta = 4\n'
        'set = { data = "elsewhere", augmentation = { stain = 0.1 } }\n'
        '[b]\nrecipe = "r.toml"\norientations = [4]\nseed = [3]\n',
    )
    jobs = read_study(path, ["b.set.epochs=2"]).jobs
    assert [job.name for job in jobs] == [
        *("a/N8-regime1-seed3", "a/N8-regime0.5-seed3", "a/N1-regime1-seed3", "a/N1-regime0.5-seed3", "b/N4-seed3"),
        *("a/N8-regime1-seed4", "a/N8-regime0.5-seed4", "a/N1-regime1-seed4", "a/N1-regime0.5-seed4"),
    ]
    assert [job.rotations for job in jobs[:5]] == [1, 1, 4, 4, 1], "only ordinary networks have test-time augmentation"
    assert (jobs[0].recipe.data, jobs[0].recipe.steps, jobs[0].recipe.augmentation.stain) == ("elsewhere", 7, 0.1)
    assert jobs[0].recipe.augmentation.quarter_turns
    assert (jobs[4].recipe.data, jobs[4].recipe.epochs, jobs[4].recipe.regime) == ("d", 2, None)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("paper", 3 * 4 * 3 * 4),
        ("synthetic", 3 * 4 * 3 * 2),
        ("samples", 3 * 4 * (4 + 3 + 5) + 4 * 3),
        ("beyond", 33),
        ("faithful", 10),
    ],
)
def test_the_studies_of_this_repository(name: str, count: int) -> None:
    jobs = read_study(STUDIES / f"{name}.toml").jobs
    assert len({job.name for job in jobs}) == len(jobs) == count


@pytest.mark.parametrize(
    ("study", "sentence"),
    [
        ("", "has no parts"),
        ("a = 1\n", "'a' must be a table such as [tumor]"),
        ('["a/b"]\nrecipe = "r.toml"\n', "the name of the part 'a/b' becomes a folder name"),
        (
            '[a]\nrecipe = "r.toml"\norientation = [1]\n',
            "the part 'a' has the unknown key 'orientation'; valid keys are recipe",
        ),
        ("[a]\nseed = [1]\n", "needs the key 'recipe'; set it to the path of a recipe file"),
        ('[a]\nrecipe = "gone.toml"\n', "gone.toml does not exist"),
        ('[a]\nrecipe = "r.toml"\nseed = 1\n', "different whole numbers, such as [1, 8]; got 1."),
        ('[a]\nrecipe = "r.toml"\nseed = [1, 1]\n', "must be a list of one or more different whole numbers"),
        ('[a]\nrecipe = "r.toml"\nseed = [0.5]\n', "must be a list of one or more different whole numbers"),
        ('[a]\nrecipe = "r.toml"\nseed = [-1]\n', "the key 'seed' must be a whole number from 0 to 4294967295"),
        ('[a]\nrecipe = "r.toml"\norientations = [0]\n', "orientations"),
        ('[a]\nrecipe = "r.toml"\ntta = 0\n', "'a.tta' must be a whole number of rotations, from 1 to 360; got 0"),
        ('[a]\nrecipe = "r.toml"\nset = 3\n', "'a.set' must be a table with keys of the recipe; got 3"),
        ('[a]\nrecipe = "r.toml"\nseed = []\n', "must be a list of one or more different whole numbers"),
        ('[a]\nrecipe = "r.toml"\nregime = [1, 7]\n', "the key 'regime' must be a fraction of each class"),
        ('[a]\nrecipe = "r.toml"\nset = { devices = 2 }\n', "runs of a study use one device each"),
        (
            '[a]\nrecipe = "r.toml"\nset = { seed = 3 }\n',
            "'a.set.seed' is not allowed; set the key 'a.seed' to a list of values",
        ),
        ('[a]\nrecipe = "r.toml"\nset = { stepps = 3 }\n', "the key 'stepps' is unknown; did you mean 'steps'?"),
    ],
)
def test_errors_in_a_plan_are_named(tmp_path: Path, study: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as error:
        read_study(write(tmp_path, study))
    assert sentence in str(error.value)


def test_changes_to_a_study_that_is_not_a_file_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="apply to study files only; set the value in the `Study` object"):
        rp.study(Study(()), tmp_path, changes=["tumor.seed=[0]"])


def test_only_some_parts_can_be_run(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('[a]\nrecipe = "tumor"\n[b]\nrecipe = "nuclei"\n')
    assert {job.part for job in read_study(path, parts=["b"]).jobs} == {"b"}
    with pytest.raises(RecipeError, match="has no part 'c'; choose from a, b"):
        read_study(path, parts=["b", "c"])


def test_the_time_on_a_gpu_is_estimated_from_operations_and_steps(tmp_path: Path) -> None:
    def estimate_s(n: int, **keys: object) -> float:
        mining = "".join(f"{key} = {value}\n" for key, value in keys.pop("mining", {}).items())  # type: ignore[attr-defined]
        table = f"[a.set.mining]\n{mining}" if mining else "mining = false\n"
        values = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
        path = tmp_path / "s.toml"
        path.write_text(f'[a]\nrecipe = "tumor"\norientations = [{n}]\nseed = [0, 1]\n[a.set]\n{values}\n{table}')
        hours = estimate_gpu_hours(read_study(path))
        assert hours is not None
        return 3600 * hours

    assert estimate_s(8, steps=100, epochs=5) == pytest.approx(2 * 500 * 64 / 170_720, rel=0.1), "as measured"
    assert estimate_s(1, steps=100, epochs=5) == pytest.approx(2 * 500 * LEAST_STEP_S), (
        "small networks wait for the CPU"
    )
    data = str(pcam(tmp_path / "data", (1200, 8, 8)))
    few = estimate_s(1, data=data, steps="pass", epochs=1, batch=2)
    assert few == pytest.approx(2 * 600 * LEAST_STEP_S), "1,200 patches in batches of 2"
    assert estimate_s(1, data="missing", steps="pass", epochs=1) == pytest.approx(2 * 500 * LEAST_STEP_S)
    mined = estimate_s(1, steps=100, epochs=5, mining={"epochs": 3})
    assert mined == pytest.approx((2 * 500 + 300) * LEAST_STEP_S), "both seeds share one baseline"


def test_a_network_that_cannot_be_measured_has_no_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job reports the error, and the other jobs run."""
    (tmp_path / "failing_network.py").write_text("def build(outputs):\n    raise ValueError('not yet written')\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "s.toml"
    path.write_text('[a]\nrecipe = "tumor"\norientations = [1]\n[a.set]\nnetwork = "failing_network:build"\n')
    assert estimate_gpu_hours(read_study(path)) is None
