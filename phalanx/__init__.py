"""Phalanx: mixture-of-experts pretraining on Megatron-Core. All imports begin with this package.

Its folders are links to those of the repository, so that a checkout, a wheel and an editable
installation have the same names, and `kernels`, which is also a package of Hugging Face, stays
theirs: without an `__init__.py` the folders beside this one never come before an installed package.
"""

__version__ = "0.1.0"
