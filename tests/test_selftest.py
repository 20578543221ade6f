"""`rotopath doctor`: a missing package is named with the command that installs it, a failing test is a failure."""

import copy
import json
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from kernel_cases import use_kernels
from rich.console import Console
from typer.testing import CliRunner, Result

from rotopath import environment, pretrained, selftest
from rotopath.cli import app
from rotopath.cli.doctor import device_line, verdict
from rotopath.inference import dense
from rotopath.models import Network
from rotopath.selftest import SelfTestFailedError, SelfTestResult

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "80"})


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Make modules look as if they were not installed."""
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name in modules else find_spec(name))


def test_everything_works() -> None:
    result = run()
    assert result.exit_code == 0, result.stdout
    assert "✗" not in result.stdout
    for text in ("Software", "Devices", "Readers", "Extras", "Self-test", "Everything that is installed works."):
        assert text in result.stdout
    for name in pretrained.list_pretrained():
        assert f"✓ {name}" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_output_is_only_json() -> None:
    result = run("--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert torch.__version__.startswith(report["software"]["packages"]["torch"])
    assert report["devices"][0]["device"] == "CPU"
    assert {test["state"] for test in report["self_tests"]} <= {"works", "not tested"}
    assert str(Path.home()) not in result.stdout


@pytest.mark.parametrize("extra", list(environment.EXTRAS))
def test_missing_extra_is_not_a_failure(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, *environment.EXTRAS[extra])
    slide_test = selftest._run_test("slide reader", selftest._test_slide_reader)
    monkeypatch.setattr(selftest, "run_self_tests", lambda: iter([slide_test]))
    result = run()
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert f"pip install 'rotopath[{extra}]'" in text
    for package in environment.EXTRAS[extra].values():
        assert package in text
    assert ("not tested: missing: openslide-python" in text) == (extra == "slides")


def test_missing_packages_are_in_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "tiffslide", "dask")
    report = selftest.describe_installation()
    assert report["extras"]["slides"]["missing"] == ["tiffslide"]
    assert report["extras"]["cluster"]["install"] == "pip install 'rotopath[cluster]'"
    assert "install" not in report["extras"]["train"] or not find_spec("lightning")
    assert {reader["reader"]: reader["installed"] for reader in report["readers"]}["tiffslide"] is False


def test_failing_self_test_gives_exit_code_1_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_device: torch.device) -> str:
        raise RuntimeError("kernels are upside down\nand more")

    monkeypatch.setattr(selftest, "_test_equivariance", fail)
    result = run()
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "✗ rotation, CPU fails: RuntimeError: kernels are upside down (0.0 s)" in text
    assert "✓ tumor-pcam-n8" in text
    assert "1 of" in text
    assert "rotopath doctor --json" in text
    assert run("--json").exit_code == 1


def test_failed_measurement_is_reported_without_an_exception_name() -> None:
    result = selftest._run_test("a", lambda: str(selftest._require(False, "it is 2 and not 1")))
    assert (result.state, result.detail) == ("fails", "it is 2 and not 1")


def test_network_that_is_not_equivariant_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    mitosis = selftest.models.mitosis
    monkeypatch.setattr(selftest.models, "mitosis", lambda _orientations: mitosis(1))
    with pytest.raises(
        SelfTestFailedError, match=r"the error under rotation by 90° is .* more than rounding can explain"
    ):
        selftest._test_equivariance(selftest.CPU)
    monkeypatch.setattr(selftest.models, "mitosis", lambda _orientations: mitosis(8))
    with pytest.raises(SelfTestFailedError, match="so the test cannot detect errors"):
        selftest._test_equivariance(selftest.CPU)


def test_pretrained_weights_that_are_not_finite_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    model = selftest.runs.load("tumor-pcam-n8")
    with torch.no_grad():
        model.network.head.conv.bias.fill_(torch.nan)
    monkeypatch.setattr(selftest.runs, "load", lambda _name: model)
    with pytest.raises(SelfTestFailedError, match="not finite"):
        selftest._test_pretrained("tumor-pcam-n8")


def test_slide_library_that_cannot_be_loaded_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openslide")

    def import_module(_name: str) -> object:
        raise ModuleNotFoundError("no libopenslide here")

    monkeypatch.setattr(selftest, "import_module", import_module)
    assert selftest._run_test("slide reader", selftest._test_slide_reader).state == "fails"
    assert selftest._describe_readers([])[1]["reason"] == "no libopenslide here"


# Self-tests of GPUs, as far as a CPU can run them.


@pytest.mark.no_cover  # tracing interpreted kernels would take long
def test_fused_kernels_are_compared_with_separate_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from rotopath.nn.triton import batch_norm

    with monkeypatch.context() as without_triton:
        without_triton.setattr(selftest, "is_installed", lambda: False)
        result = selftest._run_test("fused", lambda: selftest._test_fused_kernels(selftest.CPU))
        assert result.state == "not tested"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU interprets the kernels
    use_kernels(monkeypatch)
    assert selftest._test_fused_kernels(device).startswith("same as separate layers")
    apply = batch_norm.apply
    monkeypatch.setattr(batch_norm, "apply", lambda *args: apply(*args) * 1.01)
    with pytest.raises(SelfTestFailedError, match="differ by"):
        selftest._test_fused_kernels(device)


def test_device_is_compared_with_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selftest._test_device(selftest.CPU).startswith("as a plain CNN in precision 32: same as on the CPU")
    biases = iter([3.0, 0.0])  # of the device, then of the CPU

    def prepare(network: Network, _device: torch.device, _dtype: torch.dtype, _backend: str) -> Network:
        network = copy.deepcopy(network)
        torch.nn.init.constant_(network.head.conv.bias, next(biases))
        return network

    monkeypatch.setattr(dense, "prepare", prepare)
    with pytest.raises(SelfTestFailedError, match="from the probabilities on the CPU"):
        selftest._test_device(selftest.CPU)


def test_bf16_is_compared_with_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert selftest._test_bf16(selftest.CPU).startswith("same as float32")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    assert selftest._run_test("bf16", lambda: selftest._test_bf16(selftest.CPU)).state == "not tested"


def test_gpu_line_names_the_gpu_or_the_reason_why_there_is_none() -> None:
    gpu = {"device": "GPU 0", "name": "NVIDIA H200", "memory_gb": 150, "bf16": True}
    no_gpu = {"device": "GPU", "name": None, "reason": "the driver is too old"}
    console = Console(width=80, record=True)
    for device in (gpu, no_gpu):
        console.print(device_line(device))
    console.print(verdict([SelfTestResult("a", "works", ""), SelfTestResult("b", "fails", "")]))
    text = console.export_text()
    assert "✓ GPU 0" in text
    assert "NVIDIA H200, 150 GB, supports bf16" in text
    assert "– GPU" in text
    assert "the driver is too old" in text
    assert "✗ 1 of 2 self-tests failed: b." in text


def test_extras_are_those_of_pyproject() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in environment.EXTRAS.items():
        packages = {requirement.partition(">")[0] for requirement in declared[extra]}
        assert set(modules.values()) == packages - {"openslide-bin"}  # a shared library that the system may have
        assert all(environment.find_extra(module) == extra for module in modules)
    names = {name for name in declared if name not in ("all", "dev")}
    assert names == environment.EXTRAS.keys() == environment.PURPOSE.keys()
