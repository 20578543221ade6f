"""Geometry of the group SE(2,N): translations, N rotations and, optionally, reflections.

`grid` assigns an index to each rotation and reflection, and computes sizes of pixel grids. `kernel_families` computes
rotated kernels for lifting and group convolutions. `rotation` rotates and flips images and features.
Positive angles are counter-clockwise on the screen, where row 0 is at the top, as in `torch.rot90(x, 1, (-2, -1))`.
"""

from rotopath.group.grid import (
    angles,
    check_orientations,
    covering_size,
    disc_mask,
    inscribed_disc,
    inverses,
    multiplication_table,
    order,
    orientation_shift,
    output_size,
    reflect_index,
    unit_vector,
)
from rotopath.group.kernel_families import (
    KERNELS,
    Kernel,
    average_map,
    effective_taps,
    group_kernels,
    group_kernels_gradient,
    lift_kernels,
    rotation_map,
    write_group_kernels,
)
from rotopath.group.rotation import (
    apply_symmetries,
    count_frequencies,
    flip,
    flip_features,
    fourier_map,
    interpolate_peak,
    line_angle,
    line_direction,
    rotate,
    rotate_each,
    rotate_features,
    rotate_reflected,
    warp_each,
)

__all__ = [
    "KERNELS",
    "Kernel",
    "angles",
    "apply_symmetries",
    "average_map",
    "check_orientations",
    "count_frequencies",
    "covering_size",
    "disc_mask",
    "effective_taps",
    "flip",
    "flip_features",
    "fourier_map",
    "group_kernels",
    "group_kernels_gradient",
    "inscribed_disc",
    "interpolate_peak",
    "inverses",
    "lift_kernels",
    "line_angle",
    "line_direction",
    "multiplication_table",
    "order",
    "orientation_shift",
    "output_size",
    "reflect_index",
    "rotate",
    "rotate_each",
    "rotate_features",
    "rotate_reflected",
    "rotation_map",
    "unit_vector",
    "warp_each",
    "write_group_kernels",
]
