"""Train a network as a recipe specifies, and write the trained model to a run folder.

The run folder also gets the *provenance* of the model: software versions, seed, data and hardware of the training.

- `loop`: the function `train` does the whole training. It calls `fit`, which runs the epochs, and resumes from the
  checkpoint in the run folder if there is one.
- `checkpoint`: prepares the run folder, and writes the log, the checkpoints and the hard examples, which are the worst
  mistakes of a baseline network.
- `distributed`: sets up devices and processes.

On a single GPU, `rotopath.nn.graphs` records the passes of the network as a CUDA graph, which makes training faster.
"""

from rotopath.runs import MINED
from rotopath.training.checkpoint import can_resume, read_hard_examples
from rotopath.training.distributed import is_first_process
from rotopath.training.loop import name_folder, train

__all__ = ["MINED", "can_resume", "is_first_process", "name_folder", "read_hard_examples", "train"]
