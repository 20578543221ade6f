"""CUDA graphs compute the same training steps as the network without them. These tests need a GPU."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import rotopath as rp
from rotopath.inference.dense import MixedNetwork
from rotopath.nn import graphs

PRESETS = ("paper", "faithful")

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),  # graphs are recorded on a side stream
]


def reload_weights(net: nn.Module) -> list[Tensor]:
    """Move and load the network as trainers do, and fill memory that this would free with NaN.

    A graph that reads buffers which were replaced then computes NaN.
    """
    net.cuda().load_state_dict({name: value.clone() for name, value in net.state_dict().items()})
    return [torch.full_like(buffer, torch.nan) for buffer in net.buffers() if buffer.is_floating_point()]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_recorded_network_has_the_same_outputs_and_gradients(preset: str) -> None:
    torch.manual_seed(0)
    net = rp.models.mitosis(4, preset=preset).cuda()
    x = torch.rand(4, 3, 68, 68, device="cuda")

    def run_step() -> list[Tensor]:
        net.zero_grad()
        y = net.train()(x)
        y.square().sum().backward()
        return [y.detach().clone(), *(p.grad.clone() for p in net.parameters())]

    before = {name: value.clone() for name, value in net.state_dict().items()}
    plain = run_step()
    net.load_state_dict(before)
    graphs.record(net, x)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    freed_memory = reload_weights(net)
    for got, expected in zip(run_step(), plain, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-2)
    del freed_memory
    net.eval()
    assert net(torch.rand(1, 3, 76, 84, device="cuda")).shape == (1, 1, 2, 3), (
        "in evaluation mode images may have other sizes"
    )
    graphs.release(net)
    assert "forward" not in vars(net)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_recorded_step_trains_the_same_weights(preset: str) -> None:
    def train(record: bool, steps: int) -> list[Tensor]:
        torch.manual_seed(0)
        net = rp.models.mitosis(4, preset=preset).cuda().train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        x = torch.rand(4, 3, 68, 68, device="cuda")

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            net(x).square().sum().backward()
            optimizer.step()

        run = graphs.record_step(step) if record else step
        freed_memory = reload_weights(net)
        for _ in range(steps):
            run()
        del freed_memory
        return [value.clone() for value in net.state_dict().values()]

    for got, expected in zip(train(True, 2), train(False, 2 + graphs.WARM_UP_STEPS), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-2)


class Doubling:
    """A function that counts its calls, which replays do not call."""

    def __init__(self) -> None:
        self.calls = 0
        self.factor = torch.full((1,), 2.0, device="cuda")

    def __call__(self, images: Tensor) -> Tensor:
        self.calls += 1
        return images.float() * self.factor + images.shape[-1]


@torch.no_grad()
def test_predictions_of_repeated_shapes_are_replayed() -> None:
    compute = Doubling()
    recorded = graphs.RecordedInference(compute)
    kept = []
    for i in range(9):
        images = torch.full((1, 3, 8, 8), i, device="cuda", dtype=torch.uint8)
        kept.append(recorded(images))
        assert recorded(torch.ones(1, 3, 8, 9 + i, device="cuda")).mean() == 2 + 9 + i, "shapes that do not repeat"
    assert [float(y.mean()) for y in kept] == [2 * i + 8 for i in range(9)], "results are not overwritten"
    assert compute.calls == graphs.CALLS_BEFORE_RECORDING + 1 + 9
    compute.factor.fill_(3)
    assert recorded(images).mean() == 3 * 8 + 8, "a replay reads weights that were changed in place"
    with torch.enable_grad():
        weight = torch.ones(1, 3, 8, 8, device="cuda", requires_grad=True)
        assert recorded(weight).requires_grad


@torch.no_grad()
def test_threads_share_a_recording() -> None:
    recorded = graphs.RecordedInference(Doubling())

    def predict(value: int) -> float:
        return float(recorded(torch.full((1, 3, 64, 64), value, device="cuda", dtype=torch.uint8)).mean())

    with ThreadPoolExecutor(8) as pool, torch.no_grad():
        for _ in range(5):
            assert list(pool.map(lambda i: torch.no_grad()(predict)(i), range(60))) == [2 * i + 64 for i in range(60)]


def test_a_function_that_cannot_be_recorded_is_called() -> None:
    recorded = graphs.RecordedInference(lambda images: images * float(images.mean()))  # waits for the GPU
    with torch.no_grad():
        for _ in range(6):
            assert recorded(torch.full((1, 3, 4, 4), 3.0, device="cuda")).mean() == 9


@pytest.mark.parametrize("task", ["mitosis", "nuclei", "tumor"])
@torch.no_grad()
def test_recorded_networks_predict_the_same(task: str) -> None:
    torch.manual_seed(0)
    network = getattr(rp.models, task)(4).cuda().eval()
    mixed = MixedNetwork(network, torch.float16)
    side = network.geometry.nearest_sizes(200)[-1]
    for _ in range(6):
        images = torch.randint(256, (1, 3, side, side), device="cuda", dtype=torch.uint8)
        torch.testing.assert_close(mixed(images), mixed._compute(images), atol=1e-2, rtol=1e-2)
    assert len(mixed._replay._recordings) == 1
    assert len(copy.deepcopy(mixed)._replay._recordings) == 0
