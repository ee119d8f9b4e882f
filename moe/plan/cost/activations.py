"""Bytes that a micro-batch saves for its backward pass, and extra bytes the backward pass needs.

Checked against allocations on an H200 (tests/moe/plan/cost/test_stages.py), with Transformer
Engine's attention and norms. A tensor shared by two operations counts once. bf16 unless stated.

Legend: T tokens of a rank before sequence parallelism splits them, N received tokens, S expert
rows, L experts of a rank, D hidden, F expert width, H = 2F if gated.
"""

import functools
from dataclasses import dataclass, replace
from pkgutil import resolve_name

import torch

from phalanx.configs.arithmetic.layers import ATTENTION, expert_hidden, of_variants
from phalanx.configs.formats import fp8_row, is_fp8, quantizes, quantizes_dense, rows_in_fp8, width
from phalanx.configs.layout import expert_parallel_size, replica_slots
from phalanx.configs.remembered import GROUPS, LAYERS, remembered
from phalanx.configs.schema import Config
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.layers import MIXERS
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.kernels.expert_mlp.backend import rows_for
from phalanx.moe.plan.cost.traffic import costs, nodes, overlap_sms, received
from phalanx.moe.plan.cost.weights import LayerKind, all_kinds
from phalanx.moe.router.token_rounding import slots
from phalanx.moe.saved_tensors import (
    SavedTensors,
    TokenCounts,
    dense_backward,
    dense_saved,
    experts_backward,
    experts_saved,
    router_saved,
    saves_fp8_inputs,
)
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.costs import TransportCosts


@remembered("model", *GROUPS, "data.sequence_length", "kernels")
def sizes(cfg: Config, world: int) -> TokenCounts:
    """Sizes of a rank, with the budget of expert rows at `parallel.capacity_factor`."""
    e, p, d = cfg.model.moe, cfg.parallel, cfg.data
    tokens = d.micro_batch * d.sequence_length // p.context
    local = tokens // p.tensor
    ranks = expert_parallel_size(cfg, world)
    expert_slots = slots(e.router, experts=e.experts, top_k=e.top_k)
    local_slots = e.experts // ranks + replica_slots(cfg, world)
    worst = expert_slots.max_rows(local, ranks, local_slots)
    if not expert_backend(cfg.kernels.backend).row_budget:  # balanced load assumed
        rows = min(worst, local * e.top_k)
    else:
        budget = Budget(max(1.0, p.capacity_factor), torch.device("cpu"))
        pairs = budget.rows(local, e.top_k, ranks, local_slots, most=worst)
        backend = cfg.kernels.backend
        rows, worst = (rows_for(n, local_slots, backend) for n in (pairs, worst))
    return TokenCounts(tokens, local, ranks * local, rows, worst)


@dataclass(frozen=True)
class LayerMemory:
    """Activation bytes of one layer."""

    saved: int  # GPU memory held from the layer's forward pass until its backward pass
    backward: int  # peak of its backward pass on top of `saved`, recomputation included
    offloaded: int = 0  # bytes moved to host memory (`run.offload`), not counted in the other two


_RECOMPUTED: dict[str, tuple[str, ...]] = {
    "norm": ("norm",),
    "mla_up": ("queries_keys_values", "latents"),
    "attention": ("out", "exchanged"),
    "mlp": ("dense", "shared"),
    "expert_h": ("expert_h",),
    "moe_act": ("expert_a",),
    "moe": ("shared", "expert_h", "expert_a", "moe"),
}
"""Tensors that a name of run.recompute frees; with `full` only the input is saved."""

_OFFLOADED: dict[str, tuple[str, ...]] = {
    "residual": ("residual",),
    "attention": ("queries_keys_values", "out"),
    "expert_h": ("expert_h",),
}


class Activations:
    """Activation memory of the layers and the output head of a model on one rank.

    `kernels.backend`, `kernels.attention` and `parallel.dispatch` are resolved; `rows` are S, if
    other than that of `sizes`.
    """

    def __init__(self, cfg: Config, world: int, rows: int | None = None) -> None:
        self._cfg, self._world = cfg, world
        self.sizes = sizes(cfg, world)
        if rows is not None:
            self.sizes = replace(self.sizes, rows=rows)

    @functools.cached_property
    def _sent(self) -> TransportCosts:
        return costs(self._cfg, self._world)

    def per_layer_kind(self) -> dict[LayerKind, LayerMemory]:
        """Memory of a layer of every kind that the model has."""
        return _per_layer_kind(self._cfg, self._world, self.sizes.rows)

    def layers(self) -> dict[LayerKind, LayerMemory]:
        """`per_layer_kind`, computed anew."""
        return {
            kind: (self.dense_layer if kind.dense else self.moe_layer)(kind.fp8, kind.mixer)
            for kind in dict.fromkeys(all_kinds(self._cfg))
        }

    def dense_layer(self, fp8: bool | None = None, mixer: str = ATTENTION) -> LayerMemory:
        """Memory of a layer with a dense MLP; `fp8` None follows the recipe of most layers."""
        cfg, fp8_dense = self._cfg, self._fp8_dense(fp8)
        saved = dense_saved(cfg, self.sizes, cfg.model.dense_ffn, fp8=fp8_dense)
        backward = dense_backward(cfg, self.sizes)
        more = self._fp8_inputs(1, instead=True) if fp8_dense else 0
        return self._layer({"dense": saved}, backward, fp8_dense, more, mixer)

    def moe_layer(self, fp8: bool | None = None, mixer: str = ATTENTION) -> LayerMemory:
        """Memory of a layer with experts; `fp8` None follows the recipe of most layers."""
        cfg, fp8_dense, shared = self._cfg, self._fp8_dense(fp8), self._cfg.model.moe.shared_ffn
        parts = self._experts(is_fp8(cfg) and fp8 is not False)
        parts["shared"] = dense_saved(cfg, self.sizes, shared, fp8=fp8_dense)
        more = self._fp8_inputs(1, instead=False) if fp8_dense and shared else 0
        local = cfg.model.moe.experts // expert_parallel_size(cfg, self._world)
        backward = experts_backward(cfg, self.sizes, local) + self.replica_memory().backward
        backward += self._sent.backward * width(cfg) * expert_hidden(cfg.model)
        return self._layer(parts, backward, fp8_dense, more, mixer)

    def bytes_freed(self, name: str) -> dict[LayerKind, int]:
        """Bytes that recomputing `name` frees in a layer of every kind that saves all else."""
        layers = []
        for recompute in ([], [name]):
            run = replace(self._cfg.run, recompute=recompute, offload=[])
            other = Activations(replace(self._cfg, run=run), self._world, self.sizes.rows)
            layers.append(other.per_layer_kind())
        before, after = layers
        return {kind: layer.saved - after[kind].saved for kind, layer in before.items()}

    def head(self) -> LayerMemory:
        """Memory of final norm, logits and loss, multi-token prediction included."""
        m, s, t = self._cfg.model, self.sizes, self._cfg.parallel.tensor
        element = width(self._cfg)
        logits = s.tokens * m.vocab_size // t * element
        hidden = s.local_tokens * m.hidden * element
        fused = self._cfg.kernels.gradient_accumulation_fusion
        weight = 0 if fused else m.vocab_size * m.hidden // t * element
        # The gradient of the logits is written over them.
        return LayerMemory((1 + m.mtp_layers) * (logits + 2 * hidden), hidden * t + weight)

    def prediction_extra(self) -> int:
        """Bytes that a multi-token-prediction layer saves in addition: norms and projection."""
        return 8 * self.sizes.local_tokens * self._cfg.model.hidden * width(self._cfg)

    def _fp8_dense(self, fp8: bool | None) -> bool:
        """True if linear layers other than the routed experts follow the recipe."""
        on = quantizes(self._cfg) if fp8 is None else fp8
        return on and quantizes_dense(self._cfg)

    def _fp8_inputs(self, readers: int, *, instead: bool) -> int:
        """Extra bytes of FP8 copies of a norm's output, one for each linear layer that reads it.

        They are saved `instead` of the bf16 output or in addition to it, in full on every tensor
        parallel rank.
        """
        if not saves_fp8_inputs(self._cfg):
            return 0
        hidden, s = self._cfg.model.hidden, self.sizes
        copies = s.tokens * readers * fp8_row(hidden)
        return copies - (s.local_tokens * 2 * hidden if instead else 0)

    def _projections(self) -> int:
        """Extra bytes of FP8 inputs of attention's projections; bf16 of the output's too."""
        a, s = self._cfg.model.attention, self.sizes
        if not saves_fp8_inputs(self._cfg):
            return 0
        readers, latents, v = 1, list[int](), a.head_dim
        if a.kind == "mla":
            readers, v = 2, a.v_dim
            latents = [rank for rank in (a.q_lora_rank, a.kv_lora_rank) if rank]
        more = s.local_tokens * (fp8_row(a.heads * v) - 2 * sum(latents))
        more += s.tokens * sum(fp8_row(rank) for rank in latents)
        return self._fp8_inputs(readers, instead=True) + more

    def _layer(
        self, mlp: SavedTensors, backward: int, fp8: bool, more: int, mixer: str
    ) -> LayerMemory:
        facts = MIXERS[mixer]
        hidden = self.sizes.local_tokens * self._cfg.model.hidden * width(self._cfg)
        # Inputs and outputs of two norms; output of attention plus bias. Recomputing norms frees
        # their FP8 copies too.
        norms = 2 * hidden + more + (self._projections() if fp8 and facts.quantized else 0)
        attention: SavedTensors = resolve_name(facts.saved_tensors)(self._cfg, self.sizes)
        if facts.backward_bytes:
            own = resolve_name(facts.backward_bytes)(self._cfg, self.sizes)
            backward = max(backward, own)
        parts = attention | {"residual": 2 * hidden, "norm": norms} | mlp
        parts["bias"] = int(self._cfg.model.bias) * hidden
        changes = [] if "dense" in mlp else of_variants(self._cfg.model)
        parts["variants"] = sum(v.saved_bytes(self._cfg, self.sizes) for v in changes)
        run, offloaded = self._cfg.run, 0
        if "full" in run.recompute:
            offloaded = hidden if run.offload else 0
            held = sum(parts.values()) - hidden + backward
            return LayerMemory(hidden - offloaded, held, offloaded)
        recomputed = sum(parts.pop(part, 0) for name in run.recompute for part in _RECOMPUTED[name])
        offloaded = sum(parts.pop(part, 0) for name in run.offload for part in _OFFLOADED[name])
        return LayerMemory(sum(parts.values()), backward + recomputed, offloaded)

    def _experts(self, fp8: bool) -> SavedTensors:
        """Saved by router, dispatch and experts, without the input, which the norm saves."""
        cfg, p, hidden = self._cfg, self._cfg.precision, expert_hidden(self._cfg.model)
        if path := expert_backend(cfg.kernels.backend).saved_tensors:
            parts: SavedTensors = resolve_name(path)(cfg, self.sizes, fp8=fp8)
            parts["moe"] += router_saved(cfg, self.sizes)
            return parts
        parts, sent = experts_saved(cfg, self.sizes, fp8=fp8), self._sent
        tokens = sent.saved * width(cfg) * hidden
        if fp8 and (p.wgrad == "fp8" or rows_in_fp8(cfg)):
            # An FP8 copy besides the bf16 tokens of router and transport: of the tokens that are
            # sent once more, or of received ones. Replicas that overlap nothing copy theirs.
            copied = replica_slots(cfg, self._world) and not overlap_sms(cfg, self._world)
            resent = sent.buffers and rows_in_fp8(cfg) and not copied
            rows = max(sent.saved, self.sizes.local_tokens if resent else self._received())
            tokens = rows * fp8_row(hidden)
        parts["moe"] += router_saved(cfg, self.sizes) + tokens
        parts["moe"] += self.replica_memory().saved
        return parts

    def _received(self) -> int:
        """Received tokens; 0 if a transport for one rank stands in for a larger group."""
        one_rank = TRANSPORTS[self._cfg.parallel.dispatch].one_rank
        alone = expert_parallel_size(self._cfg, self._world) == 1
        return 0 if one_rank and not alone else received(self._cfg, self._world)

    def replica_slot_bytes(self) -> int:
        """Bytes of the replicas' weights and of their fp32 gradients."""
        e, replicas = self._cfg.model.moe, replica_slots(self._cfg, self._world)
        matrix = expert_hidden(self._cfg.model) * e.ffn
        element = width(self._cfg) + 4  # gradients in fp32
        return replicas * (ACTIVATIONS[e.activation].halves + 1) * matrix * element

    def replica_memory(self) -> LayerMemory:
        """Memory of expert replication in one layer; zero without it.

        Weights and fp32 gradients of the replicas, and exchange buffers of the larger matrix,
        unless these are in memory of a one-sided transport; fp32 gradients of local experts if
        they have no buffer; one more copy of the larger matrix if a single call takes all experts.
        """
        e, replicas = self._cfg.model.moe, replica_slots(self._cfg, self._world)
        if not replicas:
            return LayerMemory(0, 0)
        ranks, element = expert_parallel_size(self._cfg, self._world), width(self._cfg)
        halves, matrix = ACTIVATIONS[e.activation].halves, expert_hidden(self._cfg.model) * e.ffn
        expert, local, k = (halves + 1) * matrix, e.experts // ranks, self._cfg.kernels
        saved = replicas * expert * element if self._cfg.parallel.save_x == "keep" else 0
        backward = 0
        if not self._sent.buffers:
            over_nodes = TRANSPORTS[self._cfg.parallel.dispatch].over_nodes
            owners = ranks // nodes(self._cfg, self._world) if over_nodes else ranks
            backward = self.replica_slot_bytes() + 3 * owners * replicas * halves * matrix * 4
        if not k.gradient_accumulation_fusion:
            backward += local * expert * 4
        if not expert_backend(k.backend).fuses_gather:
            backward += (local + replicas) * halves * matrix * element
        return LayerMemory(saved, backward)


@remembered(*LAYERS)
def _per_layer_kind(cfg: Config, world: int, rows: int) -> dict[LayerKind, LayerMemory]:
    return Activations(cfg, world, rows).layers()
