"""SE(2,N), the group of translations, N rotations and perhaps reflections: the single home of geometry.

In: a kernel size, a number of orientations, base weights. Out: rotated kernels, turned images and features,
and the sizes on which pixel grids survive a rotation. Angles run counter-clockwise as seen on screen (rows
grow downwards), which is the direction of `torch.rot90(x, 1, (-2, -1))`.
"""

from rotopath.group.grid import (
    angles,
    check_orientations,
    covering_size,
    disc,
    inscribed_disc,
    inverses,
    mirror,
    order,
    orientation_shift,
    products,
    windows,
)
from rotopath.group.kernel_families import KERNELS, Kernel, effective_taps, group_kernels, lift_kernels, rotation_map
from rotopath.group.rotate import (
    amplitude_map,
    apply_symmetries,
    describe_line,
    find_peak,
    flip,
    flip_features,
    frequencies,
    line_angle,
    rotate,
    rotate_each,
    rotate_features,
)

__all__ = [
    "KERNELS",
    "Kernel",
    "amplitude_map",
    "angles",
    "apply_symmetries",
    "check_orientations",
    "covering_size",
    "describe_line",
    "disc",
    "effective_taps",
    "find_peak",
    "flip",
    "flip_features",
    "frequencies",
    "group_kernels",
    "inscribed_disc",
    "inverses",
    "lift_kernels",
    "line_angle",
    "mirror",
    "order",
    "orientation_shift",
    "products",
    "rotate",
    "rotate_each",
    "rotate_features",
    "rotation_map",
    "windows",
]
