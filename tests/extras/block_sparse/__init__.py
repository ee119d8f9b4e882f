"""Tests of extras/block_sparse."""
