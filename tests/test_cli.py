"""The command line: what each command prints and writes, its error messages, and its exit codes."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch
from layouts import amida13, kumar, pcam, pixels, write_csv, write_image
from PIL import Image
from rich.console import Console
from scanner_files import write_svs
from sharing import pipe_at
from typer.testing import CliRunner, Result

import rotopath
from rotopath import pretrained
from rotopath.cli import app
from rotopath.cli import train as train_command
from rotopath.model_file import FORMAT, MODEL
from rotopath.models import ARCHITECTURES
from rotopath.training import loop

pytestmark = pytest.mark.slow


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})


def test_a_seed_that_is_too_large_is_refused_before_tissue_is_made(tmp_path: Path) -> None:
    result = run("data", "make", "--task", "tumor", "--out", str(tmp_path / "tissue"), "--seed", "9" * 30)
    assert result.exit_code == 2
    assert "seed" in result.output
    assert not (tmp_path / "tissue").exists()


def test_models_prints_all_totals_within_80_columns() -> None:
    result = run("models")
    assert result.exit_code == 0
    totals = [34561, 32035, 33897, 33751, 66886, 62332, 66206, 66056, 89425, 88600, 86727, 82411]
    for total in map(str, totals):
        assert total in result.stdout
    assert "…" not in result.stdout
    assert "Receptive field 68 px, stride 8 px." in result.stdout


def test_models_shows_one_architecture_with_other_orientations() -> None:
    result = run("models", "tumor", "-n", "6")
    assert result.exit_code == 0
    assert "N=6" in result.stdout
    assert "88919" in result.stdout
    assert "mitosis" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("models", "kidney"), "There is no model 'kidney'; choose from "),
        (("models", "-n", "0"), "orientations must be a whole number, 1 or more"),
        (("models", "-n", "4000"), "use fewer orientations"),
    ],
)
def test_models_rejects_bad_arguments_in_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stdout == ""


def test_demo_trains_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "folder"
    monkeypatch.setattr("rotopath.reports.demo_report.WINDOWS", 8)
    result = run("demo", "--out", str(out), "--steps", "1", "--size", "160")
    assert result.exit_code == 0, result.stderr
    report = (out / "report.html").read_text()
    assert report.count("data:image/png;base64,") == 3
    for name in ("N=1", "N=8"):
        assert f"<td>{name}</td>" in report
        assert f"Training {name}." in result.stdout
        assert (out / name / "weights.safetensors").exists()
    again = run("demo", "--out", str(out), "--steps", "1", "--size", "160")
    assert again.exit_code == 0
    assert "Training" not in again.stdout, "finished runs are kept"


def test_demo_rejects_a_file_as_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    result = run("demo", "--out", str(tmp_path / "taken"))
    assert result.exit_code == 2
    assert "is a file, but the demo needs a folder" in result.stderr
    assert (tmp_path / "taken").read_text() == "a file"


def test_demo_rejects_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    result = run("demo", "--out", str(tmp_path / "taken" / "below"))
    assert result.exit_code == 2
    assert "cannot be read or written" in result.stderr


@pytest.mark.parametrize("columns", ["46", "60", "80", "200"])
def test_tables_fit_the_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotopath.reports.terminal.console", Console(width=int(columns)))
    result = run("models", "nuclei", *[word for n in range(1, 13) for word in ("-n", str(n))])
    assert result.exit_code == 0
    assert "…" not in result.stdout
    for n in range(1, 13):
        assert f"N={n}" in result.stdout


def test_version() -> None:
    assert run("--version").stdout == f"rotopath {rotopath.__version__}\n"


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys, runpy; sys.argv = ['rotopath', '--help']\n"
        "try: from rotopath.cli import app; app()\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "models" in done.stdout


def test_python_m_rotopath_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rotopath", "models", "tumor"], capture_output=True, text=True, check=True
    )
    assert "86727" in done.stdout


def test_data_check_prints_counts_and_published_numbers(tmp_path: Path) -> None:
    result = run("data", "check", str(pcam(tmp_path, (4, 4, 4))))
    assert result.exit_code == 0
    assert "PCam, a class for each image" in result.stdout
    assert "4 (262144)" in result.stdout
    assert "No problems." in result.stdout
    assert result.stderr == ""


def test_data_check_lists_all_problems_and_exits_with_1(tmp_path: Path) -> None:
    pcam(tmp_path)
    (tmp_path / "camelyonpatch_level_2_split_valid_y.h5").unlink()
    (tmp_path / "camelyonpatch_level_2_split_test_x.h5").write_bytes(b"no hdf5")
    result = run("data", "check", str(tmp_path))
    assert result.exit_code == 1
    assert "2 problems" in result.stdout
    assert "- camelyonpatch_level_2_split_valid_y.h5: does not exist." in result.stdout
    assert "- camelyonpatch_level_2_split_test_x.h5: is not an HDF5 file, or is damaged" in result.stdout


@pytest.mark.parametrize("layout", ["pcam", "kumar", "amida13"])
def test_data_show_draws_each_augmentation(tmp_path: Path, layout: str) -> None:
    data = {
        "pcam": lambda: pcam(tmp_path / "data", (4, 2, 2)),
        "kumar": lambda: kumar(tmp_path / "data", [f"n{i}" for i in range(6)], size=70),
        "amida13": lambda: amida13(tmp_path / "data", cases=[1, 2, 3, 13], size=(100, 110)),
    }[layout]()
    result = run("data", "show", str(data), "--augment", "--out", str(tmp_path / "sheet.png"))
    assert result.exit_code == 0, result.stderr
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.height > sheet.width, "nine rows of tiles"


def test_data_show_draws_a_contact_sheet(tmp_path: Path) -> None:
    out = tmp_path / "new" / "sheet.png"
    result = run("data", "show", str(pcam(tmp_path)), "--out", str(out))
    assert result.exit_code == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in out.parent.iterdir()] == ["sheet.png"]


@pytest.mark.parametrize("command", ["check", "show", "export"])
def test_help_names_the_folder_of_an_import_first(command: str) -> None:
    words = " ".join(run("data", command, "--help").stdout.replace("│", " ").split())
    assert "Dataset: the folder that `rotopath data import` has written; a manifest (CSV file);" in words


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("check", "{}/nowhere"), "nowhere does not exist."),
        (
            ("check", "{}/empty"),
            "empty is empty; expected a folder with a manifest.csv; or the unpacked folders of AMIDA13",
        ),
        (
            ("check", "{}", "--task", "nuclei"),
            "(PCam) contains a class for each image; expected outlines of objects",
        ),
        (("check", "{}", "--task", "detect"), "(PCam) contains a class for each image; expected positions of"),
        (
            ("check", "{}", "--task", "kidney"),
            "There is no task 'kidney'; choose from mitosis, nuclei, tumor, classify, detect, segment, or",
        ),
        (("check", "{}", "--task", "classfy"), "There is no task 'classfy'; did you mean 'classify'?"),
        (("show", "{}/empty"), "empty is empty; expected a folder"),
        (("show", "{}", "--out", "{}/sheet.txt"), "choose a file name that ends in .png, .jpg, .pdf or .svg."),
        (("show", "{}", "--out", "{}/taken/sheet.png"), "cannot be read or written"),
        (
            ("make", "--task", "kidney", "--out", "{}/new"),
            "There is no synthetic tissue for the task 'kidney'; choose mitosis, nuclei, tumor.",
        ),
        (("make", "--task", "tumor", "--out", "{}"), "is not an empty folder"),
    ],
)
def test_data_commands_reject_bad_arguments_in_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    pcam(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").write_text("a file")
    before = sorted(tmp_path.rglob("*"))
    result = run("data", *[word.format(tmp_path) for word in arguments])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before, "no files are written"


def class_folders(root: Path, count: int = 5) -> Path:
    """Patches sorted by class, in files that do not specify their pixel size."""
    for number, name in enumerate(("dots", "plain", "stripes")):
        for i in range(count):
            write_image(root / name / f"{i}.png", pixels(40, 40, number, i))
    return root


def labeled(root: Path, *labels: object) -> Path:
    """A manifest of patches with these labels."""
    for i in range(len(labels)):
        write_image(root / f"{i}.png", pixels(96, 96, i))
    rows = [(f"{i}.png", label, "train", 1) for i, label in enumerate(labels)]
    return write_csv(root / "manifest.csv", [("image", "label", "split", "spacing"), *rows])


def test_data_check_accepts_class_folders_for_classification(tmp_path: Path) -> None:
    folder = class_folders(tmp_path / "data")
    result = run("data", "check", str(folder), "--task", "classify", "--spacing-um-px", "0.5")
    assert result.exit_code == 0, result.stderr
    assert "class folders, a class for each image" in result.stdout
    assert "Pixel spacing: 0.5 µm/px." in result.stdout
    assert "No problems." in result.stdout
    head = next(line for line in result.stdout.splitlines() if "split" in line)
    assert head.split()[-3:] == ["dots", "plain", "stripes"]
    total = next(line for line in result.stdout.splitlines() if line.split()[:1] == ["all"])
    assert total.split()[-3:] == ["5", "5", "5"]


def test_class_folders_without_a_spacing_are_a_problem_with_a_solution(tmp_path: Path) -> None:
    result = run("data", "check", str(class_folders(tmp_path / "data")), "--task", "classify")
    assert result.exit_code == 1
    words = " ".join(result.stdout.split())
    assert "does not specify its pixel spacing" in words
    assert "--spacing-um-px" in words


@pytest.mark.parametrize("spacing", ["-1", "0", "99", "nan"])
def test_implausible_spacing_is_rejected(tmp_path: Path, spacing: str) -> None:
    folder = class_folders(tmp_path / "data")
    for command in (("check",), ("show", "--out", str(tmp_path / "sheet.png"))):
        result = run("data", command[0], str(folder), *command[1:], "--spacing-um-px", spacing)
        assert result.exit_code == 2
        assert f"{spacing} µm/px; expected 0.05 to 5 µm/px." in result.stderr
        assert result.stdout == ""
    assert not (tmp_path / "sheet.png").exists()


def test_contact_sheet_of_class_folders_needs_their_spacing(tmp_path: Path) -> None:
    folder, sheet = class_folders(tmp_path / "data"), tmp_path / "sheet.png"
    assert run("data", "show", str(folder), "--out", str(sheet)).exit_code == 2
    assert not sheet.exists()
    assert run("data", "show", str(folder), "--out", str(sheet), "--spacing-um-px", "0.5").exit_code == 0
    assert sheet.read_bytes().startswith(b"\x89PNG")


def test_labels_of_another_task_are_rejected_in_one_sentence(tmp_path: Path) -> None:
    manifest = labeled(tmp_path, 0, 1, 2)
    result = run("data", "check", str(manifest), "--task", "tumor")
    assert result.exit_code == 2
    assert "does not fit the task tumor: 2.png has the label '2'; expected one of 0 (normal), 1 (Tumor)." in (
        result.stderr
    )
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert run("data", "check", str(manifest), "--task", "classify").exit_code == 0, "another task may have this label"


def test_labels_of_the_task_are_accepted(tmp_path: Path) -> None:
    for name, labels in (("numbers", (0, 1)), ("names", ("normal", "Tumor"))):
        result = run("data", "check", str(labeled(tmp_path / name, *labels)), "--task", "tumor")
        assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(("task", "objects"), [("mitosis", "mitoses"), ("nuclei", "nuclei"), ("tumor", "tumor")])
def test_data_check_accepts_synthetic_tissue(
    tmp_path: Path, task: str, objects: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rotopath.synthetic as synthetic

    small = {
        "mitosis": partial(synthetic.make_mitosis, fields_per_case=1, size_px=96),
        "nuclei": partial(synthetic.make_nuclei, size_px=128),
        "tumor": partial(synthetic.make_tumor, patches={"train": 4, "valid": 4, "test": 4}),
    }
    monkeypatch.setattr(synthetic, f"make_{task}", small[task])
    out = tmp_path / task
    made = run("data", "make", "--task", task, "--out", str(out), "--seed", "3")
    assert made.exit_code == 0, made.stderr
    checked = run("data", "check", str(out), "--task", task)
    assert checked.exit_code == 0, checked.stdout
    assert "No problems." in checked.stdout
    assert objects in checked.stdout
    assert run("data", "show", str(out), "--out", str(tmp_path / "sheet.png")).exit_code == 0


SMALL = ("orientations=1", "steps=3", "epochs=1", "batch=4", "accelerator=cpu")


def small_run(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "tumor.toml").write_text(f'task = "tumor"\ndata = "{pcam(tmp_path / "data", (16, 8, 8))}"\n')
    settings = [word for setting in SMALL for word in ("--set", setting)]
    return ("train", str(tmp_path / "tumor.toml"), *settings, "--out", str(tmp_path / "run"))


def test_train_and_evaluate(tmp_path: Path) -> None:
    command = small_run(tmp_path)
    trained = run(*command)
    assert trained.exit_code == 0, trained.stderr
    assert "training, epoch 1 of at most 1: loss" in trained.stdout
    assert "accuracy" in trained.stdout
    evaluated = run("evaluate", str(tmp_path / "run"))
    assert evaluated.exit_code == 0, evaluated.stderr
    again = json.loads((tmp_path / "run/evaluation-test.json").read_text())["test"]
    before = json.loads((tmp_path / "run/metrics.json").read_text())["test"]
    assert {name: again[name] for name in before} == before, "all scores are computed again"
    rotated = run("evaluate", str(tmp_path / "run"), "--tta", "4", "--split", "val", "--data", str(tmp_path / "data"))
    assert rotated.exit_code == 0, rotated.stderr
    assert json.loads((tmp_path / "run/evaluation-valid-tta4.json").read_text())["valid"]["rotations"] == 4
    own = (tmp_path / "run/evaluation-test.json").read_text()
    elsewhere = pcam(tmp_path / "elsewhere", (4, 4, 4))
    assert run("evaluate", str(tmp_path / "run"), "--data", str(elsewhere)).exit_code == 0
    assert (tmp_path / "run/evaluation-test-on-elsewhere.json").exists()
    assert (tmp_path / "run/evaluation-test.json").read_text() == own, (
        "scores on other data do not replace those on the run's own data"
    )
    finished = run(*command)
    assert finished.exit_code == 2
    assert "contains a finished run; evaluate it, or choose another folder with --out." in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("train", "{}/none.toml"),
            "none.toml does not exist; check the path, or name a recipe of the package: mitosis, nuclei, tumor.",
        ),
        (("train", "{}/r.toml", "--set", "orientation=4"), "did you mean 'orientations'?"),
        (("train", "{}/r.toml"), "nowhere does not exist."),
        (
            ("train", "{}/r.toml", "--set", "network=resnet19"),
            "There is no network 'resnet19'; did you mean 'resnet18'?",
        ),
        (
            ("train", "{}/r.toml", "--set", "network=kidney"),
            "There is no network 'kidney'; choose from mitosis, nuclei, ",
        ),
        (
            ("train", "{}/r.toml", "--set", "task=kidney"),
            "There is no task 'kidney'; choose from mitosis, nuclei, tumor, ",
        ),
        (("evaluate", "{}/none"), "none is neither a run folder nor one of the pretrained models, "),
        (("evaluate", "{}"), "contains no run (weights.safetensors is missing); give the folder of a finished run."),
    ],
)
def test_train_and_evaluate_reject_bad_arguments_in_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "r.toml").write_text(f'task = "tumor"\ndata = "{tmp_path}/nowhere"\n')
    result = run(*[word.format(tmp_path) for word in arguments])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_recipes_lists_the_recipes_of_the_package() -> None:
    result = run("recipes")
    assert result.exit_code == 0
    for name in ("mitosis", "nuclei", "tumor"):
        assert f"{name} " in result.stdout
    assert result.stdout.count("with the settings of Lafarge et al. (2020).") == 3


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_an_interrupted_training_promises_to_resume_only_from_a_checkpoint(
    has_checkpoint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    def stop(*_: object, **__: object) -> None:
        folder.mkdir()
        if has_checkpoint:
            (folder / "resume.ckpt").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("rotopath.training.train", stop)
    result = run("train", "tumor", "--set", f"data={tmp_path}", "--out", str(folder))
    assert result.exit_code == 130
    again = "The command was interrupted; run the same command again"
    resumed = f" to resume the work in {folder}" if has_checkpoint else ""
    note = "" if has_checkpoint else ": it begins with the first step, because there was no checkpoint yet"
    assert result.stderr == f"rotopath: {again}{resumed}{note}.\n"


def test_train_by_name_from_a_pretrained_model(tmp_path: Path) -> None:
    settings = ("steps=2", "epochs=1", "batch=4", "accelerator=cpu", "mining=false", f"data={tmp_path / 'data'}")
    pcam(tmp_path / "data", (16, 8, 8))
    words = [word for setting in settings for word in ("--set", setting)]
    result = run("train", "tumor", *words, "--from", "tumor-pcam-n8", "--out", str(tmp_path / "run"))
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "11 of 11 layers start from tumor-pcam-n8, at 0.1 of the learning rate; none is fresh."
    assert lines[1] == "tumor-pcam-n8 was trained on a sample of PCam (terms of the data: CC0)."
    assert lines[2] == (
        "Training: at most 1 epoch of 2 steps, each with 4 windows. After Ctrl-C, the same command resumes it from "
        "its last checkpoint. There is one after each epoch."
    )
    assert "loss" in lines[3]
    wrong = run(
        "train", "tumor", *words, "--set", "orientations=4", "--from", "tumor-pcam-n8", "--out", str(tmp_path / "b")
    )
    assert wrong.exit_code == 2
    assert wrong.stderr.count("\n") == 1
    assert "has orientations = 8, but the recipe has orientations = 4" in wrong.stderr
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("classify", {"task": "classify", "steps": 50, "batch": 16, "window_px": 88, "spacing_um_px": 1.0}),
        ("detect", {"task": "detect", "steps": 50, "batch": 16, "window_px": 68, "spacing_um_px": 0.25}),
        ("segment", {"task": "segment", "steps": 50, "batch": 8, "window_px": 68, "spacing_um_px": 0.25}),
    ],
)
def test_init_writes_a_recipe_that_can_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    data = {
        "classify": lambda: pcam(tmp_path / "my data", (16, 8, 8)),
        "detect": lambda: amida13(tmp_path / "my data", cases=[1, 2, 3, 13], size=(100, 110)),
        "segment": lambda: kumar(tmp_path / "my data", [f"n{i}" for i in range(6)], size=70),
    }[kind]()
    written = run("init", str(data))
    assert written.exit_code == 0, written.stderr
    text = Path("my data.toml").read_text()
    recipe = tomllib.loads(text)
    assert {key: recipe[key] for key in expected} == expected
    assert "minutes on this machine (cpu)" in text
    assert "# from = " in text
    again = run("init", str(data))
    assert again.exit_code == 2
    assert "my data.toml exists; choose another file with --out." in again.stderr
    trained = run("train", "my data.toml", "--set", "steps=1", "--set", "epochs=1", "--set", "validation_steps=1")
    assert trained.exit_code == 0, trained.stderr


def test_init_adapts_to_the_data_and_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small patches are read at a finer spacing; the steps depend on the number of images and the time of a step."""
    for split, count in (("train", 80), ("valid", 4)):
        for name in ("a", "b"):
            for i in range(count):
                write_image(tmp_path / "data" / split / name / f"{i}.png", pixels(88, 100))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train_command, "LEAST_STEPS", 1)
    for step_s, steps in ((0.001, 160 // 16), (30.0, 3600 // 20 // 30)):
        monkeypatch.setattr(loop, "measure_step_s", lambda *_, s=step_s: (s, torch.device("cpu")))
        result = run(
            "init", str(tmp_path / "data"), "--spacing-um-px", "0.5", "--out", str(tmp_path / f"{step_s}.toml")
        )
        assert result.exit_code == 0, result.stderr
        recipe = tomllib.loads((tmp_path / f"{step_s}.toml").read_text())
        assert recipe["steps"] == steps
        assert (recipe["spacing_um_px"], recipe["data_spacing_um_px"], recipe["classes"]) == (0.5, 0.5, ["a", "b"])


def test_init_from_a_model_takes_its_network_and_its_images(tmp_path: Path) -> None:
    data = kumar(tmp_path / "data", [f"n{i}" for i in range(6)], size=70)
    result = run("init", str(data), "--from", "nuclei-kumar-n8", "--out", str(tmp_path / "r.toml"))
    assert result.exit_code == 0, result.stderr
    recipe = tomllib.loads((tmp_path / "r.toml").read_text())
    assert (recipe["from"], recipe["network"], recipe["stain"]) == ("nuclei-kumar-n8", "nuclei", "macenko")
    assert recipe["network_options"]["kernel"] == "bilinear"
    wrong = run("init", str(data), "--from", "tumor-pcam-n8", "--out", str(tmp_path / "s.toml"))
    assert wrong.exit_code == 2
    assert wrong.stderr.count("\n") == 1
    assert not (tmp_path / "s.toml").exists()


def copy_model(tmp_path: Path, **changes: object) -> Path:
    """A copy of a pretrained model, with changes in its model file."""
    folder = Path(shutil.copytree(pretrained.HOME / "tumor-pcam-n8", tmp_path / "model"))
    content = json.loads((folder / MODEL).read_text())
    (folder / MODEL).write_text(json.dumps(content | changes))
    return folder


def test_model_of_a_newer_format_is_rejected_as_newer(tmp_path: Path) -> None:
    image = write_image(tmp_path / "a.png", pixels(96, 96))
    words = (str(image), "--spacing-um-px", "1", "--device", "cpu", "--out", str(tmp_path / "out"))
    result = run("predict", str(copy_model(tmp_path, format=FORMAT + 1, rotopath="99.0.0")), *words)
    assert result.exit_code == 2
    assert "model.json was written by rotopath 99.0.0, which is newer than this one" in result.stderr
    assert "upgrade rotopath to use it." in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    for command in (("evaluate", "--data", str(tmp_path)), ("export",)):
        again = run(command[0], str(tmp_path / "model"), *command[1:])
        assert again.exit_code == 2
        assert "newer" in again.stderr


def test_model_of_this_format_predicts(tmp_path: Path) -> None:
    """The test above, except for the format."""
    image = write_image(tmp_path / "a.png", pixels(96, 96))
    words = (str(image), "--spacing-um-px", "1", "--device", "cpu", "--out", str(tmp_path / "out"))
    result = run("predict", str(copy_model(tmp_path)), *words)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "out/a.png/summary.json").exists()


def test_models_lists_pretrained_models_and_architectures() -> None:
    result = run("models")
    for name in (*pretrained.list_pretrained(), *ARCHITECTURES):
        assert name in result.stdout


@pytest.mark.parametrize("name", pretrained.list_pretrained())
def test_models_states_the_default_thresholds(name: str) -> None:
    """As numbers that `predict` accepts, and that change nothing there."""
    line = run("models", name).stdout.splitlines()[-1]
    assert line.startswith("Defaults of `rotopath predict`: threshold 0.")
    model = rotopath.load(name)
    threshold = float(line.split("threshold ")[1].rstrip(".").split(",")[0])
    area = float(line.split("minimum area ")[1].split()[0]) if "minimum area" in line else None
    chosen = model.task.adjust_operating_point(model.point, threshold, area)
    assert chosen == pytest.approx(dict(model.point), abs=1e-4)


def train_on_class_folders(tmp_path: Path, *settings: str) -> Result:
    """Train a small ResNet on patches in class folders, whose files do not specify their pixel size."""
    for split, count in (("train", 4), ("valid", 2), ("test", 2)):
        class_folders(tmp_path / "data" / split, count)
    (tmp_path / "r.toml").write_text(f'task = "classify"\ndata = "{tmp_path / "data"}"\ndata_spacing_um_px = 1\n')
    resnet = ("network=resnet18", "network_options.width=4", "window_px=32")
    words = [word for setting in (*resnet, *SMALL, *settings) for word in ("--set", setting)]
    return run("train", str(tmp_path / "r.toml"), *words, "--out", str(tmp_path / "run"))


def test_train_and_evaluate_a_task_with_own_classes(tmp_path: Path) -> None:
    trained = train_on_class_folders(tmp_path)
    assert trained.exit_code == 0, trained.stderr
    for name in ("dots", "plain", "stripes"):
        assert f"{name}: recall" in trained.stdout
    evaluated = run("evaluate", str(tmp_path / "run"))
    assert evaluated.exit_code == 0, evaluated.stderr
    again = json.loads((tmp_path / "run/evaluation-test.json").read_text())["test"]
    before = json.loads((tmp_path / "run/metrics.json").read_text())["test"]
    assert {name: again[name] for name in before} == before
    assert [*again["classes"]] == ["dots", "plain", "stripes"]


def test_train_draws_hard_examples_of_images_without_a_spacing(tmp_path: Path) -> None:
    trained = train_on_class_folders(tmp_path, "mining.epochs=1")
    assert trained.exit_code == 0, trained.stderr
    assert (tmp_path / "run/mined.png").read_bytes().startswith(b"\x89PNG")
    assert "Hard examples: " in trained.stdout


def test_evaluate_uses_the_spacing_of_the_recipe_only_for_its_own_data(tmp_path: Path) -> None:
    train_on_class_folders(tmp_path)
    same = run("evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "data"))
    assert same.exit_code == 0, same.stderr
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    words = ("evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "elsewhere"))
    assert run(*words).exit_code == 2, "the spacing of other data has to be given"
    other = run(*words, "--spacing-um-px", "1")
    assert other.exit_code == 0, other.stderr


def test_manifest_without_groups_has_intervals_over_patches(tmp_path: Path) -> None:
    for i in range(6):
        write_image(tmp_path / f"{i}.png", pixels(96, 96, i))
    rows = [(f"{i}.png", i % 2, "test", 1) for i in range(6)]
    write_csv(tmp_path / "manifest.csv", [("image", "label", "split", "spacing"), *rows])
    scores = tmp_path / "scores.json"
    result = run("evaluate", "tumor-pcam-n8", "--data", str(tmp_path), "--out", str(scores))
    assert result.exit_code == 0, result.stderr
    assert json.loads(scores.read_text())["test"]["interval_over"] == "patches"


def test_slides_prints_what_files_contain(tmp_path: Path) -> None:
    pytest.importorskip("openslide")
    svs = write_svs(tmp_path / "a.svs", pixels(1024, 2048))
    result = run("slides", str(svs))
    assert result.exit_code == 0, result.stderr
    lines = {line[:19].strip(): line[19:].strip() for line in result.stdout.splitlines()[1:]}
    assert lines["format"] == "aperio"
    assert lines["read by"].startswith("OpenSlide ")
    assert lines["size"] == "2048 × 1024 px (width × height), 0.512 × 0.256 mm"
    assert lines["pixel spacing"] == "0.25 µm/px"
    assert lines["level 2"] == "128 × 64 px, downsample 16, 4 µm/px"
    assert lines["missing"] == "nothing"


def test_slides_refuses_a_file_in_one_sentence_and_describes_the_others(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", pixels(40, 60))
    (tmp_path / "b.svs").write_text("not a slide")
    result = run("slides", str(tmp_path))
    assert result.exit_code == 2
    assert "60 × 40 px (width × height)" in result.stdout
    assert "--spacing-um-px" in result.stdout
    assert result.stderr.startswith(f"rotopath: {tmp_path / 'b.svs'} is")
    assert result.stderr.count("\n") == 1
    nowhere = run("slides", str(tmp_path / "nowhere"))
    assert nowhere.exit_code == 2
    assert "does not exist" in nowhere.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes in folders")
@pytest.mark.parametrize(
    ("name", "command"),
    [
        *(
            (name, "predict tumor-pcam-n8 {} --out {out} --spacing-um-px 1")
            for name in ("a.png", "a.tif", "a.svs", "a.dcm")
        ),
        *((name, "slides {}") for name in ("a.svs", "a.ome.tif")),
        ("a.toml", "train {} --out {out}"),
        ("a.toml", "study run {} --out {out}"),
        ("a.csv", "data check {}"),
        ("run/model.json", "predict {folder}/run {image} --out {out} --spacing-um-px 1"),
        ("run/weights.safetensors", "predict {folder}/run {image} --out {out} --spacing-um-px 1"),
        ("a.geojson", "predict tumor-pcam-n8 {image} --roi {} --out {out} --spacing-um-px 1"),
        ("train/camelyonpatch_level_2_split_train_x.h5", "data check {folder}/train"),
    ],
)
def test_a_pipe_is_refused_and_not_waited_for(name: str, command: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if path.parent.name == "run":
        shutil.copytree(pretrained.HOME / "tumor-pcam-n8", path.parent, dirs_exist_ok=True)
    image = write_image(tmp_path / "image.png", pixels(90, 90))
    places = {"folder": tmp_path, "out": tmp_path / "out", "image": image}
    with pipe_at(path):
        result = run(*command.format(path, **places).split())
    assert result.exit_code in (1, 2)
    assert "is a pipe, a socket or a device and not a file" in result.output
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
