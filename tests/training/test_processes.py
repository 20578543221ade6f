"""Several processes: they learn what one would."""

import csv
import json
import os
import subprocess
import sys
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
from rotopath.training import MINED, read_examples, train
from rotopath.training.distributed import SharedBatchNorm, share_statistics


def norms() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Sequential(rp.nn.Project("mean"), nn.BatchNorm2d(3))
    net = nn.Sequential(rp.nn.GroupBatchNorm2d(3), head, nn.BatchNorm2d(3, momentum=None, affine=False)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.uniform_(0.5, 1.5)
    return net


def batch() -> Tensor:
    return 3 + torch.rand(6, 3, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def outcome(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output, gradients and statistics of two steps."""
    x.requires_grad_()
    for _ in range(2):
        net.zero_grad()
        x.grad = None
        y = net(x)
        y.pow(3).sum().backward()
    gradients = {f"{name} gradient": parameter.grad for name, parameter in net.named_parameters()}
    return {"output": y.detach(), "input gradient": x.grad, **gradients, **dict(net.named_buffers())}


def run_worker(rank: int, rendezvous: str, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    net = norms()
    share_statistics(net)
    start, stop = ((0, 2), (2, 6))[rank]  # shares need not be equal
    torch.save(outcome(net, batch()[start:stop].clone()), Path(results) / f"norms-{rank}.pt")
    torch.manual_seed(0)
    network = rp.models.nuclei(orientations=4).double()
    share_statistics(network)
    gradients = nuclei_gradients(DistributedDataParallel(network), slice(rank, None, 2))
    torch.save(gradients, Path(results) / f"nuclei-{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_see_the_whole_batch_and_learn_from_it(tmp_path: Path) -> None:
    """Batch norms, and nuclei: pixels of unlike weights, and a batch norm behind the projection."""
    mp.spawn(run_worker, args=(str(tmp_path / "rendezvous"), str(tmp_path)), nprocs=2)
    check_norms(*(torch.load(tmp_path / f"norms-{rank}.pt", weights_only=True) for rank in range(2)))
    torch.manual_seed(0)
    expected = nuclei_gradients(rp.models.nuclei(orientations=4).double(), slice(None))
    for rank in range(2):
        for got, value in zip(torch.load(tmp_path / f"nuclei-{rank}.pt", weights_only=True), expected, strict=True):
            torch.testing.assert_close(got, value)


def check_norms(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    expected = outcome(norms(), batch())
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


def nuclei_gradients(net: nn.Module, shared: slice) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    images = torch.rand(6, 3, 60, 60, dtype=torch.float64, generator=generator)[shared]
    classes = torch.randint(0, 3, (6, 20, 20), generator=generator)[shared]
    weighted_cross_entropy(net(images), classes, torch.tensor([0.5, 4.0, 1.0], dtype=torch.float64)).backward()
    return [parameter.grad for parameter in net.parameters()]


def test_shared_batch_norms_keep_names_and_weights() -> None:
    net = rp.models.nuclei(orientations=4)
    before = {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}
    share_statistics(net)
    assert {name: tensor.data_ptr() for name, tensor in net.state_dict().items()} == before
    assert sum(isinstance(module, SharedBatchNorm) for module in net.modules()) == 7
    x = torch.rand(1, 3, 60, 60)
    other = rp.models.nuclei(orientations=4)
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(net.eval()(x), other.eval()(x))


def command_line(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, env=dict(os.environ))


def write(path: Path, **keys: object) -> Path:
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in keys.items()))
    return path


def validation(folder: Path) -> list[float]:
    with (folder / runs.LOG).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [float(row[f"validation_{name}"]) for row in rows for name in ("loss", "accuracy") if row["validation_loss"]]


@pytest.mark.filterwarnings("ignore:stain normalisation left an image unchanged")
def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    """The learning rate is low, since on random pixels rounding alone soon leads elsewhere."""
    data = kumar(tmp_path / "data", [f"n{i}" for i in range(6)], size=70)
    keys = {"task": "nuclei", "data": str(data), "orientations": 4, "epochs": 1, "steps": 3, "batch": 6}
    keys |= {"learning_rate": 1e-3, "validation_steps": 2, "accelerator": "cpu"}
    recipe = Recipe(**keys)  # type: ignore[arg-type]
    train(recipe, tmp_path / "one")
    path = write(tmp_path / "nuclei.toml", **keys, devices=2)
    done = command_line("-m", "rotopath", "train", str(path), "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1 of at most 1") == 1, "the first process alone prints"
    assert validation(tmp_path / "two") == pytest.approx(validation(tmp_path / "one"), abs=1e-4)
    one, two = (load_file(tmp_path / name / WEIGHTS) for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-4, rtol=1e-3)
    scores = [json.loads((tmp_path / name / runs.METRICS).read_text())["valid"] for name in ("one", "two")]
    assert scores[1]["dice"] == pytest.approx(scores[0]["dice"], abs=1e-4)
    assert json.loads((tmp_path / "two" / runs.PROVENANCE).read_text())["hardware"]["processes"] == 2


def test_processes_that_torchrun_started_mine_and_go_on(tmp_path: Path) -> None:
    """Nine patches of validation, of which one process has one more. The learning rate is low, as above."""
    data = pcam(tmp_path / "data", (16, 9, 8))
    keys = {"task": "tumor", "data": str(data), "orientations": 1, "epochs": 1, "steps": 3, "batch": 4}
    keys["learning_rate"] = 1e-3
    path = write(tmp_path / "tumor.toml", **keys, accelerator="cpu", checkpoint_steps=1)
    with path.open("a") as file:
        file.write("[mining]\nepochs = 1\nexamples = 4\n")
    rotopath = ("-m", "rotopath", "train", str(path))
    assert command_line(*rotopath, "--out", str(tmp_path / "one")).returncode == 0
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *rotopath)
    done = command_line(*launch, "--set", "devices=2", "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    one, two = (read_examples(tmp_path / name / MINED) for name in ("one", "two"))
    assert [each.image for each in two] == [each.image for each in one]
    assert [each.score for each in two] == pytest.approx([each.score for each in one], abs=1e-4)
    assert 0 < len(two) <= 4
    assert all(each.score > 0.5 for each in two), "only what was wrong"
    assert validation(tmp_path / "two/baseline") == pytest.approx(validation(tmp_path / "one/baseline"), abs=1e-4)
    assert validation(tmp_path / "two") == pytest.approx(validation(tmp_path / "one"), abs=1e-4)


def test_another_number_of_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RunError, match=r"has started 3 processes, but the recipe's devices times nodes are 1; .*=3"):
        train(Recipe("tumor", str(pcam(tmp_path / "data"))), tmp_path / "run")
    assert not (tmp_path / "run").exists()
