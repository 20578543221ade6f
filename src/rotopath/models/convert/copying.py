"""Copy the weights of a plain network to its SE(2,N) counterpart, so that each orientation computes the plain network.

The kernel of a group convolution has one slice per difference of orientations. A copied filter is the slice of the
difference 0, and all other slices are 0. Orientation i then reads orientation i only, and computes the plain network
with all kernels rotated by 360°·i / N. For multiples of 90°, this is the plain network on the image rotated back, and
the mean over orientations is the plain network's mean over rotations of its input. Training makes the other slices
differ from 0: orientations begin to read each other.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rotopath import group
from rotopath.models.convert.nodes import Operation, ValueKind
from rotopath.nn import GroupConv2d, GroupConvTranspose2d, LiftConv2d

TOLERANCE = 1e-4  # largest error of a kernel that a family cannot represent, relative to the kernel


def copy_weights(new: nn.Module, plain: nn.Module) -> None:
    """Copy the weights and running statistics of a plain layer to the layer of the converted network, in place.

    Raises ValueError if the kernel family of `new` cannot represent a kernel of `plain`.
    """
    if not isinstance(new, LiftConv2d | GroupConv2d | GroupConvTranspose2d):
        state = plain.state_dict()
        new.load_state_dict({name: state[name] for name in new.state_dict()})
        return
    assert isinstance(plain, nn.Conv2d | nn.ConvTranspose2d)
    kernels = plain.weight.detach()
    if isinstance(new, GroupConvTranspose2d):  # torch correlates with the kernels rotated by 180°
        kernels = torch.unflatten(kernels.flip(-2, -1), 0, (new.groups, -1)).transpose(1, 2).flatten(0, 1)
    base = _solve(kernels, new.kernel)
    with torch.no_grad():
        if isinstance(new, LiftConv2d):
            new.weight.copy_(base)
        else:
            new.weight.zero_()[:, :, 0] = base
        if new.bias is not None and plain.bias is not None:
            new.bias.copy_(plain.bias)


def expect_linear_head(operations: Iterable[tuple[Operation, ValueKind]]) -> None:
    """Raise ValueError if a layer that is not linear follows the projection.

    The mean over orientations would then not be the mean of the outputs.
    """
    for operation, kind in operations:
        is_plain_layer = operation.layer is not None and operation.role in ("linear", "plain", "norm")
        if kind is ValueKind.PLAIN and is_plain_layer and not isinstance(operation.layer, nn.Softmax | nn.LogSoftmax):
            raise ValueError(
                f"equivariant() cannot copy weights: a {type(operation.layer).__name__} reads values whose shape is "
                f"not known, so that the mean over orientations comes too early; use weights='new'."
            )


def _solve(kernels: Tensor, family: group.Kernel) -> Tensor:
    """Return the base weights (O, C, P) whose kernels at 0° are `kernels` (O, C, k, k).

    Raises ValueError if the family cannot represent them.
    """
    size = kernels.shape[-1]
    basis = group.rotation_map(size, 1, family)[0]  # (k², P)
    entries = kernels.double().cpu().flatten(2)  # (O, C, k²)
    base = entries @ torch.linalg.pinv(basis).T
    error = float((base @ basis.T - entries).norm() / entries.norm().clamp(min=1e-30))
    if error > TOLERANCE:
        raise ValueError(
            f"its kernel of {size} × {size} px cannot be copied, because kernel={family!r} has no weights for its "
            f"corners; use kernel='square', the default of weights='copy'"
        )
    solved: Tensor = base.to(kernels)
    return solved
