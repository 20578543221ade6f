"""Check an installation of rotopath: list what is installed and what is missing, and run self-tests.

`describe_installation` returns versions, devices, image readers and extras (groups of optional packages) as a
dictionary for JSON. `run_self_tests` takes a few seconds. The result of each test is a state ("works", "fails" or "not
tested") and a short explanation. The state is "not tested" if a test needs software or hardware that is missing. If a
test raises an error, its state is "fails", and the remaining tests are run.
"""

import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rotopath import group, models, nn, pretrained, runs
from rotopath.environment import EXTRAS, PURPOSE, describe_software, install_command, list_missing
from rotopath.images import open_slide
from rotopath.images.containers import OPENSLIDE_SUFFIXES
from rotopath.images.pyramid import write_pyramid
from rotopath.inference import predict
from rotopath.metrics.equivariance import smooth_images, untrained_errors
from rotopath.nn.triton import is_installed, supports_device

PACKAGES = ("torch", "numpy", "scipy", "scikit-image", "pillow", "tifffile", "safetensors", "typer", "rich")
FLOAT32_TOLERANCE, FLOAT16_TOLERANCE, BF16_TOLERANCE = 1e-4, 1e-2, 5e-2  # larger errors cannot be due to rounding
PATCH_PX = 124  # height and width of a test image that all pretrained networks accept
CPU = torch.device("cpu")
State = Literal["works", "fails", "not tested"]


@dataclass(frozen=True)
class SelfTestResult:
    """The result of a self-test."""

    what: str  # name of the test
    state: State
    detail: str  # what was measured, or why the test failed or did not run
    seconds: float = 0.0


class NotTestedError(Exception):
    """Raised if a self-test cannot run on this machine. The message states the reason."""


class SelfTestFailedError(Exception):
    """Raised if a self-test fails. The message states what was measured."""


# What is installed


def describe_installation() -> dict[str, Any]:
    """Return versions, devices, image readers and extras (groups of optional packages), as a dictionary for JSON.

    The entry of an extra with missing packages also contains the command that installs them.
    """
    missing = {extra: list_missing(extra) for extra in EXTRAS}
    return {
        "software": describe_software(PACKAGES) | {"system": platform.platform(), "torch_build": _torch_build()},
        "devices": _describe_devices(),
        "readers": _describe_readers(missing["slides"]),
        "extras": {
            extra: {"for": PURPOSE[extra], "missing": packages}
            | ({"install": install_command(extra)} if packages else {})
            for extra, packages in missing.items()
        },
    }


def _torch_build() -> str:
    """Return the platform for which torch is built, such as "for CUDA 12.8" or "for the CPU only"."""
    for platform_name, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)):
        if version:
            return f"for {platform_name} {version}"
    return "for the CPU only"


def _describe_devices() -> list[dict[str, Any]]:
    """Return an entry for the CPU and for each GPU.

    If no GPU can be used, there is one GPU entry, which contains the reason.
    """
    cpu = {"device": "CPU", "name": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    devices: list[dict[str, Any]] = [cpu | {"threads": torch.get_num_threads()}]
    with warnings.catch_warnings(record=True) as caught:  # torch warns if it cannot use the driver
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    for i in range(torch.cuda.device_count() if usable else 0):
        properties = torch.cuda.get_device_properties(i)
        with torch.cuda.device(i):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        memory_gb = properties.total_memory // 10**9
        devices.append({"device": f"GPU {i}", "name": properties.name, "memory_gb": memory_gb, "bf16": bf16})
    if not usable:
        reason = "torch is built for the CPU only"
        if torch.version.cuda or torch.version.hip:
            reason = str(caught[0].message).splitlines()[0] if caught else "torch detects no GPU"
        devices.append({"device": "GPU", "name": None, "reason": reason})
    return devices


def _describe_readers(missing: list[str]) -> list[dict[str, Any]]:
    """Return an entry for each image reader (package that reads images): its file formats, and whether it is installed.

    The entry of an installed reader also contains its version, or the reason why it cannot be loaded. `missing` are the
    names of the packages that are not installed.
    """
    slides = ", ".join(sorted(suffix[1:].upper() for suffix in OPENSLIDE_SUFFIXES))
    readers: list[dict[str, Any]] = []
    for name, package, (module, version), reads in (
        ("Pillow", "pillow", ("PIL", "__version__"), "PNG, JPEG, TIFF and other images"),
        ("OpenSlide", "openslide-python", ("openslide", "__library_version__"), f"slides: {slides}, pyramidal TIFF"),
        ("tiffslide", "tiffslide", ("tiffslide", "__version__"), "pyramids in OME-TIFF"),
        ("zarr", "zarr", ("zarr", "__version__"), "OME-Zarr"),
    ):
        reader = {"reader": name, "reads": reads, "installed": package not in missing}
        if reader["installed"]:
            try:
                reader["version"] = getattr(import_module(module), version)
            except Exception as error:  # for example, the shared library of the reader is missing
                reader["reason"] = str(error).splitlines()[0]
        readers.append(reader)
    return readers


# Self-tests


def run_self_tests() -> Iterator[SelfTestResult]:
    """Run all self-tests, and yield the result of each test as soon as it is known."""
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    for device in (CPU, *gpus):
        yield _run_test(f"rotation, {_name(device)}", partial(_test_equivariance, device))
    for name in pretrained.list_pretrained():
        yield _run_test(name, partial(_test_pretrained, name))
    for gpu in gpus:
        with torch.cuda.device(gpu):  # Triton computes on the current device
            yield _run_test(f"prediction, {_name(gpu)}", partial(_test_device, gpu))
            yield _run_test(f"bf16, {_name(gpu)}", partial(_test_bf16, gpu))
            yield _run_test(f"fused kernels, {_name(gpu)}", partial(_test_fused_kernels, gpu))
    yield _run_test("slide reader", _test_slide_reader)


def _run_test(name: str, test: Callable[[], str]) -> SelfTestResult:
    """Run `test` and return the result. `test` is a function that returns what was measured, or raises an error."""
    start = time.perf_counter()
    state: State = "works"
    try:
        detail = test()
    except NotTestedError as error:
        state, detail = "not tested", str(error)
    except SelfTestFailedError as error:
        state, detail = "fails", str(error)
    except Exception as error:  # an unexpected error must not stop the other tests
        state, detail = "fails", f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    return SelfTestResult(name, state, detail, round(time.perf_counter() - start, 2))


def _test_equivariance(device: torch.device) -> str:
    """Test that a network with 8 orientations is equivariant to rotations by 90°, and that an ordinary CNN is not.

    A network is equivariant if rotating its input only rotates its output.
    """
    images = smooth_images(1, 76).to(device)
    with _without_tf32():
        (error,), (ordinary,) = (untrained_errors(partial(models.mitosis, n), images, draws=1) for n in (8, 1))
    _require(
        error < FLOAT32_TOLERANCE,
        f"with 8 orientations, the error under rotation by 90° is {error:.1e}, which is more than rounding can explain",
    )
    _require(
        ordinary > 100 * FLOAT32_TOLERANCE,
        f"the error of an ordinary CNN is only {ordinary:.1e}, so the test cannot detect errors",
    )
    return f"error {error:.0e} under rotation by 90° (ordinary CNN: {ordinary:.1f})"


def _test_pretrained(name: str) -> str:
    """Test that a pretrained model can be loaded, and that its prediction for a patch rotates with the patch."""
    network = runs.load(name).network
    patch = _make_patch()[0]
    images = (image.permute(1, 2, 0).numpy() for image in (patch, group.rotate(patch, 90)))
    upright, rotated = (torch.from_numpy(predict(network, image, CPU).probabilities) for image in images)
    _require(bool(upright.isfinite().all()), "the probabilities are not finite")
    error = float((group.rotate(upright, 90) - rotated).abs().max())
    _require(error < FLOAT32_TOLERANCE, f"the probabilities change by {error:.1e} when the patch is rotated by 90°")
    return f"same prediction after rotation by 90° (error {error:.0e})"


def _test_device(device: torch.device) -> str:
    """Test that predictions on a GPU and on the CPU are the same, up to rounding.

    On the GPU, the network has the form and the precision that `rotopath predict` uses.
    """
    run, patch = runs.load(pretrained.list_pretrained()[0]), _make_patch()[0].permute(1, 2, 0).numpy()
    model = run.prepare(device)
    on_device, on_cpu = (predict(m.network, patch, m.device).probabilities for m in (model, run.prepare(CPU)))
    error = float(np.abs(on_device - on_cpu).max())
    _require(error < FLOAT16_TOLERANCE, f"the probabilities differ by {error:.1e} from the probabilities on the CPU")
    form = "with Triton kernels" if supports_device(device) else "as a plain CNN"
    return f"{form} in precision {model.precision}: same as on the CPU (error {error:.0e})"


def _test_bf16(device: torch.device) -> str:
    """Test that predictions in bf16 and in float32 are the same, up to rounding."""
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise NotTestedError('this GPU does not support bf16; to train on it, set precision = "32" in the recipe')
    network: Any = runs.load(pretrained.list_pretrained()[0]).network.to(device)
    images = _make_patch().to(device)
    with torch.no_grad():
        float32 = network(images).sigmoid()
        with torch.autocast(device.type, torch.bfloat16):
            bf16 = network(images).float().sigmoid()
    error = float((bf16 - float32).abs().max())
    _require(error < BF16_TOLERANCE, f"the probabilities change by {error:.1e} in bf16")
    return f"same as float32 (error {error:.0e})"


def _test_fused_kernels(device: torch.device) -> str:
    """Test that fused kernels compute the same outputs and gradients as separate layers.

    A fused kernel computes batch norm, ReLU and pooling together on the GPU.
    """
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 16, 16, 8, 8, generator=generator).to(device).permute(0, 3, 4, 1, 2)
    if not is_installed():
        raise NotTestedError("Triton is not installed, so training uses separate layers, which are slower")
    pools = (nn.GroupMaxPool2d(2), nn.GroupAvgPool2d(2, blur=5, power=2).to(device))
    error = max(_fused_error(features, pool) for pool in pools)
    _require(error < FLOAT32_TOLERANCE, f"the results of fused kernels differ by {error:.1e} from separate layers")
    return f"same as separate layers (error {error:.0e})"


def _fused_error(features: Tensor, pool: torch.nn.Module) -> float:
    """Return the largest difference between a fused kernel and separate layers, in the outputs and in the gradients.

    The layers are a batch norm, a ReLU and `pool`. Their input is `features` (B, C, N, H, W). The gradients are those
    of the sum of squares of the outputs, with respect to the input.
    """
    norms = [nn.GroupBatchNorm2d(features.shape[1]).to(features.device).train() for _ in range(2)]
    inputs = [features.clone(memory_format=torch.preserve_format).requires_grad_() for _ in norms]
    fused = pool(F.relu(norms[0](inputs[0])))
    with nn.disable_fusion():
        separate = pool(F.relu(norms[1](inputs[1])))
    for output in (fused, separate):
        output.square().sum().backward()
    pairs = ((fused, separate), (inputs[0].grad, inputs[1].grad))
    return max(float((a - b).detach().abs().max()) for a, b in pairs if a is not None and b is not None)


def _test_slide_reader() -> str:
    """Test that the pixels and levels of a small pyramidal TIFF are the same after writing and reading."""
    missing = list_missing("slides")
    if "openslide-python" not in missing:
        import_module("openslide")  # if the shared library cannot be loaded, this error is the result of the test
    if missing:
        raise NotTestedError(f"missing: {' and '.join(missing)}; to install, run {install_command('slides')}")
    rows, columns, spacing_um_px = 600, 1100, 0.5
    image = np.random.default_rng(0).integers(0, 256, (rows, columns, 3), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slide.tif"
        write_pyramid(path, image, spacing_um_px)
        with open_slide(path) as slide:
            levels, spacing, pixels = len(slide.levels), slide.spacing_um_px, slide.read(0, 0, rows, columns)
    _require(
        levels == 3 and abs(spacing - spacing_um_px) < 1e-6,
        f"the slide has {levels} levels at {spacing} µm/px, but 3 at {spacing_um_px} µm/px were written",
    )
    _require(np.array_equal(pixels, image), "the pixels that were read differ from the pixels that were written")
    return f"{levels} levels, all pixels as written"


def _require(condition: bool, message: str) -> None:
    """Raise SelfTestFailedError with `message` if `condition` is false."""
    if not condition:
        raise SelfTestFailedError(message)


def _make_patch() -> Tensor:
    """Return a random light patch with dark spots: uint8 (1, 3, PATCH_PX, PATCH_PX)."""
    return (smooth_images(1, PATCH_PX) * 40 + 170).clamp(0, 255).byte()


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute the convolutions in the `with` block in float32, without TF32 (rounding of float32 to fewer bits).

    On a GPU, TF32 would cause errors that are larger than FLOAT32_TOLERANCE.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _name(device: torch.device) -> str:
    """Return the name of a device for users: "CPU", or for example "GPU 0"."""
    return "CPU" if device == CPU else f"GPU {device.index}"
