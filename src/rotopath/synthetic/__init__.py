"""Make datasets of synthetic H&E tissue from a random seed, for tests and demos.

`make_mitosis` writes a dataset in the layout of AMIDA13, `make_nuclei` in the layout of Kumar et al., and `make_tumor`
in the layout of PCam. Here, a layout means the names, folders and formats of the files. All tissue is computed: each
cell is painted as concentrations of hematoxylin and eosin, and no pixel is from a patient.
"""

from rotopath.synthetic.lymph_nodes import make_tumor
from rotopath.synthetic.mitoses import make_mitosis
from rotopath.synthetic.organs import make_nuclei

__all__ = ["make_mitosis", "make_nuclei", "make_tumor"]
