"""Compiling kernels, keeping them on disk, and launching them with torch tensors."""
