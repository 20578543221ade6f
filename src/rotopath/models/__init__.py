"""Networks: the paper's mitosis, nuclei and tumor models for any N, and the ways from plain CNNs to SE(2) and back."""

from rotopath.models.architecture import Architecture, Stage
from rotopath.models.converting import equivariant
from rotopath.models.freezing import FrozenNetwork, freeze
from rotopath.models.network import Choices, Network, mitosis, nuclei, tumor
from rotopath.models.tables import ARCHITECTURES

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Choices",
    "FrozenNetwork",
    "Network",
    "Stage",
    "equivariant",
    "freeze",
    "mitosis",
    "nuclei",
    "tumor",
]
