"""Networks: the paper's mitosis, nuclei and tumor models for any number of orientations."""

from rotopath.models.architecture import ARCHITECTURES, Architecture, Stage
from rotopath.models.network import Network, mitosis, nuclei, tumor

__all__ = ["ARCHITECTURES", "Architecture", "Network", "Stage", "mitosis", "nuclei", "tumor"]
