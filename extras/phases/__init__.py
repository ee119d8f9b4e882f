"""Phases of a run, and the positions of its sources where it reads other samples."""
