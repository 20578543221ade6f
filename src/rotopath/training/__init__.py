"""Train a network as a recipe specifies, and write the trained model and its provenance to a run folder.

`loop` contains `train`, which does the whole training, and `fit`, which runs the epochs. To resume an interrupted
training, `fit` loads the checkpoint in the run folder. `checkpoint` prepares the run folder and writes the log and the
checkpoints. `mining` finds hard examples, `distributed` sets up devices and processes, and `graphs` records CUDA
graphs.
"""

from rotopath.training.distributed import is_first_process
from rotopath.training.loop import name_folder, train
from rotopath.training.mining import MINED, read_hard_examples

__all__ = ["MINED", "is_first_process", "name_folder", "read_hard_examples", "train"]
