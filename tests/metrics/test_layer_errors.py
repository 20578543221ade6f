"""`equivariance_report` finds planted losses of equivariance, names their causes, and nothing else."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rotopath as rp


def exact(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(rp.nn.LiftConv2d(3, 4, 3, 4), nn.ReLU(), *layers).double()


class Crop(nn.Module):
    """A function in forward() crops at one end only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = rp.nn.GroupConv2d(4, 4, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)[..., 1:, 1:]


@pytest.mark.parametrize(
    ("build", "name", "cause"),
    [
        (lambda: [rp.nn.Project(), nn.Conv2d(4, 4, 3)], "3", "kernel: an ordinary kernel of 3 × 3 px does not rotate"),
        (
            lambda: [rp.nn.Project(), nn.MaxPool2d(2, 2)],
            "3",
            "size: windows of 2 px at stride 2 leave 1 of 11 px at one",
        ),
        (lambda: [rp.nn.Project(), nn.ZeroPad2d((1, 2, 1, 2))], "3", r"padding: \(1, 2, 1, 2\) px"),
        (lambda: [rp.nn.Project(), nn.Upsample(size=17)], "3", "size: nearest neighbors from 11 to 17 px"),
        (lambda: [rp.nn.Project(), nn.Flatten()], "3", "positions: it puts 11 × 11 positions into a vector"),
        (lambda: [Crop(), rp.nn.Project()], "2", r"functions in its forward\(\)"),
        (lambda: [rp.nn.Project(), nn.Dropout(0.5)], "3", "dropout"),
    ],
    ids=["kernel", "size", "padding", "nearest", "positions", "function", "dropout"],
)
def test_a_planted_loss_is_found_with_its_cause(build: Callable[[], list[nn.Module]], name: str, cause: str) -> None:
    report = rp.equivariance_report(exact(*build()), torch.rand(1, 3, 13, 13).double())
    assert [layer.name for layer in report.lossy] == [name]
    assert report.lossy[0].own > 1e-3
    assert re.match(cause, report.lossy[0].cause)


def test_an_orientation_that_is_missing_is_named() -> None:
    net = nn.Sequential(rp.nn.LiftConv2d(3, 4, 3, 6), rp.nn.Project()).double()
    report = rp.equivariance_report(net, torch.rand(1, 3, 13, 13).double())
    assert [layer.cause for layer in report.lossy] == ["kernel: 6 orientations do not include 90°"]


def test_an_exact_network_has_no_losses_and_is_not_changed() -> None:
    net = exact(rp.nn.GroupBatchNorm2d(4), rp.nn.GroupMaxPool2d(3, 1), rp.nn.Project(), nn.Conv2d(4, 2, 1)).train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    x = torch.rand(2, 3, 13, 15).double()
    report = rp.equivariance_report(net, x)
    assert report.lossy == []
    assert report.error == rp.equivariance_error(net, x) < 1e-10
    assert [layer.name for layer in report.layers] == ["0", "1", "2", "3", "4", "5"]
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not any(module._forward_hooks for module in net.modules())


def test_errors_so_far_add_up_and_own_errors_do_not() -> None:
    report = rp.equivariance_report(
        exact(rp.nn.Project(), nn.Conv2d(4, 4, 3), nn.ReLU()), torch.rand(1, 3, 13, 13).double()
    )
    *_, conv, relu = report.layers
    assert conv.own == pytest.approx(conv.error)
    assert relu.own < 1e-10 < relu.error == report.error


def test_between_right_angles_the_kernel_family_is_named() -> None:
    report = rp.equivariance_report(exact(rp.nn.Project()), rp.metrics.smooth_images(1, 33).double(), 22.5)
    assert report.lossy[0].cause == "kernel: 4 orientations do not include 22.5°"
    net = nn.Sequential(rp.nn.LiftConv2d(3, 4, 3, 8), rp.nn.GroupMaxPool2d(2))
    causes = [layer.cause for layer in rp.equivariance_report(net, rp.metrics.smooth_images(1, 34), 45).lossy]
    assert causes == ["kernel: 'bilinear' interpolates 3 × 3 px", "stride: it keeps one of 2 px"]


def test_the_printed_report_has_one_line_a_layer_and_a_summary() -> None:
    text = str(rp.equivariance_report(exact(rp.nn.Project(), nn.Conv2d(4, 4, 3)), torch.rand(1, 3, 13, 13).double()))
    lines = text.splitlines()
    assert lines[0].split()[:3] == ["layer", "class", "output"]
    assert len(lines) == 1 + 4 + 1
    assert "1 of 4 layers lose equivariance, 3 first." in lines[-1]


def test_other_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"takes images .* got a tensor of shape \(1, 3\), torch.float32"):
        rp.equivariance_report(nn.Identity(), torch.rand(1, 3))
