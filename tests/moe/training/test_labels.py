"""Every label of a global batch weighs the same, however the batch is cut and dealt.

Documents are of very different lengths, and some rows have no label at all: means of micro-batches
or ranks would differ by tens of percent.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.test_layouts import DEEPSEEK, EP1, TINY
from tests.support.runs import write_corpus
from tests.support.training import Trained, trained

pytestmark = pytest.mark.dist

MODELS = {
    # The losses over a micro-batch change with it by their meaning.
    "tiny": [*TINY, "model.moe.router.aux_loss=0", "model.layers=4"],
    "deepseek": [*DEEPSEEK, "model.moe.router.seq_aux_loss=0", "model.mtp_layers=2"],
}
DP2, DP4 = (2, EP1), (4, EP1)
TP2, CP2, PP2 = ((2, {f"parallel.{kind}": 2} | EP1) for kind in ("tensor", "context", "pipeline"))
VP2 = (2, PP2[1] | {"parallel.virtual_pipeline": 2})
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "micro_4": (1, {"data.micro_batch": 4}),
    "micro_16": (1, {"data.micro_batch": 16}),
    "dp2": DP2,
    "dp2_micro_8": (2, EP1 | {"data.micro_batch": 8}),
    "dp4_micro_4": (4, EP1 | {"data.micro_batch": 4}),
    "cp2": CP2,
    "cp2_micro_4": (2, CP2[1] | {"data.micro_batch": 4}),
    "pp2": PP2,
    "pp2_micro_4": (2, PP2[1] | {"data.micro_batch": 4}),
    "vp2": VP2,
    "vp2_micro_4": (2, VP2[1] | {"data.micro_batch": 4}),
    "tp2": TP2,
    "tp2_micro_4": (2, TP2[1] | {"data.micro_batch": 4}),
    "cp2_dp2": (4, CP2[1] | {"data.micro_batch": 2}),
    "cp2_pp2": (4, CP2[1] | PP2[1] | {"data.micro_batch": 2}),
}
if __name__ == "__main__":
    import tempfile, sys
    folder = Path(tempfile.mkdtemp())
    lengths = [1] * 40 + [3, 2, 90, 1, 1, 5, 30, 2, 4, 1, 17, 8, 1, 1, 60, 2]
    g = torch.Generator().manual_seed(1)
    docs = [torch.randint(0, 64, (n,), generator=g).tolist() for n in lengths * 4]
    prefix = write_corpus(folder / "text", docs)
    data = {"data.source": "indexed", "data.blend": [prefix], "data.split": "90,10", "data.cache": str(folder / "cache"),
            "data.document_mask": True, "data.global_batch": 16, "run.steps": 1}
    for name in MODELS:
        ref = None
        for lay in [(1, {}), *LAYOUTS.values()]:
            if name == "deepseek" and "parallel.virtual_pipeline" in lay[1]: continue
            t = trained(lay[0], MODELS[name], data | lay[1])
            ref = ref or t
            e = lambda k: max(abs(a / b - 1) for a, b in zip(t.series(k), ref.series(k)))
            w = max(((t.after[k] - ref.after[k]).norm() / ref.after[k].norm()).item() for k in ref.after if ref.after[k].norm())
            print(name, lay, t.series("loss"), t.series("grad_norm"), "%.1e %.1e %.1e %.1e mtp %.1e" % (e("loss"), e("grad_norm"), w, abs(t.valid_loss/ref.valid_loss-1), e("mtp_loss") if "mtp_loss" in t.steps[0] else 0), t.steps[0].get("labels"))
