"""CUDA graphs compute the same training steps as the network without them. These tests need a GPU."""

import pytest
import torch
from torch import Tensor, nn

import rotopath as rp
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
