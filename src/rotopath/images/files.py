"""Read image files in any format that Pillow supports: RGB pixels, label maps, and the pixel spacing.

Pixels are arrays (H, W, 3) of uint8. Label maps are arrays (H, W) of int32 with an object number at each pixel, and 0
for background. If a file cannot be used, `UnreadableImageError` is raised, with a message of one sentence.
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

PLAUSIBLE_UM_PX = (0.05, 5.0)  # range for microscopes; other values in files are usually for printers or screens
UM_PER_INCH = 25_400.0
NUMBER_PATTERN = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
_WARNING_FILTERS = Lock()  # warning filters apply to the whole process; only one thread may change them at a time


class UnreadableFileError(ValueError):
    """A file is missing, damaged or of the wrong type. The message is the path, followed by `fault`, the problem."""

    def __init__(self, path: Path | str, fault: str = "") -> None:
        super().__init__(path, fault)
        self.path, self.fault = path, fault

    def __str__(self) -> str:
        return f"{self.path} {self.fault}".strip()


class UnreadableImageError(UnreadableFileError):
    """An image file, label map or slide cannot be used. The attribute `fault` states the problem."""


class ImageTooLargeError(UnreadableImageError):
    """An image is too large to be read as a whole."""


def expect_file(path: Path) -> None:
    """Raise UnreadableFileError if a path is a pipe, a socket or a device: reading it may wait or go on without end.

    A path that does not exist, or that is a folder, is reported by the function that reads it.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UnreadableFileError(path, "is a pipe, a socket or a device and not a file; copy its content into a file.")


# Pixels


def read_rgb(path: Path, page: int = 0) -> NDArray[np.uint8]:
    """Read an image as RGB pixels (H, W, 3) of uint8. `page` is the number of the image in a file with several images.

    Transparent pixels are blended with white. 16-bit gray values are reduced to 8 bits, and gray images get three equal
    channels.
    """
    with open_image(path) as image:
        image.seek(page)
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
    with open_image(path) as image:
        if len(image.getbands()) != 1 or image.mode in ("F", "1"):
            raise UnreadableImageError(
                path,
                f"is not a label map: its Pillow mode is {image.mode}, but object numbers need one gray channel of 8, "
                f"16 or 32 bits; save the object numbers in such an image.",
            )
        labels = np.array(image)
    largest = np.iinfo(np.int32).max
    if labels.min() < 0 or labels.max() > largest:
        raise UnreadableImageError(
            path,
            f"is not a label map: it contains numbers from {labels.min()} to {labels.max()}, but object numbers are 0 "
            f"to {largest}; renumber the objects.",
        )
    return labels.astype(np.int32)


def resample(image: NDArray[np.uint8], scale: float) -> NDArray[np.uint8]:
    """Resize an image (H, W, 3) by the factor `scale`. The Lanczos filter also prevents aliasing."""
    height, width = round(image.shape[0] * scale), round(image.shape[1] * scale)
    if (height, width) == image.shape[:2]:
        return image
    return np.array(Image.fromarray(image).resize((max(width, 1), max(height, 1)), Image.Resampling.LANCZOS))


# Size and spacing


def image_size_px(path: Path) -> tuple[int, int]:
    """Return (height, width) of an image in pixels. Only the header of the file is read."""
    with open_image(path) as image:
        return image.height, image.width


def spacing_um_px(path: Path) -> float | None:
    """Read the pixel spacing (the width of a pixel, in µm/px) from the metadata of an image file.

    The metadata can be those of Aperio or OME, or the resolution of a TIFF, PNG or JPEG file. Returns None if the size
    of a pixel is missing, or if its height or width is not in the range `PLAUSIBLE_UM_PX`.
    """
    size = pixel_size_um(path)
    return None if size is None else size[1]


def pixel_size_um(path: Path, page: int = 0) -> tuple[float, float] | None:
    """Read the height and width of a pixel in µm from the metadata of an image file.

    `page` is the number of the image in a file with several images. Returns None if height and width are missing, or
    if one of them is not in the range `PLAUSIBLE_UM_PX`.
    """
    with open_image(path) as image:
        image.seek(page)
        tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
        description = str(tags.get(TiffImagePlugin.IMAGEDESCRIPTION, ""))
        dots_per_inch = image.info.get("dpi")  # Pillow converts resolutions per centimeter as well
    if size := parse_pixel_size_um(description):
        return size
    try:
        width_um, height_um = (UM_PER_INCH / float(dots) for dots in dots_per_inch or ())
    except (TypeError, ValueError, ZeroDivisionError):  # not stated, or a damaged header states 0/0
        return None
    return _plausible_size(height_um, width_um)


def parse_pixel_size_um(description: str) -> tuple[float, float] | None:
    """Parse the height and width of a pixel in µm from the image description in a TIFF file (Aperio or OME).

    If only the width is stated, the pixel is assumed to be square. Returns None if the width is missing, or if the
    width or the height is implausible.
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
    """Return the side of a pixel along the axis "X" or "Y" in µm, from OME metadata.

    Returns None if the side is missing, and 0 (an implausible side) if its unit is "pixel". Numbers in nm, mm and cm
    are converted to µm. Numbers in any other unit are assumed to be in µm.
    """
    size = re.search(rf'\bPhysicalSize{axis}="{NUMBER_PATTERN}"', description)
    unit = re.search(rf'\bPhysicalSize{axis}Unit="([^"]+)"', description)
    um_per_unit = {"nm": 1e-3, "mm": 1e3, "cm": 1e4, "pixel": 0.0}.get(unit[1] if unit else "µm", 1.0)
    return float(size[1]) * um_per_unit if size else None


def _plausible_size(height_um: float, width_um: float) -> tuple[float, float] | None:
    """Return the height and width of a pixel, or None if one of them is implausible."""
    return (height_um, width_um) if is_plausible(height_um) and is_plausible(width_um) else None


# Opening


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """Open an image for a `with` statement, in which any error is converted to an UnreadableImageError."""
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
        raise ImageTooLargeError(
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
    """Open an image without decoding its pixels. Warnings about damaged or very large files are raised as errors."""
    expect_file(path)
    with _WARNING_FILTERS, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="PIL")  # about unusual metadata
        warnings.filterwarnings("error", "Truncated File Read")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(path)
