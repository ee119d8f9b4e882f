"""Formatting of names, numbers and tables."""
