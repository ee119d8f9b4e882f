"""Implementations of the kernels' operations: one entry each, best first.

An entry names functions by import path, `module:function`, so that reading it imports neither torch
nor a library. No other file compares the name of an implementation.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Package(NamedTuple):
    """An optional package, and how to recognise it without an import."""

    name: str  # its name in `kernels.registry.Facts.packages`
    module: str
    folder: str = ""  # a folder in it, if another package has the same top-level name


@dataclass(frozen=True)
class Implementation:
    """Facts that all operations' implementations have."""

    unavailable: str
    """Path of `(facts: kernels.registry.Facts) -> str | None`: why it cannot run, or None."""
    meaning: str = ""  # short description, in Markdown, for the documentation
    package: Package | None = None  # package that only this implementation needs
    auto: bool = True  # `auto` considers it
    limits: str = ""
    """Path of a function like `unavailable`, asked after it: an extra is not imported in vain."""
    slower: str = ""
    """Path of a function like `unavailable`: why `auto` prefers a later entry. Empty: never."""
    cuda: bool = False  # runs only on GPUs
    bf16: bool = False  # runs only in bf16
    per_model: bool = False  # compiled for sizes of a model (`moe.model.kernel_facts`)


@dataclass(frozen=True)
class ExpertBackend(Implementation):
    """An implementation of the experts, `kernels.backend`."""

    provider: str = ""
    """Path of `(options: kernels.expert_mlp.backend.Options) -> Backend`. Empty: it has none."""
    layer: str = ""
    """Path of the class of a MoE layer in place of `moe.layer.MoE`, built from the same options."""
    config_fields: str = ""
    """Path of `(cfg: Config) -> dict` with more fields of Megatron-Core's TransformerConfig."""
    problems: str = ""
    """Path of `(cfg: Config) -> Iterator[str]`: limits of its FP8 recipe; it repairs `cfg`."""
    described: str = ""
    """Path of `(packages: Collection[str]) -> str`: more words on it for the start page."""
    saved_tensors: str = ""
    """Path of `(cfg, counts, *, fp8) -> SavedTensors` of its experts. Empty: those of ours."""
    machine_rates: str = ""
    """Path of `(model: ModelConfig, machine: Machine) -> Machine` with rates of its experts, passes
    over weight gradients included. Empty: those of ours."""
    beside_products: str = ""
    """Path of a function for the seconds of a layer beside these products, with the signature of
    `extras.baseline.rules.beside_products`. Empty: none."""
    own_exchange: str = ""
    """Path of `(cfg: Config, group: GroupTopology) -> TransportCosts` of its own dispatcher. Empty:
    tokens travel as `parallel.dispatch` says."""
    maker: str = ""  # name of whose experts they are in messages, if not ours
    own_fp8: str = ""
    """Sentence for the start page on its library's FP8 copies; linear layers beside its experts
    stay in bf16. Empty: all follow the recipe of the run."""
    own_router: bool = False  # routing is not recorded, rows of an expert not rounded
    row_budget: bool = True  # expert rows have a budget; else it takes what arrives
    recomputes: tuple[str, ...] = ("expert_h",)
    """Tensors of experts that `run.recompute` can name, and `run.offload` if it has them."""
    delays_wgrad: bool = True  # weight gradients can wait for transfers
    joint_placeholder: bool = False  # one for gradients of all experts, fused accumulation
    bf16_on_cuda: bool = False  # on GPUs, runs only in bf16
    host_counts: bool = False  # reads numbers of rows, which no CUDA graph can capture
    waits_for_rows: bool = False  # kernels start with rows that arrived, beside exchanges
    fuses_router: bool = False  # its router is one kernel, where the options of the router allow it
    fuses_gather: bool = False  # GEMMs gather rows and accumulate weight gradients
    pairs_wgrad: bool = False  # weight gradients of two micro-batches in one pass
    adds_in_combine: bool = False  # its sum takes shared experts and residual, then rounds
    orders_experts: bool = False  # its plans have an order of experts
    records: bool = False  # eager calls may repeat its launches (`kernels.tape`)
    replicates: bool = True  # takes replicas of other ranks' experts
    channel_order: str = ""
    """Path of its `kernels.expert_mlp.mlp_spec.ChannelOrder` of fc1 in memory. Empty: [gate; up].
    """
    pads_rows_to: int = 1  # multiple to which the rows of each expert are padded
    dense_multiple: int = 0  # divisor of widths of dense layers that it runs; 0: none
    dense: str = ""  # for dense layers, where its own needs rows by expert
    multiplies: tuple[str, ...] = ()  # recipes whose operands its GEMMs read
    emulates: bool = False  # runs all recipes by multiplying dequantized values in bf16
    placeholder_grads: bool = True  # cached, for gradients with fused accumulation


@dataclass(frozen=True)
class AttentionBackend(Implementation):
    """An implementation of core attention, `kernels.attention`."""

    layer: str = ""
    """Path of `(whole_with_sinks: bool) -> module spec` of its core attention; empty: ours."""
    graph: bool = True  # steps can be captured in a CUDA graph
    other_mixers: str = "auto"  # implementation of other mixers that goes with it
    documents: bool = True  # attends within documents of a sequence
    documents_over_ranks: bool = True  # the same for sequences that context-parallel ranks share
    document_bounds: bool = False  # takes the bounds of documents, of a fixed number
    max_logits_over_ranks: bool = True  # measured also with context parallelism
    graph_over_ranks: bool = True  # steps can be captured with context parallelism
    copies_heads: bool = False  # copies queries and values out of a fused projection with norms
    reads_projection: bool = False  # reads values in the fused projection, which stays


@dataclass(frozen=True)
class NormBackend(Implementation):
    """An implementation of RMSNorm, `kernels.norm`."""

    implementation: str = ""  # module with `rms_norm` and `fork`
    layer: str = ""
    """Path of `() -> module`, built by a layer spec; empty: ours, over `implementation`."""
    copies_heads: bool = False  # copies and saves what it normalises


_AVAILABILITY = "phalanx.kernels.availability"
_BASELINE = "phalanx.extras.baseline"

EXPERT_BACKENDS: dict[str, ExpertBackend] = {
    "fused": ExpertBackend(
        f"{_AVAILABILITY}:fused_experts",
        "CuTe DSL kernels for Hopper",
        provider="phalanx.kernels.sm90.experts.backend:fused",
        cuda=True,
        bf16_on_cuda=True,
        waits_for_rows=True,
        fuses_router=True,
        fuses_gather=True,
        pairs_wgrad=True,
        adds_in_combine=True,
        orders_experts=True,
        records=True,
        dense_multiple=64,
        multiplies=("fp8_block",),
    ),
    "cudnn": ExpertBackend(
        f"{_AVAILABILITY}:blackwell",
        "cuDNN's fused grouped GEMMs for Blackwell",
        package=Package("nvidia_cudnn_frontend", "cudnn", "gemm/cutedsl/grouped"),
        limits="phalanx.extras.blackwell.availability:runs_here",
        provider="phalanx.extras.blackwell.backend:cudnn",
        cuda=True,
        bf16_on_cuda=True,
        replicates=False,
        channel_order="phalanx.extras.blackwell.interleave:Interleaved",
        pads_rows_to=256,
        dense="torch",
        multiplies=("mxfp8", "nvfp4"),
    ),
    "te": ExpertBackend(
        f"{_AVAILABILITY}:te_experts",
        "Transformer Engine's grouped GEMM, which needs row counts on the host",
        cuda=True,
    ),
    "torch": ExpertBackend(
        f"{_AVAILABILITY}:torch_experts",
        "`torch._grouped_mm` with offsets on the device",
        slower=f"{_AVAILABILITY}:torch_experts_on_cpu",
        provider="phalanx.kernels.expert_mlp.torch_grouped:grouped",
        bf16_on_cuda=True,
        emulates=True,
    ),
    "reference": ExpertBackend(
        f"{_AVAILABILITY}:always",
        "plain PyTorch, a loop over experts",
        provider="phalanx.kernels.expert_mlp.reference:reference",
        host_counts=True,
        emulates=True,
        placeholder_grads=False,
    ),
    "megatron": ExpertBackend(
        f"{_BASELINE}.rules:stock_experts",
        "Megatron-Core's stock MoE layer",
        auto=False,
        layer=f"{_BASELINE}.stock_moe:StockMoE",
        config_fields=f"{_BASELINE}.rules:config_fields",
        problems=f"{_BASELINE}.rules:problems",
        described=f"{_BASELINE}.rules:described",
        saved_tensors=f"{_BASELINE}.rules:saved_tensors",
        machine_rates=f"{_BASELINE}.rules:with_grouped_products",
        beside_products=f"{_BASELINE}.rules:beside_products",
        own_exchange=f"{_BASELINE}.rules:exchange_costs",
        maker="Megatron-Core",
        own_fp8="Transformer Engine keeps its own; dense linear layers are bf16",
        own_router=True,
        row_budget=False,
        recomputes=("moe_act",),
        delays_wgrad=False,
        joint_placeholder=True,
        host_counts=True,
        replicates=False,
        multiplies=("fp8_block",),
    ),
}
"""Backends of the expert MLP by value of `kernels.backend`."""

ATTENTION_BACKENDS: dict[str, AttentionBackend] = {
    "fa4": AttentionBackend(
        f"{_AVAILABILITY}:fa4",
        "flash-attn-4 on Hopper",
        cuda=True,
        bf16=True,
        per_model=True,
        documents_over_ranks=False,
        document_bounds=True,
        reads_projection=True,
    ),
    "te": AttentionBackend(
        f"{_AVAILABILITY}:te_attention",
        "Transformer Engine",
        layer=f"{_BASELINE}.transformer_engine:attention",
        cuda=True,
        documents=False,
        documents_over_ranks=False,
        max_logits_over_ranks=False,
        graph_over_ranks=False,
        copies_heads=True,
    ),
    "sdpa": AttentionBackend(
        f"{_AVAILABILITY}:sdpa", "PyTorch's fused kernels", reads_projection=True
    ),
    "flex": AttentionBackend(
        f"{_AVAILABILITY}:flex", "FlexAttention, compiled to Triton", reads_projection=True
    ),
    "reference": AttentionBackend(
        f"{_AVAILABILITY}:always", "explicit softmax", graph=False, other_mixers="torch"
    ),
}
"""Backends of attention by value of `kernels.attention`."""

NORM_BACKENDS: dict[str, NormBackend] = {
    "quack": NormBackend(
        f"{_AVAILABILITY}:quack",
        "QuACK on Hopper",
        implementation="phalanx.kernels.rms_norm.quack",
        cuda=True,
        bf16=True,
        per_model=True,
    ),
    "te": NormBackend(
        f"{_AVAILABILITY}:te",
        "Transformer Engine",
        layer=f"{_BASELINE}.transformer_engine:norm",
        cuda=True,
        copies_heads=True,
    ),
    "torch": NormBackend(
        f"{_AVAILABILITY}:always", "PyTorch", implementation="phalanx.kernels.rms_norm.torch_norm"
    ),
}
"""Backends of norms by value of `kernels.norm`."""

_UNRESOLVED = ExpertBackend("", emulates=True)
_UNRESOLVED_ATTENTION = AttentionBackend("")
_UNRESOLVED_NORM = NormBackend("")


def expert_backend(name: str) -> ExpertBackend:
    """The entry of a backend of the experts; for `auto` one that no rule excludes."""
    return EXPERT_BACKENDS.get(name, _UNRESOLVED)


def attention_backend(name: str) -> AttentionBackend:
    """The entry of a backend of attention; for `auto` one that no rule excludes."""
    return ATTENTION_BACKENDS.get(name, _UNRESOLVED_ATTENTION)


def norm_backend(name: str) -> NormBackend:
    """The entry of a backend of RMSNorm; for `auto` one that no rule excludes."""
    return NORM_BACKENDS.get(name, _UNRESOLVED_NORM)
