"""Studies: grids of runs, on this machine or on a cluster, and what came of them."""

from rotopath.study.plan import Job, Study, read_study
from rotopath.study.running import run_study

__all__ = ["Job", "Study", "read_study", "run_study"]
