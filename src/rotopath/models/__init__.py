"""Networks: the paper's mitosis, nuclei and tumor models for any number of orientations, and plain CNNs of them."""

from rotopath.models.architecture import ARCHITECTURES, PRESETS, Architecture, Stage
from rotopath.models.freezing import FrozenNetwork, freeze
from rotopath.models.network import Choices, Network, mitosis, nuclei, tumor

__all__ = [
    "ARCHITECTURES",
    "PRESETS",
    "Architecture",
    "Choices",
    "FrozenNetwork",
    "Network",
    "Stage",
    "freeze",
    "mitosis",
    "nuclei",
    "tumor",
]
