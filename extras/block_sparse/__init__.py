"""Experts whose weights live in blocks, which are pruned and grown on a schedule."""
