"""Tensors for CUDA are created on the CPU, whatever watches the calls."""

import contextlib
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from tests.support.distributed import run_distributed


class _Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _made() -> list[list[tuple[str, str]]]:
    """(device, type) of tensors that are asked for on CUDA, plainly and under a mode."""
    from phalanx.parallel.megatron.cpu import install

    assert install() and install()
    found, cuda = [], torch.device("cuda", 0)
    for watching in (contextlib.nullcontext(), _Watching()):
        with watching:
            here = torch.zeros(2, device="cpu")
            tensors = [
                torch.ones(2, device="cuda"),
                torch.empty(2, dtype=torch.bfloat16, device=torch.cuda.current_device()),
                torch.tensor([1], device=cuda, pin_memory=True),
                torch.empty(2, pin_memory=True),
                torch.arange(3, device="cuda:1"),
                torch.randn(2, device=cuda),
                torch.zeros_like(here, device="cuda"),
                here.new_full((2,), 1.0, device="cuda"),
                here.to("cuda"),
                here.to(cuda, torch.float64),
                here.to(device="cuda", dtype=torch.int32),
                here.cuda(),
                next(torch.nn.Linear(2, 2).cuda().parameters()),
                next(torch.nn.Linear(2, 2).to("cuda").parameters()),
            ]
            found.append([(str(x.device), x.type()) for x in tensors])
            assert torch.empty(2, device="meta").is_meta and here.to("meta").is_meta
            with torch.device("meta"):
                assert torch.empty(2).is_meta
            with torch._C.DisableTorchFunction(), FakeTensorMode():
                assert torch.empty(2, device="cuda").is_cuda
                assert torch.empty(2).to("cuda").is_cuda
    return found


@pytest.mark.dist
def test_tensors_for_cuda_are_on_the_cpu() -> None:
    ((plain, watched),) = run_distributed(_made, 1)
    assert plain == watched
    assert {device for device, _ in plain} == {"cpu"}
    kinds = ["Float", "BFloat16", "Long", "Float", "Long", *["Float"] * 4, "Double", "Int"]
    kinds += ["Float"] * 3
    assert [kind for _, kind in plain] == [f"torch.cuda.{kind}Tensor" for kind in kinds]
