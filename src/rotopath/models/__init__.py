"""Networks: the paper's mitosis, nuclei and tumor models for any N, and the ways from plain CNNs to SE(2) and back."""

from rotopath.models.architecture import ARCHITECTURES, Architecture, Stage
from rotopath.models.convert import equivariant
from rotopath.models.freeze import FrozenNetwork, freeze
from rotopath.models.network import Choices, Network, mitosis, nuclei, tumor
from rotopath.models.protocols import DenseNetwork, Geometry, WindowNetwork, make_dense
from rotopath.models.registry import build_network, list_networks
from rotopath.pretrained import list_pretrained

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Choices",
    "DenseNetwork",
    "FrozenNetwork",
    "Geometry",
    "Network",
    "Stage",
    "WindowNetwork",
    "build_network",
    "equivariant",
    "freeze",
    "list_networks",
    "list_pretrained",
    "make_dense",
    "mitosis",
    "nuclei",
    "tumor",
]
