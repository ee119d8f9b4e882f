"""Kernels that this package's heuristics can choose: built ahead of time, checked by tests.

One function a group of families, one line a family. Others are compiled at their first launch. CuTe
DSL is not imported before `SHIPPED` or `COMPILED` is read. Those of optional capabilities are in
lists of their own, which `with_capabilities` adds.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, product
from pkgutil import resolve_name
from typing import Any

from phalanx.configs.tables.capabilities import KERNELS
from phalanx.kernels.expert_mlp.activation import Activation

SHIPPED: tuple[tuple[type, Any], ...]  # those that train a model
COMPILED: tuple[tuple[type, Any], ...]  # those of wheels, also for the public functions

SWIGLU = Activation("swiglu")
GPT_OSS = Activation("quick_geglu", limit=7.0, offset=1.0)
OTHERS = (Activation("geglu"), Activation("squared_relu"))
EITHER = (False, True)


def _gemms() -> Iterator[tuple[type, Any]]:
    from phalanx.kernels.sm90.experts.fc1_act import Fc1Kernel
    from phalanx.kernels.sm90.experts.fc2_dgrad_dact import DgradKernel
    from phalanx.kernels.sm90.experts.grouped_gemm import GroupedGemmKernel
    from phalanx.kernels.sm90.gemm.epilogues import Act, ActGrad, Linear
    from phalanx.kernels.sm90.gemm.gemm import GemmConfig
    from phalanx.kernels.sm90.gemm.tiles import configured, table

    def gemm(
        epilogue: Any, tile: str, gather: bool, transposed: bool, waits: bool = False
    ) -> GemmConfig:
        loop = configured(tile, gather=gather, transposed=transposed)
        return GemmConfig(epilogue, loop, waits=waits)

    for tile in table()["grouped_gemm"]:
        for bias, signals in product(EITHER, EITHER):
            yield GroupedGemmKernel, gemm(Linear(bias, signals), tile, False, False)
        yield GroupedGemmKernel, gemm(Linear(), tile, False, True)
    for tile, gather in product(table()["fc1_act"], EITHER):
        yield Fc1Kernel, gemm(Act(SWIGLU), tile, gather, False)
    for kind, gather in (("fc2_dgrad_dact", False), ("fc2_dgrad_dact gathered", True)):
        for tile in table()[kind]:
            yield DgradKernel, gemm(ActGrad(SWIGLU), tile, gather, True)
    for gather in EITHER:
        yield Fc1Kernel, gemm(Act(GPT_OSS, bias=True), "pp192", gather, False)
        yield DgradKernel, gemm(ActGrad(GPT_OSS), "pp192", gather, True)
    for tile in table()["fc1_act"]:
        yield Fc1Kernel, gemm(Act(SWIGLU), tile, True, False, waits=True)
    for tile in table()["fc2_dgrad_dact gathered"]:
        yield DgradKernel, gemm(ActGrad(SWIGLU), tile, True, True, waits=True)
    yield Fc1Kernel, gemm(Act(GPT_OSS, bias=True), "pp192", True, False, waits=True)
    yield DgradKernel, gemm(ActGrad(GPT_OSS), "pp192", True, True, waits=True)
    for act in OTHERS:
        yield Fc1Kernel, gemm(Act(act), "pp192", True, False)
        tile = "pp128" if act.kind == "geglu" else "pp192"
        yield DgradKernel, gemm(ActGrad(act), tile, True, True)


def _fp8_gemms() -> Iterator[tuple[type, Any]]:
    from phalanx.kernels.sm90.experts.bias_grad import BiasGradConfig, BiasGradKernel
    from phalanx.kernels.sm90.experts.fc1_act import Fc1Kernel
    from phalanx.kernels.sm90.experts.fc2_dgrad_dact import DgradKernel
    from phalanx.kernels.sm90.experts.grouped_gemm import GroupedGemmKernel
    from phalanx.kernels.sm90.fp8.act import Fp8Act, Fp8ActGrad
    from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop
    from phalanx.kernels.sm90.gemm.epilogues import Linear
    from phalanx.kernels.sm90.gemm.gemm import GemmConfig
    from phalanx.kernels.sm90.wgrad.fp8 import Fp8Contraction
    from phalanx.kernels.sm90.wgrad.kernel import (
        WgradConfig,
        WgradKernel,
        WgradPairKernel,
    )

    for columns, signals in product((192, 256), EITHER):
        for bias in EITHER:
            yield GroupedGemmKernel, GemmConfig(Linear(bias, signals), Fp8Mainloop(columns))
        e5m2 = Fp8Mainloop(columns, rows_format="e5m2")
        yield GroupedGemmKernel, GemmConfig(Linear(False, signals), e5m2)
    acts = (Fp8Act(SWIGLU), Fp8Act(GPT_OSS, bias=True))
    for epilogue, gather in product(acts, EITHER):
        yield Fc1Kernel, GemmConfig(epilogue, Fp8Mainloop(256, gather=gather))
    gathered = Fp8Mainloop(256, gather=True)
    yield from ((Fc1Kernel, GemmConfig(epilogue, gathered, waits=True)) for epilogue in acts)
    yield from ((Fc1Kernel, GemmConfig(Fp8Act(act), gathered)) for act in OTHERS)
    for rows_format, gather in product(("e4m3", "e5m2"), EITHER):
        loop = Fp8Mainloop(256, gather=gather, rows_format=rows_format)
        for act in (SWIGLU, GPT_OSS, *(OTHERS if gather else ())):
            grad = Fp8ActGrad(act, grad_format=rows_format)
            yield DgradKernel, GemmConfig(grad, loop)
            if gather and act not in OTHERS:
                yield DgradKernel, GemmConfig(grad, loop, waits=True)
    for rows_format, scaled, fp32, add in product(("e4m3", "e5m2"), EITHER, EITHER, EITHER):
        yield BiasGradKernel, BiasGradConfig(fp32, add, scaled, scaled, rows_format=rows_format)
    for columns, rows_format in product((192, 256), ("e4m3", "e5m2")):
        math = Fp8Contraction(columns, rows_format)
        for fp32_out, add, ordered in product(EITHER, EITHER, EITHER):
            yield WgradKernel, WgradConfig(math, fp32_out, add, ordered)
        for add in EITHER:
            yield WgradPairKernel, WgradConfig(math, True, add, ordered=True)


def _other_gradients() -> Iterator[tuple[type, Any]]:
    """Gradients in bf16, or added to fp32 ones; experts in the order of the plan, if any."""
    from phalanx.kernels.sm90.experts.bias_grad import BiasGradConfig, BiasGradKernel
    from phalanx.kernels.sm90.experts.fc2_dgrad_dact import DprobConfig, DprobKernel
    from phalanx.kernels.sm90.wgrad.bf16 import Contraction, D, V
    from phalanx.kernels.sm90.wgrad.kernel import (
        WgradConfig,
        WgradKernel,
        WgradPairKernel,
    )

    for columns, add, gathered in product((192, 256), EITHER, (None, D, V)):
        yield WgradKernel, WgradConfig(Contraction(columns, gathered), add, add, ordered=True)
    for math in (Contraction(*chosen) for chosen in product((192, 256), (D, V))):
        # A step's first gradient, which overwrites; and one added in bf16.
        yield WgradKernel, WgradConfig(math, True, False, ordered=True)
        yield WgradKernel, WgradConfig(math, False, True, ordered=True)
        for fp32_out, add in product(EITHER, EITHER):  # of two micro-batches
            yield WgradPairKernel, WgradConfig(math, fp32_out, add, ordered=True)
    for columns, fp32_out, add in product((192, 256), EITHER, EITHER):
        yield WgradKernel, WgradConfig(Contraction(columns), fp32_out, add)
    for add, scaled in product(EITHER, EITHER):
        yield BiasGradKernel, BiasGradConfig(fp32_out=True, add=add, scaled=scaled, indexed=scaled)
    yield from ((BiasGradKernel, BiasGradConfig(True, add, scaled=True)) for add in EITHER)
    for table, gather in ((False, False), (True, False), (True, True)):
        yield DprobKernel, DprobConfig(table, gather)


def _routing() -> Iterator[tuple[type, Any]]:
    """Routing and combining of tokens; `topk` as the models in configs/model need it."""
    from phalanx.kernels.sm90.experts.combine import CombineConfig, CombineKernel
    from phalanx.kernels.sm90.routing.logits import ExpertGroups, TopkConfig
    from phalanx.kernels.sm90.routing.place import CAPACITIES, PlanConfig, PlanKernel
    from phalanx.kernels.sm90.routing.plan import GatherConfig, GatherKernel
    from phalanx.kernels.sm90.routing.topk import TopkKernel
    from phalanx.kernels.sm90.routing.topk_gradient import TopkGradientKernel

    yield from ((PlanKernel, PlanConfig(capacity)) for capacity in CAPACITIES)
    yield GatherKernel, GatherConfig()
    yield from ((CombineKernel, CombineConfig(slots)) for slots in (1, 2, 4, 6, 8, 10, 16))
    for rows, addends in product((2, 4, 6, 8), (1, 2)):  # rows of experts, or of ranks
        yield CombineKernel, CombineConfig(rows, addends)
    softmax = (2, 4, 8)
    for weights, numbers in (("softmax", softmax), ("softmax_all", (6, 8))):
        for config in (TopkConfig(top_k, 1, bf16=False, weights=weights) for top_k in numbers):
            yield from ((kernel, config) for kernel in (TopkKernel, TopkGradientKernel))
    for kernel in (TopkKernel, TopkGradientKernel):  # 512 experts, as in Qwen3-Next
        yield kernel, TopkConfig(10, 4, bf16=False, weights="softmax")
    deepseek = ExpertGroups(number=8, size=32, chosen=4, best=2)
    tiny = ExpertGroups(number=4, size=4, chosen=2, best=2)
    several = (4, 1, tiny), (6, 1, None), (8, 1, None), (8, 2, None, deepseek), (8, 3, None)
    for top_k, vectors, *groups in several:
        # The choice, its gradient, and the best logits, which balancing losses count.
        choice: dict[str, Any] = dict(
            top_k=top_k, vectors=vectors, bf16=False, weights="sigmoid_sum"
        )
        yield from ((TopkKernel, TopkConfig(**choice, biased=True, groups=g)) for g in groups)
        yield TopkGradientKernel, TopkConfig(**choice)
        if vectors > 1 or top_k not in softmax:
            yield TopkKernel, TopkConfig(top_k, vectors, bf16=False, weights="softmax")


def _exchanges() -> Iterator[tuple[type, Any]]:
    from phalanx.kernels.sm90.exchange.combine_push import CombinePushConfig, CombinePushKernel
    from phalanx.kernels.sm90.exchange.push import (
        PushConfig,
        PushKernel,
        WaitPeersConfig,
        WaitPeersKernel,
    )

    sizes = {
        2: (4096, 6144),
        4: (2880,),
        6: (2048,),
        8: (2048, 3072, 4096, 5120, 6144, 7168),
        10: (2048,),
    }
    for slots, widths in sizes.items():
        for hidden, back in product(widths, EITHER):
            yield PushKernel, PushConfig(2 * hidden, 8, slots, back)
    for slots, side in product(sizes, EITHER):
        yield CombinePushKernel, CombinePushConfig(slots, 8, side, False)
    yield WaitPeersKernel, WaitPeersConfig(8)


def _loss() -> Iterator[tuple[type, Any]]:
    from phalanx.kernels.sm90.loss.cross_entropy import (
        CLUSTERS,
        CrossEntropyConfig,
        CrossEntropyKernel,
    )

    yield from ((CrossEntropyKernel, CrossEntropyConfig(cluster)) for cluster in CLUSTERS)


def _shipped() -> Iterator[tuple[type, Any]]:
    yield from _gemms()
    yield from _fp8_gemms()
    yield from _other_gradients()
    yield from _routing()
    yield from _exchanges()
    yield from _loss()


def _for_functions() -> Iterator[tuple[type, Any]]:
    """Kernels of `kernels.functional` alone: for any width of experts, without a backward pass,
    without probabilities, on rows in the order of experts, and exchanges of fewer ranks."""
    from phalanx.kernels.sm90.exchange.combine_push import CombinePushConfig, CombinePushKernel
    from phalanx.kernels.sm90.exchange.push import (
        PushConfig,
        PushKernel,
        WaitPeersConfig,
        WaitPeersKernel,
    )
    from phalanx.kernels.sm90.experts.combine import CombineConfig, CombineKernel
    from phalanx.kernels.sm90.experts.fc1_act import Fc1Kernel
    from phalanx.kernels.sm90.experts.fc2_dgrad_dact import DgradKernel
    from phalanx.kernels.sm90.fp8.act import Fp8Act, Fp8ActGrad
    from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop
    from phalanx.kernels.sm90.gemm.epilogues import Act, ActGrad
    from phalanx.kernels.sm90.gemm.gemm import GemmConfig
    from phalanx.kernels.sm90.gemm.tiles import configured, table

    # Gathered rows have probabilities; which others are in SHIPPED does not matter here. Widths of
    # experts that a wider tile does not divide have a narrower one.
    kinds = (*((True, keep_h, True) for keep_h in EITHER), *product((False,), EITHER, EITHER))
    acts = ((SWIGLU, False), (GPT_OSS, True), *((act, False) for act in OTHERS))
    for (act, bias), (gather, keep_h, prob) in product(acts, kinds):
        for tile in table()["fc1_act"]:
            loop = configured(tile, gather=gather, transposed=False)
            yield Fc1Kernel, GemmConfig(Act(act, bias, keep_h, prob), loop)
        loop = Fp8Mainloop(256, gather=gather)
        yield Fc1Kernel, GemmConfig(Fp8Act(act, bias, keep_h, prob), loop)
    for (act, _), prob in product(acts, EITHER):
        tiles = ("pp128",) if act.kind == "geglu" else table()["fc2_dgrad_dact"]
        for tile, gather in product(tiles, (False, True) if prob else (False,)):
            loop = configured(tile, gather=gather, transposed=True)
            yield DgradKernel, GemmConfig(ActGrad(act, prob), loop)
        yield DgradKernel, GemmConfig(Fp8ActGrad(act, prob), Fp8Mainloop(256))
    yield from ((CombineKernel, CombineConfig(slots)) for slots in range(1, 17))
    sizes = {1: (2880, 5120), 2: (4096, 6144), 4: (2048, 2880), 6: (2048,)}
    sizes |= {8: (2048, 3072, 4096, 5120, 7168), 10: (2048,)}
    for ranks, slots in product((2, 4), sizes):
        for hidden, back in product(sizes[slots], EITHER):
            yield PushKernel, PushConfig(2 * hidden, ranks, slots, back)
        yield from (
            (CombinePushKernel, CombinePushConfig(slots, ranks, side, False)) for side in EITHER
        )
    yield from ((WaitPeersKernel, WaitPeersConfig(ranks)) for ranks in (2, 4))


def _compiled() -> Iterator[tuple[type, Any]]:
    yield from dict.fromkeys((*_shipped(), *_for_functions()))


def with_capabilities(kernels: Sequence[tuple[type, Any]]) -> tuple[tuple[type, Any], ...]:
    """Kernels, and behind them those of optional capabilities (`configs.tables.capabilities`)."""
    more = chain.from_iterable(resolve_name(path)() for path in KERNELS)
    return tuple(dict.fromkeys((*kernels, *more)))


def __getattr__(name: str) -> Any:
    tables = {"SHIPPED": _shipped, "COMPILED": _compiled}
    if name not in tables:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    globals()[name] = kernels = tuple(tables[name]())
    return kernels
