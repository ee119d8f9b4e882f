"""Plans of ranks that have met, and what the start page has of them."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml

from phalanx.configs.load import load
from phalanx.moe.plan import described
from phalanx.moe.plan.facts import facts_here
from phalanx.moe.plan.resolve import resolve
from phalanx.parallel.runtime import Runtime
from tests.support.distributed import run_distributed
from tests.support.pages import TEXTS, blocks
from tests.support.runs import SMALL, run


def _here() -> Runtime:
    return Runtime(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))


def _plan() -> tuple[Any, ...]:
    plan, facts = described.agreed_plan(load(["model=tiny", "parallel.expert=2"]), _here())
    return plan.cfg, plan.transports, facts.world, facts.on_host(0), facts.kind


@pytest.mark.dist
def test_all_ranks_have_the_same_plan() -> None:
    first, second = run_distributed(_plan, 2)
    assert first == second
    cfg, transports, *of_job = first
    assert (cfg.kernels.backend, cfg.parallel.dispatch) == ("reference", "alltoall")
    assert len(transports) == 1 and of_job == [2, [0, 1], "cpu"]


def _differing() -> str:
    def other(cfg: Any, facts: Any) -> Any:
        cfg.run.graph = ["auto", "off"][dist.get_rank()]
        cfg.model.moe.shared_ffn = 64 * dist.get_rank()
        return resolve(cfg, facts)

    with mock.patch.object(described, "resolve", other), pytest.raises(RuntimeError) as error:
        described.agreed_plan(load(["model=tiny", "parallel.expert=2"]), _here())
    return str(error.value)


@pytest.mark.dist
def test_ranks_that_plan_another_run_are_named() -> None:
    for text in run_distributed(_differing, 2):
        assert text.startswith("rank 1 plans another run than rank 0 from the same facts")


@pytest.mark.parametrize(
    ("device", "gpu", "name"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("cuda", "NVIDIA H200", "H200"),
        ("cuda", "NVIDIA GB300", "H100 SXM"),
        ("cpu", "NVIDIA H200", "H100 SXM"),
    ],
)
def test_rates_of_a_run_are_those_of_the_gpu_that_it_has(device: str, gpu: str, name: str) -> None:
    here = Runtime(0, 1, 0, torch.device(device))
    with (
        mock.patch.object(torch.cuda, "get_device_name", return_value=gpu),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(5, 9)),
        mock.patch.object(torch.cuda, "memory_reserved", return_value=3),
        mock.patch.object(torch.cuda, "memory_allocated", return_value=1),
    ):
        facts = facts_here(load(["run.machine=h100"]), here)
    assert facts.device.machine.name == name
    assert device == "cpu" or (facts.free, facts.memory.device) == (7, "GPU 0")


@pytest.mark.dist
def test_the_page_has_what_auto_came_to_and_the_folder_what_was_given(tmp_path: Path) -> None:
    given = [*SMALL, "data=synthetic", "run.steps=1", "run.save_interval=-1"]
    main = run(2, [*given, "model.attention.head_dim=8", f"run.dir={tmp_path}"])[0]
    assert main.code == 0, main.err
    pages = blocks("text", TEXTS["docs/operations.md"])
    shown = next(page for page in pages if "  op           backend" in page)
    start = shown.index("  op           backend")
    table = shown[start : shown.index("\n\n", start)]
    assert "Kernels need CUDA, of which" in table and table in main.out
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["run"]["graph"] == saved["parallel"]["comm_sms"] == "auto"
