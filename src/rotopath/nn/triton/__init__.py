"""Triton's kernels for a GPU, and their gradients. They need Triton: import them where `gpu` says that they serve."""
