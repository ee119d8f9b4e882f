"""Refusals and warnings about memory before a model is built."""

from dataclasses import replace

import pytest

from phalanx.configs.knobs import changed
from phalanx.configs.load import load
from phalanx.configs.validate import ConfigError
from phalanx.moe.plan.cost.stages import needed
from phalanx.moe.plan.facts import FreeMemory, JobFacts
from phalanx.moe.plan.resolve import resolve
from phalanx.moe.run.memory_check import check_memory
from tests.moe.plan.jobs import CPU, job, known

FP8 = ["precision=fp8_block", "parallel.dispatch=local", "run.graph=off"]


def warnings(*overrides: str, facts: JobFacts) -> list[str]:
    cfg = load(list(overrides))
    return check_memory(cfg, resolve(cfg, facts), facts)


def test_copies_that_auto_leaves_out_are_no_reason_to_warn() -> None:
    cfg = known(*FP8, facts=job())
    least, most = (
        needed(changed(cfg, {"precision.weights": each}), 1) for each in ("scratch", "resident")
    )
    assert least < most

    def told(*more: str, free: int) -> str:
        return "".join(warnings(*FP8, *more, facts=job(free=[int(free / 0.9) + 1])))

    assert told(free=least) == ""
    assert "is expected to take" in told(free=least - 2**20)
    assert "is expected to take" in told("precision.weights=resident", free=most - 2**20)


def test_the_rank_with_the_least_memory_decides() -> None:
    enough, little = 2**36, 2**20
    with pytest.raises(
        ConfigError, match=r"^tiny does not fit: weights.* of a rank take .*\(rank 1\)$"
    ):
        warnings("parallel.expert=2", facts=job(free=[enough, little]))
    with pytest.raises(ConfigError, match=r"[^)]$"):
        warnings("parallel.expert=2", facts=job(free=[little, enough]))
    most = needed(known("parallel.expert=2"), 2)
    (near,) = warnings("parallel.expert=2", facts=job(free=[enough, most]))
    assert near.startswith("tiny is expected to take")


def test_ranks_on_a_host_without_gpus_share_its_memory() -> None:
    hosts = job(CPU, ranks=4, node_ranks=2, free=[2**36])
    assert warnings("parallel.expert=2", facts=hosts) == []
    each = job(CPU, ranks=4, node_ranks=2, free=[2**36, 2**36, 2**24, 2**24])
    with pytest.raises(ConfigError, match=r"of 2 ranks take .* of this host.*\(rank 2\)$"):
        warnings("parallel.expert=2", facts=each)


def test_pinned_memory_of_checkpoints_is_that_of_all_ranks_of_a_host() -> None:
    facts = job(ranks=2)
    small = [replace(r, host_memory=FreeMemory("this host", 2**24)) for r in facts.ranks]
    (text,) = warnings("parallel.expert=2", facts=JobFacts(tuple(small)))
    assert text.startswith("a background checkpoint is expected to take")
    assert text.endswith("set run.async_save=off")
    off = ["run.async_save=off"]
    assert warnings("parallel.expert=2", *off, facts=JobFacts(tuple(small))) == []
