"""Largest attention logits of a step, against all logits in fp64 and on all layouts."""

import contextlib
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.configs.knobs import put
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.validate import validate
from tests.support.distributed import run_distributed
from tests.support.scheduling import mostly_slow, slow
from tests.support.training import Trained, trained

SMALL = [
    *["run.device=cpu", "precision=fp32", "model.layers=2", "model.hidden=32", "data=synthetic"],
    *["model.vocab_size=64", "model.dense_ffn=48", "model.moe.ffn=16", "model.init_std=0.3"],
    *["data.sequence_length=16", "data.micro_batch=1", "data.global_batch=4", "run.seed=3"],
    *["optim.warmup_steps=0", "optim.schedule=constant", "run.save_interval=-1"],
    "parallel.capacity_factor=16",
]
TINY = ["model=tiny", *SMALL, "model.attention.head_dim=8"]
GPT_OSS = ["model=tiny_gpt_oss", *SMALL, "model.attention.head_dim=8", "model.attention.window=6"]
DEEPSEEK = ["model=tiny_deepseek", *SMALL]
QWEN3_NEXT = ["model=tiny_qwen3_next", *SMALL, "model.layers=4", "model.attention.head_dim=8"]
DOCUMENTS = [
    *["data=embedded", "model.vocab_size=256", "data.document_mask=true", "data.micro_batch=2"],
    "data.sequence_length=64",
]
EVERY = {"optim.max_logit_every": 1}

# --- against every logit --------------------------------------------------------------------------


@contextmanager
def trainer_of(cfg: Config) -> Iterator[Any]:
    """Inside a rank."""
    from phalanx.parallel.fault.signals import StopSignal
    from phalanx.parallel.runtime import start

    runtime = start(seed=cfg.run.seed, timeout=60, deterministic=False)
    from phalanx.moe.run.start import make_trainer

    with tempfile.TemporaryDirectory() as cfg.run.dir, contextlib.redirect_stdout(io.StringIO()):
        yield make_trainer(cfg, runtime, StopSignal())


def configured(overrides: list[str], changes: dict[str, Any], world: int = 1) -> Config:
    cfg = load(overrides)
    for knob, value in changes.items():
        put(cfg, knob, value)
    validate(cfg, world)
    return cfg


def _rows(trainer: Any) -> dict[Any, int]:
    """Row of the table of each core attention of one process, by the name of its module."""
    found = {}
    for name, module in trainer.job.engine.modules[0].named_modules():
        if name.endswith("core_attention"):
            number = int(name.split("layers.")[1].split(".")[0])
            found[module] = number + (2 if name.startswith("mtp.") else 0)
    return found


def _all_logits(query: Tensor, key: Tensor, core: Any, positions: Tensor | None) -> Tensor:
    """[H]: the largest of what queries see, fp64."""
    q, k = (x.detach().double().permute(1, 2, 0, 3) for x in (query, key))
    logits = core.scale * q @ k.repeat_interleave(q.size(1) // k.size(1), 1).transpose(-1, -2)
    i = torch.arange(q.size(2))
    ahead = i[:, None] - i
    unseen = (ahead < 0) | (ahead >= core.window if core.window else False)
    if positions is not None:
        document = (positions == 0).cumsum(0)
        unseen |= document[:, None] != document
    return logits.masked_fill(unseen, float("-inf")).amax((0, 2, 3))


def _measured(cfg: Config) -> tuple[Tensor, Tensor, Tensor, int]:
    """The table of a step, that of all logits, what the host was told, and passes over logits."""
    from phalanx.kernels.core_attention import core as kernels
    from phalanx.moe.model.attention import CoreAttention
    from phalanx.moe.router import balance

    with trainer_of(cfg) as trainer:
        tops, rows, passes = trainer.job.max_logits, _rows(trainer), []
        found = torch.full(tops.most_LH.shape, float("-inf"), dtype=torch.float64)
        forward, raise_max_logits = CoreAttention.forward, kernels.raise_max_logits

        def active_max_logit(
            self: Any, query: Tensor, key: Tensor, *given: Any, **named: Any
        ) -> Tensor:
            packed = named.get("packed_seq_params")
            positions = None if packed is None else packed.position_T
            row = found[rows[self]]
            torch.maximum(row, _all_logits(query, key, self, positions), out=row)
            return forward(self, query, key, *given, **named)

        def counting(*given: Any, **named: Any) -> None:
            passes.append(1)
            raise_max_logits(*given, **named)

        CoreAttention.forward, kernels.raise_max_logits = active_max_logit, counting
        try:
            batches, before = trainer.data.loader.next_step(), balance.snapshot([])
            trainer.job.engine.train()
            totals = trainer.compute(batches, before, measure_logits=True)
        finally:
            CoreAttention.forward, kernels.raise_max_logits = forward, raise_max_logits
        table = tops.most_LH.clone()
        trainer.job.engine.eval()
        with torch.no_grad():
            assert not len(trainer.compute(batches, before, forward_only=True).max_logits)
        assert torch.equal(tops.most_LH, table), "validation counts"
        return table, found, totals.max_logits, len(passes)


@pytest.mark.parametrize(
    ("overrides", "layers"),
    [
        (GPT_OSS, 2),
        ([*TINY, "model.attention.qk_norm=true", "kernels.attention=reference"], 2),
        (DEEPSEEK, 3),
        ([*GPT_OSS, *DOCUMENTS], 2),
        ([*DEEPSEEK, *DOCUMENTS, "model.moe.router.seq_aux_loss=0"], 3),
    ],
    ids=["window and sinks", "normalised", "latent", "documents", "latent documents"],
)
def test_every_head_of_a_step(overrides: list[str], layers: int) -> None:
    """Logits of four micro-batches, or two of two sequences."""
    cfg = configured(overrides, EVERY)
    ((table, want, told, passes),) = run_distributed(_measured, 1, cfg)
    assert want.isfinite().all() and len(want) == layers
    torch.testing.assert_close(table.double(), want, rtol=2e-6, atol=2e-6)
    assert torch.equal(told, table.amax(1).double())
    assert passes == layers * cfg.data.global_batch // cfg.data.micro_batch


@mostly_slow("what", ["full", "attention"], "full")
def test_what_is_computed_again_is_not_measured_again(what: str) -> None:
    plain, again = (
        run_distributed(_measured, 1, configured(DEEPSEEK, EVERY | {"run.recompute": how}))[0]
        for how in ([], [what])
    )
    assert torch.equal(plain[0], again[0]) and plain[3] == again[3]


# --- layouts --------------------------------------------------------------------------------------

EP1, EP2, TP2 = {"parallel.expert": 1}, {"parallel.expert": 2}, {"parallel.tensor": 2}
CP2, PP2 = {"parallel.context": 2}, {"parallel.pipeline": 2}
STEPS = {"run.steps": 1, "optim.lr": 1e-3, "optim.eps": 1e-2}
MODELS = {"gpt_oss": GPT_OSS, "deepseek": DEEPSEEK, "one group": [*TINY, "model.layers=4"]}


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    return {name: trained(1, model, STEPS | EVERY | _more(name)) for name, model in MODELS.items()}


def _more(name: str) -> dict[str, Any]:
    return {"model.attention.kv_heads": 1} if name == "one group" else {}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [
        ("gpt_oss", 2, CP2 | EP2 | {"kernels.attention": "reference"}),
        ("one group", 2, PP2 | {"parallel.virtual_pipeline": 2}),
        ("deepseek", 2, TP2 | EP2),
        *slow(("deepseek", 4, CP2 | TP2 | EP2)),
        *slow(("gpt_oss", 2, EP1), ("gpt_oss", 2, CP2 | EP1), ("one group", 2, TP2 | EP1)),
        *slow(("deepseek", 2, EP2), ("deepseek", 2, TP2 | EP1), ("deepseek", 2, PP2)),
        *slow(("gpt_oss", 2, EP2 | {"kernels.backend": "megatron"})),
    ],
)
def test_layouts_measure_the_same(
    name: str, world: int, layout: dict[str, Any], alone: dict[str, Trained]
) -> None:
    many, one = trained(world, MODELS[name], STEPS | EVERY | _more(name) | layout), alone[name]
    for ours, theirs in zip(many.steps, one.steps, strict=True):
        assert ours["max_logits"] == pytest.approx(theirs["max_logits"], rel=2e-5)
        assert ours["max_logit"] == pytest.approx(theirs["max_logit"], rel=2e-5)


@pytest.mark.dist
def test_layers_of_linear_attention_have_none() -> None:
    """Logits of four layers and a prediction layer; also if a stage has no layer that counts."""
    one = trained(1, QWEN3_NEXT, STEPS | EVERY)
    two = trained(2, QWEN3_NEXT, STEPS | EVERY | PP2)
    for record, split in zip(one.steps, two.steps, strict=True):
        assert record["max_logits"].keys() == {"4", "5"}
        largest = max(record["max_logits"].values())
        assert record["max_logit"] == pytest.approx(largest, rel=1e-5) and largest > 0
        assert split["max_logits"] == pytest.approx(record["max_logits"], rel=2e-5)


# --- when it is due -------------------------------------------------------------------------------


def test_records_have_what_was_measured_since_the_last() -> None:
    steps = {"run.steps": 6, "optim.lr": 3e-2}
    every = trained(1, TINY, steps | EVERY)
    third = trained(1, TINY, steps | {"optim.max_logit_every": 3})
    never = trained(1, TINY, steps)
    seldom = trained(1, TINY, steps | {"optim.max_logit_every": 2, "run.log_interval": 3})
    maxima = [r["max_logits"] for r in every.steps]
    assert all(r["max_logit"] == pytest.approx(max(m.values()), rel=1e-5)
               for r, m in zip(every.steps, maxima, strict=True))  # fmt: skip
    assert maxima[0].keys() == {"1", "2"} and maxima[0] != maxima[1]
    assert [r.get("max_logits") for r in third.steps] == [
        *[None, None, maxima[2], None, None, maxima[5]],
    ]
    assert not any("max_logit" in r for r in never.steps)
    assert [r["max_logits"] for r in seldom.steps] == [
        maxima[1],
        {n: max(maxima[3][n], maxima[5][n]) for n in ("1", "2")},
    ]
    assert never.left == every.left == third.left, "measuring has changed the training"
