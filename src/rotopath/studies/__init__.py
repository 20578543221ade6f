"""Studies: grids of runs, on this machine or on a cluster, and their results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rotopath.recipe import RecipeError
from rotopath.studies.plan import Job, Study, read_study
from rotopath.studies.schedule import JobState, Watch, count_at_once, here, on_cluster, run_study

__all__ = ["Job", "JobState", "Study", "read_study", "run_study", "study"]


def study(
    plan: Study | Path | str,
    out: Path | str | None = None,
    changes: Sequence[str] = (),
    at_once: int | None = None,
    cluster: str | None = None,
    watch: Watch = lambda _states: None,
) -> Mapping[Job, JobState]:
    """Run a grid of trainings and evaluations; what is done is skipped, what was cut off is resumed.

    The plan is a TOML file, to which `changes` such as "tumor.seed=[0]" are applied. Runs go to the folder `out`, named
    after the file when left out; `at_once` of them side by side, or on a Dask `cluster`: "local", "slurm", an address.
    """
    if changes and isinstance(plan, Study):
        raise RecipeError("Changes are for studies in files; change the study itself.")
    chosen = plan if isinstance(plan, Study) else read_study(Path(plan), changes)
    folder = Path(out) if out else Path("runs") / ("study" if isinstance(plan, Study) else Path(plan).stem)
    count = at_once or count_at_once()
    with here(count) if cluster is None else on_cluster(cluster, count) as submit:
        return run_study(chosen, folder, submit, watch)
