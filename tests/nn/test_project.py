"""Projections and the orientation field: equivariance, known answers, finite gradients, and negative controls."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exactness import CASES, TOLERANCE
from torch import Tensor, nn

import rotopath as rp
from rotopath import group
from rotopath.nn import project, triton
from rotopath.nn.project import PROJECTIONS, project_attention

LEARNED = ("attention", "fourier")
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def features(entries: int, channels: int = 4, size: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, channels, entries, size, size + 2, dtype=dtype)


def make(mode: str, orientations: int, reflections: bool = False, dtype: torch.dtype = torch.float64) -> rp.nn.Project:
    """Return a projection with random weights."""
    project = rp.nn.Project(mode, 4, orientations, reflections, dtype=dtype)
    for parameter in project.parameters():
        nn.init.normal_(parameter)
    return project


def wave(orientations: int, frequency: int, amplitude: float, phase: float, mean: float = 0.0) -> Tensor:
    theta = torch.tensor(group.angles(orientations), dtype=torch.float64).deg2rad()
    return (mean + amplitude * torch.cos(frequency * theta - phase)).view(1, 1, -1, 1, 1)


def distance(angle: Tensor, other: Tensor) -> Tensor:
    """Return the distance of two angles on the circle."""
    difference = (angle - other) % (2 * math.pi)
    return torch.minimum(difference, 2 * math.pi - difference)


@every_dtype
@pytest.mark.parametrize(("orientations", "angle"), CASES)
@pytest.mark.parametrize("mode", PROJECTIONS)
def test_projections_rotate_with_their_input(mode: str, orientations: int, angle: float, dtype: torch.dtype) -> None:
    project = make(mode, orientations, dtype=dtype)
    assert rp.equivariance_error(project, features(orientations, dtype=dtype), angle) < TOLERANCE[dtype]


@every_dtype
@pytest.mark.parametrize(("orientations", "angle"), [(1, 0), (2, 180), (3, 0), (4, 90), (8, 90)])
@pytest.mark.parametrize("mode", PROJECTIONS)
def test_projections_flip_with_their_input(mode: str, orientations: int, angle: float, dtype: torch.dtype) -> None:
    project, x = make(mode, orientations, True, dtype), features(2 * orientations, dtype=dtype)
    for rotation in (0, angle, -angle):
        assert rp.equivariance_error(project, x, rotation, flip=True) < TOLERANCE[dtype]
        assert rp.equivariance_error(project, x, rotation) < TOLERANCE[dtype]


@given(orientations=st.integers(1, 12), shift=st.integers(0, 11), mirrored=st.booleans(), mode=st.sampled_from(LEARNED))
@settings(deadline=None, max_examples=60)
def test_projections_are_invariant_to_every_element_of_the_group(
    orientations: int, shift: int, mirrored: bool, mode: str
) -> None:
    """By the multiplication table: including rotations that are not exact on pixels."""
    project, x = make(mode, orientations, mirrored), features(group.order(orientations, mirrored), size=1)
    step = shift % group.order(orientations, mirrored)
    moved = torch.empty_like(x)
    moved[:, :, group.multiplication_table(orientations, mirrored)[step]] = x
    torch.testing.assert_close(project(moved), project(x), atol=1e-12, rtol=0)


# Known answers.


def test_projection_returns_the_maximum_or_the_mean_over_orientations() -> None:
    x = torch.randn(2, 3, 8, 4, 4)
    assert torch.equal(rp.nn.Project("max")(x), x.max(dim=2).values)
    torch.testing.assert_close(rp.nn.Project("mean")(x), x.mean(dim=2))
    with pytest.raises(ValueError, match="must be 'max' or 'mean' or 'attention' or 'fourier'; got 'median'"):
        rp.nn.Project("median")


def test_the_maximum_divides_the_gradient_among_equal_maxima() -> None:
    x = torch.ones(1, 1, 4, 1, 1, requires_grad=True)
    rp.nn.Project("max")(x).sum().backward()
    assert x.grad.flatten().tolist() == [0.25] * 4


@pytest.mark.parametrize("reflections", [False, True])
@pytest.mark.parametrize("mode", LEARNED)
def test_learned_projections_start_as_the_mean(mode: str, reflections: bool) -> None:
    project = rp.nn.Project(mode, 4, 8, reflections, dtype=torch.float64)
    x = features(16 if reflections else 8)
    torch.testing.assert_close(project(x), x.mean(dim=2))
    project(x).square().sum().backward()
    assert all(parameter.grad.abs().min() > 1e-3 for parameter in project.parameters()), "and can change"
    trained = make(mode, 8, reflections)
    trained.reset_parameters()
    torch.testing.assert_close(trained(x), x.mean(dim=2))


def test_attention_with_a_large_sharpness_is_the_maximum() -> None:
    project, x = rp.nn.Project("attention", 4), features(8).float()
    nn.init.constant_(project.sharpness, 1e6)
    torch.testing.assert_close(project(x), rp.nn.Project("max")(x), atol=1e-4, rtol=0)
    nn.init.constant_(project.sharpness, -1e6)
    torch.testing.assert_close(project(x), x.amin(dim=2), atol=1e-4, rtol=0)
    project.sharpness.data = torch.tensor([0.0, 1e6, 0.0, 0.0])
    torch.testing.assert_close(project(x)[:, 0], x[:, 0].mean(dim=1))
    torch.testing.assert_close(project(x)[:, 1], x[:, 1].amax(dim=1), atol=1e-4, rtol=0)


def test_attention_weighs_by_a_softmax() -> None:
    values = torch.tensor([[0.0, math.log(3.0)]])
    assert project_attention(values, torch.ones(1)).item() == pytest.approx(0.75 * math.log(3))
    assert project_attention(values, torch.full((1,), 2.0)).item() == pytest.approx(0.9 * math.log(3))


@pytest.mark.parametrize(("orientations", "frequency"), [(8, 1), (8, 2), (5, 1), (4, 1), (12, 3), (16, 4)])
def test_fourier_of_a_wave_is_its_mean_plus_its_amplitude(orientations: int, frequency: int) -> None:
    project = rp.nn.Project("fourier", 1, orientations, dtype=torch.float64)
    weights = torch.arange(1.0, orientations // 4 + 1)
    project.weight.data[:] = weights
    for phase in (0.0, 0.4, 2.0):
        y = project(wave(orientations, frequency, amplitude=5.0, phase=phase, mean=-3.0))
        # The smooth square root is up to 0.001 too small.
        assert y.item() == pytest.approx(-3 + float(weights[frequency - 1]) * 5, abs=0.002 * float(weights.sum()))


def test_frequencies_above_a_quarter_of_n_are_ignored() -> None:
    project = rp.nn.Project("fourier", 1, 8, dtype=torch.float64)
    nn.init.ones_(project.weight)
    for frequency in (3, 4):
        assert project(wave(8, frequency, 5.0, 0.0, mean=2.0)).item() == pytest.approx(2, abs=1e-9)
    for orientations in (1, 2, 3):
        assert rp.nn.Project("fourier", 1, orientations).weight.numel() == 0


def test_both_halves_of_the_axis_contribute_equally_with_reflections() -> None:
    project = rp.nn.Project("fourier", 1, 8, reflections=True, dtype=torch.float64)
    project.weight.data[:] = torch.tensor([1.0, 0.0])
    rotated, mirrored = wave(8, 1, 3.0, 0.2, mean=1.0), wave(8, 1, 4.0, 1.9, mean=-2.0)
    for halves in ((rotated, mirrored), (mirrored, rotated)):
        assert project(torch.cat(halves, dim=2)).item() == pytest.approx(-0.5 + math.sqrt((9 + 16) / 2), abs=0.002)


@pytest.mark.parametrize("mode", PROJECTIONS)
@pytest.mark.parametrize("reflections", [False, True])
def test_gradients_are_finite_where_everything_is_zero(mode: str, reflections: bool) -> None:
    project = make(mode, 4, reflections, torch.float32)
    x = torch.zeros(1, 4, 8 if reflections else 4, 3, 3, requires_grad=True)
    y = project(x)
    assert not y.any()
    y.sum().backward()
    for tensor in (x, *project.parameters()):
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("mode", LEARNED)
def test_gradients_pass_gradcheck(mode: str) -> None:
    project = make(mode, 4, reflections=True)
    x = features(8, size=1)[:1].requires_grad_()
    assert torch.autograd.gradcheck(project, (x,))


@pytest.mark.parametrize(("mode", "expected"), [("max", 0), ("mean", 0), ("attention", 4), ("fourier", 8)])
def test_number_of_weights(mode: str, expected: int) -> None:
    for reflections in (False, True):
        project = rp.nn.Project(mode, 4, 8, reflections)
        assert sum(parameter.numel() for parameter in project.parameters()) == expected
        assert set(project.state_dict()) == {name for name, _ in project.named_parameters()}


# Negative controls.


def test_separate_weights_for_orientations_fail() -> None:
    project = nn.Conv3d(4, 4, (8, 1, 1), groups=4).double()
    assert rp.equivariance_error(lambda x: project(x)[:, :, 0], features(8)) > 0.1


def test_amplitudes_over_sixteen_rotations_do_not_flip() -> None:
    """Sixteen entries treated as sixteen rotations instead of eight rotations and eight reflections."""
    project, x = make("fourier", 16), features(16)
    assert rp.equivariance_error(project, x, 90) < 1e-10
    assert rp.equivariance_error(project, x, 90, reflections=True) > 0.01
    assert rp.equivariance_error(project, x, 0, flip=True, reflections=True) > 0.01


# Data types, devices, compilation, messages.


@pytest.mark.parametrize("mode", LEARNED)
def test_waves_are_exact_in_double_and_after_meta(mode: str) -> None:
    project, x = make(mode, 6, dtype=torch.float32), features(6)
    twin = rp.nn.Project(mode, 4, 6, dtype=torch.float64)
    twin.load_state_dict(project.double().state_dict())
    assert torch.equal(project(x), twin(x))
    with torch.device("meta"):
        empty = rp.nn.Project(mode, 4, 6)
    empty.load_state_dict(project.state_dict(), assign=True)
    assert torch.equal(empty(x), project(x))


@pytest.mark.parametrize("mode", LEARNED)
def test_autocast_and_compilation(mode: str) -> None:
    project, x = make(mode, 8, dtype=torch.float32), features(8, dtype=torch.float32)
    expected = project(x).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = project(x.bfloat16())
    y.float().sum().backward()
    assert float((y.detach() - expected).norm() / expected.norm()) < 0.03
    compiled = torch.compile(project, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), project(x))


def test_repr_lists_the_arguments() -> None:
    assert repr(rp.nn.Project("max", 4, 8)) == "Project('max')"
    assert repr(rp.nn.Project("attention", 4)) == "Project('attention', 4)"
    expected = "Project('fourier', 4, orientations=8, reflections=True)"
    assert repr(rp.nn.Project("fourier", 4, 8, reflections=True)) == expected


def test_wrong_arguments_and_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Project\('attention'\) has weights and requires values for channels\."):
        rp.nn.Project("attention")
    with pytest.raises(ValueError, match="requires values for channels and orientations"):
        rp.nn.Project("fourier")
    with pytest.raises(ValueError, match="requires values for orientations"):
        rp.nn.Project("fourier", 4)
    with pytest.raises(ValueError, match="'channels' of Project must be a whole number, 1 or more; got 0"):
        rp.nn.Project("attention", 0)
    with pytest.raises(ValueError, match="Project was built for 4 input channels, but got 3"):
        rp.nn.Project("attention", 4)(features(8, channels=3))
    with pytest.raises(ValueError, match=r"built for 16 orientations \(including reflections\), but got 8"):
        rp.nn.Project("fourier", 4, 8, reflections=True)(features(8))


# The orientation field.


@given(
    orientations=st.integers(3, 16),
    phase=st.floats(0, 6.28),
    mean=st.floats(-5, 5),
    amplitude=st.floats(0.1, 10),
)
@settings(deadline=None)
def test_the_angle_of_a_wave_is_exact(orientations: int, phase: float, mean: float, amplitude: float) -> None:
    x = wave(orientations, 1, amplitude, phase, mean)
    strength, angle = rp.nn.orientation_field(x)
    assert float(distance(angle, torch.tensor(phase, dtype=torch.float64))) < 1e-6
    assert strength.item() == x.max().item()


def test_the_strength_is_the_maximum_and_the_angle_is_within_half_a_step_of_it() -> None:
    x = features(8)
    strength, angle = rp.nn.orientation_field(x)
    assert torch.equal(strength, rp.nn.Project("max")(x))
    assert (distance(angle, x.argmax(dim=2) * math.pi / 4) <= math.pi / 8 + 1e-12).all()
    assert (distance(angle, x.argmax(dim=2) * math.pi / 4) > 1e-3).any()


@pytest.mark.parametrize("orientations", [4, 8, 12])
def test_rotating_the_image_rotates_the_field_and_adds_to_its_angles(orientations: int) -> None:
    lift = rp.nn.LiftConv2d(3, 4, 5, orientations, dtype=torch.float64)
    x = torch.randn(2, 3, 12, 16, dtype=torch.float64)
    strength, angle = rp.nn.orientation_field(lift(x))
    for quarters in (1, 2, 3):
        rotated_strength, rotated_angle = rp.nn.orientation_field(lift(torch.rot90(x, quarters, (-2, -1))))
        torch.testing.assert_close(rotated_strength, torch.rot90(strength, quarters, (-2, -1)))
        expected = torch.rot90(angle, quarters, (-2, -1)) + quarters * math.pi / 2
        assert distance(rotated_angle, expected).max() < 1e-9
        assert distance(rotated_angle, expected - math.pi / 2).max() > 1, "a wrong angle would fail"


def test_with_reflections_a_flip_negates_the_angles() -> None:
    lift = rp.nn.LiftConv2d(3, 4, 5, 8, reflections=True, dtype=torch.float64)
    x = torch.randn(2, 3, 12, 16, dtype=torch.float64)
    strength, angle = rp.nn.orientation_field(lift(x), reflections=True)
    flipped_strength, flipped_angle = rp.nn.orientation_field(lift(x.flip(-1)), reflections=True)
    torch.testing.assert_close(flipped_strength, strength.flip(-1))
    assert distance(flipped_angle, -angle.flip(-1)).max() < 1e-9
    _, rotated_angle = rp.nn.orientation_field(lift(torch.rot90(x, 1, (-2, -1))), reflections=True)
    assert distance(rotated_angle, torch.rot90(angle, 1, (-2, -1)) + math.pi / 2).max() < 1e-9
    with pytest.raises(ValueError, match="with reflections takes features with an even number of orientations; got 3"):
        rp.nn.orientation_field(features(3), reflections=True)


def test_where_all_values_are_equal_the_angle_is_0() -> None:
    x = torch.full((1, 1, 8, 2, 2), 3.0, requires_grad=True)
    strength, angle = rp.nn.orientation_field(x)
    assert not angle.any()
    (strength + angle).sum().backward()
    assert x.grad.isfinite().all()
    for entries, expected in ((1, 0.0), (2, math.pi)):
        x = torch.arange(float(entries)).view(1, 1, -1, 1, 1)
        assert rp.nn.orientation_field(x)[1].item() == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"orientation_field takes SE\(2\) features .* lift it first"):
        rp.nn.orientation_field(torch.zeros(1, 3, 8, 8))


def test_the_maximum_by_a_pool_equals_amax(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, without gradients."""
    x = torch.randn(2, 3, 8, 5, 7).to(memory_format=torch.channels_last_3d)
    x[0, 0, 0, 0, 0] = torch.nan
    expected, empty = rp.nn.Project("max")(x), rp.nn.Project("max")(x[:0])
    pools = []
    real = torch.nn.functional.max_pool2d
    monkeypatch.setattr(torch.nn.functional, "max_pool2d", lambda *args: pools.append(args) or real(*args))
    monkeypatch.setattr(triton, "can_run_on", lambda _: True)
    rp.nn.Project("max")(x)
    assert not pools, "for few values amax is faster"
    monkeypatch.setattr(project, "MIN_POOL_VALUES", 0)
    torch.testing.assert_close(rp.nn.Project("max")(x), expected, atol=0, rtol=0, equal_nan=True)
    assert len(pools) == 1
    assert rp.nn.Project("max")(x[:0]).shape == empty.shape
    rp.nn.Project("max")(x.requires_grad_()).sum().backward()
    assert len(pools) == 1, "its gradient would go to the first of equal maxima"
