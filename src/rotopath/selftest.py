"""Is this installation well? What is there, what is missing, and whether it works.

In: the machine. Out: versions, devices, readers and extras, ready for JSON; and a few seconds of self-tests, each of
which ends in a state and a sentence. What is not installed is not tested, and nothing that is amiss raises.
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
from rotopath.extras import EXTRAS, PURPOSE, install, list_missing
from rotopath.images import open_slide
from rotopath.images.pyramid import write_pyramid
from rotopath.images.readers import SLIDE_SUFFIXES
from rotopath.inference import predict
from rotopath.metrics.equivariance import smooth_images, untrained_errors
from rotopath.nn.fuse import can_fuse, can_pool, norm_relu_pool
from rotopath.nn.gpu import serves
from rotopath.runs import describe_software

PACKAGES = ("torch", "numpy", "scipy", "scikit-image", "pillow", "tifffile", "safetensors", "typer", "rich")
ROUNDING, HALF_ROUNDING, BF16_ROUNDING = 1e-4, 1e-2, 5e-2  # errors below are those of the numbers, not of the software
PATCH_PX = 124  # on the grid of all networks
CPU = torch.device("cpu")
State = Literal["works", "fails", "not tested"]


@dataclass(frozen=True)
class SelfTest:
    """What came of a self-test."""

    what: str
    state: State
    detail: str
    seconds: float = 0.0


class NotTestedError(Exception):
    """There is nothing to test here, and why."""


class FailedError(Exception):
    """What was found instead of what is right."""


def examine() -> dict[str, Any]:
    """What is installed, and on what it runs."""
    missing = {extra: list_missing(extra) for extra in EXTRAS}
    return {
        "software": describe_software(PACKAGES) | {"system": platform.platform(), "torch_build": _name_build()},
        "devices": _describe_devices(),
        "readers": _describe_readers(missing["slides"]),
        "extras": {
            extra: {"for": PURPOSE[extra], "missing": packages} | ({"install": install(extra)} if packages else {})
            for extra, packages in missing.items()
        },
    }


def run_self_tests() -> Iterator[SelfTest]:
    """One after another, as they end."""
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    for device in (CPU, *gpus):
        yield _attempt(f"turns exactly, {_name(device)}", partial(_test_exactness, device))
    for name in pretrained.list_pretrained():
        yield _attempt(name, partial(_test_prediction, name))
    for gpu in gpus:
        with torch.cuda.device(gpu):  # on which Triton computes
            yield _attempt(f"predicts, {_name(gpu)}", partial(_test_ready, gpu))
            yield _attempt(f"bf16, {_name(gpu)}", partial(_test_bf16, gpu))
            yield _attempt(f"fused kernels, {_name(gpu)}", partial(_test_fused, gpu))
    yield _attempt("reads a slide", _test_slide)


def _attempt(what: str, test: Callable[[], str]) -> SelfTest:
    begun = time.perf_counter()
    state: State = "works"
    try:
        detail = test()
    except NotTestedError as reason:
        state, detail = "not tested", str(reason)
    except FailedError as found:
        state, detail = "fails", str(found)
    except Exception as error:  # whatever it is, the other tests go on
        state, detail = "fails", f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
    return SelfTest(what, state, detail, round(time.perf_counter() - begun, 2))


def _test_exactness(device: torch.device) -> str:
    """A network with 8 orientations turns with its input, to rounding; an ordinary one does not."""
    images = smooth_images(1, 76).to(device)
    with _full_precision():
        (exact,), (ordinary,) = (untrained_errors(partial(models.mitosis, n), images, draws=1) for n in (8, 1))
    _expect(exact < ROUNDING, f"a network with 8 orientations errs by {exact:.1e} under a turn by 90°, not by rounding")
    _expect(ordinary > 100 * ROUNDING, f"an ordinary network errs by {ordinary:.1e} only, so nothing was measured")
    return f"errs by {exact:.0e} at 90°, an ordinary network by {ordinary:.1f}"


def _test_prediction(name: str) -> str:
    """A pretrained model loads, and what it says about a patch turns with the patch."""
    network = runs.load(name).network
    patch = _draw_patch()[0]
    images = (image.permute(1, 2, 0).numpy() for image in (patch, group.rotate(patch, 90)))
    upright, turned = (torch.from_numpy(predict(network, image, CPU).probabilities) for image in images)
    _expect(bool(upright.isfinite().all()), "its probabilities are not finite")
    error = float((group.rotate(upright, 90) - turned).abs().max())
    _expect(error < ROUNDING, f"its probabilities change by {error:.1e} when the patch is turned by 90°")
    return f"the same answer after a quarter turn, to {error:.0e}"


def _test_ready(device: torch.device) -> str:
    """What `rotopath predict` runs on a device answers as the CPU does."""
    run, patch = runs.load(pretrained.list_pretrained()[0]), _draw_patch()[0].permute(1, 2, 0).numpy()
    model = run.ready(device)
    there, here = (predict(one.network, patch, one.device).probabilities for one in (model, run.ready(CPU)))
    error = float(np.abs(there - here).max())
    _expect(error < HALF_ROUNDING, f"its probabilities differ by {error:.1e} from those of the CPU")
    form = "by Triton's kernels" if serves(device) else "as a plain CNN"
    return f"{form} in precision {model.precision}, the same as the CPU, to {error:.0e}"


def _test_bf16(device: torch.device) -> str:
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise NotTestedError("this GPU has none; train with precision 32")
    network: Any = runs.load(pretrained.list_pretrained()[0]).network.to(device)
    images = _draw_patch().to(device)
    with torch.no_grad():
        full = network(images).sigmoid()
        with torch.autocast(device.type, torch.bfloat16):
            half = network(images).float().sigmoid()
    error = float((half - full).abs().max())
    _expect(error < BF16_ROUNDING, f"probabilities change by {error:.1e} in bf16")
    return f"the same as float32, to {error:.0e}"


def _test_fused(device: torch.device) -> str:
    """Fused kernels give what layers give one after another, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(4, 24, 24, 8, 8, generator=generator).to(device).permute(0, 3, 4, 1, 2)
    if not can_fuse(features, nn.GroupBatchNorm2d(8).to(device), torch.nn.ReLU()):
        raise NotTestedError("Triton is not installed; training uses plain layers, which are slower")
    pools = (nn.GroupMaxPool2d(2), nn.GroupAvgPool2d(2, blur=5, power=2).to(device))
    error = max(_compare_fused(features, pool) for pool in pools if can_pool(features, pool))
    _expect(error < ROUNDING, f"they differ by {error:.1e} from plain layers")
    return f"the same as plain layers, to {error:.0e}"


def _compare_fused(features: Tensor, pool: torch.nn.Module) -> float:
    """How far what is computed in one pass, and its gradient, is from what layers give."""
    norms = [nn.GroupBatchNorm2d(features.shape[1]).to(features.device).train() for _ in range(2)]
    inputs = [features.clone(memory_format=torch.preserve_format).requires_grad_() for _ in norms]
    fused, plain = norm_relu_pool(inputs[0], norms[0], pool), pool(F.relu(norms[1](inputs[1])))
    for answer in (fused, plain):
        answer.square().sum().backward()
    pairs = ((fused, plain), (inputs[0].grad, inputs[1].grad))
    return max(
        float((one - other).detach().abs().max()) for one, other in pairs if one is not None and other is not None
    )


def _test_slide() -> str:
    """A pyramid is written, and read back as it was."""
    missing = list_missing("slides")
    if "openslide-python" not in missing:
        import_module("openslide")  # whatever is wrong with its library is told as it is
    if missing:
        raise NotTestedError(f"{' and '.join(missing)} not installed: {install('slides')}")
    rows, columns, spacing_um_px = 600, 1100, 0.5
    image = np.random.default_rng(0).integers(0, 256, (rows, columns, 3), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slide.tif"
        write_pyramid(path, [image], (rows, columns), spacing_um_px)
        with open_slide(path) as slide:
            levels, told, read = len(slide.levels), slide.spacing_um_px, slide.read(0, 0, rows, columns)
    _expect(levels == 3 and abs(told - spacing_um_px) < 1e-6, f"it has {levels} levels at {told} µm/px, not 3 at 0.5")
    _expect(np.array_equal(read, image), "its pixels are not those that were written")
    return f"{levels} levels, every pixel as it was written"


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise FailedError(otherwise)


def _draw_patch() -> Tensor:
    """Something pale with darker spots, (1, 3, H, W) bytes."""
    return (smooth_images(1, PATCH_PX) * 40 + 170).clamp(0, 255).byte()


@contextmanager
def _full_precision() -> Iterator[None]:
    """A GPU would round float32 to the ten bits of TF32, and that is what would be measured."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _name(device: torch.device) -> str:
    return "CPU" if device == CPU else f"GPU {device.index}"


def _name_build() -> str:
    for title, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)):
        if version:
            return f"for {title} {version}"
    return "for the CPU only"


def _describe_devices() -> list[dict[str, Any]]:
    cpu = {"device": "CPU", "name": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    devices: list[dict[str, Any]] = [cpu | {"threads": torch.get_num_threads()}]
    with warnings.catch_warnings(record=True) as said:  # by torch, about drivers that it cannot use
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    for i in range(torch.cuda.device_count() if usable else 0):
        about = torch.cuda.get_device_properties(i)
        with torch.cuda.device(i):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        memory_gb = about.total_memory // 10**9
        devices.append({"device": f"GPU {i}", "name": about.name, "memory_gb": memory_gb, "bf16": bf16})
    if not usable:
        built = torch.version.cuda or torch.version.hip
        reason = str(said[0].message).splitlines()[0] if said else "torch finds none"
        devices.append(
            {"device": "GPU", "name": None, "reason": reason if built else "torch is built for the CPU only"}
        )
    return devices


def _describe_readers(missing: list[str]) -> list[dict[str, Any]]:
    """What reads which files; a reader that is installed and cannot be loaded has a reason instead of a version."""
    slides = ", ".join(sorted(suffix[1:].upper() for suffix in SLIDE_SUFFIXES))
    readers: list[dict[str, Any]] = []
    for name, package, (module, version), reads in (
        ("Pillow", "pillow", ("PIL", "__version__"), "PNG, JPEG, TIFF and other images"),
        ("OpenSlide", "openslide-python", ("openslide", "__library_version__"), f"slides: {slides}, pyramidal TIFF"),
        ("tiffslide", "tiffslide", ("tiffslide", "__version__"), "pyramids in OME-TIFF"),
    ):
        reader = {"reader": name, "reads": reads, "installed": package not in missing}
        if reader["installed"]:
            try:
                reader["version"] = getattr(import_module(module), version)
            except Exception as error:  # a library that is not there, or not of this system
                reader["reason"] = str(error).splitlines()[0]
        readers.append(reader)
    return readers
