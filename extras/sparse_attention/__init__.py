"""Sparse attention: a lightning indexer chooses the keys of latent attention (arXiv 2512.02556)."""
