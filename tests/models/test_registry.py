"""Networks by name: those of the package, functions of users, and errors for everything else."""

import copy
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rotopath as rp
from rotopath.models import ARCHITECTURES, Network, build_network, list_networks, make_dense
from rotopath.models.registry import (
    check_options,
    expand_preset,
    find_builder,
    find_window_px,
    import_object,
    is_equivariant,
)

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # a sweep of numbers: tracing it would take minutes

SMALL = {"resnet18": {"width": 8}, "resnet34": {"width": 8}, "resnet50": {"width": 8}, "unet": {"width": 8, "depth": 3}}
WEIGHTS = {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032}  # in torchvision, for 1000 classes

every_name = pytest.mark.parametrize("name", list_networks())
every_family = pytest.mark.parametrize("name", SMALL)


def count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


# User functions, with names such as "test_registry:own"


def own(outputs: int, width: int = 8, kernel: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, kernel), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, outputs, 1))


own.window_px = 31  # type: ignore[attr-defined]


class Own(nn.Module):
    """A class works like a function; this one has a parameter `orientations`."""

    def __init__(self, outputs: int, orientations: int, *, name: str = "it") -> None:
        super().__init__()
        self.lift, self.project = rp.nn.LiftConv2d(3, 4, 3, orientations), rp.nn.Project()
        self.head, self.orientations, self.name = nn.Conv2d(4, outputs, 1), orientations, name

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.project(self.lift(x)))


def plain_by_orientations(outputs: int, orientations: int) -> nn.Module:
    return nn.Conv2d(3, outputs * orientations, 3)


def made_of_rotopath(outputs: int) -> nn.Module:
    return Own(outputs, 6)


def without_outputs(classes: int) -> nn.Module:
    raise AssertionError(f"must not be called, with {classes} or anything")


def of_anything(**options: int) -> nn.Module:
    raise AssertionError(f"must not be called, with {options}")


def no_module(outputs: int) -> list[int]:
    return [outputs]


not_a_function = 7


# Networks of the package


@every_name
@pytest.mark.parametrize("orientations", [1, 4])
@pytest.mark.parametrize("outputs", [1, 3])
def test_every_network_returns_the_requested_number_of_outputs(name: str, orientations: int, outputs: int) -> None:
    torch.manual_seed(0)
    module = build_network(name, outputs, orientations, SMALL.get(name))
    window_px = find_window_px(name)
    assert window_px is not None
    logits = module.eval()(torch.rand(2, 3, window_px, window_px))
    assert logits.shape[:2] == (2, outputs)
    assert logits.isfinite().all()
    assert make_dense(module, outputs, window_px).geometry.outputs == outputs


@every_name
def test_every_network_is_equivariant_for_n_4_and_not_for_n_1(name: str) -> None:
    torch.manual_seed(0)
    images = rp.metrics.smooth_images(2, find_window_px(name) or 0)
    for orientations, exact in ((1, False), (4, True)):
        module = build_network(name, 2, orientations, SMALL.get(name)).eval()
        error = rp.equivariance_error(module, images)
        assert (error < 1e-4) == exact, (orientations, error)
        assert is_equivariant(module) or orientations == 1


@every_name
def test_weights_are_fresh_and_follow_the_seed(name: str) -> None:
    def build(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return list(build_network(name, 2, 4, SMALL.get(name)).parameters())

    first, again, other = build(0), build(0), build(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("name", "weights"), WEIGHTS.items())
def test_resnets_have_the_weights_of_torchvision(name: str, weights: int) -> None:
    """With the same number of weights and the same names, so that pretrained weights can be loaded."""
    with torch.device("meta"):
        module = find_builder(name)(outputs=1000)
    assert count(module) == weights
    names = set(module.state_dict())
    expected = {"conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight", "layer2.0.downsample.0.weight", "fc.bias"}
    assert expected <= names
    assert ("layer1.0.downsample.1.weight" in names) == ("layer3.5.conv3.weight" in names) == (name == "resnet50")
    assert ("layer3.5.conv1.weight" in names) == (name != "resnet18")


@every_family
def test_conversion_keeps_the_number_of_weights(name: str) -> None:
    plain, converted = (build_network(name, 3, n, {**SMALL[name], "width": 16}) for n in (1, 4))
    assert count(converted) == pytest.approx(count(plain), rel=0.1)


def test_the_papers_networks_can_be_built_by_name() -> None:
    for name in ARCHITECTURES:
        module = build_network(name, 5, 4, {"preset": "faithful"})
        assert isinstance(module, Network)
        assert module.architecture == getattr(rp.models, name)(4, preset="faithful", outputs=5).architecture
        assert find_window_px(name) == module.architecture.input_px


# Options


def test_options_are_passed_to_the_builder() -> None:
    unet = build_network("unet", 2, 1, {"width": 6, "depth": 2})
    assert [level[0].out_channels for level in unet.down] == [6, 12]  # type: ignore[union-attr]
    assert build_network("resnet50", 2, 1, {"width": 4}).conv1.out_channels == 4  # type: ignore[union-attr]
    mitosis = build_network("mitosis", 1, 4, {"preset": "faithful", "pooling": "max", "reflections": True})
    assert mitosis.architecture.pooling == "max"  # type: ignore[union-attr]
    assert mitosis.architecture.kernel == "harmonic"  # type: ignore[union-attr]
    assert mitosis.architecture.reflections  # type: ignore[union-attr]
    assert build_network("test_registry:own", 2, 1, {"width": 5})[0].out_channels == 5  # type: ignore[index]
    assert build_network("test_registry:Own", 2, 4, {"name": "mine"}).name == "mine"


@pytest.mark.parametrize("kernel", ["bilinear", "harmonic"])
def test_options_are_passed_to_the_conversion(kernel: str) -> None:
    module = build_network("resnet18", 2, 4, {"width": 4, "kernel": kernel})
    kernels = {layer.kernel for layer in module.modules() if isinstance(layer, rp.nn.LiftConv2d | rp.nn.GroupConv2d)}
    assert kernels == {kernel}


def test_reflections_are_an_option_of_the_conversion() -> None:
    images = rp.metrics.smooth_images(2, 32)
    for reflections in (False, True):
        module = build_network("unet", 2, 4, {"width": 8, "depth": 2, "reflections": reflections}).eval()
        assert (rp.equivariance_error(module, images, 0, flip=True) < 1e-4) == reflections


def test_keep_is_an_option_of_the_conversion() -> None:
    options = {"width": 8, "depth": 2}
    weights, maps = (count(build_network("unet", 2, 4, {**options, "keep": keep})) for keep in ("weights", "maps"))
    assert maps < weights / 2


def test_a_parameter_of_the_builder_hides_an_option_of_the_conversion() -> None:
    """And accepts values that the conversion would refuse."""
    for orientations in (1, 4):
        module = build_network("test_registry:own", 2, orientations, {"kernel": 5})
        assert module(torch.rand(1, 3, 9, 9)).shape == (1, 2, 5, 5)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("tumor", {"kernal": "harmonic"}, "The network 'tumor' has no option 'kernal'; did you mean 'kernel'?"),
        ("tumor", {"classes": 3}, "The network 'tumor' has no option 'classes'; options are preset, "),
        ("resnet18", {"widht": 8}, "The network 'resnet18' has no option 'widht'; did you mean 'width'?"),
        ("unet", {"colour": 8}, "The network 'unet' has no option 'colour'; options are width, depth, keep, kernel, "),
        ("unet", {"orientations": 8}, "The network 'unet' has no option 'orientations'; "),
        ("unet", {"outputs": 2}, "The network 'unet' has no option 'outputs'; options are width, depth, "),
        (
            "test_registry:Own",
            {"keep": "maps"},
            "The network 'test_registry:Own' has no option 'keep'; options are name",
        ),
        ("unet", {"keep": "all"}, "The option 'keep' of the network 'unet' is 'all'; choose from 'weights', "),
        (
            "unet",
            {"reflections": "yes"},
            "The option 'reflections' of the network 'unet' is 'yes'; choose from ",
        ),
        (
            "tumor",
            {"pooling": "min"},
            "The option 'pooling' of tumor must be 'max' or 'max-blur' or 'rms-blur'; got 'min'.",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) and " " not in given else None,
)
def test_unknown_options_are_refused(name: str, options: dict[str, object], sentence: str) -> None:
    for refuse in (lambda: check_options(name, options), lambda: build_network(name, 2, 4, options)):
        with pytest.raises(ValueError, match="option") as error:
            refuse()
        assert str(error.value).startswith(sentence)


def test_outputs_are_not_an_option() -> None:
    """Because their number follows from the task."""
    with pytest.raises(ValueError, match="The network 'tumor' has no option 'outputs'") as error:
        build_network("tumor", 2, 4, {"outputs": 3})
    assert "did you mean 'outputs'" not in str(error.value)


def test_the_given_options_are_not_changed() -> None:
    options = {"width": 8, "depth": 2, "keep": "maps"}
    before = copy.deepcopy(options)
    build_network("unet", 2, 4, options)
    assert options == before


def test_presets_are_expanded() -> None:
    expanded = expand_preset("tumor", {"preset": "faithful", "kernel": "gaussian"})
    assert expanded == {
        "kernel": "gaussian",
        "pooling": "rms-blur",
        "upsampling": "bilinear",
        "smoothing": True,
        "projection": "mean",
        "reflections": False,
    }
    network = build_network("tumor", 2, 4, expanded)
    assert network.architecture == rp.models.tumor(4, preset="faithful", kernel="gaussian", outputs=2).architecture
    assert expand_preset("unet", {"width": 8}) == {"width": 8}


# Names


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("resnet81", "There is no network 'resnet81'; did you mean 'resnet18'?"),
        ("Tumour", "There is no network 'Tumour'; did you mean 'tumor'?"),
        (
            "vit",
            "There is no network 'vit'; choose from mitosis, nuclei, tumor, resnet18, resnet34, resnet50, unet",
        ),
        (
            "no_such.module:build",
            "'no_such.module:build' cannot be imported (No module named 'no_such'); install its package, or run",
        ),
        (":build", "':build' cannot be imported (Empty module name); install its package"),
        (".relative:build", "'.relative:build' cannot be imported"),
        (
            "test_registry:missing",
            "The module test_registry has no 'missing'; check the name 'test_registry:missing'.",
        ),
        (
            "test_registry:not_a_function",
            "The network 'test_registry:not_a_function' is an object of type int; it must be a function that builds",
        ),
        ("test_registry:without_outputs", "The function 'test_registry:without_outputs' has no parameter 'outputs', "),
        ("test_registry:of_anything", "The function 'test_registry:of_anything' has no parameter 'outputs', "),
        (
            "test_registry:no_module",
            "The function 'test_registry:no_module' returned an object of type list; it must return a torch.nn.Module.",
        ),
        ("plain_networks:ResNet18", "The function 'plain_networks:ResNet18' has no parameter 'outputs', the number of"),
    ],
    ids=lambda given: given if " " not in given else "",
)
def test_unknown_names_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        build_network(name, 2, 4)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize("orientations", [0, -4, 2.5])
def test_orientations_must_be_whole_numbers(orientations: int) -> None:
    with pytest.raises(ValueError, match="whole number, 1 or more"):
        build_network("unet", 2, orientations)


def test_the_network_of_a_user_function_is_converted() -> None:
    plain, converted = (build_network("test_registry:own", 2, n) for n in (1, 4))
    assert type(plain) is nn.Sequential
    images = rp.metrics.smooth_images(2, 15)
    assert rp.equivariance_error(converted.eval(), images) < 1e-4
    assert rp.equivariance_error(plain.eval(), images) > 1e-3
    assert (find_window_px("test_registry:own"), find_window_px("test_registry:Own")) == (31, None)


@pytest.mark.parametrize("orientations", [1, 3, 8])
def test_functions_with_a_parameter_orientations_are_not_converted(orientations: int) -> None:
    module = build_network("test_registry:Own", 2, orientations)
    assert isinstance(module, Own), "and is not converted"
    assert module.orientations == module.lift.orientations == orientations
    plain = build_network("test_registry:plain_by_orientations", 2, orientations)
    assert isinstance(plain, nn.Conv2d)
    assert plain.out_channels == 2 * orientations


def test_equivariant_modules_are_not_converted() -> None:
    module = build_network("test_registry:made_of_rotopath", 2, 4)
    assert isinstance(module, Own)
    assert module.orientations == 6
    assert is_equivariant(module)
    assert not is_equivariant(nn.Conv2d(3, 2, 3))


# Imports


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def test_modules_in_the_current_folder_can_be_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "nets_of_mine").mkdir()
    (folder / "nets_of_mine" / "__init__.py").touch()
    (folder / "nets_of_mine" / "small.py").write_text(
        "from torch import nn\ndef build(outputs, width=4):\n    return nn.Conv2d(3, outputs, 3)\n"
    )
    before = list(sys.path)
    try:
        module = build_network("nets_of_mine.small:build", 7, 1)
        assert isinstance(module, nn.Conv2d)
        assert module.out_channels == 7
        assert sys.path == before
        assert Path(import_object("nets_of_mine.small:__file__")).parent == folder / "nets_of_mine"  # type: ignore[arg-type]
    finally:
        for name in ("nets_of_mine.small", "nets_of_mine"):
            monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_failed_import_restores_sys_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "broken_net.py").write_text("import no_such_package\n")
    (folder / "wrong_net.py").write_text("this is no Python\n")
    before = list(sys.path)
    with pytest.raises(ValueError, match=r"'broken_net:build' cannot be imported \(No module named 'no_such_package'"):
        import_object("broken_net:build")
    assert sys.path == before
    with pytest.raises(SyntaxError):
        import_object("wrong_net:build")
    assert sys.path == before
    monkeypatch.setattr(sys, "path", [*before, str(folder)])
    with pytest.raises(ValueError, match="cannot be imported"):
        import_object("broken_net:build")
    assert sys.path == [*before, str(folder)], "also if the folder is in sys.path already"


def test_the_current_folder_does_not_hide_installed_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tabnanny.py").write_text("raise AssertionError('must not be imported')\n")
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    assert isinstance(import_object("tabnanny:NannyNag"), type)


@pytest.mark.parametrize("orientations", [1, 4])
def test_functions_without_outputs_are_not_called(
    folder: Path, orientations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because a model file from a stranger may name any function."""
    with pytest.raises(ValueError, match="The function 'os:system' has no parameter 'outputs'"):
        build_network("os:system", 1, orientations, {"command": f"touch {folder / 'called'}"})
    called: list[object] = []
    monkeypatch.setattr(os, "system", lambda command: called.append(command))
    monkeypatch.setattr(os, "remove", lambda *arguments, **named: called.append((arguments, named)))
    for name in ("os:system", "os:remove", "builtins:exec", "builtins:print", "subprocess:Popen"):
        for options in ({}, {"command": "ls"}, {"outputs": "ls"}):
            with pytest.raises(ValueError, match="has no parameter 'outputs'"):
                build_network(name, 1, orientations, options)
            with pytest.raises(ValueError, match="has no parameter 'outputs'"):
                check_options(name, options)
    assert called == []
    assert list(folder.iterdir()) == []
