"""Measure dense inference of the tumor network: frozen and not, a plain CNN of the same width, and other libraries.

    .venv/bin/python benchmarks/inference.py [cuda] [--side 2000] [--rounds 15] [--without compiled]

The input is one image. Its side is the valid image side nearest to `--side`. Precisions are bfloat16, float16 and
float32 on a GPU, and float32 on the CPU. On a GPU, "rotopath" is the network as `rotopath predict` runs it, with
weights in float32. On the CPU, it is the network before freezing. In the plain CNN, as in a frozen network, batch norm
is folded into the convolutions. The networks of escnn and e2cnn are exported to plain layers by the library itself.
Errors are relative errors of all logits, in comparison with the network in float64.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from contenders import PlainCNN, Steerable, peers, straightforward
from record import record
from timing import build, describe, leave_out, measure, reset_compiler, reset_peak_memory
from torch import Tensor, nn

import rotopath as rp
from rotopath.inference.dense import MixedNetwork
from rotopath.models import Network
from rotopath.models.protocols import IMAGE_CHANNELS

SIDES = {"cpu": 500, "cuda": 2000}  # default of --side, in px
PRECISIONS = {"cpu": (torch.float32,), "cuda": (torch.bfloat16, torch.float16, torch.float32)}
REPEATS = {"cpu": 1, "cuda": 10}  # calls per measurement
TOLERANCES = {
    torch.bfloat16: 0.2,
    torch.float16: 2e-2,
    torch.float32: 5e-3,
}  # largest allowed relative errors: untrained logits are near 0, and on a GPU float32 convolutions use TF32
Predict = Callable[[], Tensor]


def prepare(model: nn.Module, image: Tensor) -> nn.Module:
    """Move a model to the device and data type of the image, for evaluation."""
    return model.to(image.device, image.dtype).eval()


def prepare_mixed(network: Network, image: Tensor) -> nn.Module:
    """Prepare a network as `rotopath predict` does on a GPU: float32 weights, convolutions in the image's data type."""
    network = copy.deepcopy(network).to(image.device).eval()
    return network if image.dtype == torch.float32 else MixedNetwork(network, image.dtype)


def compile_model(model: nn.Module, image: Tensor) -> nn.Module:
    compiled: nn.Module = torch.compile(prepare(model, image), dynamic=False)  # type: ignore[assignment]
    return compiled


def record_graph(model: nn.Module, image: Tensor) -> Predict:
    """Record the model as a CUDA graph, and return a function that replays it."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # a recording requires a warm-up on another stream
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(image)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits: Tensor = model(image)

    # A graph contains addresses of the weights and the image, but no references. The default argument keeps them alive.
    def replay(_alive: object = (model, image)) -> Tensor:
        graph.replay()
        return logits

    return replay


def make_models(network: Network, image: Tensor) -> dict[str, Callable[[], Predict]]:
    """Return functions that build the models, by name. A built model is a function that returns the image's logits."""

    def of(make: Callable[[nn.Module, Tensor], nn.Module], model: Callable[[], nn.Module]) -> Callable[[], Predict]:
        return lambda: partial(make(model(), image), image)

    def plain() -> nn.Module:
        return PlainCNN(network.architecture, network.orientations, norm=False)

    def frozen() -> nn.Module:
        return rp.freeze(network)

    def peer(builder: Callable[..., nn.Module]) -> nn.Module:
        model = builder(network.architecture, network.orientations)
        return model.export() if isinstance(model, Steerable) else model

    makers = {"plain CNN": of(prepare, plain), "rotopath, frozen": of(prepare, frozen)}
    if image.dtype == torch.bfloat16:  # in one precision only, because compiling takes long
        makers |= {
            "plain CNN, compiled": of(compile_model, plain),
            "rotopath, frozen and compiled": of(compile_model, frozen),
        }
    if image.is_cuda:
        makers |= {
            "plain CNN, replayed": lambda: record_graph(prepare(plain(), image), image),
            "rotopath, frozen and replayed": lambda: record_graph(prepare(frozen(), image), image),
            "rotopath, replayed": lambda: record_graph(prepare_mixed(network, image), image),
        }
    makers["rotopath"] = lambda: partial(prepare_mixed(network, image), image)
    for name, builder in ({"straightforward": straightforward} | peers()).items():
        makers[name] = of(prepare, partial(peer, builder))
    return makers


@torch.no_grad()
def compare(network: Network, image: Tensor, rounds: int, without: Sequence[str] = ()) -> list[dict[str, object]]:
    device, dtype = image.device.type, image.dtype
    reset_compiler(device)
    expected = copy.deepcopy(network).double()(image.double())
    predictors: dict[str, Callable[[], object]] = {}
    columns: dict[str, dict[str, str]] = {}
    for name, make in leave_out(make_models(network, image), without, kept=("plain CNN",)).items():

        def start(name: str = name, make: Callable[[], Predict] = make) -> tuple[Predict, Tensor]:
            predict = make()
            predict()
            reset_peak_memory(name, device)
            return predict, predict().double()

        if (built := build(f"{name}, {dtype}", start, device)) is not None:
            (predictors[name], logits), peak = built
            error = float((logits - expected).norm() / expected.norm())
            columns[name] = {"peak MiB": peak, "error": f"{error:.1e}" if "rotopath" in name else ""}
    times = measure(predictors, device, rounds, REPEATS[device])
    about = {"image": f"{image.shape[-2]} × {image.shape[-1]} px", "precision": str(dtype).removeprefix("torch.")}
    return [
        {"what": name, **about, **describe(times[name], times["plain CNN"]), **columns[name]} for name in predictors
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--side", type=int)
    parser.add_argument("--orientations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        help="leave out models whose names contain one of these words; no file is written in this case",
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    network = rp.models.tumor(options.orientations).to(options.device)
    warm_up_statistics(network)
    side = options.side or SIDES[options.device]
    size = min(network.nearest_sizes(side), key=lambda size: abs(size - side))
    image = torch.rand(1, IMAGE_CHANNELS, size, size, device=options.device)
    rows = [
        row
        for dtype in PRECISIONS[options.device]
        for row in compare(network, image.to(dtype, memory_format=torch.channels_last), options.rounds, options.without)
    ]
    record("inference", rows, options.device, write=not options.without)
    for row in rows:
        allowed = TOLERANCES[getattr(torch, str(row["precision"]))]
        if row["error"] and not float(str(row["error"])) < allowed:
            raise SystemExit(
                f"{row['what']}, {row['precision']}: the error is {row['error']}, above the limit of {allowed}."
            )


def warm_up_statistics(network: Network) -> None:
    """Update the batch norm statistics on a few batches, so that activations have the scale of a trained network."""
    side = network.receptive_field
    with torch.no_grad():
        for _ in range(20):
            network.train()(torch.rand(4, IMAGE_CHANNELS, side, side, device=next(network.parameters()).device))
    network.eval()


if __name__ == "__main__":
    main()
