"""Studies: a study is a set of trainings and evaluations that one TOML file describes.

`plan` reads the TOML file, `jobs` runs the study on this machine or on a cluster, and `results` reads the results.
"""

# `jobs` is not imported here, because it is also run as a program: `python -m rotopath.studies.jobs`. Python first
# imports this package, and then warns if the package has already imported `jobs`.
from rotopath.studies.plan import Job, Study, read_study

__all__ = ["Job", "Study", "read_study"]
