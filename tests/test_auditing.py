"""Audits of models with a known dependence on the angle: the figures are that dependence, or 0 where there is none."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from drawn_slides import draw_slide
from layouts import kumar, pcam, pixels, write_image
from onnx import TensorProto, helper
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner
from untrained_runs import make_run

import rotopath as rp
from rotopath.audited_models import ModelOptions, open_model
from rotopath.auditing import FIGURES, PAGE, TABLE
from rotopath.cli import app
from rotopath.data import DataError
from rotopath.evaluation import evaluate
from rotopath.group import covering_size, inscribed_disc, unit_vector
from rotopath.group.grid import centered_coordinates
from rotopath.group.rotation import SPLINE_REACH
from rotopath.inference.dense import prepare_export
from rotopath.model_file import RunError

WINDOW = 24
FIELD = covering_size(WINDOW) + 2 * SPLINE_REACH
DIRECTIONS = (0, 10, 30, 45, 40, 80)  # of ramps, in degrees
AMPLITUDE = 0.3


def ramps(directions: tuple[float, ...] = DIRECTIONS) -> np.ndarray:
    """Return images that get brighter towards a direction. Interpolation by splines does not change ramps."""
    across = centered_coordinates(FIELD).numpy()
    values = [across[None] * right - across[:, None] * up for right, up in map(unit_vector, directions)]
    gray = np.stack([128 + 4 * value for value in values]).round().clip(0, 255).astype(np.uint8)
    return np.repeat(gray[..., None], 3, axis=3)


def find_direction(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the unit vector (right, up) towards which images get brighter, by least squares."""
    across = centered_coordinates(images.shape[-1]).to(images)
    right = (images.mean(dim=1) * across).sum(dim=(1, 2))
    up = (images.mean(dim=1) * -across[:, None]).sum(dim=(1, 2))
    length = torch.hypot(right, up)
    return right / length, up / length


def follow_angle(images: Tensor) -> Tensor:
    """Probability 0.5 + 0.3·cos θ for an image whose brightness increases in the direction θ."""
    return (0.5 + AMPLITUDE * find_direction(images)[0])[:, None]


def follow_four_angles(images: Tensor) -> Tensor:
    """The same with cos 4θ, which is equal at angles that differ by 90°."""
    right, up = find_direction(images)
    return (0.5 + AMPLITUDE * (8 * right**4 - 8 * right**2 + 1) + 0 * up)[:, None]


def measure_contrast(images: Tensor) -> Tensor:
    """Return a probability from the energy in the inscribed disc, which no rotation changes, but any interpolation."""
    disc = inscribed_disc(WINDOW, WINDOW, inner=0.7).float()
    energy = ((images - 0.5).square().mean(dim=1) * disc).sum(dim=(1, 2)) / disc.sum()
    return (200 * (energy - 0.022)).sigmoid()[:, None]


def plain_network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 10 * 10, 2))
    network = nn.Sequential(*layers).eval()
    with torch.no_grad():
        layers[3].weight.mul_(20)
    network.window_px = WINDOW
    return network


def noise(count: int = 6, size: int = FIELD) -> np.ndarray:
    return np.stack([pixels(size, size, i) for i in range(count)])


# Known answers


@pytest.mark.parametrize("model", [follow_angle, follow_four_angles])
def test_a_planted_dependence_on_the_angle_is_measured(model: Callable[[Tensor], Tensor]) -> None:
    """The standard deviation of 0.3·cos over equally spaced angles is 0.3 / √2; interpolation explains none of it."""
    decisions = rp.audit(model, ramps(), window_px=WINDOW, activation="none").figures["decisions"]
    expected = AMPLITUDE / math.sqrt(2)
    on_grid = expected if model is follow_angle else 0
    assert decisions["grid"]["deviation"] == pytest.approx(on_grid, abs=2e-3)
    assert decisions["fair"]["deviation"] == pytest.approx(expected, abs=2e-3)
    assert decisions["beyond"]["deviation"] == pytest.approx(expected, rel=0.03)
    assert decisions["resampling"]["fraction"] < 0.06, "nearby angles differ by 5°"
    assert decisions["resampling"]["same_pixels"] == pytest.approx(float(model is follow_angle), abs=1e-3)


def test_the_planted_fraction_of_changed_decisions_is_measured() -> None:
    """The threshold is reached at up to 33.6° from the right: of quarter rotations of six ramps, four reach it."""
    result = rp.audit(follow_angle, ramps(), window_px=WINDOW, activation="none", threshold=0.75)
    decisions = result.figures["decisions"]
    assert decisions["grid"]["changed"] == pytest.approx(4 / 6)
    assert decisions["fair"]["changed"] == decisions["beyond"]["changed"] == 1
    assert result.changed == 1
    never = rp.audit(follow_angle, ramps(), window_px=WINDOW, activation="none", threshold=0.9)
    assert never.changed == 0
    assert "none of the model's decisions" in never.figures["sentence"]


def test_an_invariant_model_gets_zero_on_the_grid() -> None:
    network, images = plain_network(), noise()
    plain = rp.audit(network, images).figures["decisions"]
    average = rp.audit(rp.symmetrize(network, 4), images, window_px=WINDOW).figures["decisions"]
    assert plain["grid"]["deviation"] > 0.05
    assert average["grid"]["deviation"] < 1e-6
    assert average["grid"]["changed"] == 0
    torch.manual_seed(0)
    by_design = rp.audit(rp.models.tumor(orientations=4).eval(), noise(2, 136)).figures["decisions"]
    assert by_design["grid"]["deviation"] < 1e-6


def test_interpolation_explains_what_it_changes() -> None:
    """An invariant model that notices interpolation: what rotations seem to change is subtracted, on average."""
    smooth = rp.metrics.smooth_images(16, FIELD, blur_px=0.5) * 40 + 128
    images = smooth.clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    decisions = rp.audit(measure_contrast, images, window_px=WINDOW, activation="none").figures["decisions"]
    assert decisions["grid"]["deviation"] < 1e-6
    assert decisions["plain"]["deviation"] > 0.04, "only some of these angles interpolate"
    assert decisions["fair"]["deviation"] < decisions["plain"]["deviation"] / 2
    assert decisions["resampling"]["same_pixels"] < 1e-6
    assert decisions["resampling"]["fraction"] > 0.7
    assert decisions["beyond"]["deviation"] < decisions["fair"]["deviation"] * 0.55


def test_decisions_that_only_interpolation_changes_do_not_count() -> None:
    smooth = rp.metrics.smooth_images(16, FIELD, blur_px=0.5) * 40 + 128
    images = smooth.clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    audited = rp.audit(measure_contrast, images, window_px=WINDOW, activation="none")
    middle = float(np.median(audited.rotated.fair[:, 0]))
    found = rp.audit(measure_contrast, images[:1], window_px=WINDOW, activation="none", threshold=middle)
    assert found.figures["decisions"]["fair"]["changed"] == 1
    assert found.changed == 0
    assert found.figures["sentence"].startswith("Interpolation explains all decisions that change")


def test_averages_of_the_audit_are_those_of_symmetrized_models() -> None:
    """Over four rotations: the same pixels, and so exactly the figures of an audit of the average."""
    network, images = plain_network(), noise()
    averaged = rp.audit(network, images).figures["decisions"]["averaged"]["4"]
    audited = rp.audit(rp.symmetrize(network, 4, "probabilities"), images, window_px=WINDOW).figures["decisions"]
    assert averaged["deviation"] == pytest.approx(audited["fair"]["deviation"], abs=1e-5)
    assert averaged["changed"] == audited["fair"]["changed"]


def test_embeddings_have_the_similarity_of_their_angles() -> None:
    """Unit vectors in all directions sum to 0: the mean cosine between pairs of n of them is -1 / (n - 1)."""

    def embed(images: Tensor) -> Tensor:
        return torch.stack(find_direction(images), dim=1)

    result = rp.audit(embed, ramps(), window_px=WINDOW, embedding=True)
    embedding = result.figures["embedding"]
    assert result.figures["decisions"] is None
    assert embedding["grid"]["cosine"] == pytest.approx(-1 / 3, abs=1e-3)
    assert embedding["fair"]["cosine"] == pytest.approx(-1 / 15, abs=1e-3)
    assert embedding["resampling"]["cosine"] == pytest.approx(math.cos(math.radians(5)), abs=1e-3), (
        "of the nearby angle"
    )
    assert embedding["grid"]["neighbors"] == 1, "all rotate together"
    assert result.changed == pytest.approx(4 / 3, abs=1e-3)


def test_maps_are_rotated_back_before_they_are_compared() -> None:
    """Brightness rotates with the image. A gradient towards the right does not."""

    def brightness(images: Tensor) -> Tensor:
        return images.mean(dim=1, keepdim=True)

    def gradient(images: Tensor) -> Tensor:
        return images.mean(dim=1, keepdim=True).diff(dim=3, append=images[:, :1, :, -1:]).mul(20).sigmoid()

    images = (rp.metrics.smooth_images(3, FIELD, blur_px=3) * 40 + 128).clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    same = rp.audit(brightness, images, window_px=WINDOW, activation="none").figures
    other = rp.audit(gradient, images, window_px=WINDOW, activation="none").figures["decisions"]
    assert same["decisions"]["inputs"] == "pixels of fields"
    assert same["decisions"]["grid"]["deviation"] < 1e-6
    assert same["decisions"]["fair"]["deviation"] < 0.01
    assert other["grid"]["deviation"] > 0.05
    assert other["fair"]["deviation"] > 0.05


# The same figures as `rotopath evaluate --robustness`


@pytest.mark.slow
def test_a_run_and_its_exports_have_the_figures_of_evaluate(tmp_path: Path) -> None:
    data = pcam(tmp_path / "data", (4, 4, 6))
    folder = make_run(tmp_path / "run", data=data, orientations=1, random_statistics=True)
    expected = evaluate(folder, robustness=True, out=tmp_path / "scores.json").scores["rotation"]
    del expected["cases"]  # the table has the images
    result = rp.audit(folder, data, tmp_path / "audit")
    decisions = result.figures["decisions"]
    assert {key: decisions[key] for key in expected} == expected
    assert expected["fair"]["deviation"] > 0
    assert result.figures["embedding"]["features"] == 16
    for to in ("torchscript", "onnx"):
        exported = rp.export(folder, to, tmp_path / to)  # type: ignore[arg-type]
        actual = rp.audit(exported, data, trust=True).figures["decisions"]
        assert actual["fair"]["deviation"] == pytest.approx(expected["fair"]["deviation"], abs=1e-5)
        assert actual["plain"]["deviation"] == pytest.approx(expected["plain"]["deviation"], abs=1e-5)
        assert actual["fair"]["changed"] == expected["fair"]["changed"]
    page = (tmp_path / "audit" / PAGE).read_text()
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert json.loads((tmp_path / "audit" / FIGURES).read_text())["decisions"] == decisions
    rows = (tmp_path / "audit" / TABLE).read_text().splitlines()
    assert len(rows) == 1 + 6
    assert rows[0].startswith("image,deviation on the grid,")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:stain normalization left an image unchanged")
def test_maps_of_a_run_have_the_figures_of_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotopath.evaluation.FIELD_PX", 20)
    data = kumar(tmp_path / "data", ["a", "b", "c"], size=60)
    folder = make_run(tmp_path / "run", task="nuclei", data=data)
    expected = evaluate(folder, robustness=True, out=tmp_path / "scores.json").scores["rotation"]
    del expected["cases"]  # the table has the images
    result = rp.audit(folder, data, tmp_path / "audit")
    decisions = result.figures["decisions"]
    assert {key: decisions[key] for key in expected} == expected
    assert decisions["grid"]["deviation"] < 1e-5
    assert decisions["fair"]["deviation"] > 1e-4


# Models of other software


def write_onnx(path: Path, last: bool) -> Path:
    """Write a linear model of the direction of ramps, with images (1, 3, H, W), or (B, H, W, 3) of bytes."""
    across = centered_coordinates(WINDOW).float() / WINDOW**2
    weights = across.expand(WINDOW, WINDOW)[None].expand(3, -1, -1)
    weights = (weights.permute(1, 2, 0) / 255 if last else weights).reshape(-1, 1).numpy()
    shape = ["batch", WINDOW, WINDOW, 3] if last else [1, 3, WINDOW, WINDOW]
    kind = TensorProto.UINT8 if last else TensorProto.FLOAT
    nodes = [
        helper.make_node("Cast", ["pixels"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["floats"], ["flat"], axis=1),
        helper.make_node("MatMul", ["flat", "weights"], ["score"]),
    ]
    graph = helper.make_graph(
        nodes,
        "direction",
        [helper.make_tensor_value_info("pixels", kind, shape)],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, [shape[0], 1])],
        [helper.make_tensor("weights", TensorProto.FLOAT, weights.shape, weights.ravel())],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("last", [False, True], ids=["channels first, batches of 1", "channels last, bytes"])
def test_an_onnx_file_of_other_software(tmp_path: Path, last: bool) -> None:
    def score(images: Tensor) -> Tensor:
        across = centered_coordinates(WINDOW).to(images) / WINDOW**2
        return (images * across).sum(dim=(1, 2, 3))[:, None]

    path = write_onnx(tmp_path / "model.onnx", last)
    expected = rp.audit(score, ramps(), window_px=WINDOW).figures["decisions"]
    actual = rp.audit(path, ramps()).figures["decisions"]
    assert expected["fair"]["deviation"] > 0.1
    for part in ("grid", "fair", "plain", "beyond"):
        assert actual[part] == pytest.approx(expected[part], abs=2e-3 if last else 1e-5)
    average = rp.symmetrize(path, 4)
    images = torch.from_numpy(ramps()).permute(0, 3, 1, 2)[..., :WINDOW, :WINDOW].float() / 255
    assert average(images).abs().max() < 0.1 * open_model(path).network(images).abs().max()  # type: ignore[operator]


def zoo_folder(folder: Path, **changes: object) -> Path:
    """Write a folder as in WSInfer's model zoo, with a model for larger, normalized images."""
    folder.mkdir()
    module = nn.Sequential(nn.AvgPool2d(2), plain_network())
    with prepare_export():
        script = torch.jit.trace(module, torch.rand(2, 3, 2 * WINDOW, 2 * WINDOW))  # type: ignore[no-untyped-call]
        script.save(str(folder / "torchscript_model.pt"))
    normalize = {"mean": [0.7, 0.6, 0.7], "std": [0.2, 0.25, 0.2]}
    config = {
        "spec_version": "1.0",
        "architecture": "resnet34",
        "num_classes": 2,
        "class_names": ["Other", "<b>Tumor"],
        "patch_size_pixels": WINDOW,
        "spacing_um_px": 0.5,
        "transform": [
            {"name": "Resize", "arguments": {"size": 2 * WINDOW}},
            {"name": "ToTensor"},
            {"name": "Normalize", "arguments": normalize},
        ],
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_a_folder_of_the_model_zoo_of_wsinfer(tmp_path: Path) -> None:
    folder, network = zoo_folder(tmp_path / "zoo"), plain_network()

    def expect(images: Tensor) -> Tensor:
        resized = nn.functional.interpolate(images, scale_factor=2, mode="bilinear", antialias=True)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.7, 0.6, 0.7), (0.2, 0.25, 0.2)))
        output: Tensor = network(nn.functional.avg_pool2d((resized - mean) / std, 2))
        return output

    with pytest.raises(RunError, match="--trust"):
        rp.audit(folder, noise())
    result = rp.audit(folder, noise(), tmp_path / "audit", trust=True)
    expected = rp.audit(expect, noise(), window_px=WINDOW).figures["decisions"]
    assert result.figures["decisions"]["fair"] == pytest.approx(expected["fair"], abs=1e-5)
    assert result.figures["model"]["spacing_um_px"] == 0.5
    assert result.figures["model"]["outputs"] == ["Other", "<b>Tumor"]
    page = (tmp_path / "audit" / PAGE).read_text()
    assert "<b>Tumor" not in page
    assert "needs the network as a torch module" in page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size_pixels": "large"}, "patch_size_pixels"),
        ({"spacing_um_px": 0}, "spacing_um_px"),
        ({"class_names": []}, "class_names"),
        ({"class_names": ["a", "b", "c"]}, "2 outputs"),
        ({"transform": [{"name": "Rotate"}]}, "Rotate"),
        ({"transform": [{"name": "Normalize", "arguments": {"mean": [0, 0, 0], "std": [1, 0, 1]}}]}, "std"),
        ({"transform": [{"name": "Resize", "arguments": {"size": 0}}]}, "Resize"),
        ({"patch_size_pixels": 3, "transform": []}, "--window-px"),
    ],
)
def test_damaged_configurations_are_explained(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(RunError, match=message) as refused:
        open_model(zoo_folder(tmp_path / "zoo", **changes), ModelOptions(trust=True))
    assert "\n" not in str(refused.value)


MODULE = """
import torch
from torch import nn

ready = nn.Sequential(nn.Conv2d(3, 2, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten())
def build(): return ready
def build_for(outputs): return nn.Sequential(nn.Conv2d(3, outputs, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten())
def apply(images): return ready(images)
def many(a, b): return None
number = 3
"""


def test_names_of_python_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_audited.py").write_text(MODULE)
    images = noise(3)
    expected = rp.audit("my_audited:ready", images, window_px=WINDOW).figures
    assert expected["decisions"]["fair"]["deviation"] > 0
    assert expected["conversion"]["possible"]
    for name in ("build", "apply"):
        actual = rp.audit(f"my_audited:{name}", images, window_px=WINDOW).figures["decisions"]
        assert actual["fair"] == expected["decisions"]["fair"]
    weights = sys.modules["my_audited"].ready.state_dict()
    save_file(weights, tmp_path / "weights.safetensors")
    loaded = {"window_px": WINDOW, "checkpoint": tmp_path / "weights.safetensors", "classes": ("a", "b")}
    assert rp.audit("my_audited:build_for", images, **loaded).figures["decisions"] == expected["decisions"]
    for name, message in (
        ("many", "required parameters a, b"),
        ("number", "int"),
        ("missing", "missing"),
        ("build_for", "names of the classes"),
    ):
        with pytest.raises(RunError, match=message):
            open_model(f"my_audited:{name}", ModelOptions(window_px=WINDOW))
    with pytest.raises(RunError, match="no weights to load"):
        open_model("my_audited:apply", ModelOptions(window_px=WINDOW, checkpoint=tmp_path / "weights.safetensors"))
    del sys.modules["my_audited"]


def test_a_network_of_timm_gets_its_classes_from_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for timm, which is not installed: the classifier `fc` has as many classes as the checkpoint."""

    class Small(nn.Module):
        def __init__(self, num_classes: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 5)
            self.fc = nn.Linear(4, num_classes) if num_classes else nn.Identity()
            self.num_classes = num_classes
            mean, std = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)
            size = (3, WINDOW, WINDOW)
            self.pretrained_cfg = {"classifier": "fc", "input_size": size, "mean": mean, "std": std}

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.fc(self.conv(x).relu().mean(dim=(2, 3)))
            return output

    def create_model(name: str, pretrained: bool, num_classes: int = 1000) -> nn.Module:
        assert not pretrained
        if name != "small":
            raise RuntimeError(f"Unknown model ({name})")
        return Small(num_classes)

    fake = ModuleType("timm")
    fake.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", fake)
    torch.manual_seed(0)
    network = Small(3).eval()
    save_file(network.state_dict(), tmp_path / "three.safetensors")
    headless = {key: value for key, value in network.state_dict().items() if "fc" not in key}
    save_file(headless, tmp_path / "none.safetensors")
    with pytest.raises(RunError, match="--checkpoint"):
        open_model("timm:small")
    with pytest.raises(RunError, match="Unknown model"):
        open_model("timm:other", ModelOptions(checkpoint=tmp_path / "three.safetensors"))
    classes = rp.audit("timm:small", noise(), checkpoint=tmp_path / "three.safetensors").figures
    assert len(classes["model"]["outputs"]) == 3
    mean, std = (torch.full((3, 1, 1), value) for value in (0.5, 0.2))
    expected = rp.audit(lambda x: network((x - mean) / std), noise(), window_px=WINDOW).figures
    assert classes["decisions"]["fair"] == pytest.approx(expected["decisions"]["fair"], abs=1e-6)
    features = rp.audit("timm:small", noise(), checkpoint=tmp_path / "none.safetensors").figures
    assert features["decisions"] is None
    assert features["embedding"]["features"] == 4
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(RunError, match="pip install timm"):
        open_model("timm:small", ModelOptions(checkpoint=tmp_path / "three.safetensors"))


def test_outputs_that_are_probabilities_are_not_activated_again() -> None:
    def probabilities(images: Tensor) -> Tensor:
        return torch.cat([1 - follow_angle(images), follow_angle(images)], dim=1)

    decisions = rp.audit(probabilities, ramps(), window_px=WINDOW).figures["decisions"]
    assert decisions["fair"]["deviation"] == pytest.approx(AMPLITUDE / math.sqrt(2), abs=2e-3)


# Images


def test_windows_on_the_tissue_of_a_slide_have_real_surroundings(tmp_path: Path) -> None:
    slide = draw_slide(tmp_path / "slide.tif").path
    seen: list[Tensor] = []

    def record(images: Tensor) -> Tensor:
        seen.append(images)
        return images.mean(dim=(1, 2, 3))[:, None]

    found = rp.audit(record, slide, window_px=64, count=20, model_spacing_um_px=0.25)
    assert found.figures["images"]["count"] == 20
    assert found.figures["images"]["real_surroundings"] == 1
    first = torch.cat([batch for batch in seen if batch.shape[0] == 20][:1])
    assert (first.mean(dim=(1, 2, 3)) < 0.85).float().mean() > 0.8, "tissue, and not glass"


def test_large_images_are_divided_and_patches_are_not(tmp_path: Path) -> None:
    for i in range(2):
        write_image(tmp_path / "fields" / f"{i}.png", pixels(3 * FIELD, 2 * FIELD, i))
        write_image(tmp_path / "patches" / f"{i}.png", pixels(WINDOW, WINDOW, i))
    fields = rp.audit(plain_network(), tmp_path / "fields")
    assert fields.figures["images"]["count"] == 12
    assert fields.figures["images"]["real_surroundings"] == 1
    patches = rp.audit(plain_network(), tmp_path / "patches")
    assert patches.names == ("0.png", "1.png")
    assert patches.figures["images"]["real_surroundings"] == patches.figures["images"]["smaller_than_window"] == 0
    small = rp.audit(plain_network(), pixels(WINDOW - 4, WINDOW - 4, 0)[None])
    assert small.figures["images"]["smaller_than_window"] == 1
    assert "reflection" in _page(tmp_path, plain_network(), tmp_path / "patches")


def _page(folder: Path, model: nn.Module, images: Path) -> str:
    path = rp.audit(model, images, folder / "written").path
    assert path is not None
    return path.read_text()


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        ("none", {}, "does not exist"),
        ("patches", {"split": "test"}, "--split"),
        ("data", {"split": "third"}, "third"),
        ("patches", {"count": 0}, "count|number of images"),
        ("patches", {"model_spacing_um_px": 0.5}, "--spacing-um-px"),
    ],
)
def test_images_that_cannot_be_used_are_explained(
    tmp_path: Path, images: str, options: dict[str, object], message: str
) -> None:
    write_image(tmp_path / "patches" / "0.png", pixels(WINDOW, WINDOW, 0))
    pcam(tmp_path / "data", (2, 2, 2))
    with pytest.raises(DataError, match=message):
        rp.audit(plain_network(), tmp_path / images, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Flatten(), {}, "--window-px"),
        (nn.Linear(2, 2), {"window_px": 8}, "cannot predict images"),
        (lambda x: "tumor", {"window_px": 8}, "str"),  # noqa: ARG005
        (lambda x: x.mean(dim=(0, 2, 3))[None], {"window_px": 8}, "two images"),
        (nn.Flatten(), {"window_px": 8, "threshold": 2}, "probability"),
        (nn.Flatten(), {"window_px": 8, "std": (0.0,)}, "std"),
        (nn.Flatten(), {"window_px": 8, "activation": "tanh"}, "tanh"),
        ("model.onnx", {}, "does not exist"),
        ("tumor-pcam", {}, "did you mean"),
    ],
)
def test_models_that_cannot_be_used_are_explained(model: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(RunError, match=message):
        rp.audit(model, noise(2), **options)  # type: ignore[arg-type]


def test_files_that_are_no_models_are_explained(tmp_path: Path) -> None:
    expected = {"a.onnx": "ONNX Runtime", "a.pt": "not a TorchScript", "a.txt": "not a model file that can be audited"}
    for name, message in expected.items():
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(RunError, match=message):
            open_model(tmp_path / name, ModelOptions(trust=True))


# The command


def test_the_command_writes_a_report_and_fails_above_a_threshold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_onnx(tmp_path / "model.onnx", last=False)
    for i, ramp in enumerate(ramps()):
        write_image(tmp_path / "ramps" / f"<{i}>.png", ramp)
    arguments = ["audit", str(path), str(tmp_path / "ramps"), "--fail-above"]
    failed = CliRunner().invoke(app, [*arguments, "0.05"], env={"COLUMNS": "80"})
    assert failed.exit_code == 1
    assert "1.0000 is above --fail-above 0.05." in failed.stderr
    assert "100 of 100 images" in failed.stdout
    assert {file.name for file in (tmp_path / "audit-model").iterdir()} == {PAGE, TABLE, FIGURES}
    page = (tmp_path / "audit-model" / PAGE).read_text()
    assert "&lt;0&gt;.png" in page
    assert "<0>" not in page
    passed = CliRunner().invoke(app, [*arguments, "1"], env={"COLUMNS": "80"})
    assert passed.exit_code == 0
    assert max(map(len, passed.stdout.replace(str(tmp_path), "").splitlines()[1:])) <= 80
    for options, message in (
        (["--fail-above", "5"], "--fail-above is 5"),
        (["--mean", "a"], "--mean is 'a'"),
        (["--out", str(path)], "is a file"),
    ):
        wrong = CliRunner().invoke(app, ["audit", str(path), str(tmp_path / "ramps"), *options])
        assert wrong.exit_code == 2, wrong.output
        assert message in wrong.stderr


def test_audits_show_the_most_important_figure_in_python() -> None:
    result = rp.audit(follow_angle, ramps(), window_px=WINDOW, activation="none")
    assert repr(result).startswith("Audit(follow_angle: For 100 of 100 images")
    assert SimpleNamespace(**result.figures).format == 1
