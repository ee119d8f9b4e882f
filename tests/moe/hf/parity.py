"""How far logits of small models of all families are from those of transformers, as a record.

    python -m tests.moe.hf.parity docs/measured/parity_transformers.json

The models are those of tests/moe/hf/models.py, saved by transformers with random values, imported,
and run by one CPU process. `fp32` is the largest relative error of a token's logits. `bf16` is the
error in bf16 of all logits, `transformers_bf16` that of transformers' own, both against fp32.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from tests.moe.hf import models
from tests.moe.hf.models import MODELS, imported, our_logits, words
from tests.moe.hf.test_models import errors
from tests.support.distributed import run_distributed


def measured(name: str, folder: Path) -> dict[str, float]:
    """The errors of a family's model."""
    found, ids = {}, words()
    for dtype in (torch.float32, torch.bfloat16):
        at, wide = folder / str(dtype), dtype == torch.float32
        model = models.theirs(name, dtype)
        model.save_pretrained(at / "theirs")
        cfg = imported(at / "theirs", at / "step", "fp32" if wide else "bf16")
        ((ours, _),) = run_distributed(our_logits, 1, cfg, at / "step", ids)
        with torch.no_grad():
            theirs = model(ids).logits.float()
            exact = model.float()(ids).logits
        if wide:
            found["fp32"] = float(errors(ours, exact).max())
        else:
            found["bf16"] = float((ours - exact).norm() / exact.norm())
            found["transformers_bf16"] = float((theirs - exact).norm() / exact.norm())
    return {key: float(f"{value:.2e}") for key, value in found.items()}


def main(path: Path) -> None:
    errors = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            errors[name] = measured(name, Path(folder))
        print(name, errors[name], flush=True)
    record = {
        "command": f"python -m tests.moe.hf.parity {path}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "errors": errors,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
