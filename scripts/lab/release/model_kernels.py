"""Kernels that MoE layers of published models launch, recorded without a GPU.

A layer of each model in configs/model, `kernels.functional.moe.MoE` in bf16 with the model's sizes,
is called with fake tensors of a CUDA device, and its kernels are noted where they would be
launched: forward and backward pass, with gradients and without. Tiny models are left out. Needs
CuTe DSL and Hydra.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch._library.simple_registry import singleton
from torch._library.utils import Kernel
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.configs.load import load, options
from phalanx.configs.schema import ModelConfig
from phalanx.kernels.api import Activation, MoE
from phalanx.kernels.custom_op import OPS
from phalanx.kernels.functional.custom_ops import grouped_mlp, grouped_mlp_backward
from phalanx.kernels.routing.topk_ops import router_topk, router_topk_backward

TOKENS = 4096
_DEVICE = "cuda:0"

KernelKey = tuple[type, Any]


def models() -> list[str]:
    """Names of published models with experts, as `model=` takes them."""
    return [name for name in options("model") if not name.startswith("tiny")]


def kernels_of(name: str) -> list[KernelKey]:
    """(class, configuration) of the kernels of a model's MoE layer, in the order of launches."""
    model = load([f"model={name}"]).model
    with _recording() as found, torch.no_grad():
        layer = _layer(model)
        layer(torch.empty(TOKENS, model.hidden, dtype=torch.bfloat16, device=_DEVICE))
    return list(dict.fromkeys(found))


def common() -> dict[KernelKey, list[str]]:
    """Kernels of all published models, and the models that launch each."""
    found = dict[KernelKey, list[str]]()
    for name in models():
        for kernel in kernels_of(name):
            found.setdefault(kernel, []).append(name)
    return found


def _layer(model: ModelConfig) -> MoE:
    moe, router = model.moe, model.moe.router
    return MoE(
        hidden=model.hidden,
        ffn=moe.ffn,
        num_experts=moe.experts,
        top_k=moe.top_k,
        activation=Activation(
            moe.activation, moe.activation_alpha, moe.activation_limit, moe.activation_offset
        ),
        device=_DEVICE,
        dtype=torch.bfloat16,
        bias=model.bias,
        shared_ffn=moe.shared_ffn,
        bias_rate=router.bias_rate if router.score == "sigmoid" else 0.0,
        router={
            "score": router.score,
            "softmax_over": router.softmax_over,
            "normalize": router.normalize,
            "scale": router.scale,
            "groups": router.groups,
            "group_topk": router.group_topk,
        },
    )


@contextmanager
def _recording() -> Iterator[list[KernelKey]]:
    """A Hopper GPU that launches nothing; yields the kernels that it was asked for."""
    found: list[KernelKey] = []

    def note(kernel: type, config: Any, /, *rest: Any, **arguments: Any) -> None:
        found.append((kernel, config))

    def experts(*inputs: Any) -> Any:
        """The pass with gradients, its backward pass, and the pass without."""
        x, w1, w2, b1, b2, *plan, spec, _ = inputs
        out, h = grouped_mlp.compute(*inputs[:-1], True)
        needs = [True, True, True, b1 is not None, b2 is not None]
        grouped_mlp_backward.compute(out, x, w1, w2, b2, h, *plan, spec, needs)
        return grouped_mlp.compute(*inputs[:-1], False)

    def router(logits: Any, bias: Any, top_k: int, groups: Any, *weighting: Any) -> Any:
        idx, prob = router_topk.compute(logits, bias, top_k, groups, *weighting)
        router_topk_backward.compute(prob, idx, prob, logits, *weighting)
        return idx, prob

    passes = {op._name: op.compute for op in OPS.values()}
    passes |= {grouped_mlp._name: experts, router_topk._name: router}
    gpu = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_capability": lambda device=None: (9, 0),
        "torch._subclasses.fake_tensor.init_gpu_context": lambda device: None,
        "torch._subclasses.fake_tensor.FakeTensor.data_ptr": lambda tensor: 0,
        "triton.runtime.jit.JITFunction.run": lambda kernel, *arguments, **options: None,
        "torch.nn.init.uniform_": lambda tensor, *limits: tensor,
        "torch.nn.init.normal_": lambda tensor, *limits: tensor,
    }
    stands_in = {"launch": note, "launch_persistent": note, "sms": lambda device: 132}
    with ExitStack() as stack:
        for path, value in gpu.items():
            stack.enter_context(patch(path, value, create=True))
        for module in _modules():
            for name in stands_in.keys() & vars(module).keys():
                if callable(getattr(module, name)):
                    stack.enter_context(patch.object(module, name, stands_in[name]))
        for path, compute in passes.items():
            fake = singleton.find(path).fake_impl
            stack.enter_context(patch.object(fake, "kernels", [Kernel(compute, __file__)]))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        # Else a CPU stands in for CUDA where Megatron-Core ran in this process.
        stack.enter_context(torch._C.DisableTorchFunction())
        yield found


def _modules() -> list[ModuleType]:
    """All modules of kernels, some of which have imported a launch by name."""
    package = importlib.import_module("phalanx.kernels.sm90")
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [importlib.import_module(module.name) for module in found]
