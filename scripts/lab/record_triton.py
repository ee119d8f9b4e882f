"""Run train.py and append the launches of our Triton kernels to a table of them.

    python -m torch.distributed.run --standalone --nproc-per-node 1 scripts/lab/record_triton.py \
        TABLE OVERRIDE ...

TABLE gets a line for each launch that it lacks (kernels.triton_table says of what); the first rank
writes. Needs a Hopper GPU.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def record(table: Path) -> None:
    """Append from now on what Triton compiles, or loads, for a launch."""
    from triton import knobs

    from phalanx.kernels.triton_table import described

    known = set(table.read_text().splitlines()) if table.exists() else set[str]()

    def compiled(*, compile: dict[str, Any], **_: Any) -> None:
        line = described(json.loads(compile["specialization_data"]))
        if line and line not in known:
            known.add(line)
            with table.open("a") as file:
                file.write(line + "\n")

    knobs.runtime.jit_post_compile_hook = compiled


def main(argv: list[str]) -> int:
    if len(argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") == "0":
        record(Path(argv[0]))
    from phalanx.train import main as train

    return train(argv[1:], ends_process=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
