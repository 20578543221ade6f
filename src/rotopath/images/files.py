"""Images from files: RGB pixels, label maps, and the spacing of pixels where the file knows it.

In: a path to anything Pillow reads. Out: arrays (H, W, 3) uint8 or (H, W) int32; or one sentence about the file.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin, UnidentifiedImageError

PLAUSIBLE_UM_PX = (0.05, 5.0)  # outside of it a resolution speaks of print or screen, not of a microscope
UM_PER_INCH = 25_400.0
_FILTERING = Lock()
NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"


class UnreadableFileError(ValueError):
    """A file that is missing, damaged, or not what it should be: the file, and in words that follow its name, why."""

    def __init__(self, path: Path | str, fault: str = "") -> None:
        super().__init__(path, fault)
        self.path, self.fault = path, fault

    def __str__(self) -> str:
        return f"{self.path} {self.fault}".strip()


class UnreadableImageError(UnreadableFileError):
    """A file that is no image, or a damaged one."""


def read_rgb(path: Path) -> NDArray[np.uint8]:
    """The image as (H, W, 3) bytes: transparency lies on white, 16 bits are reduced to 8, grey becomes RGB."""
    with _opened(path) as image:
        if image.mode == "F":
            raise UnreadableImageError(path, "holds floating-point numbers; save it with 8 bits for each colour.")
        if image.mode.startswith("I"):
            grey = np.array(image).clip(0, 65_535) >> 8
            return np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2)
        if "A" in image.getbands() or "transparency" in image.info:
            layer = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
        return np.array(image.convert("RGB"))


def read_labels(path: Path) -> NDArray[np.int32]:
    """A map of object numbers (H, W), 0 for background, from a grey image of 8, 16 or 32 bits."""
    with _opened(path) as image:
        if len(image.getbands()) != 1 or image.mode in ("F", "1"):
            raise UnreadableImageError(
                path,
                f"is no label map: it has mode {image.mode}, but object numbers need one grey channel "
                f"of 8, 16 or 32 bits.",
            )
        labels = np.array(image)
    if labels.min() < 0 or labels.max() > np.iinfo(np.int32).max:
        raise UnreadableImageError(path, "is no label map: object numbers are whole, 0 or above.")
    return labels.astype(np.int32)


def image_size_px(path: Path) -> tuple[int, int]:
    """(height, width) from the file's head, without decoding its pixels."""
    with _opened(path) as image:
        return image.height, image.width


def spacing_um_px(path: Path) -> float | None:
    """Micrometres per pixel from the file's own words (Aperio, OME, TIFF or PNG resolution); None where it has none."""
    size = pixel_size_um(path)
    return None if size is None else size[1]


def pixel_size_um(path: Path) -> tuple[float, float] | None:
    """Height and width of a pixel from the file's own words; None where it has none, or none of a microscope."""
    with _opened(path) as image:
        tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
        description = str(tags.get(TiffImagePlugin.IMAGEDESCRIPTION, ""))
        density = image.info.get("dpi")  # Pillow has brought resolutions in inches and centimetres to this
    if described := described_pixel_size_um(description):
        return described
    if not density or min(density) <= 0:
        return None
    return _plausible(UM_PER_INCH / float(density[1]), UM_PER_INCH / float(density[0]))


def described_pixel_size_um(description: str) -> tuple[float, float] | None:
    """Height and width of a pixel from what Aperio or OME write into the description of a TIFF."""
    if aperio := re.search(rf"\bMPP\s*=\s*{NUMBER}", description):
        return _plausible(float(aperio[1]), float(aperio[1]))
    if not (width := _physical_size_um(description, "X")):
        return None
    return _plausible(_physical_size_um(description, "Y") or width, width)


def _physical_size_um(description: str, axis: str) -> float | None:
    size = re.search(rf'\bPhysicalSize{axis}="{NUMBER}"', description)
    unit = re.search(rf'\bPhysicalSize{axis}Unit="([^"]+)"', description)
    scale = {"nm": 1e-3, "mm": 1e3, "cm": 1e4, "pixel": 0.0}.get(unit[1] if unit else "µm", 1.0)
    return float(size[1]) * scale if size else None


def _plausible(height_um: float, width_um: float) -> tuple[float, float] | None:
    return (height_um, width_um) if is_plausible(height_um) and is_plausible(width_um) else None


def is_plausible(spacing: float) -> bool:
    """Whether a microscope could have so many micrometres in a pixel."""
    return PLAUSIBLE_UM_PX[0] <= spacing <= PLAUSIBLE_UM_PX[1]


def resample(image: NDArray[np.uint8], scale: float) -> NDArray[np.uint8]:
    """The image enlarged or reduced by a factor, low-passed where it is reduced, so that detail does not alias."""
    height, width = round(image.shape[0] * scale), round(image.shape[1] * scale)
    if (height, width) == image.shape[:2]:
        return image
    return np.array(Image.fromarray(image).resize((max(width, 1), max(height, 1)), Image.Resampling.LANCZOS))


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with _head_read(path) as image:
            yield image
    except FileNotFoundError:
        raise UnreadableImageError(path, "does not exist.") from None
    except UnidentifiedImageError:
        raise UnreadableImageError(path, "is not an image that can be read (TIFF, PNG, JPEG, ...).") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise UnreadableImageError(
            path, "is too large to be read at once; save it as a tiled TIFF, which is read in parts."
        ) from None
    except UnreadableFileError:
        raise
    except (PermissionError, IsADirectoryError) as error:
        raise UnreadableImageError(path, f"cannot be read ({error.strerror}).") from None
    except Exception as error:  # decoders meet damaged bytes with whatever they stumble over
        raise UnreadableImageError(
            path, f"is damaged and cannot be decoded ({error}); download or export it anew."
        ) from None


def _head_read(path: Path) -> Image.Image:
    """The opened image, its pixels not yet decoded. Filters of warnings belong to the process, hence the lock."""
    with _FILTERING, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="PIL")  # odd tags do no harm
        warnings.filterwarnings("error", "Truncated File Read")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(path)
