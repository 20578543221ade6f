"""Load models of other software as torch modules: ONNX, TorchScript, functions of the user, and timm.

`load_onnx` reads data only: an ONNX file cannot execute code. TorchScript is a program, and a function of the user is
code, so load these only from people whom you trust. `Preprocessed` adds the preprocessing that a model expects, so that
all of them map RGB images (B, 3, S, S) with values from 0 to 1 to one tensor.
"""

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rotopath.images.files import UnreadableFileError, expect_file
from rotopath.models.protocols import IMAGE_CHANNELS, in_one_line
from rotopath.models.registry import import_object

FLOATS = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16, "tensor(double)": torch.float64}
BYTES = "tensor(uint8)"
MAIN_OUTPUTS = ("logits", "out", "output")  # names of the output that is used, if a model returns several


class OnnxModule(nn.Module):
    """An ONNX model with one image as its input, computed by ONNX Runtime on the CPU, without gradients.

    Images (B, 3, H, W) are floats from 0 to 1. If the input of the model is (B, H, W, 3), as of models made with
    TensorFlow or Keras, the axes of images and of maps are moved. If it is bytes, images are scaled to 0 to 255.
    `window_px` is the side of the images if the model fixes it, otherwise None. The first output is returned.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # Threads that wait in a loop would slow down the threads that read slides and find objects.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises types of its own
            raise ValueError(f"ONNX Runtime cannot read the model ({in_one_line(error)}); export it again.") from None
        inputs, outputs = session.get_inputs(), session.get_outputs()
        shape = inputs[0].shape if len(inputs) == 1 else []
        if len(shape) != 4 or inputs[0].type not in (*FLOATS, BYTES):
            found = "; ".join(f"{given.name} {given.shape} {given.type}" for given in inputs)
            raise ValueError(
                f"The ONNX model must have one input, images (B, 3, H, W) or (B, H, W, 3) of floats or bytes; its "
                f"inputs are: {found}."
            )
        self._is_last = shape[3] == IMAGE_CHANNELS and shape[1] != IMAGE_CHANNELS
        sides = shape[1:3] if self._is_last else shape[2:]
        self.window_px = sides[0] if isinstance(sides[0], int) and sides[0] == sides[1] else None
        self._batch = shape[0] if isinstance(shape[0], int) else None
        self._dtype, name = FLOATS.get(inputs[0].type), inputs[0].name
        names = [given.name for given in outputs if given.type in FLOATS] or [outputs[0].name]
        wanted = [next((known for known in MAIN_OUTPUTS if known in names), names[0])]
        # A function, because a session cannot be copied: copies of this module share it.
        self._compute: Callable[[Any], Any] = lambda images: session.run(wanted, {name: images})[0]
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        images = x.detach().cpu()
        if self._dtype is None:
            images = images if images.dtype == torch.uint8 else (images * 255).round().clamp(0, 255).to(torch.uint8)
        else:
            images = (images / 255 if images.dtype == torch.uint8 else images).to(self._dtype)
        images = images.movedim(1, -1) if self._is_last else images
        size = self._batch or len(images)
        parts = []
        for start in range(0, len(images), size):
            part = images[start : start + size]
            missing = size - len(part)  # only if the model fixes the size of the batch
            part = torch.cat([part, part[-1:].expand(missing, *part.shape[1:])]) if missing else part
            parts.append(torch.from_numpy(self._compute(part.contiguous().numpy()))[: size - missing])
        outputs = torch.cat(parts)
        outputs = outputs.movedim(-1, 1) if self._is_last and outputs.ndim == 4 else outputs
        return outputs.to(x.device, torch.float32)


def load_onnx(content: bytes) -> OnnxModule:
    """Return the module that computes an ONNX model. Raises ValueError if it cannot be read, or takes no images."""
    return OnnxModule(content)


def read_model_file(path: Path) -> bytes:
    """Return the content of a model file. Raises ValueError if the file does not exist or cannot be read."""
    try:
        expect_file(path)
        return path.read_bytes()
    except UnreadableFileError as error:
        raise ValueError(str(error)) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check the path.") from None


def load_torchscript(path: Path) -> nn.Module:
    """Return a TorchScript model in evaluation mode, on the CPU. It can execute code: load only what you trust."""
    read_model_file(path)  # for the message, if the file cannot be read
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        try:
            module: nn.Module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
        except (RuntimeError, ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a TorchScript model ({in_one_line(error):.200}).") from None
    return module.eval()


def load_function(name: str, outputs: int | None = None) -> nn.Module | Callable[[Tensor], Any]:
    """Import "package.module:name", and return the model that it is or that it builds.

    A module of torch is the model. A class or function without required parameters, or with the required parameter
    `outputs` only, builds the model. A function with any other single parameter is the model, a function of images.
    """
    found = import_object(name)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise ValueError(f"{name!r} is an object of type {type(found).__name__}; name a function or a torch module.")
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return found
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required == ["outputs"]:
        if outputs is None:
            raise ValueError(f"The function {name!r} needs the number of outputs; give the names of the classes.")
        built = found(outputs=outputs)
    elif not required:
        built = found()
    elif len(required) == 1 and not isinstance(found, type):
        return found
    else:
        raise ValueError(
            f"{name!r} has the required parameters {', '.join(required)}; it must take images only, or build the model "
            f"without parameters or from `outputs`."
        )
    if not callable(built):
        raise ValueError(f"{name!r} returned an object of type {type(built).__name__}; it must return a torch module.")
    model: nn.Module | Callable[[Tensor], Any] = built
    return model


def load_timm(name: str, weights: Mapping[str, Tensor]) -> tuple[nn.Module, Mapping[str, Any]]:
    """Build a network of timm for the given weights. Also return how timm prepares its images.

    The number of classes is that of the classifier in the weights. Without a classifier, the network returns features.
    The second result has the keys `input_size`, `mean` and `std`.
    """
    timm: Any = importlib.import_module("timm")
    try:
        known = timm.create_model(name, pretrained=False)
        layer = known.pretrained_cfg.get("classifier") or "fc"
        layers = [layer] if isinstance(layer, str) else list(layer)
        classes = next((len(weights[key]) for key in (f"{member}.weight" for member in layers) if key in weights), 0)
        module = timm.create_model(name, pretrained=False, num_classes=classes)
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"timm cannot build {name!r} ({in_one_line(error)}); check the name.") from None
    return module.eval(), dict(known.pretrained_cfg)


class Preprocessed(nn.Module):
    """A model with its preprocessing: images (B, 3, S, S) from 0 to 1 are resized and normalized.

    `size_px` is the side to which images are resized, by bilinear interpolation as of Pillow and torchvision; None: the
    images keep their size. If the model returns several tensors, one is chosen: by the names in MAIN_OUTPUTS in a
    dictionary, and otherwise the first one. `window_px` is S, and `outputs` the number of channels of the result.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[Tensor], Any],
        window_px: int,
        size_px: int | None = None,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__()
        self.model, self.window_px, self.size_px = model, window_px, size_px
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(1, -1, 1, 1), persistent=False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.size_px is not None and self.size_px != x.shape[-1]:
            size = (self.size_px, self.size_px)
            x = functional.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False)
        mean, std = self.get_buffer("mean"), self.get_buffer("std")
        if (mean != 0).any() or (std != 1).any():
            x = (x - mean) / std
        return choose_output(self.model(x))


def choose_output(outputs: Any) -> Tensor:
    """Return the tensor (B, K) or (B, K, h, w) of what a model returns. Raises ValueError if there is none."""
    if isinstance(outputs, Mapping):
        key = next((name for name in MAIN_OUTPUTS if name in outputs), next(iter(outputs), None))
        return choose_output(None if key is None else outputs[key])
    if isinstance(outputs, list | tuple):
        return choose_output(outputs[0] if outputs else None)
    if not isinstance(outputs, Tensor) or outputs.ndim not in (2, 4):
        got = f"a tensor {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"A model must return a tensor (B, K) of a prediction for each image, or a map (B, K, h, w); this one "
            f"returned {got}; wrap it in a function that does."
        )
    return outputs
