"""A run whose expert rows overflow repeatedly is bitwise equal to one without overflow."""

import contextlib
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from phalanx.moe.router.balance import routers
from tests.support.row_overflow import EVERY, overflow_sometimes
from tests.support.runs import DEEPSEEK, GPT_OSS, SMALL, exact, records, run
from tests.support.training import digest

pytestmark = pytest.mark.dist

STEPS = 12
MODELS = {
    "tiny_gpt_oss": GPT_OSS,
    "tiny_deepseek": [*DEEPSEEK, "model.moe.router.bias_rate=0.01"],
}
TRAINING = [
    *[*SMALL, "data=synthetic", f"run.steps={STEPS}", "run.save_interval=-1"],
    *["run.eval_interval=11", "run.eval_batches=2", "optim.decay_steps=40"],
    # The balanced load is two tiles, of which a tenth of it is one.
    *["data.sequence_length=32", "data.micro_batch=2", "data.global_batch=4"],
]


@contextlib.contextmanager
def followed(rank: int, *, tight: bool) -> Iterator[list[str]]:
    """Digests of all parameters and of the routers' buffers after the last step."""
    from phalanx.moe.run.trainer import Trainer

    original, seen = Trainer.fit, list[str]()

    def fit(self: Any) -> None:
        original(self)
        modules = self.job.engine.modules
        tensors = [p for module in modules for p in module.parameters()]
        tensors += [buffer for router in routers(modules) for buffer in router.buffers()]
        seen.extend(map(digest, tensors))

    overflows = overflow_sometimes() if tight else contextlib.nullcontext()
    with mock.patch.object(Trainer, "fit", fit), overflows:
        yield seen


@pytest.mark.parametrize(
    "model", ["tiny_deepseek", pytest.param("tiny_gpt_oss", marks=pytest.mark.slow)]
)
def test_overflows_every_ten_steps_change_nothing(model: str, tmp_path: Path) -> None:
    seen, printed = {}, {}
    for tight in (True, False):
        more = ["parallel.capacity_factor=8", f"run.dir={tmp_path}", f"run.name={tight}"]
        ranks = run(2, [*TRAINING, *MODELS[model], *more], partial(followed, tight=tight))
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
        seen[tight], printed[tight] = [rank.seen for rank in ranks], ranks[0].out
        assert all(len(rank.seen) > 20 for rank in ranks)
    often, never = (records(tmp_path / str(tight)) for tight in (True, False))
    assert exact(often) == exact(never) and seen[True] == seen[False]
    assert len({r["loss"] for r in never}) == STEPS
    for key in ("load_max", "dead_experts", "mtp_loss", "valid_loss"):
        assert [r.get(key) for r in often] == [r.get(key) for r in never]

    # All that is told of it: counts, the factor in use, and a line for each time.
    reruns = [r["reruns"] for r in often]
    before = [0, *reruns]
    assert all(reruns[n] > before[n] for n in range(0, STEPS, EVERY))
    assert f"reruns {reruns[-1]}" in printed[True] and "reruns" not in printed[False]
    assert {r["reruns"] for r in never} == {0} and {r["capacity_factor"] for r in never} == {8.0}
    lines = (tmp_path / "True/metrics.jsonl").read_text().splitlines()
    events = [e for line in lines if "experts needed" in (e := json.loads(line).get("event", ""))]
    assert len(events) == max(reruns) == reruns[-1]
    reported = [
        re.fullmatch(
            r"experts needed ([\d.]+) x the balanced rows: "
            r"(step|the validation after step) (\d+) was run again with capacity_factor ([\d.]+)",
            event,
        )
        for event in events
    ]
    for actual in reported:
        assert actual and 1 < float(actual[1]) < float(actual[4])
        if actual[2] == "step":
            assert often[int(actual[3]) - 1]["capacity_factor"] == pytest.approx(
                float(actual[4]), abs=0.005
            )
