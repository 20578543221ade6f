"""Run functions on the workers of a Dask cluster, and predict slides there. No other module uses Dask.

`connect` connects to a cluster and yields its `Workers`. `predict_on_cluster` yields the outcome of each slide as soon
as the slide is finished. Every worker needs an installation of rotopath and access to the same shared folders.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rotopath.inference.predict_files import (
    DiskFullError,
    FileOptions,
    OutcomeState,
    SlideOutcome,
    assign_folders,
    find_region_files,
    predict_files,
)
from rotopath.inference.slide_pass import Model
from rotopath.writing import remove_leftovers

JOIN_WITHIN_S = 600  # longest wait for the first worker, in seconds
CONNECT_WITHIN_S = 30  # longest wait for the scheduler, in seconds


class ClusterError(ValueError):
    """The requested cluster does not exist or is not configured. The message is one sentence for the user."""


@dataclass(frozen=True)
class Workers:
    """The workers of a connected cluster."""

    client: Any  # Dask client
    resources: dict[str, float] | None  # {"GPU": fraction that one call reserves}; None if no worker declares GPUs

    def submit(self, function: Callable[..., object], *arguments: object, retries: int = 0) -> Any:
        """Call a function on a worker, and return a Dask future of the result.

        A call that raises an error is repeated up to `retries` times. If the worker process dies during the call, Dask
        repeats the call on another worker. If several workers die during this call, the future raises `KilledWorker`.
        """
        # pure=False: Dask must not reuse the result of an earlier call with the same arguments.
        return self.client.submit(function, *arguments, pure=False, retries=retries, resources=self.resources)


@contextmanager
def connect(cluster: str, at_once: int) -> Iterator[Workers]:
    """Connect to a Dask cluster, wait for its first worker, and yield the workers.

    `cluster` is "local" to start `at_once` workers on this machine, "slurm" to start `at_once` SLURM jobs (each is a
    worker), or the address of a running scheduler. If workers declare GPUs (`dask worker --resources GPU=1`), up to
    `at_once` calls of `Workers.submit` share a GPU. Raises ClusterError for any other `cluster`, and if SLURM jobs are
    not configured.
    """
    from distributed import Client

    with _start_cluster(cluster, at_once) as address, Client(address, timeout=CONNECT_WITHIN_S) as client:
        client.wait_for_workers(1, JOIN_WITHIN_S)
        workers = client.scheduler_info()["workers"].values()
        have_gpus = any(worker["resources"].get("GPU") for worker in workers)
        # Slightly less than 1 / at_once: otherwise rounding could leave no room on the GPU for the last call.
        yield Workers(client, {"GPU": 1 / at_once - 1e-6} if have_gpus else None)


def predict_on_cluster(
    make_model: Callable[[], Model],
    slides: Sequence[Path],
    out: Path,
    options: FileOptions,
    cluster: str,
    at_once: int,
) -> Iterator[SlideOutcome]:
    """Predict slides on the workers of a cluster, and yield the outcome of each slide as soon as it is finished.

    The files written to `out` are the same as those of `predict_files`. `cluster` and `at_once` are the arguments of
    `connect`. For each slide, a worker calls the function `make_model`. It must be picklable, such as
    `functools.partial(rotopath.runs.prepare_model, "tumor-pcam-n8")`. If the worker process dies, another worker
    predicts the slide. If this happens several times for a slide, the slide is reported as failed.
    """
    from distributed import as_completed

    folders = assign_folders(slides, out)
    regions = find_region_files(slides, options)
    try:
        with connect(cluster, at_once) as workers:
            futures = {}
            for path in slides:
                # Paths are absolute, because a worker may have a different current folder. If a slide is a symbolic
                # link, the link is not resolved, because the folder of results has the name of the link.
                slide_options = replace(options, roi=regions[path].roi, exclude=regions[path].exclude)
                # Dask's workers are daemonic processes, which must not start other processes.
                slide_options = replace(slide_options, slide=replace(options.slide, workers=0))
                future = workers.submit(_predict_slide, make_model, path.absolute(), out.resolve(), slide_options)
                futures[future] = path
            for future in as_completed(futures):
                path = futures[future]
                state, reason = _collect(future)
                yield SlideOutcome(path, folders[path], state, reason)
    finally:  # workers are killed after an interrupt, or may have been killed for lack of memory
        for folder in folders.values():
            remove_leftovers(folder)


def _predict_slide(make_model: Callable[[], Model], path: Path, out: Path, options: FileOptions) -> SlideOutcome:
    """Predict one slide, and return its outcome. Runs on a worker."""
    *_, outcome = predict_files(make_model(), [path], out, options)  # the last, if another process was predicting it
    return outcome


def _collect(future: Any) -> tuple[OutcomeState, str]:
    """Wait for the Dask future of a `SlideOutcome`, and return its state and reason ("" unless the slide failed)."""
    try:
        outcome: SlideOutcome = future.result()
    except DiskFullError:
        raise  # ends the prediction of all slides
    except Exception as error:  # raised by the prediction or by Dask
        return "failed", describe_failure(error)
    return outcome.state, outcome.reason


def describe_failure(error: Exception) -> str:
    """Describe the error of a failed call on a worker in one sentence, for the user."""
    from distributed import KilledWorker

    if isinstance(error, KilledWorker):
        count = error.allowed_failures + 1
        return f"the worker process was killed {count} times, perhaps for lack of memory; use workers with more memory."
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _start_cluster(cluster: str, at_once: int) -> Iterator[Any]:
    """Start a local or SLURM cluster and yield the cluster, or yield `cluster` if it is an address. See `connect`."""
    if cluster == "local":
        from distributed import LocalCluster

        # Dask's log messages about errors are silenced, because the results of the calls report the errors.
        options = {"dashboard_address": "127.0.0.1:0", "silence_logs": logging.CRITICAL}
        try:
            started = LocalCluster(n_workers=at_once, threads_per_worker=1, **options)
        except RuntimeError as error:  # a worker process was killed while it started
            raise ClusterError(
                f"The workers did not start ({error}); run the same command again, or with fewer workers."
            ) from None
        with started as local:
            yield local
    elif cluster == "slurm":
        from dask_jobqueue import SLURMCluster

        try:
            jobs = SLURMCluster()  # configured in Dask's jobqueue.yaml
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise ClusterError(
                f"SLURM jobs are not configured ({reason}); complete the section jobqueue.slurm of Dask's file "
                f"jobqueue.yaml."
            ) from None
        with jobs as slurm:
            slurm.scale(jobs=at_once)
            yield slurm
    elif "://" in cluster:
        yield cluster
    else:
        raise ClusterError(
            f"There is no cluster {cluster!r}; choose 'local', 'slurm', or the address of a Dask scheduler, such as "
            f"tcp://10.0.0.1:8786."
        )
