"""Compile kernels, cache them on disk, and launch them with torch tensors."""
