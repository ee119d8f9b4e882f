"""Type of the answer to "why can this not run here?"."""

Refusal = str | None
"""A reason, in one line that can follow `cannot run:` or `not NAME:`; None: it can run."""
