"""Time of a step and its parts."""
