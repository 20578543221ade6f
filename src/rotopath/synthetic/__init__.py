"""Make synthetic H&E tissue from a seed, in the layouts of the three benchmarks.

`make_mitosis`, `make_nuclei` and `make_tumor` write datasets in the layouts of AMIDA13, Kumar et al. and PCam, for
tests and demos. Tissue is painted cell by cell as concentrations of hematoxylin and eosin; no pixel is from a patient.
"""

from rotopath.synthetic.lymph_nodes import make_tumor
from rotopath.synthetic.mitoses import make_mitosis
from rotopath.synthetic.organs import make_nuclei

__all__ = ["make_mitosis", "make_nuclei", "make_tumor"]
