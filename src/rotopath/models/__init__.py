"""Networks: the paper's mitosis, nuclei and tumor models for any number of orientations, and plain CNNs of them."""

from rotopath.models.architecture import ARCHITECTURES, Architecture, Stage
from rotopath.models.freezing import FrozenNetwork, freeze
from rotopath.models.network import Network, mitosis, nuclei, tumor

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "FrozenNetwork",
    "Network",
    "Stage",
    "freeze",
    "mitosis",
    "nuclei",
    "tumor",
]
