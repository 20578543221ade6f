"""Networks: build the paper's networks for any N, convert plain CNNs to SE(2,N), and freeze networks to plain CNNs."""

from rotopath.models.architecture import ARCHITECTURES, Architecture, Choices, Stage
from rotopath.models.convert import equivariant
from rotopath.models.freeze import FrozenNetwork, freeze
from rotopath.models.network import Network, mitosis, nuclei, tumor
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
