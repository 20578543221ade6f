"""Training steps as CUDA graphs, where there is a GPU: nothing changes but the time."""

import pytest
import torch
from torch import Tensor, nn

import rotopath as rp
from rotopath.training import graphs

PRESETS = ("paper", "faithful")

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),  # graphs are recorded on one of their own
]


def move_to_where_it_is(net: nn.Module) -> list[Tensor]:
    """As trainers do; what would be freed by it is taken, and holds no numbers."""
    net.cuda().load_state_dict({name: value.clone() for name, value in net.state_dict().items()})
    return [torch.full_like(buffer, torch.nan) for buffer in net.buffers() if buffer.is_floating_point()]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_recorded_network_learns_and_answers_the_same(preset: str) -> None:
    torch.manual_seed(0)
    net = rp.models.mitosis(4, preset=preset).cuda()
    x = torch.rand(4, 3, 68, 68, device="cuda")

    def outcome() -> list[Tensor]:
        net.zero_grad()
        y = net.train()(x)
        y.square().sum().backward()
        return [y.detach().clone(), *(p.grad.clone() for p in net.parameters())]

    before = {name: value.clone() for name, value in net.state_dict().items()}
    plain = outcome()
    net.load_state_dict(before)
    graphs.record(net, x)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    in_freed_places = move_to_where_it_is(net)
    for got, expected in zip(outcome(), plain, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-2)
    del in_freed_places
    net.eval()
    assert net(torch.rand(1, 3, 76, 84, device="cuda")).shape == (1, 1, 2, 3), "other sizes, in evaluation"
    graphs.forget(net)
    assert "forward" not in vars(net)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_recorded_step_learns_what_the_step_learns(preset: str) -> None:
    def trained(record: bool, steps: int) -> list[Tensor]:
        torch.manual_seed(0)
        net = rp.models.mitosis(4, preset=preset).cuda().train()
        optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        x = torch.rand(4, 3, 68, 68, device="cuda")

        def step() -> None:
            optimiser.zero_grad(set_to_none=True)
            net(x).square().sum().backward()
            optimiser.step()

        taken = graphs.record_step(step) if record else step
        in_freed_places = move_to_where_it_is(net)
        for _ in range(steps):
            taken()
        del in_freed_places
        return [value.clone() for value in net.state_dict().values()]

    for got, expected in zip(trained(True, 2), trained(False, 2 + graphs.WARM_UP), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-2)
