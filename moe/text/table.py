"""Tables in text."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Lines of a table.

    Args:
        rows: cells of each line, the headings first.
        texts: number of first columns that are aligned to the left; the others are numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
