"""Several processes train the same network as one process would."""

import csv
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layouts import kumar, pcam
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rotopath as rp
from rotopath import runs
from rotopath.model_file import WEIGHTS, RunError
from rotopath.recipe import Recipe
from rotopath.tasks.segment import weighted_cross_entropy
from rotopath.training import MINED, read_hard_examples, train
from rotopath.training.distributed import SynchronizedBatchNorm, synchronize_batch_norms

pytestmark = pytest.mark.slow


def make_norms() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Sequential(rp.nn.Project("mean"), nn.BatchNorm2d(3))
    net = nn.Sequential(rp.nn.GroupBatchNorm2d(3), head, nn.BatchNorm2d(3, momentum=None, affine=False)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.uniform_(0.5, 1.5)
    return net


def make_batch() -> Tensor:
    return 3 + torch.rand(6, 3, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def run_two_steps(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the output, the gradients and the statistics after two forward and backward passes."""
    x.requires_grad_()
    for _ in range(2):
        net.zero_grad()
        x.grad = None
        y = net(x)
        y.pow(3).sum().backward()
    gradients = {f"{name} gradient": parameter.grad for name, parameter in net.named_parameters()}
    return {"output": y.detach(), "input gradient": x.grad, **gradients, **dict(net.named_buffers())}


def run_worker(rank: int, rendezvous: str, results: str) -> None:
    timeout = timedelta(seconds=120)  # for the other process to start, and to answer
    method = f"file://{rendezvous}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=timeout)
    net = make_norms()
    synchronize_batch_norms(net)
    start, stop = ((0, 2), (2, 6))[rank]  # processes may have parts of different sizes
    torch.save(run_two_steps(net, make_batch()[start:stop].clone()), Path(results) / f"norms-{rank}.pt")
    torch.manual_seed(0)
    network = rp.models.nuclei(orientations=4).double()
    synchronize_batch_norms(network)
    gradients = nuclei_gradients(DistributedDataParallel(network), slice(rank, None, 2))
    torch.save(gradients, Path(results) / f"nuclei-{rank}.pt")
    dist.barrier()  # gloo may abort a process whose peer has left already
    dist.destroy_process_group()


def test_two_processes_have_the_statistics_and_gradients_of_the_whole_batch(tmp_path: Path) -> None:
    """For batch norms alone, and for nuclei: weighted pixels, and a batch norm after the projection."""
    arguments = (str(tmp_path / "rendezvous"), str(tmp_path))
    other = mp.get_context("spawn").Process(target=run_worker, args=(1, *arguments))
    other.start()
    run_worker(0, *arguments)  # this process is one of the two
    other.join()
    assert other.exitcode == 0
    check_norms(*(torch.load(tmp_path / f"norms-{rank}.pt", weights_only=True) for rank in range(2)))
    torch.manual_seed(0)
    expected = nuclei_gradients(rp.models.nuclei(orientations=4).double(), slice(None))
    for rank in range(2):
        for got, value in zip(torch.load(tmp_path / f"nuclei-{rank}.pt", weights_only=True), expected, strict=True):
            torch.testing.assert_close(got, value)


def check_norms(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    expected = run_two_steps(make_norms(), make_batch())
    assert first.keys() == expected.keys()
    for name, value in expected.items():
        if name in ("output", "input gradient"):
            together = torch.cat([first[name], second[name]])
        elif name.endswith("gradient"):
            together = first[name] + second[name]
        else:
            together = first[name]
            assert torch.equal(first[name], second[name])
        torch.testing.assert_close(together, value)


def nuclei_gradients(net: nn.Module, part: slice) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    images = torch.rand(6, 3, 60, 60, dtype=torch.float64, generator=generator)[part]
    classes = torch.randint(0, 3, (6, 20, 20), generator=generator)[part]
    weighted_cross_entropy(net(images), classes, torch.tensor([0.5, 4.0, 1.0], dtype=torch.float64)).backward()
    return [parameter.grad for parameter in net.parameters()]


def test_synchronized_batch_norms_keep_names_and_weights() -> None:
    net = rp.models.nuclei(orientations=4)
    before = {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}
    synchronize_batch_norms(net)
    assert {name: tensor.data_ptr() for name, tensor in net.state_dict().items()} == before
    assert sum(isinstance(module, SynchronizedBatchNorm) for module in net.modules()) == 7
    x = torch.rand(1, 3, 60, 60)
    other = rp.models.nuclei(orientations=4)
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(net.eval()(x), other.eval()(x))


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, env=dict(os.environ))


def write_toml(path: Path, **keys: object) -> Path:
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in keys.items()))
    return path


def read_validation(folder: Path) -> list[float]:
    with (folder / runs.LOG).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [float(row[f"validation_{name}"]) for row in rows for name in ("loss", "accuracy") if row["validation_loss"]]


@pytest.mark.filterwarnings("ignore:stain normalization left an image unchanged")
def test_two_processes_train_the_network_that_one_process_trains(tmp_path: Path) -> None:
    """With a low learning rate: on random pixels, differences in rounding grow quickly."""
    data = kumar(tmp_path / "data", [f"n{i}" for i in range(6)], size=70)
    keys = {"task": "nuclei", "data": str(data), "orientations": 4, "epochs": 1, "steps": 3, "batch": 6}
    keys |= {"learning_rate": 1e-3, "validation_steps": 2, "accelerator": "cpu"}
    recipe = Recipe(**keys)  # type: ignore[arg-type]
    train(recipe, tmp_path / "one")
    path = write_toml(tmp_path / "nuclei.toml", **keys, devices=2)
    finished = run_python("-m", "rotopath", "train", str(path), "--out", str(tmp_path / "two"))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("epoch 1 of at most 1") == 1, "only the first process prints"
    assert read_validation(tmp_path / "two") == pytest.approx(read_validation(tmp_path / "one"), abs=1e-4)
    one, two = (load_file(tmp_path / name / WEIGHTS) for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-4, rtol=1e-3)
    scores = [json.loads((tmp_path / name / runs.METRICS).read_text())["valid"] for name in ("one", "two")]
    assert scores[1]["dice"] == pytest.approx(scores[0]["dice"], abs=1e-4)
    assert json.loads((tmp_path / "two" / runs.PROVENANCE).read_text())["hardware"]["processes"] == 2


def test_processes_started_by_torchrun_mine_hard_examples_and_continue(tmp_path: Path) -> None:
    """With nine validation patches, one process has one more than the other. The learning rate is low, as above."""
    data = pcam(tmp_path / "data", (16, 9, 8))
    keys = {"task": "tumor", "data": str(data), "orientations": 1, "epochs": 1, "steps": 3, "batch": 4}
    keys["learning_rate"] = 1e-3
    path = write_toml(tmp_path / "tumor.toml", **keys, accelerator="cpu", checkpoint_steps=1)
    with path.open("a") as file:
        file.write("[mining]\nepochs = 1\nexamples = 4\n")
    train(path, tmp_path / "one")
    rotopath = ("-m", "rotopath", "train", str(path))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *rotopath)
    finished = run_python(*launch, "--set", "devices=2", "--out", str(tmp_path / "two"))
    assert finished.returncode == 0, finished.stderr
    one, two = (read_hard_examples(tmp_path / name / MINED) for name in ("one", "two"))
    assert [example.image for example in two] == [example.image for example in one]
    assert [example.score for example in two] == pytest.approx([example.score for example in one], abs=1e-4)
    assert 0 < len(two) <= 4
    assert all(example.score > 0.5 for example in two), "only mistakes"
    assert read_validation(tmp_path / "two/baseline") == pytest.approx(
        read_validation(tmp_path / "one/baseline"), abs=1e-4
    )
    assert read_validation(tmp_path / "two") == pytest.approx(read_validation(tmp_path / "one"), abs=1e-4)


def test_another_number_of_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RunError, match=r"has started 3 processes, but the recipe has 1 devices .*=3"):
        train(Recipe("tumor", str(pcam(tmp_path / "data"))), tmp_path / "run")
    assert not (tmp_path / "run").exists()
