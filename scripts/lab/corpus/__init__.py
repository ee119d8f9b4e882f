"""Corpora of text that is inside packages of PyPI and Debian (`make_corpus`)."""
