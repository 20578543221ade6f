"""The paper's networks: weights, sizes, receptive fields, dense application, equivariance, options, errors."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rotopath as rp
from rotopath.models import ARCHITECTURES, Architecture, Network

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # a sweep of numbers: tracing it would take minutes

BUILDERS = {"mitosis": rp.models.mitosis, "nuclei": rp.models.nuclei, "tumor": rp.models.tumor}
PAPER = {  # N to the weights of each layer, as printed in the paper
    "mitosis": {
        1: [1040, 5408, 5408, 21632, 1056, 17],
        4: [650, 8420, 8420, 13472, 1056, 17],
        8: [520, 10768, 10768, 10768, 1056, 17],
        16: [390, 12108, 12108, 8072, 1056, 17],
    },
    "nuclei": {
        1: [1040, 5408, 5408, 10784, 43136, 1056, 54],
        4: [650, 8420, 8420, 16820, 26912, 1056, 54],
        8: [520, 10768, 10768, 21520, 21520, 1056, 54],
        16: [390, 12108, 12108, 24204, 16136, 1056, 54],
    },
    "tumor": {
        1: [2080, 21568, 21568, 43136, 1056, 17],
        4: [1235, 30362, 30362, 25568, 1056, 17],
        8: [910, 32956, 32956, 18832, 1056, 17],
        16: [650, 33620, 33620, 13448, 1056, 17],
    },
}
TOTALS = {
    "mitosis": [34561, 32035, 33897, 33751],
    "nuclei": [66886, 62332, 66206, 66056],
    "tumor": [89425, 88600, 86727, 82411],
}

every_network = pytest.mark.parametrize("name", BUILDERS)
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@every_network
def test_every_layer_has_the_papers_number_of_weights(name: str) -> None:
    for (orientations, layers), total in zip(PAPER[name].items(), TOTALS[name], strict=True):
        net = BUILDERS[name](orientations)
        assert [count(module) for module in (*net.stages, net.head)] == layers
        assert count(net) == total
        assert list(net.architecture.weights(orientations)) == layers


@every_network
def test_faithful_networks_have_the_papers_number_of_weights_and_sizes(name: str) -> None:
    for (orientations, layers), total in zip(PAPER[name].items(), TOTALS[name], strict=True):
        net = BUILDERS[name](orientations, preset="faithful")
        assert [count(module) for module in (*net.stages, net.head)] == layers
        assert count(net) == total
    side = net.architecture.input_px
    assert net(torch.rand(2, 3, side, side)).shape == BUILDERS[name](1)(torch.rand(2, 3, side, side)).shape


@every_architecture
@pytest.mark.parametrize("orientations", [2, 3, 5, 6, 7, 9, 10, 12, 20, 24, 32])
def test_other_orientations_keep_the_number_of_weights(architecture: Architecture, orientations: int) -> None:
    net = Network(architecture, orientations)
    assert count(net) == sum(architecture.weights(orientations))
    assert abs(count(net) / sum(architecture.weights(1)) - 1) <= 0.05


@every_architecture
def test_orientations_without_matching_channels_are_refused(architecture: Architecture) -> None:
    with pytest.raises(ValueError, match=r"cannot have 5000 orientations, because .*; use fewer"):
        architecture.channels(5000)


@every_network
def test_orientations_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="whole number, 1 or more"):
        BUILDERS[name](0)


@pytest.mark.parametrize(
    ("name", "receptive_field", "stride", "step", "sizes"),
    [
        ("mitosis", 68, 8, 8, (32, 14, 5, 1, 1)),
        ("nuclei", 44, 1, 4, (28, 12, 8, 12, 20, 20)),
        ("tumor", 88, 12, 12, (42, 19, 5, 1, 1)),
    ],
)
def test_sizes_of_the_paper(name: str, receptive_field: int, stride: int, step: int, sizes: tuple[int, ...]) -> None:
    architecture = ARCHITECTURES[name]
    assert (architecture.receptive_field, architecture.stride, architecture.size_step) == (
        receptive_field,
        stride,
        step,
    )
    assert architecture.sizes(architecture.input_px) == sizes
    assert [s for s in range(1, 200) if architecture.fits(s)] == list(range(receptive_field, 200, step))


@every_architecture
def test_sizes_fit_if_every_stage_fits(architecture: Architecture) -> None:
    for size in range(1, 300):
        try:
            sizes = architecture.sizes(size)
        except ValueError:
            assert not architecture.fits(size)
        else:
            assert architecture.fits(size)
            assert architecture.output_size(size) == sizes[-1]


@every_network
def test_the_network_reads_exactly_its_receptive_field(name: str) -> None:
    """The gradients of single logits are nonzero on the receptive field only, and together on all of it."""
    net = BUILDERS[name](4).double().eval()
    for module in net.modules():  # positive weights and mean pools, so that no gradient vanishes
        if isinstance(module, rp.nn.LiftConv2d | rp.nn.GroupConv2d):
            torch.nn.init.constant_(module.weight, 0.01)
    net.pools = torch.nn.ModuleList(
        rp.nn.GroupAvgPool2d(s.pool) if s.pool > 1 else torch.nn.Identity() for s in net.architecture.stages
    )
    torch.nn.init.ones_(net.head.conv.weight)
    side = net.receptive_field + 3 * net.architecture.size_step
    x = torch.rand(1, 3, side, side, dtype=torch.float64, requires_grad=True)
    logits = net(x)[0, 0]

    def rows_read(position: int) -> Tensor:
        (gradient,) = torch.autograd.grad(logits[position, position], x, retain_graph=True)
        return gradient[0].abs().sum(dim=(0, 2)).nonzero()

    per_step = net.architecture.size_step // net.stride  # logits per step of the pooling grid
    fields = [rows_read(position) for position in range(2 * per_step)]
    assert max(int(rows.max() - rows.min()) + 1 for rows in fields) == net.receptive_field
    assert int(fields[per_step].min() - fields[0].min()) == net.architecture.size_step


def by_hand(name: str, net: Network, x: Tensor) -> Tensor:
    """The paper's tables with torch's functions; only rotated kernels are taken from the layers."""

    def stage(i: int, x: Tensor) -> Tensor:
        layers = net.stages[i]
        y = F.conv2d(x, layers.conv.kernels())
        norm = layers.norm
        statistics = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        return F.relu(F.batch_norm(y, *(t.repeat_interleave(net.orientations) for t in statistics), eps=1e-5))

    def crop(x: Tensor, like: Tensor) -> Tensor:
        margin = (x.shape[-1] - like.shape[-1]) // 2
        return x[..., margin:-margin, margin:-margin]

    def enlarge(x: Tensor) -> Tensor:
        return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)

    if name == "nuclei":
        first = stage(0, x)
        second = stage(1, F.max_pool2d(first, 2))
        up = enlarge(stage(2, F.max_pool2d(second, 2)))
        up = enlarge(stage(3, torch.cat([up, crop(second, up)], dim=1)))
        features = stage(5, stage(4, torch.cat([up, crop(first, up)], dim=1)))
    else:
        last_pool = {"mitosis": 2, "tumor": 3}[name]
        for i, pool in enumerate((2, 2, last_pool)):
            x = F.max_pool2d(stage(i, x), pool)
        features = stage(4, stage(3, x))
    by_orientation = features.unflatten(1, (16, net.orientations))
    projected = by_orientation.mean(dim=2) if name == "tumor" else by_orientation.max(dim=2).values
    head = net.head
    if name == "nuclei":
        logits = F.conv2d(projected, head.conv.weight)
        norm = head.norm
        return F.batch_norm(logits, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=1e-5)
    return F.conv2d(projected, head.conv.weight, head.conv.bias)


@every_network
@pytest.mark.parametrize("orientations", [1, 4, 6])
def test_networks_equal_the_papers_tables_computed_by_hand(name: str, orientations: int) -> None:
    net = BUILDERS[name](orientations).double().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
            for tensor in (module.running_mean, module.bias.data):
                tensor.normal_()
            for tensor in (module.running_var, module.weight.data):
                tensor.uniform_(0.5, 2)
    side = net.architecture.input_px
    x = torch.rand(2, 3, side, side, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(net(x), by_hand(name, net, x))


@pytest.mark.parametrize("name", ["mitosis", "tumor"])
def test_dense_outputs_equal_those_of_single_windows(name: str) -> None:
    net = BUILDERS[name](4).double().eval()
    field, stride = net.receptive_field, net.stride
    image = torch.rand(1, 3, field + 2 * stride, field + stride, dtype=torch.float64)
    with torch.no_grad():
        dense = net(image)
        assert dense.shape == (1, 1, 3, 2)
        for row in range(3):
            for column in range(2):
                top, left = row * stride, column * stride
                window = image[..., top : top + field, left : left + field]
                torch.testing.assert_close(dense[..., row : row + 1, column : column + 1], net(window))


def test_dense_segmentation_equals_that_of_crops() -> None:
    net = rp.models.nuclei(4).double().eval()
    image = torch.rand(1, 3, 68, 60, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(net(image)[..., 4:24, :], net(image[..., 4:64, :]))


@every_network
@pytest.mark.parametrize("orientations", [4, 8, 12])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_networks_are_exactly_equivariant_to_90_degrees(name: str, orientations: int, training: bool) -> None:
    """In float32 on a batch of training size, because on few windows batch norm may divide by almost zero."""
    net = BUILDERS[name](orientations).train(training)
    field, step = net.receptive_field, net.architecture.size_step
    assert rp.equivariance_error(net, rp.metrics.smooth_images(16, field)) < 1e-5
    x = torch.rand(2, 3, field + step, field + 2 * step, dtype=torch.float64)
    assert rp.equivariance_error(net.double(), x) < 1e-10


OPTIONS = [
    {"preset": "faithful"},
    {"kernel": "gaussian"},
    {"kernel": "harmonic", "upsampling": "bilinear"},
    {"pooling": "max-blur"},
    {"smoothing": True},
    {"preset": "faithful", "pooling": "max"},
    {"projection": "attention"},
    {"projection": "fourier", "preset": "faithful"},
]


@every_network
@pytest.mark.parametrize("choices", OPTIONS, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_networks_with_any_options_are_exactly_equivariant(name: str, choices: dict[str, str], training: bool) -> None:
    net = BUILDERS[name](4, **choices).train(training)
    for parameter in net.project.parameters():
        nn.init.normal_(parameter)
    x = rp.metrics.smooth_images(8, net.receptive_field)
    assert rp.equivariance_error(net, x) < 1e-5
    wide = torch.rand(2, 3, net.receptive_field, net.receptive_field + net.architecture.size_step)
    assert rp.equivariance_error(net.double(), wide.double()) < 1e-10


def test_options_reach_the_layers() -> None:
    net = rp.models.nuclei(4, preset="faithful")
    assert {stage.conv.kernel for stage in net.stages} == {"harmonic"}
    assert repr(net.pools[0]) == "GroupAvgPool2d(2, stride=2, padding=0, blur=5, power=2)"
    assert net.up.mode == "bilinear"
    assert repr(rp.models.tumor(4, pooling="max-blur").pools[2]) == "GroupMaxPool2d(3, stride=3, padding=0, blur=7)"
    faithful = rp.models.tumor(4, preset="faithful")
    assert repr(faithful.pools[2]) == "GroupAvgPool2d(3, stride=3, padding=0, blur=7, power=2)"
    assert [type(network.smooth) for network in (net, faithful)] == [nn.Identity, rp.nn.Smooth2d]
    paper = rp.models.nuclei(4)
    assert {stage.conv.kernel for stage in paper.stages} == {"bilinear"}
    assert repr(paper.pools[0]) == "GroupMaxPool2d(2, stride=2, padding=0)"
    assert paper.up.mode == "nearest"
    assert rp.models.nuclei(4, preset="faithful", kernel="bilinear").stages[0].conv.kernel == "bilinear"
    assert repr(rp.models.nuclei(4, projection="fourier").project) == "Project('fourier', 16, orientations=4)"
    assert [build(4).project.mode for build in BUILDERS.values()] == ["max", "max", "mean"]
    assert {build(4, preset="faithful").project.mode for build in BUILDERS.values()} == {"mean"}


@every_network
@pytest.mark.parametrize("reflections", [False, True])
@pytest.mark.parametrize(("projection", "more"), [("attention", 16), ("fourier", 32)])
def test_learned_projections_add_few_weights_and_start_as_the_mean(
    name: str, reflections: bool, projection: str, more: int
) -> None:
    """With fresh weights, each of them is the mean over orientations."""
    torch.manual_seed(0)
    plain = BUILDERS[name](8, projection="mean", reflections=reflections)
    torch.manual_seed(0)
    net = BUILDERS[name](8, projection=projection, reflections=reflections)
    assert count(net) == count(plain) + more == sum(net.architecture.weights(8))
    x = torch.rand(1, 3, net.receptive_field, net.receptive_field)
    torch.testing.assert_close(net.eval()(x), plain.eval()(x))


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"preset": "exact"}, "The preset of tumor must be 'paper' or 'faithful'; got 'exact'"),
        (
            {"kernel": "cubic"},
            "'kernel' of tumor must be 'bilinear' or 'gaussian' or 'harmonic' or 'square'; got 'cubic'",
        ),
        ({"pooling": "min"}, "'pooling' of tumor must be 'max' or 'max-blur' or 'rms-blur'; got 'min'"),
        ({"projection": "min"}, "'projection' of tumor must be 'max' or 'mean' or 'attention' or 'fourier'; got 'min'"),
        ({"upsampling": "cubic"}, "'upsampling' of tumor must be 'nearest' or 'bilinear'; got 'cubic'"),
        ({"smoothing": "much"}, "'smoothing' of tumor must be False or True; got 'much'"),
    ],
)
def test_unknown_option_values_are_refused(choices: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        rp.models.tumor(**choices)


@every_network
@pytest.mark.parametrize("choices", [{}, {"smoothing": True}, {"pooling": "max-blur"}, {"preset": "faithful"}], ids=str)
def test_only_outputs_in_the_rim_depend_on_the_image_edge(name: str, choices: dict[str, str]) -> None:
    """A crop on the pooling grid has the outputs of the whole image, except `rim` outputs along each edge."""
    net = BUILDERS[name](2, **choices).double().eval()
    rim, step = net.architecture.rim, net.architecture.size_step
    margin = step * 4  # larger than the reach of any filter
    side = net.receptive_field + step * (4 if net.stride > 1 else 6)
    image = torch.rand(1, 3, side + 2 * margin, side + 2 * margin, dtype=torch.float64)
    with torch.no_grad():
        inside = net(image[..., margin:-margin, margin:-margin])
        whole = net(image)
    outputs, skipped = inside.shape[-1], margin // net.stride
    difference = (inside - whole[..., skipped : skipped + outputs, skipped : skipped + outputs]).abs().amax((0, 1))
    assert 2 * rim < outputs
    assert difference[rim : outputs - rim, rim : outputs - rim].max() < 1e-12
    if rim:
        assert difference[rim - 1, outputs // 2] > 1e-9, "the rim is not larger than necessary"
    else:
        assert not choices


@every_network
@pytest.mark.parametrize("orientations", [2, 6])
def test_even_orientations_are_exactly_equivariant_to_180_degrees(name: str, orientations: int) -> None:
    net = BUILDERS[name](orientations).double()
    x = torch.rand(2, 3, net.receptive_field, net.receptive_field, dtype=torch.float64)
    assert rp.equivariance_error(net, x, 180) < 1e-10


@every_network
def test_a_network_of_one_orientation_is_not_equivariant(name: str) -> None:
    net = BUILDERS[name](1).double()
    x = torch.rand(2, 3, net.receptive_field, net.receptive_field, dtype=torch.float64)
    assert rp.equivariance_error(net, x) > 0.01


@every_network
def test_a_rotated_batch_gives_the_same_weight_gradients(name: str) -> None:
    """So training is invariant as well."""

    def gradients(x: Tensor) -> list[Tensor]:
        net.zero_grad()
        net(x).square().mean().backward()
        return [p.grad.clone() for p in net.parameters()]

    net = BUILDERS[name](8).double()
    x = torch.rand(2, 3, net.receptive_field, net.receptive_field, dtype=torch.float64)
    for upright, rotated in zip(gradients(x), gradients(torch.rot90(x, 1, (-2, -1))), strict=True):
        torch.testing.assert_close(upright, rotated, atol=1e-12, rtol=1e-8)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ((1, 3, 65, 68), "mitosis accepts image sides of 68 px or more, but got 65 px; .* pad them"),
        (
            (1, 3, 68, 110),
            r"mitosis accepts image sides of 68 \+ 8·k px \(k = .*\), but got 110 px; crop or pad to 108 or 116 px\.",
        ),
        ((1, 4, 68, 68), "mitosis was built for 3 input channels, but got 4"),
        ((1, 68, 68, 3), r"but got 68 .* x.permute\(0, 3, 1, 2\)"),
        ((3, 68, 68), r"mitosis takes images \(B, C, H, W\), .* batch axis: x\[None\]"),
        ((1, 3, 8, 68, 68), r"takes images .* apply rp.nn.Project first"),
    ],
)
def test_wrong_images_are_refused(shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        rp.models.mitosis()(torch.zeros(shape))


def test_nearest_sizes() -> None:
    nearest: Callable[[int], tuple[int, ...]] = rp.models.mitosis().nearest_sizes
    assert nearest(10) == (68,)
    assert nearest(68) == (68,)
    assert nearest(69) == (68, 76)
    assert nearest(75) == (68, 76)


def test_networks_scale_bytes() -> None:
    net = rp.models.mitosis(4).eval()
    image = torch.randint(0, 256, (1, 3, 68, 68), dtype=torch.uint8)
    torch.testing.assert_close(net(image), net(image.float() / 255))
    with pytest.raises(ValueError, match=r"mitosis takes floating point numbers, but got torch.int64"):
        net(image.long())


@every_network
@pytest.mark.parametrize("frozen", [False, True], ids=["as built", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_floats_from_0_to_255_are_refused(name: str, frozen: bool, dtype: torch.dtype) -> None:
    """Otherwise the network would return plausible but meaningless outputs."""
    net = BUILDERS[name](4).to(dtype).eval()
    net = rp.freeze(net) if frozen else net
    side = net.receptive_field
    image = torch.randint(0, 256, (1, 3, side, side), dtype=torch.uint8)
    image[0, 0, 0, 0] = 255
    for wrong in (image.to(dtype), image.to(dtype).requires_grad_()):
        with pytest.raises(ValueError, match=rf"^{name} takes images from 0 to 1, but got values up to 255; .* 255"):
            net(wrong)
    torch.testing.assert_close(net(image), net(image.to(dtype) / 255))
    with pytest.raises(ValueError, match=r"from 0 to 1, but got values up to 255"):
        net(torch.where(torch.arange(side) == 3, 255.0, 0.5).to(dtype).expand(1, 3, side, side))


@pytest.mark.parametrize("frozen", [False, True], ids=["as built", "frozen"])
def test_images_slightly_outside_0_to_1_are_accepted(frozen: bool) -> None:
    """Standardized images, images with overshoots of splines, and empty batches."""
    net = rp.models.mitosis(1).eval()
    net = rp.freeze(net) if frozen else net
    for image in (4 * torch.randn(1, 3, 68, 68), torch.full((1, 3, 68, 68), -200.0), torch.full((1, 3, 68, 68), 1.1)):
        assert net(image.clamp(max=19)).isfinite().all()
    assert net(torch.rand(0, 3, 68, 68)).shape == (0, 1, 1, 1)


@every_network
def test_networks_return_the_requested_number_of_outputs(name: str) -> None:
    for preset in ("paper", "faithful"):
        net = BUILDERS[name](4, preset=preset, outputs=5).eval()
        side = net.architecture.input_px
        assert net(torch.rand(2, 3, side, side)).shape[:2] == (2, 5)
        assert net.geometry.outputs == 5
        assert count(net) == sum(net.architecture.weights(4))
        assert rp.equivariance_error(net.double(), torch.rand(1, 3, side, side, dtype=torch.float64)) < 1e-10
    usual = BUILDERS[name](4)
    assert net.architecture.channels(4) == usual.architecture.channels(4), "all but the head is unchanged"


@every_network
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"classes": 3}, "has no option 'classes'; use 'outputs'."),
        ({"num_classes": 3}, "has no option 'num_classes'; use 'outputs'."),
        ({"in_channels": 1}, "has no option 'in_channels'; images have 3 channels, and the channels of layers follow"),
        ({"kernels": "bilinear"}, "has no option 'kernels'; options are outputs, kernel, pooling, upsampling,"),
        ({"smoothing": True, "depth": 3}, "has no option 'depth'; options are "),
    ],
    ids=str,
)
def test_unknown_options_are_refused_with_a_suggestion(name: str, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(TypeError) as error:
        BUILDERS[name](**options)
    assert str(error.value).startswith(f"The network {name} {sentence}")


@pytest.mark.parametrize("outputs", [0, -1, 2.0, True, "3", None])
def test_outputs_must_be_a_whole_number(outputs: object) -> None:
    with pytest.raises(ValueError, match="The option 'outputs' of tumor must be a whole number, 1 or more; got"):
        rp.models.tumor(outputs=outputs)  # type: ignore[arg-type]


def test_repr_names_the_network() -> None:
    assert repr(rp.models.mitosis()).startswith("mitosis(\n  orientations=8")


# Reflections


@every_network
@pytest.mark.parametrize("preset", ["paper", "faithful"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_networks_with_reflections_are_exactly_equivariant(name: str, preset: str, training: bool) -> None:
    net = BUILDERS[name](4, preset=preset, reflections=True).double().train(training)
    x = torch.rand(1, 3, net.receptive_field, net.receptive_field, dtype=torch.float64)
    for angle, flip in ((0, True), (90, True), (90, False)):
        assert rp.equivariance_error(net, x, angle, flip) < 1e-10
    assert rp.equivariance_error(BUILDERS[name](4).double().train(training), x, 0, flip=True) > 1e-3


@every_network
def test_reflections_keep_the_number_of_weights(name: str) -> None:
    plain = ARCHITECTURES[name]
    for orientations in (1, 2, 4, 6, 8):
        net = BUILDERS[name](orientations, reflections=True)
        assert count(net) == sum(net.architecture.weights(orientations)) == sum(plain.weights(2 * orientations))
        if 2 * orientations not in plain.published:
            assert abs(count(net) / sum(plain.weights(1)) - 1) <= 0.05
    assert repr(net).startswith(f"{name}(\n  orientations=8, reflections=True")


@every_network
def test_networks_with_reflections_are_frozen(name: str) -> None:
    net = BUILDERS[name](4, reflections=True).double().eval()
    x = torch.rand(1, 3, net.receptive_field, net.receptive_field, dtype=torch.float64)
    torch.testing.assert_close(rp.freeze(net)(x), net(x))
