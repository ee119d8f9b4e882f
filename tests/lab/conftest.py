"""Fixtures of several tests of the laboratory."""

from tests.scripts.conftest import figures

__all__ = ["figures"]
