"""Results that are kept: they depend on no knob besides those that are named."""

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from phalanx.configs import layout
from phalanx.configs.knobs import copied, get, knobs, put
from phalanx.configs.load import load
from phalanx.configs.remembered import LAYERS, SHARDS, STAGES, STEP, remembered
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MACHINES
from phalanx.moe.plan.cost import activations, stages, step_time, traffic, weights, work
from phalanx.moe.plan.described import resolved

pytestmark = pytest.mark.extras  # those of Muon and linear attention


def watched(cfg: Config, read: set[str]) -> Config:
    """A copy that adds every knob that is read to `read`, but for those of `replace`."""

    def watch(section: Any, at: str) -> None:
        kind = type(section)
        names = {f.name for f in fields(kind) if not is_dataclass(getattr(section, f.name))}

        def value_of(self: Any, name: str) -> Any:
            if name in names and sys._getframe(1).f_globals["__name__"] != "dataclasses":
                read.add(f"{at}{name}")
            return object.__getattribute__(self, name)

        for f in fields(kind):
            if f.name not in names:
                watch(getattr(section, f.name), f"{at}{f.name}.")
        section.__class__ = type(kind.__name__, (kind,), {"__getattribute__": value_of})

    copy = copied(cfg)
    watch(copy, "")
    return copy


def computed(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function whose results are kept."""
    inner: Callable[..., Any] = f.__wrapped__  # type: ignore[attr-defined]
    return inner


H100 = MACHINES["h100"]
DELAY = "parallel.delay_wgrad"
CASES: dict[str, tuple[Callable[[Config, int], object], tuple[str, ...]]] = {
    "chunks": (lambda c, _: computed(weights.chunks)(c), (*STAGES, "precision")),
    "pipeline_chunks": (lambda c, _: computed(layout.pipeline_chunks)(c), STAGES),
    "stage_weights": (
        lambda c, n: computed(weights.stage_weights)(c, n),
        (*STAGES, *SHARDS, "precision", "kernels"),
    ),
    "reach": (lambda c, n: computed(traffic.reach)(c, n), (*LAYERS,)),
    "sizes": (lambda c, n: computed(activations.sizes)(c, n), (*LAYERS,)),
    "layers": (lambda c, n: activations.Activations(c, n).layers(), LAYERS),
    "flops": (lambda c, _: computed(work.flops)(c), ("model", "data.sequence_length")),
    "stage_memory": (lambda c, n: computed(stages.stage_memory)(c, n, None), (*STEP, DELAY)),
    "step_time": (lambda c, n: computed(step_time.step_time)(c, n, H100), (*STEP, DELAY)),
}
RUNS = {
    "deepseek_v3": (["experiment=deepseek_v3_1024gpu"], 1024),
    "fp8": (["experiment=deepseek_v3_1024gpu", "precision=fp8_block"], 1024),
    "muon": (["experiment=moonlight_8gpu", "optim=muon"], 8),
    "documents": (["experiment=gpt_oss_120b_64gpu", "data.document_mask=true"], 64),
    "linear": (["experiment=qwen3_next_16gpu", "run.recompute=[norm,moe]"], 16),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", CASES)
def test_a_result_depends_on_the_knobs_that_are_named(name: str, run: str) -> None:
    (words, world), (f, named) = RUNS[run], CASES[name]
    read = set[str]()
    f(watched(resolved(load(words), world, 8), read), world)
    sections = tuple(f"{each}." for each in named)
    assert read
    assert {path for path in read if path not in named and not path.startswith(sections)} == set()


def test_a_result_is_computed_once_and_again_for_another_value_of_a_knob() -> None:
    seen = list[int]()

    @remembered("parallel", "run.recompute", "run.machine")
    def tensor(cfg: Config, more: int = 0) -> int:
        seen.append(cfg.parallel.tensor)
        return cfg.parallel.tensor + more

    cfg = load(["model=tiny"])
    assert [tensor(cfg), tensor(copied(cfg)), tensor(cfg, 1)] == [1, 1, 2] and seen == [1, 1]
    cfg.parallel.tensor = 2
    assert tensor(cfg) == 2 and tensor(cfg, more=2) == 4
    cfg.run.recompute = ["norm"]
    tensor(cfg)
    cfg.run.machine = "h100"
    tensor(cfg)
    cfg.model.hidden += 1  # which it does not read
    tensor(cfg)
    assert seen == [1, 1, 2, 2, 2, 2]


def test_a_copy_shares_nothing() -> None:
    cfg = load(["model=tiny", "run.recompute=[norm]", "run.phases=[{name: a, steps: 2}]"])
    copy = copied(cfg)
    assert copy == cfg and type(copy.run.phases[0]) is type(cfg.run.phases[0])
    for path in knobs():
        if isinstance(value := get(copy, path), list):
            assert value is not get(cfg, path)
            value.append("more")
        else:
            put(copy, path, None)
    copy.run.phases[0].name = "b"
    assert cfg == load(["model=tiny", "run.recompute=[norm]", "run.phases=[{name: a, steps: 2}]"])
