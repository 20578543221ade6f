"""Layers support what torch supports: saving, copying, pickling, casting, compiling, distributed training."""

import copy
import io
import pickle
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

import rotopath as rp
from rotopath.nn.features import is_being_recorded

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # tracing torch's compiler would take minutes

NETWORKS = [rp.models.mitosis, rp.models.nuclei, rp.models.tumor]


def small_network() -> nn.Sequential:
    return nn.Sequential(
        rp.nn.LiftConv2d(3, 4, 5, 8),
        rp.nn.GroupBatchNorm2d(4),
        nn.ReLU(),
        rp.nn.GroupMaxPool2d(2),
        rp.nn.GroupConv2d(4, 4, 3, 8, padding="same"),
        rp.nn.GroupLayerNorm2d(4),
        nn.ReLU(),
        rp.nn.GroupUpsample2d(2),
        rp.nn.GroupConv2d(4, 2, 1, 8),
        rp.nn.Project("max"),
    )


@pytest.fixture
def x() -> Tensor:
    return torch.rand(2, 3, 20, 24)


@pytest.mark.parametrize("build", NETWORKS)
def test_state_dict_contains_weights_and_statistics_only(build: type[nn.Module]) -> None:
    net = build(orientations=8)
    weights = {name for name, _ in net.named_parameters()}
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    in_training = set(net.train().state_dict())
    assert in_training == set(net.eval().state_dict())
    assert {name.rpartition(".")[2] for name in in_training - weights} == statistics
    net(torch.rand(1, 3, net.receptive_field, net.receptive_field))
    assert set(net.state_dict()) == in_training


def test_state_dict_restores_the_network_without_pickle(x: Tensor) -> None:
    net, other = small_network(), small_network()
    net(x)  # updates the running statistics
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(net.eval()(x), other.eval()(x))


def test_copies_and_pickles_are_equal_and_independent(x: Tensor) -> None:
    net = small_network().eval()
    before = net(x)
    for clone in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(clone(x), before)
        nn.init.zeros_(clone[0].weight)
    assert torch.equal(net(x), before)


def test_casting_to_double_is_as_precise_as_building_in_double() -> None:
    single = rp.nn.GroupConv2d(2, 2, 5, 8)
    double = rp.nn.GroupConv2d(2, 2, 5, 8, dtype=torch.float64)
    double.load_state_dict(single.double().state_dict())
    x = torch.randn(1, 2, 8, 9, 9, dtype=torch.float64)
    assert torch.equal(single(x), double(x))
    assert single.rotation.dtype == torch.float64
    assert not torch.equal(single.rotation, single.rotation.float().double()), "the map was rounded on the way"


@pytest.mark.parametrize(
    "layer",
    [rp.nn.LiftConv2d(3, 2, 5, 8), rp.nn.GroupConv2d(2, 2, 5, 8, kernel="harmonic"), rp.nn.Project("fourier", 2, 8)],
    ids=lambda layer: type(layer).__name__,
)
def test_maps_keep_their_memory_until_the_weights_change_device_or_dtype(layer: nn.Module) -> None:
    """CUDA graphs read maps at the address at which they were recorded."""
    maps = list(layer.buffers())  # references keep the memory from being reused
    values = [buffer.clone() for buffer in maps]
    layer.to("cpu", torch.float32).load_state_dict({name: w.clone() for name, w in layer.state_dict().items()})
    layer.to_empty(device="cpu")
    assert maps
    assert [buffer.data_ptr() for buffer in layer.buffers()] == [buffer.data_ptr() for buffer in maps]
    for buffer, value in zip(layer.double().float().buffers(), values, strict=True):
        torch.testing.assert_close(buffer, value)


def test_maps_made_in_inference_mode_support_training() -> None:
    state = rp.nn.GroupConv2d(2, 2, 3, 4).state_dict()
    with torch.device("meta"):
        conv = rp.nn.GroupConv2d(2, 2, 3, 4)
    with torch.inference_mode():
        conv.load_state_dict(state, assign=True)
    conv(torch.randn(1, 2, 4, 5, 5)).sum().backward()
    assert conv.weight.grad.any()


def test_maps_follow_weights_that_were_turned_into_buffers() -> None:
    project = rp.nn.Project("fourier", 2, 8)
    weight = project.weight.detach()
    del project.weight
    project.register_buffer("weight", weight)
    assert project.double()(torch.randn(1, 2, 8, 3, 3).double()).dtype == torch.float64
    assert project.waves.dtype == torch.float64


def test_dtypes_and_devices_reach_every_tensor() -> None:
    net = small_network()
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.float32):
        net.to(dtype)
        floats = [t for t in [*net.parameters(), *net.buffers()] if t.is_floating_point()]
        assert {t.dtype for t in floats} == {dtype}
    assert net.to("meta")(torch.empty(1, 3, 20, 24, device="meta")).shape == (1, 2, 16, 20)


def test_maps_are_computed_when_a_network_leaves_the_meta_device(x: Tensor) -> None:
    net = small_network().eval()
    with torch.device("meta"):
        empty = small_network()
    filled = empty.to_empty(device="cpu").eval()
    filled.load_state_dict(net.state_dict())
    assert torch.equal(filled(x), net(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_can_be_assigned_to_a_network_on_meta(x: Tensor, dtype: torch.dtype) -> None:
    net = small_network().eval().to(dtype)
    with torch.device("meta"):
        empty = small_network().eval()
    empty.load_state_dict(net.state_dict(), assign=True)
    assert torch.equal(empty(x.to(dtype)), net(x.to(dtype)))


def test_pruned_layers_can_be_cast() -> None:
    conv = prune.random_unstructured(rp.nn.GroupConv2d(2, 2, 3, 4), "weight", 0.5).double()
    assert conv(torch.randn(1, 2, 4, 5, 5, dtype=torch.float64)).dtype == torch.float64


def test_the_private_function_that_detects_torch_func_works() -> None:
    """`is_being_recorded` calls a private function of torch; a change in torch must fail here."""
    recorded = []

    def record(x: Tensor) -> Tensor:
        recorded.append(is_being_recorded())
        return x.sum()

    record(torch.ones(2))
    grad(record)(torch.ones(2))
    vmap(record)(torch.ones(2, 2))
    record(torch.ones(2))
    assert recorded == [False, True, True, False]


def test_gradients_of_single_samples() -> None:
    net = rp.models.mitosis(orientations=4).eval()
    x = torch.rand(3, 3, 68, 68)

    def loss(weights: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(net, weights, (image[None],)).sum()

    weights = {name: p.detach() for name, p in net.named_parameters()}
    batched = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    for i in range(3):
        for name, expected in grad(loss)(weights, x[i]).items():
            torch.testing.assert_close(batched[name][i], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_autocast_to_bfloat16(x: Tensor, training: bool) -> None:
    net = small_network().train(training)
    expected = net(x).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(x)
        assert net[0](x).dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())
    assert float((y.detach() - expected).norm() / expected.norm()) < 0.03


def test_autocast_interpolates_kernels_in_full_precision() -> None:
    lift = rp.nn.LiftConv2d(1, 1, 5, 8, bias=False)
    x = torch.zeros(1, 1, 9, 9)
    x[..., 4, 4] = 1  # the output is the mirrored kernel
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = lift(x)[0, 0]
    expected = lift.kernels().detach()[:, 0].flip(1, 2)
    assert torch.equal(y, expected.bfloat16())


@pytest.mark.parametrize("build", [small_network, lambda: rp.models.nuclei(orientations=4)])  # has skip connections
def test_compiles_as_one_graph(build: type[nn.Module]) -> None:
    net = build()
    side = getattr(net, "receptive_field", 20)
    x = torch.rand(2, 3, side, side)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), net(x), atol=1e-4, rtol=1e-4)
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # raised by inductor
def test_compiles_layers_of_several_kernel_sizes() -> None:
    """After the second size, torch.compile treats the sizes of kernels as variables."""
    torch.compiler.reset()
    x = torch.rand(1, 3, 20, 20)
    for size in (3, 5, 7):
        net = nn.Sequential(rp.nn.LiftConv2d(3, 2, size, 4), rp.nn.GroupConv2d(2, 2, size, 4), rp.nn.Project())
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), net(x), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # raised by inductor
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_compiles_to_code(x: Tensor) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net, x = small_network().eval().to(device), x.to(device)
    compiled = torch.compile(net, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x), atol=1e-5, rtol=1e-5)


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    net(x).square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


def run_worker(rank: int, rendezvous: str, results: str) -> None:
    torch.manual_seed(rank)  # DDP must broadcast the weights of the first process
    timeout = timedelta(seconds=120)  # for the other process to start, and to answer
    method = f"file://{rendezvous}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=timeout)
    net = DistributedDataParallel(small_network())
    batch = torch.rand(4, 3, 20, 24, generator=torch.Generator().manual_seed(7))[rank::2]
    torch.save(gradients(net, batch), Path(results) / f"{rank}.pt")
    dist.barrier()  # gloo may abort a process whose peer has left already
    dist.destroy_process_group()


def test_two_processes_average_gradients(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "rendezvous"), str(tmp_path))
    other = mp.get_context("spawn").Process(target=run_worker, args=(1, *arguments))
    other.start()
    run_worker(0, *arguments)  # this process is one of the two
    other.join()
    assert other.exitcode == 0
    torch.manual_seed(0)
    net = small_network()
    batch = torch.rand(4, 3, 20, 24, generator=torch.Generator().manual_seed(7))
    separate = [gradients(net, batch[rank::2]) for rank in range(2)]
    for rank in range(2):
        averaged = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for actual, first, second in zip(averaged, *separate, strict=True):
            torch.testing.assert_close(actual, (first + second) / 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("build", NETWORKS)
def test_exact_on_a_gpu(build: type[nn.Module]) -> None:
    net = build(orientations=8).cuda()
    # With two images, a batch norm may have sixteen values per channel, and would magnify rounding.
    x = torch.rand(8, 3, net.receptive_field, net.receptive_field, device="cuda")
    assert rp.equivariance_error(net, x) < 1e-5
    assert rp.equivariance_error(net.double(), x.double()) < 1e-10
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert rp.equivariance_error(net.float(), x) < 0.1
