"""Annotated images: the benchmarks in their official formats."""
