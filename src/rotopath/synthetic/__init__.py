"""Synthetic H&E tissue, made from a seed and written in the layouts of the three benchmarks.

In: a folder and a seed. Out: mitosis (AMIDA13), nuclei (Kumar) and tumor (PCam) data sets to try everything on. Tissue
is composed as concentrations of hematoxylin and eosin, cell by cell, and never contains pixels of a patient.
"""

from rotopath.synthetic.lymph_nodes import make_tumor
from rotopath.synthetic.mitoses import make_mitosis
from rotopath.synthetic.organs import make_nuclei

__all__ = ["make_mitosis", "make_nuclei", "make_tumor"]
