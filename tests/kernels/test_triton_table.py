"""The table of Triton launches: a line builds what a launch looks for in the folder."""

import json
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from phalanx.kernels.elementwise import sums_triton
from phalanx.kernels.routing import plan_triton
from phalanx.kernels.triton_table import FOLDER, Launch, described, launches


class HopperThatIsNotThere:
    """A driver whose device compiles and never launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def warm_up(tmp_path, monkeypatch):
    """Compile a kernel as a launch with these arguments does; returns the lines of the table."""

    def compiled(kernel: Any, folder: str, *args: Any, **constants: Any) -> list[str]:
        seen = list[dict[str, Any]]()
        monkeypatch.setattr(
            knobs.runtime,
            "jit_post_compile_hook",
            lambda *, compile, **_: seen.append(json.loads(compile["specialization_data"])),
        )
        kernel.device_caches.clear()
        with monkeypatch.context() as patch, knobs.cache.scope():
            patch.setattr(driver, "_active", HopperThatIsNotThere())
            knobs.cache.dir = str(tmp_path / folder / FOLDER)
            kernel.warmup(*args, grid=(1,), **constants)
        kernel.device_caches.clear()
        return [line for line in map(described, seen) if line]

    return compiled


def test_a_line_builds_what_its_launch_looks_for(warm_up, tmp_path):
    parts = torch.empty(48, 33, device="meta")
    out = torch.empty(33, dtype=torch.bfloat16, device="meta")
    order = torch.empty(8, dtype=torch.int32, device="meta")
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (sums_triton.square_sum, (parts, out.float(), 1584, 1024), {"BLOCK": 1024, "num_warps": 8}),
        (plan_triton.split_order_kernel, (order, order, 8, 1), {"SLOTS": 8, "num_warps": 1}),
    ]
    for kernel, args, constants in cases:
        (line,) = warm_up(kernel, "of a launch", *args, **constants)
        launch = Launch(line)
        assert not launch.is_built(tmp_path / "ahead")
        launch.build(tmp_path / "ahead")
        assert launch.is_built(tmp_path / "ahead")
        built, wanted = (
            {
                f.relative_to(tmp_path / of): f.read_bytes()
                for f in (tmp_path / of / FOLDER).glob("*/*.cubin")
            }
            for of in ("ahead", "of a launch")
        )
        assert built == wanted


def test_kernels_of_others_are_not_described():
    assert described({"name": "torch._inductor.fused"}) is None


@pytest.mark.extras  # have kernels, too
def test_every_line_has_a_kernel_with_as_many_arguments():
    for launch in launches():
        launch._source()
