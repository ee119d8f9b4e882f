"""Drawing to files."""

from typing import Any


def pyplot() -> Any:
    """matplotlib's, without a display; ValueError if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install -e '.[dev]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
