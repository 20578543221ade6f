"""Averages of a model over rotations: exact on the grid, for vectors and maps, in training, for modules and files."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rotopath as rp
from rotopath import group
from rotopath.inference.dense import prepare_export

TOLERANCE = 1e-5


def classifier(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 12 * 12, outputs))


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))


@pytest.mark.parametrize("how", ["mean", "probabilities", "max"])
@pytest.mark.parametrize(("orientations", "flips"), [(4, False), (8, False), (4, True), (8, True)])
def test_predictions_do_not_depend_on_quarter_rotations(how: str, orientations: int, flips: bool) -> None:
    images, model = torch.rand(2, 3, 16, 16), classifier()
    average = rp.symmetrize(model, orientations, how, flips=flips)  # type: ignore[arg-type]
    with torch.no_grad():
        expected = average(images)
        for angle in (90, 180, 270):
            torch.testing.assert_close(average(group.rotate(images, angle)), expected, atol=TOLERANCE, rtol=0)
            assert (model(group.rotate(images, angle)) - model(images)).abs().max() > 100 * TOLERANCE
        flipped = (average(group.flip(images)) - expected).abs().max()
    assert flipped < TOLERANCE if flips else flipped > 100 * TOLERANCE


@pytest.mark.parametrize("size", [(20, 20), (20, 28)], ids=["square", "oblong"])
@pytest.mark.parametrize(("orientations", "flips"), [(4, False), (8, True)])
def test_maps_rotate_with_the_image(size: tuple[int, int], orientations: int, flips: bool) -> None:
    images, model = torch.rand(2, 3, *size), segmenter()
    average = rp.symmetrize(model, orientations, flips=flips)
    for angle in (90, 180, 270):
        assert rp.equivariance_error(average, images, angle) < TOLERANCE
    assert rp.equivariance_error(model, images, 90) > 0.1
    if flips:
        assert rp.equivariance_error(average, images, flip=True) < TOLERANCE


def test_the_mean_is_that_of_the_four_rotations() -> None:
    images, model = torch.rand(2, 3, 16, 16), classifier(1)
    with torch.no_grad():
        logits = torch.stack([model(group.rotate(images, angle)) for angle in (0, 90, 180, 270)])
        torch.testing.assert_close(rp.symmetrize(model, 4)(images), logits.mean(dim=0))
        torch.testing.assert_close(rp.symmetrize(model, 4, "max")(images), logits.amax(dim=0))
        probabilities = rp.symmetrize(model, 4, "probabilities")(images).sigmoid()
        torch.testing.assert_close(probabilities, logits.sigmoid().mean(dim=0))


def test_the_average_of_probabilities_is_test_time_augmentation() -> None:
    """Of a window in its surroundings, at all eight angles: `symmetrize` reflects the corners, which are empty here."""
    torch.manual_seed(0)
    network = rp.models.tumor(1).eval()
    images = rp.metrics.smooth_images(2, 88) * 0.1 + 0.5
    images = images * group.inscribed_disc(88, 88, inner=0.5).float()
    average = rp.symmetrize(network, 8, "probabilities")
    with torch.no_grad():
        actual = average(images).sigmoid().flatten()
    surrounded = nn.functional.pad(images, [30] * 4)
    expected = rp.inference.predict_patches(network, surrounded, 8)
    torch.testing.assert_close(actual, torch.from_numpy(expected).flatten(), atol=2e-3, rtol=0)


def test_a_constant_map_stays_constant_up_to_its_corners() -> None:
    """Corners are averaged over the rotations that cover them; empty corners must not count."""
    average = rp.symmetrize(lambda images: torch.ones_like(images), 8)
    torch.testing.assert_close(average(torch.rand(1, 3, 15, 15)), torch.ones(1, 3, 15, 15))


def test_gradients_and_training_mode_reach_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    average = rp.symmetrize(model, 8)
    assert average.training
    average(torch.rand(2, 3, 8, 8)).sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    assert model[1].num_batches_tracked == 1, "one call for all rotations"
    average.eval()
    assert not model.training
    assert dict(average.named_parameters()).keys() == {f"model.{name}" for name, _ in model.named_parameters()}


def test_one_call_for_each_rotation_gives_the_same() -> None:
    images, model, calls = torch.rand(2, 3, 16, 16), classifier(), []

    def count(x: Tensor) -> Tensor:
        calls.append(len(x))
        output: Tensor = model(x)
        return output

    torch.testing.assert_close(
        rp.symmetrize(count, 8)(images), rp.symmetrize(count, 8, batched=False)(images), atol=TOLERANCE, rtol=0
    )
    assert calls == [16] + 8 * [2]


def test_nested_outputs_are_averaged_one_by_one() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, object]:
            return {"map": x, "more": (x.mean(dim=(2, 3)), [x[:, :1]])}

    images = torch.rand(2, 3, 8, 8)
    outputs = rp.symmetrize(Two(), 4)(images)
    torch.testing.assert_close(outputs["map"], images)
    torch.testing.assert_close(outputs["more"][0], images.mean(dim=(2, 3)))
    torch.testing.assert_close(outputs["more"][1][0], images[:, :1])


def test_three_axes_need_to_be_explained() -> None:
    images = torch.rand(2, 3, 8, 8)
    gray: Callable[[Tensor], Tensor] = lambda x: x.mean(dim=1)  # noqa: E731
    with pytest.raises(ValueError, match="maps=True"):
        rp.symmetrize(gray, 4)(images)
    torch.testing.assert_close(rp.symmetrize(gray, 4, maps=True)(images), images.mean(dim=1))
    tokens = rp.symmetrize(gray, 4, maps=False)(images)
    assert (tokens - images.mean(dim=1)).abs().max() > 0.01, "not rotated back"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Flatten(), 0), "orientations"),
        ((nn.Flatten(), 4, "median"), "median"),
        (("model.pt", 4), "torch.jit.load"),
        ((3, 4), "int"),
    ],
)
def test_mistakes_are_explained(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rp.symmetrize(*arguments)  # type: ignore[arg-type]


def test_models_that_return_something_else_are_explained() -> None:
    with pytest.raises(ValueError, match="str"):
        rp.symmetrize(lambda x: "tumor", 4)(torch.rand(1, 3, 8, 8))  # noqa: ARG005
    with pytest.raises(ValueError, match="batched=False"):
        rp.symmetrize(lambda x: x.sum(dim=0)[:1], 4)(torch.rand(1, 3, 8, 8))
    with pytest.raises(ValueError, match="images"):
        rp.symmetrize(nn.Flatten(), 4)(torch.rand(3, 8, 8))


def test_a_dense_network_stays_dense_if_no_rotation_interpolates() -> None:
    network = rp.models.tumor(1)
    assert rp.models.make_dense(rp.symmetrize(network, 4), outputs=1).geometry == network.geometry
    assert not hasattr(rp.symmetrize(network, 8), "geometry")


@pytest.mark.slow
def test_torchscript_and_torch_export() -> None:
    images, model = torch.rand(2, 3, 16, 16), classifier().eval()
    expected = rp.symmetrize(model, 4)(images)
    program = torch.export.export(rp.symmetrize(model, 4).eval(), (images,)).module()
    torch.testing.assert_close(program(images), expected, atol=TOLERANCE, rtol=0)
    with prepare_export():
        script = torch.jit.trace(model, images)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(rp.symmetrize(script, 4)(images), expected, atol=TOLERANCE, rtol=0)
