"""Print all records of docs as a table: `python -m phalanx.scripts.lab.records`."""

import sys
from collections.abc import Sequence

from phalanx.configs.records import Record, own, published


def table(records: Sequence[Record]) -> str:
    """A Markdown table, one row a record."""
    head = ("model", "system", "GPUs", "dtype", "routing", "data", "tokens/s/GPU", "TFLOP/s/GPU")
    rows = [head, ("---",) * 6 + ("---:",) * 2]
    for r in records:
        rates = (f"{r.tokens_per_second_per_gpu:,.0f}", f"{r.tflops_per_gpu:.0f}")
        model = r.model + ("*" if r.overrides else "")
        rows.append((model, r.system, r.hardware, r.dtype, r.routing, r.data, *rates))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    everything = [*published(), *own().values()]
    sys.stdout.write(table(everything) + "\n\n* with changes, which the record names\n")
