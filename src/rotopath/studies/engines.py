"""Where the jobs of a study run: in processes on this machine, or on the workers of a Dask cluster.

In: how many at once, or a cluster. Out: a function that takes a job and gives a future of it.
"""

import os
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from rotopath.data.batches import count_cores
from rotopath.model_file import RunError
from rotopath.studies.running import TRIES, Future, Submit, run_process

ON_A_GPU = 12  # small trainings leave most of a GPU idle; more were not tried (benchmarks/together.py)
JOIN_WITHIN_S = 600  # the first worker of a cluster


def count_at_once() -> int:
    """How many jobs run side by side on this machine if nobody says so."""
    gpus = torch.cuda.device_count()
    return max(1, min(gpus * ON_A_GPU, count_cores() * 3 // 4)) if gpus else max(1, count_cores() // 4)


@contextmanager
def here(at_once: int) -> Iterator[Submit]:
    """So many processes on this machine, spread over its GPUs; each has its share of the cores."""
    gpus = torch.cuda.device_count()
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(at_once):
        slots.put(slot)

    mine = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or list(
        map(str, range(gpus))
    )

    def run(recipe: str, rotations: int, cwd: str) -> str:
        slot = slots.get()
        share = str(max(1, count_cores() // at_once))
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", share)}
        if gpus > 1:
            environment["CUDA_VISIBLE_DEVICES"] = mine[slot % gpus]
        try:
            return run_process(recipe, rotations, cwd, environment)
        finally:
            slots.put(slot)

    pool = ThreadPoolExecutor(at_once)
    try:
        yield lambda *job: pool.submit(run, *job)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def on_cluster(cluster: str, at_once: int) -> Iterator[Submit]:
    """A Dask cluster: the address of its scheduler, `local` for so many workers here, or `slurm` for so many jobs.

    Where workers declare GPUs (`--resources GPU=1`), each of them takes `at_once` jobs a GPU if an address is given.
    """
    with connected(cluster, at_once) as (client, resources):

        def submit(*job: object) -> Future:
            # A new key each time: a job that failed is to run again, and not to be looked up.
            future: Future = _Cancellable(
                client.submit(run_process, *job, pure=False, retries=TRIES, resources=resources)
            )
            return future

        yield submit


@contextmanager
def connected(cluster: str, at_once: int) -> Iterator[tuple[Any, dict[str, float] | None]]:
    """A client of a cluster that has workers, and what a job takes of a worker's GPUs, if they have some."""
    from distributed import Client

    with _cluster(cluster, at_once) as address, Client(address, timeout=30) as client:
        client.wait_for_workers(1, JOIN_WITHIN_S)
        workers = client.scheduler_info()["workers"].values()
        gpus = any(worker["resources"].get("GPU") for worker in workers)
        yield client, {"GPU": 1 / at_once - 1e-6} if gpus else None  # so that rounded shares add up to one


class _Cancellable:
    """A Dask future that can say, as others do, that a task was under way and goes on for now."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def done(self) -> bool:
        return bool(self._future.done())

    def result(self) -> object:
        return self._future.result()

    def cancel(self) -> bool:
        self._future.cancel()
        return False


@contextmanager
def _cluster(cluster: str, at_once: int) -> Iterator[Any]:
    if cluster == "local":
        from distributed import LocalCluster

        with LocalCluster(n_workers=at_once, threads_per_worker=1, dashboard_address=":0") as local:
            yield local
    elif cluster == "slurm":
        from dask_jobqueue import SLURMCluster

        try:
            jobs = SLURMCluster()  # its settings are in Dask's jobqueue.yaml
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise RunError(f"Dask's jobqueue.yaml does not describe SLURM jobs yet: {reason}") from None
        with jobs as slurm:
            slurm.scale(jobs=at_once)
            yield slurm
    elif "://" in cluster:
        yield cluster
    else:
        raise RunError(
            f"There is no cluster {cluster!r}; give 'local', 'slurm', or an address such as tcp://10.0.0.1:8786."
        )
