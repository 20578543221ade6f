"""Read image files in any format that Pillow supports: RGB pixels, label maps, and the pixel spacing.

Pixels are (H, W, 3) as uint8; label maps are (H, W) as int32, with an object number at each pixel and 0 for background.
If a file cannot be used, `UnreadableImageError` is raised, with a message of one sentence.
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

PLAUSIBLE_UM_PX = (0.05, 5.0)  # a spacing outside this range is for a printer or a screen, not of a microscope
UM_PER_INCH = 25_400.0
NUMBER_PATTERN = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
_WARNING_FILTERS = Lock()  # warning filters belong to the whole process, so only one thread changes them at a time


class UnreadableFileError(ValueError):
    """A file is missing, damaged or of the wrong type. The message is the path, then `fault`: what is wrong with it."""

    def __init__(self, path: Path | str, fault: str = "") -> None:
        super().__init__(path, fault)
        self.path, self.fault = path, fault

    def __str__(self) -> str:
        return f"{self.path} {self.fault}".strip()


class UnreadableImageError(UnreadableFileError):
    """An image file, label map or slide cannot be used. The attribute `fault` states the reason."""


# Pixels


def read_rgb(path: Path) -> NDArray[np.uint8]:
    """Read an image as RGB pixels (H, W, 3) of uint8.

    Transparent pixels are blended with white, 16-bit values are reduced to 8 bits, and gray images get three equal
    channels.
    """
    with _open_image(path) as image:
        if image.mode == "F":
            raise UnreadableImageError(path, "holds floating-point numbers; save it with 8 bits for each color.")
        if image.mode.startswith("I"):
            gray = np.array(image).clip(0, 65_535) >> 8
            return np.repeat(gray.astype(np.uint8)[:, :, None], 3, axis=2)
        if "A" in image.getbands() or "transparency" in image.info:
            rgba = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
        return np.array(image.convert("RGB"))


def read_labels(path: Path) -> NDArray[np.int32]:
    """Read a label map (H, W) from a gray image of 8, 16 or 32 bits."""
    with _open_image(path) as image:
        if len(image.getbands()) != 1 or image.mode in ("F", "1"):
            raise UnreadableImageError(
                path,
                f"is not a label map: its Pillow mode is {image.mode}, but object numbers need one gray channel of 8, "
                f"16 or 32 bits; save it with such a channel.",
            )
        labels = np.array(image)
    largest = np.iinfo(np.int32).max
    if labels.min() < 0 or labels.max() > largest:
        raise UnreadableImageError(
            path,
            f"is not a label map: it holds numbers from {labels.min()} to {labels.max()}, but object numbers are 0 to "
            f"{largest}; renumber its objects.",
        )
    return labels.astype(np.int32)


def resample(image: NDArray[np.uint8], scale: float) -> NDArray[np.uint8]:
    """Resize an image (H, W, 3) by the factor `scale`, with a Lanczos filter, which also prevents aliasing."""
    height, width = round(image.shape[0] * scale), round(image.shape[1] * scale)
    if (height, width) == image.shape[:2]:
        return image
    return np.array(Image.fromarray(image).resize((max(width, 1), max(height, 1)), Image.Resampling.LANCZOS))


# Size and spacing


def image_size_px(path: Path) -> tuple[int, int]:
    """Return (height, width) of an image in pixels. Only the header of the file is read."""
    with _open_image(path) as image:
        return image.height, image.width


def spacing_um_px(path: Path) -> float | None:
    """Read the pixel spacing in µm/px (the width of a pixel) from the metadata (Aperio, OME, TIFF or PNG).

    Returns None if the height or the width of a pixel is missing or not in the range `PLAUSIBLE_UM_PX`.
    """
    size = pixel_size_um(path)
    return None if size is None else size[1]


def pixel_size_um(path: Path) -> tuple[float, float] | None:
    """Read the height and width of a pixel in µm from the metadata; None if they are missing or implausible."""
    with _open_image(path) as image:
        tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
        description = str(tags.get(TiffImagePlugin.IMAGEDESCRIPTION, ""))
        dots_per_inch = image.info.get("dpi")  # Pillow converts resolutions per centimeter as well
    if size := parse_pixel_size_um(description):
        return size
    if not dots_per_inch or min(dots_per_inch) <= 0:
        return None
    return _plausible_size(UM_PER_INCH / float(dots_per_inch[1]), UM_PER_INCH / float(dots_per_inch[0]))


def parse_pixel_size_um(description: str) -> tuple[float, float] | None:
    """Parse the height and width of a pixel in µm from the image description in a TIFF file (Aperio or OME).

    Returns None if they are missing or implausible.
    """
    if aperio := re.search(rf"\bMPP\s*=\s*{NUMBER_PATTERN}", description):
        return _plausible_size(float(aperio[1]), float(aperio[1]))
    if not (width := _parse_ome_size_um(description, "X")):
        return None
    return _plausible_size(_parse_ome_size_um(description, "Y") or width, width)


def is_plausible(spacing: float) -> bool:
    """Return whether a pixel spacing in µm/px is plausible for a microscope image: in the range `PLAUSIBLE_UM_PX`."""
    return PLAUSIBLE_UM_PX[0] <= spacing <= PLAUSIBLE_UM_PX[1]


def _parse_ome_size_um(description: str, axis: str) -> float | None:
    size = re.search(rf'\bPhysicalSize{axis}="{NUMBER_PATTERN}"', description)
    unit = re.search(rf'\bPhysicalSize{axis}Unit="([^"]+)"', description)
    um_per_unit = {"nm": 1e-3, "mm": 1e3, "cm": 1e4, "pixel": 0.0}.get(unit[1] if unit else "µm", 1.0)
    return float(size[1]) * um_per_unit if size else None


def _plausible_size(height_um: float, width_um: float) -> tuple[float, float] | None:
    return (height_um, width_um) if is_plausible(height_um) and is_plausible(width_um) else None


# Opening


@contextmanager
def _open_image(path: Path) -> Iterator[Image.Image]:
    """Open an image. Any error while it is open is converted to an UnreadableImageError."""
    try:
        with _read_header(path) as image:
            yield image
    except FileNotFoundError:
        raise UnreadableImageError(path, "does not exist.") from None
    except UnidentifiedImageError:
        raise UnreadableImageError(
            path, "is not an image in a supported format; convert it to TIFF, PNG or JPEG."
        ) from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise UnreadableImageError(
            path, "is too large to be read as a whole; save it as a tiled TIFF, which is read in parts."
        ) from None
    except UnreadableFileError:
        raise
    except (PermissionError, IsADirectoryError) as error:
        raise UnreadableImageError(path, f"cannot be read ({error.strerror}).") from None
    except Exception as error:  # decoders raise errors of any type for damaged bytes
        raise UnreadableImageError(
            path, f"is damaged and cannot be decoded ({error}); download or export it again."
        ) from None


def _read_header(path: Path) -> Image.Image:
    """Open an image without decoding its pixels."""
    with _WARNING_FILTERS, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="PIL")  # unusual tags are harmless
        warnings.filterwarnings("error", "Truncated File Read")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(path)
