"""What a transport delivers to the experts of a rank, and takes back from them.

Legend: D hidden, N received rows.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from kernels.plan import Plan


class Received(NamedTuple):
    """What a rank's experts work on."""

    rows_ND: Tensor
    """Received tokens, rank-major. Rows that `plan` does not name are unspecified: never read."""
    plan: Plan
    """Which of the rows each local expert reads."""
    ready: Tensor | None = None
    """Device flags that a kernel must wait on before it reads rows, or None: all rows are there."""
    route: Any = None
    """The transport's own: what the way back needs."""
    saving: Callable[[], AbstractContextManager] = nullcontext
    """Context for what saves rows for the backward pass: rows may be in a place that is reused."""
