"""Answers to rotated inputs: what an equivariant network must not change, and an ordinary one does."""

from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import amida13, kumar, pcam, write_csv, write_image

import rotopath as rp
from rotopath.evaluation import answer_rotated_inputs, summarise
from rotopath.metrics.equivariance import list_angles
from rotopath.model_file import ModelInfo, NetworkInfo
from rotopath.models import Network
from rotopath.runs import Run
from rotopath.tasks import PAPER, Class, Classify, Task

pytestmark = pytest.mark.filterwarnings("ignore:stain normalisation left an image unchanged")
CPU = torch.device("cpu")
POINTS = {
    "mitosis": {"threshold": 0.5},
    "nuclei": {"inside": 0.5, "background": 0.5, "least_px": 5},
    "tumor": {"threshold": 0.5},
}


def make_run(task: Task, network: Network, point: dict[str, float]) -> Run:
    info = NetworkInfo(network.architecture.name, network.orientations, {}, network.receptive_field, network.geometry)
    return Run(Path("nowhere"), ModelInfo(task, info, point, None), network)


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
    monkeypatch.setattr("rotopath.evaluation.FIELD_PX", 20)
    samples = rp.data.open_data(data[task]).split("test")
    spreads = {}
    for n in (1, 4):
        run = make_run(PAPER[task], getattr(rp.models, task)(n), POINTS[task])
        turned = answer_rotated_inputs(run, samples, CPU, most=8)
        assert turned.plain_degrees[::4] == [0, 90, 180, 270]
        assert turned.fair.shape == turned.plain.shape
        assert turned.fair_decisions.shape == turned.plain_decisions.shape == turned.plain.shape
        assert len(turned.fair) == 16
        spreads[n] = np.ptp(turned.plain[::4], axis=0).max()
    assert spreads[4] < 1e-5
    assert spreads[1] > 100 * spreads[4]


def test_two_numbers_and_where_they_come_from(data: dict[str, Path]) -> None:
    samples = rp.data.open_data(data["tumor"]).split("test")
    network = rp.models.tumor(1)
    first = answer_rotated_inputs(make_run(PAPER["tumor"], network, {"threshold": 0.5}), samples, CPU)
    middle = float(np.median(first.fair))
    turned = answer_rotated_inputs(make_run(PAPER["tumor"], network, {"threshold": middle}), samples, CPU)
    found = summarise(turned)
    assert found["inputs"] == "windows"
    assert found["count"] == 4
    assert found["fair"] == {
        "deviation": pytest.approx(turned.fair.std(axis=0).mean(), rel=1e-5),
        "changed": ((turned.fair >= middle).any(axis=0) & (turned.fair < middle).any(axis=0)).mean(),
    }
    assert found["fair"]["changed"] > 0, "the median parts some of them"  # type: ignore[index]
    assert [PAPER["tumor"].label_names[label] for label in turned.labels] == ["normal", "Tumor"] * 2
    assert [sample.label for sample in samples] == ["normal", "tumor"] * 2


def test_of_several_classes_the_likeliest_over_all_angles_is_followed(tmp_path: Path) -> None:
    """Its probability is what scatters, and a decision changes when another class is the likeliest at an angle."""
    rows = []
    for i, smooth in enumerate(rp.metrics.smooth_images(6, 96, blur_px=2, seed=1)):
        write_image(tmp_path / f"{i}.png", (smooth * 50 + 128).clamp(0, 255).byte().permute(1, 2, 0).numpy())
        rows.append((f"{i}.png", "abc"[i % 3], 1.0, "test"))
    write_csv(tmp_path / "manifest.csv", [("image", "label", "spacing", "split"), *rows])
    task = Classify("organs", tuple(Class(name, (0, 0, 0)) for name in "abc"), spacing_um_px=1.0)
    torch.manual_seed(0)
    network = rp.models.tumor(1, outputs=3).eval()
    stored = np.stack([rp.images.read_rgb(tmp_path / f"{i}.png") for i in range(6)])
    images = torch.from_numpy(stored).permute(0, 3, 1, 2)
    with torch.no_grad():  # no class is the likeliest of all inputs
        network.head[0].weight.mul_(20)
        logits = rp.inference.predict_rotated(network, images, list_angles(), lambda logits: logits)
        network.head[0].bias -= torch.from_numpy(logits.mean(axis=(0, 1)))
    run = make_run(task, network, {})
    samples = rp.data.open_data(tmp_path).split("test")
    turned = answer_rotated_inputs(run, samples, CPU)
    answers = rp.inference.predict_rotated(network, images, [*turned.fair_degrees, *turned.plain_degrees])
    followed = answers.mean(axis=0).argmax(axis=1)
    np.testing.assert_allclose(turned.fair, answers[:16, np.arange(6), followed], atol=1e-5)
    np.testing.assert_array_equal(turned.plain_decisions, answers[16:].argmax(axis=2))
    changed = (answers[:16].argmax(axis=2) != answers[0].argmax(axis=1)).any(axis=0).mean()
    assert changed > 0
    assert len(set(followed.tolist())) > 1
    assert summarise(turned)["fair"]["changed"] == pytest.approx(changed)  # type: ignore[index]
    assert turned.labels.tolist() == [0, 1, 2, 0, 1, 2]
