"""The process of one job, as `running.run_process` starts it."""

import sys
from pathlib import Path

from rotopath.studies.job import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
