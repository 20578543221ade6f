"""Studies: a study is a set of trainings and evaluations, planned in one TOML file.

`plan` reads the file, `jobs` runs the study on this machine or on a cluster, and `results` reads the results.
"""

# `jobs` is not imported here, because it is also run as a program (`python -m rotopath.studies.jobs`). Python warns if
# the package has already imported the module that it runs as a program.
from rotopath.studies.plan import Job, Study, read_study

__all__ = ["Job", "Study", "read_study"]
