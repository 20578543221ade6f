"""Predictions of rotated inputs: those of an equivariant network stay the same, those of an ordinary one change."""

from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import amida13, kumar, pcam, write_csv, write_image

import rotopath as rp
from rotopath.evaluation import predict_rotated_inputs, summarize_rotation
from rotopath.metrics.equivariance import robustness_angles
from rotopath.model_file import ModelInfo, NetworkInfo
from rotopath.models import Network
from rotopath.runs import Run
from rotopath.tasks import PAPER, Class, Classify, Task

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:stain normalization left an image unchanged")]
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
def test_quarter_rotations_change_predictions_for_n_1_but_not_for_n_4(
    data: dict[str, Path], task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rotopath.evaluation.FIELD_PX", 20)
    samples = rp.data.open_data(data[task]).split("test")
    spreads = {}
    for n in (1, 4):
        run = make_run(PAPER[task], getattr(rp.models, task)(n), POINTS[task])
        rotated = predict_rotated_inputs(run, samples, CPU, max_windows=8)
        assert rotated.plain_degrees[::4] == [0, 90, 180, 270]
        assert rotated.fair.shape == rotated.plain.shape
        assert rotated.fair_decisions.shape == rotated.plain_decisions.shape == rotated.plain.shape
        assert len(rotated.fair) == 16
        assert set(rotated.cases) <= {sample.case or sample.name for sample in samples}
        total, inputs = np.sum(list(summarize_rotation(rotated)["cases"].values()), axis=0)  # type: ignore[attr-defined]
        assert inputs == rotated.fair[0].size
        assert total / inputs == pytest.approx(rotated.fair.std(axis=0, dtype=np.float64).mean())
        spreads[n] = np.ptp(rotated.plain[::4], axis=0).max()
    assert spreads[4] < 1e-5
    assert spreads[1] > 100 * spreads[4]


def test_the_summary_has_the_deviation_and_the_fraction_of_changed_decisions(data: dict[str, Path]) -> None:
    samples = rp.data.open_data(data["tumor"]).split("test")
    network = rp.models.tumor(1)
    first = predict_rotated_inputs(make_run(PAPER["tumor"], network, {"threshold": 0.5}), samples, CPU)
    middle = float(np.median(first.fair))
    rotated = predict_rotated_inputs(make_run(PAPER["tumor"], network, {"threshold": middle}), samples, CPU)
    summary = summarize_rotation(rotated)
    assert summary["inputs"] == "windows"
    assert summary["count"] == 4
    assert summary["fair"] == {
        "deviation": pytest.approx(rotated.fair.std(axis=0).mean(), rel=1e-5),
        "changed": ((rotated.fair >= middle).any(axis=0) & (rotated.fair < middle).any(axis=0)).mean(),
    }
    assert summary["fair"]["changed"] > 0, "the threshold is between some of them"  # type: ignore[index]
    cases = summary["cases"]
    assert isinstance(cases, dict)
    assert list(cases) == [sample.case or sample.name for sample in samples]
    deviations = rotated.fair.std(axis=0, dtype=np.float64)
    assert list(cases.values()) == [[pytest.approx(deviation), 1] for deviation in deviations]
    assert [PAPER["tumor"].label_names[label] for label in rotated.labels] == ["normal", "Tumor"] * 2
    assert [sample.label for sample in samples] == ["normal", "tumor"] * 2


def test_of_several_classes_the_one_with_the_highest_mean_probability_is_followed(tmp_path: Path) -> None:
    """The deviation is that of its probability. A decision changes if another class is more probable at an angle."""
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
    with torch.no_grad():  # so that inputs differ in their most probable class
        network.head[0].weight.mul_(20)
        logits = rp.inference.predict_rotated(network, images, robustness_angles(), lambda logits: logits)
        network.head[0].bias -= torch.from_numpy(logits.mean(axis=(0, 1)))
    run = make_run(task, network, {})
    samples = rp.data.open_data(tmp_path).split("test")
    rotated = predict_rotated_inputs(run, samples, CPU)
    predictions = rp.inference.predict_rotated(network, images, [*rotated.fair_degrees, *rotated.plain_degrees])
    followed = predictions.mean(axis=0).argmax(axis=1)
    np.testing.assert_allclose(rotated.fair, predictions[:16, np.arange(6), followed], atol=1e-5)
    np.testing.assert_array_equal(rotated.plain_decisions, predictions[16:].argmax(axis=2))
    changed = (predictions[:16].argmax(axis=2) != predictions[0].argmax(axis=1)).any(axis=0).mean()
    assert changed > 0
    assert len(set(followed.tolist())) > 1
    assert summarize_rotation(rotated)["fair"]["changed"] == pytest.approx(changed)  # type: ignore[index]
    assert rotated.labels.tolist() == [0, 1, 2, 0, 1, 2]
