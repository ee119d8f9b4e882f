"""Typed configuration: schema.py holds every knob, the YAML groups beside it only set values."""
