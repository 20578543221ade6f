"""The doctor: what is missing is named with its cure, what fails is a failure, and the rest goes on."""

import copy
import json
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from rotopath import extras, pretrained, selftest
from rotopath.cli import app
from rotopath.inference import preparing
from rotopath.models import Network
from rotopath.selftest import FailedError, SelfTest

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "80"})


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in modules else find_spec(name))


def test_all_is_well() -> None:
    result = run()
    assert result.exit_code == 0, result.stdout
    assert "✗" not in result.stdout
    for words in ("Software", "Devices", "Readers", "Extras", "Self-test", "All that is installed works."):
        assert words in result.stdout
    for name in pretrained.list_pretrained():
        assert f"✓ {name}" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_is_json_and_nothing_else() -> None:
    result = run("--json")
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert torch.__version__.startswith(said["software"]["packages"]["torch"])
    assert said["devices"][0]["device"] == "CPU"
    assert {one["state"] for one in said["self_tests"]} <= {"works", "not tested"}
    assert str(Path.home()) not in result.stdout


@pytest.mark.parametrize("extra", list(extras.EXTRAS))
def test_a_missing_extra_is_named_with_its_cure_and_is_no_failure(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, *extras.EXTRAS[extra])
    monkeypatch.setattr(
        selftest, "run_self_tests", lambda: iter([selftest._attempt("reads a slide", selftest._test_slide)])
    )
    result = run()
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert f"pip install 'rotopath[{extra}]'" in words
    for package in extras.EXTRAS[extra].values():
        assert package in words
    assert ("not tested: openslide-python" in words) == (extra == "slides")


def test_what_is_missing_is_missing_in_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "tiffslide", "dask")
    found = selftest.examine()
    assert found["extras"]["slides"]["missing"] == ["tiffslide"]
    assert found["extras"]["cluster"]["install"] == "pip install 'rotopath[cluster]'"
    assert "install" not in found["extras"]["train"] or not find_spec("lightning")
    assert {one["reader"]: one["installed"] for one in found["readers"]}["tiffslide"] is False


def test_a_failing_self_test_is_exit_code_1_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fall_ill(_device: torch.device) -> str:
        raise RuntimeError("kernels are upside down\nand more")

    monkeypatch.setattr(selftest, "_test_exactness", fall_ill)
    result = run()
    assert result.exit_code == 1
    words = " ".join(result.stdout.split())
    assert "✗ turns exactly, CPU fails: RuntimeError: kernels are upside down (0.0 s)" in words
    assert "✓ tumor-pcam-n8" in words
    assert "1 of" in words
    assert "rotopath doctor --json" in words
    assert run("--json").exit_code == 1


def test_what_is_found_is_told_without_the_jargon_of_programmers() -> None:
    outcome = selftest._attempt("a", lambda: str(selftest._expect(False, "it is 2 and not 1")))
    assert (outcome.state, outcome.detail) == ("fails", "it is 2 and not 1")


def test_networks_that_do_not_turn_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    mitosis = selftest.models.mitosis
    monkeypatch.setattr(selftest.models, "mitosis", lambda _orientations: mitosis(1))
    with pytest.raises(FailedError, match=r"errs by .* not by rounding"):
        selftest._test_exactness(selftest.CPU)
    monkeypatch.setattr(selftest.models, "mitosis", lambda _orientations: mitosis(8))
    with pytest.raises(FailedError, match="so nothing was measured"):
        selftest._test_exactness(selftest.CPU)


def test_pretrained_weights_that_are_not_numbers_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sick = selftest.runs.load("tumor-pcam-n8")
    with torch.no_grad():
        sick.network.head.conv.bias.fill_(torch.nan)
    monkeypatch.setattr(selftest.runs, "load", lambda _name: sick)
    with pytest.raises(FailedError, match="not finite"):
        selftest._test_prediction("tumor-pcam-n8")


def test_a_slide_library_that_is_broken_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openslide")

    def load(_name: str) -> object:
        raise ModuleNotFoundError("no libopenslide here")

    monkeypatch.setattr(selftest, "import_module", load)
    assert selftest._attempt("reads a slide", selftest._test_slide).state == "fails"
    assert selftest._describe_readers([])[1]["reason"] == "no libopenslide here"


# What runs on GPUs only, as far as a CPU can tell.


def test_fused_kernels_are_compared_with_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    with monkeypatch.context() as without:
        without.setattr(selftest, "can_fuse", lambda _features, _norm, _relu: False)
        assert selftest._attempt("fused", lambda: selftest._test_fused(selftest.CPU)).state == "not tested"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # there the kernels are interpreted
    monkeypatch.setattr(selftest, "can_fuse", lambda _features, _norm, _relu: True)
    assert selftest._test_fused(device).startswith("the same as plain layers")
    right = selftest.norm_relu_pool
    monkeypatch.setattr(selftest, "norm_relu_pool", lambda x, norm, pool: right(x, norm, pool) * 1.01)
    with pytest.raises(FailedError, match="they differ by"):
        selftest._test_fused(device)


def test_what_predicts_is_compared_with_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selftest._test_ready(selftest.CPU).startswith("as a plain CNN in precision 32, the same as the CPU")
    biases = iter([3.0, 0.0])  # there, and here

    def prepare(network: Network, _device: torch.device, _dtype: torch.dtype) -> Network:
        network = copy.deepcopy(network)
        torch.nn.init.constant_(network.head.conv.bias, next(biases))
        return network

    monkeypatch.setattr(preparing, "prepare", prepare)
    with pytest.raises(FailedError, match="from those of the CPU"):
        selftest._test_ready(selftest.CPU)


def test_bf16_is_compared_with_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert selftest._test_bf16(selftest.CPU).startswith("the same as float32")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    assert selftest._attempt("bf16", lambda: selftest._test_bf16(selftest.CPU)).state == "not tested"


def test_a_gpu_that_is_there_is_shown_and_a_driver_that_is_too_old_explained() -> None:
    from rotopath.reports import terminal as health

    gpu = {"device": "GPU 0", "name": "NVIDIA H200", "memory_gb": 150, "bf16": True}
    none = {"device": "GPU", "name": None, "reason": "the driver is too old"}
    console = Console(width=80, record=True)
    for device in (gpu, none):
        console.print(health._device(device))
    console.print(health.verdict([SelfTest("a", "works", ""), SelfTest("b", "fails", "")]))
    shown = console.export_text()
    assert "✓ GPU 0" in shown
    assert "NVIDIA H200, 150 GB, bf16" in shown
    assert "– GPU" in shown
    assert "the driver is too old" in shown
    assert "✗ 1 of 2 self-tests failed: b." in shown


def test_extras_are_those_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in extras.EXTRAS.items():
        packages = {requirement.partition(">")[0] for requirement in declared[extra]}
        assert set(modules.values()) == packages - {"openslide-bin"}  # a library that may be the system's
        assert all(extras.extra_of(module) == extra for module in modules)
    assert {name for name in declared if name not in ("all", "dev")} == extras.EXTRAS.keys() == extras.PURPOSE.keys()
