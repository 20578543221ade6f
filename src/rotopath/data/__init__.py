"""Annotated images: outlines of nuclei, and the splits and regimes of the benchmarks."""
