"""Matrices of test cases, of which a few pairs are tested by default."""

import itertools

import pytest


def matrix(names: tuple[str, str], *default: tuple[object, object]) -> pytest.MarkDecorator:
    """Parametrize by these pairs, and by all other pairs of their values as slow tests."""
    values = (dict.fromkeys(column) for column in zip(*default, strict=True))
    others = [pair for pair in itertools.product(*values) if pair not in default]
    slow = (pytest.param(*pair, marks=pytest.mark.slow) for pair in others)
    return pytest.mark.parametrize(names, [*default, *slow])
