"""How long dense inference by the tumor network takes: frozen, as it is, a plain CNN as wide, and peers.

    .venv/bin/python benchmarks/inference.py [cuda] [--side 2000] [--rounds 15] [--without compiled]

One image of the size on the network's grid that is nearest to the side; in bfloat16, float16 and float32 on a GPU,
where "rotopath" is as `rotopath predict` runs it, with weights in float32; in float32 on the CPU. The plain CNN has its
batch norm folded into its convolutions, as a frozen network has; escnn and e2cnn are measured as they export
themselves. Errors are those of all logits together against the network in float64.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from contenders import PlainCNN, Steerable, peers, straightforward
from record import record
from timing import build, describe, forget_compiled, forget_peak, leave_out, measure
from torch import Tensor, nn

import rotopath as rp
from rotopath.inference.dense import MixedNetwork
from rotopath.models import Network
from rotopath.models.protocols import IMAGE_CHANNELS

SIDES = {"cpu": 500, "cuda": 2000}
PRECISIONS = {"cpu": (torch.float32,), "cuda": (torch.bfloat16, torch.float16, torch.float32)}
AT_ONCE = {"cpu": 1, "cuda": 10}
TOLERANCES = {torch.bfloat16: 0.2, torch.float16: 2e-2, torch.float32: 5e-3}  # of logits near 0; float32 is TF32 there
Answer = Callable[[], Tensor]


def prepared(model: nn.Module, image: Tensor) -> nn.Module:
    """On the device and in the precision of the image, for evaluation."""
    return model.to(image.device, image.dtype).eval()


def mixed(network: Network, image: Tensor) -> nn.Module:
    """As `rotopath predict` runs it on a GPU: weights in float32, convolutions in the precision of the image."""
    network = copy.deepcopy(network).to(image.device).eval()
    return network if image.dtype == torch.float32 else MixedNetwork(network, image.dtype)


def compiled(model: nn.Module, image: Tensor) -> nn.Module:
    made: nn.Module = torch.compile(prepared(model, image), dynamic=False)  # type: ignore[assignment]
    return made


def replayed(model: nn.Module, image: Tensor) -> Answer:
    """Recorded as a CUDA graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # where recording has to be warmed up
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(image)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits: Tensor = model(image)

    # A graph knows where weights and image lie, but does not hold them: without `_alive` it would read what was freed.
    def answer(_alive: object = (model, image)) -> Tensor:
        graph.replay()
        return logits

    return answer


def models(network: Network, image: Tensor) -> dict[str, Callable[[], Answer]]:
    """What gives the logits of the image, to be built one after the other."""

    def of(make: Callable[[nn.Module, Tensor], nn.Module], model: Callable[[], nn.Module]) -> Callable[[], Answer]:
        return lambda: partial(make(model(), image), image)

    def plain() -> nn.Module:
        return PlainCNN(network.architecture, network.orientations, norm=False)

    def frozen() -> nn.Module:
        return rp.freeze(network)

    def peer(builder: Callable[..., nn.Module]) -> nn.Module:
        model = builder(network.architecture, network.orientations)
        return model.export() if isinstance(model, Steerable) else model

    found = {"plain CNN": of(prepared, plain), "rotopath, frozen": of(prepared, frozen)}
    if image.dtype == torch.bfloat16:  # alone: compiling takes its time
        found |= {"plain CNN, compiled": of(compiled, plain), "rotopath, frozen and compiled": of(compiled, frozen)}
    if image.is_cuda:
        found |= {
            "plain CNN, replayed": lambda: replayed(prepared(plain(), image), image),
            "rotopath, frozen and replayed": lambda: replayed(prepared(frozen(), image), image),
            "rotopath, replayed": lambda: replayed(mixed(network, image), image),
        }
    found["rotopath"] = lambda: partial(mixed(network, image), image)
    for name, builder in ({"straightforward": straightforward} | peers()).items():
        found[name] = of(prepared, partial(peer, builder))
    return found


@torch.no_grad()
def compare(network: Network, image: Tensor, rounds: int, without: Sequence[str] = ()) -> list[dict[str, object]]:
    device, dtype = image.device.type, image.dtype
    forget_compiled(device)
    expected = copy.deepcopy(network).double()(image.double())
    answers: dict[str, Callable[[], object]] = {}
    columns: dict[str, dict[str, str]] = {}
    for name, make in leave_out(models(network, image), without, kept=("plain CNN",)).items():

        def start(name: str = name, make: Callable[[], Answer] = make) -> tuple[Answer, Tensor]:
            answer = make()
            answer()
            forget_peak(name, device)
            return answer, answer().double()

        if (built := build(f"{name}, {dtype}", start, device)) is not None:
            (answers[name], logits), peak = built
            error = float((logits - expected).norm() / expected.norm())
            columns[name] = {"peak MiB": peak, "error": f"{error:.1e}" if "rotopath" in name else ""}
    times = measure(answers, device, rounds, AT_ONCE[device])
    about = {"image": f"{image.shape[-2]} × {image.shape[-1]} px", "precision": str(dtype).removeprefix("torch.")}
    return [{"what": name, **about, **describe(times[name], times["plain CNN"]), **columns[name]} for name in answers]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--side", type=int)
    parser.add_argument("--orientations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without", nargs="+", default=[], help="words in names to leave out; then no file is written")
    options = parser.parse_args()
    torch.manual_seed(0)
    network = rp.models.tumor(options.orientations).to(options.device)
    settle(network)
    side = options.side or SIDES[options.device]
    size = min(network.nearest_sizes(side), key=lambda good: abs(good - side))
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
            raise SystemExit(f"{row['what']}, {row['precision']}: its error is {row['error']}; {allowed} is allowed.")


def settle(network: Network) -> None:
    """Statistics of a few batches, so that signals are of the size that they have in a trained network."""
    side = network.receptive_field
    with torch.no_grad():
        for _ in range(20):
            network.train()(torch.rand(4, IMAGE_CHANNELS, side, side, device=next(network.parameters()).device))
    network.eval()


if __name__ == "__main__":
    main()
