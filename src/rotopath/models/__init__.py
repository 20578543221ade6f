"""Build networks with N orientations, convert plain CNNs to such networks, and freeze such networks to plain CNNs.

`mitosis`, `nuclei` and `tumor` build the networks of the paper (Lafarge et al., arXiv:2002.08725). `build_network`
builds a network by name: one of these three, a well-known network such as "resnet18", or a network of the user.
`equivariant` converts a plain CNN to its SE(2,N) counterpart, whose features have N orientations. `freeze` converts an
SE(2,N) network to a plain CNN with the same outputs. `make_dense` adapts a network to images of many sizes.
"""

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
