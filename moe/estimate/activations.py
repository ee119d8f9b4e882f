"""Bytes that a micro-batch saves for its backward pass, and extra bytes the backward pass needs.

Counted from the tensors that modules save, and checked against allocations on an H200
(tests/moe/estimate/test_memory.py), with Transformer Engine's attention and norms. A tensor shared
by two operations counts once. bf16 unless stated.

Legend: T tokens of a rank before sequence parallelism splits them, N received tokens, S expert
rows, L experts of a rank, D hidden, F expert width, H = 2F if gated.
"""

from dataclasses import dataclass, replace
from itertools import product

import torch

from phalanx.configs.activations import ACTIVATIONS
from phalanx.configs.formats import fp8_row, is_fp8, quantizes, width
from phalanx.configs.layout import clone_slots, expert_parallel_size
from phalanx.configs.linear_attention import HEAD_DIM, input_dim
from phalanx.configs.schema import Config
from phalanx.configs.transports import TRANSPORTS
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.expert_mlp.providers import rows_for
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.moe.estimate.traffic import costs, nodes, overlaps
from phalanx.moe.estimate.weights import LayerKind
from phalanx.moe.experts import activation_of
from phalanx.moe.model.dense_mlp import uses_expert_kernels
from phalanx.moe.router.router import slots
from phalanx.parallel.dispatcher.capacity import Budget

_CHUNK = 64
"""Positions of a chunk of flash-linear-attention's kernels."""


@dataclass(frozen=True)
class Sizes:
    """Token and row counts of one rank's micro-batch."""

    tokens: int
    """T."""
    local_tokens: int
    """Tokens after sequence parallelism has split them over tensor ranks; input of the experts."""
    received: int
    """N."""
    rows: int
    """S that is budgeted."""
    worst_rows: int
    """S if all tokens of the expert-parallel group went to this rank."""


def sizes(cfg: Config, world: int) -> Sizes:
    """Sizes of a rank, with the budget of expert rows at `parallel.capacity_factor`."""
    e, p, d = cfg.model.moe, cfg.parallel, cfg.data
    tokens = d.micro_batch * d.sequence_length // p.context
    local = tokens // p.tensor
    ranks = expert_parallel_size(cfg, world)
    expert_slots = slots(e.router, experts=e.experts, top_k=e.top_k)
    local_slots = e.experts // ranks + clone_slots(cfg, world)
    worst = expert_slots.most(local, ranks, local_slots)
    if cfg.kernels.backend == "megatron":  # no row budget; balanced load assumed
        rows = min(worst, local * e.top_k)
    else:
        budget = Budget(max(1.0, p.capacity_factor), torch.device("cpu"))
        pairs = budget.rows(local, e.top_k, ranks, local_slots, most=worst)
        backend = cfg.kernels.backend
        rows, worst = (rows_for(n, local_slots, backend) for n in (pairs, worst))
    return Sizes(tokens, local, ranks * local, rows, worst)


@dataclass(frozen=True)
class LayerMemory:
    """Activation bytes of one layer."""

    saved: int
    """GPU memory held from the layer's forward pass until its backward pass."""
    backward: int
    """Peak of its backward pass on top of `saved`, recomputation included."""
    offloaded: int = 0
    """Bytes moved to host memory (`run.offload`), not counted in the other two."""


SavedTensors = dict[str, int]
"""Saved bytes of a layer, by group of tensors."""

_RECOMPUTED: dict[str, tuple[str, ...]] = {
    "norm": ("norm",),
    "mla_up": ("queries_keys_values", "latents"),
    "attention": ("out",),
    "mlp": ("dense", "shared"),
    "expert_h": ("expert_h",),
    "moe_act": ("expert_a",),
    "moe": ("shared", "expert_h", "expert_a", "moe"),
}
"""Groups of tensors that a name of run.recompute frees; with `full` only the input is saved."""

_OFFLOADED: dict[str, tuple[str, ...]] = {
    "residual": ("residual",),
    "attention": ("queries_keys_values", "out"),
    "expert_h": ("expert_h",),
}


class Activations:
    """Activation memory of the layers and the output head of a model on one rank.

    Args:
        cfg: valid; `kernels.backend`, `kernels.attention` and `parallel.dispatch` are resolved.
        world: ranks.
        rows: S, if other than that of `sizes`.
    """

    def __init__(self, cfg: Config, world: int, rows: int | None = None) -> None:
        self._cfg, self._world = cfg, world
        self.sizes = sizes(cfg, world)
        if rows is not None:
            self.sizes = replace(self.sizes, rows=rows)
        self._fp32_factor = width(cfg) // 2
        """2 in fp32, which doubles everything that is bf16 otherwise; else 1."""

    def per_layer_kind(self) -> dict[LayerKind, LayerMemory]:
        """Memory of a layer of every kind."""
        both = (False, True)
        layers = {}
        for fp8, linear in product(both, both):
            layers[LayerKind(True, fp8, linear)] = self.dense_layer(fp8, linear)
            layers[LayerKind(False, fp8, linear)] = self.moe_layer(fp8, linear)
        return layers

    def dense_layer(self, fp8: bool | None = None, linear: bool = False) -> LayerMemory:
        """Memory of a layer with a dense MLP; `fp8` None follows the recipe of most layers."""
        fp8_dense = self._fp8_dense(fp8)
        ffn = self._cfg.model.dense_ffn
        gradients = self.sizes.tokens * 2 * self._fp32_factor * 3 * ffn // self._cfg.parallel.tensor
        act = ACTIVATIONS[self._cfg.model.moe.activation]
        saved = self._mlp(ffn)
        more = self._fp8_inputs(1, instead=True) if fp8_dense else 0
        if self._by_experts_kernels(ffn, fp8_dense):
            saved = self.sizes.tokens * 2 * self._fp32_factor * act.halves * ffn
        return self._layer({"dense": saved}, gradients, fp8_dense, more, linear)

    def moe_layer(self, fp8: bool | None = None, linear: bool = False) -> LayerMemory:
        """Memory of a layer with experts; `fp8` None follows the recipe of most layers."""
        fp8_dense, shared = self._fp8_dense(fp8), self._cfg.model.moe.shared_ffn
        parts = self._experts(is_fp8(self._cfg) and fp8 is not False)
        parts["shared"] = self._shared(fp8_dense)
        more = self._fp8_inputs(1, instead=False) if fp8_dense and shared else 0
        return self._layer(parts, self._experts_backward(), fp8_dense, more, linear)

    def bytes_freed(self, kind: LayerKind, name: str) -> int:
        """Bytes that recomputing `name` frees in a layer that saves everything else."""
        run = self._cfg.run
        saved = []
        for recompute in ([], [name]):
            changed = replace(self._cfg, run=replace(run, recompute=recompute, offload=[]))
            other = Activations(changed, self._world, self.sizes.rows)
            saved.append(other.per_layer_kind()[kind].saved)
        return saved[0] - saved[1]

    def head(self) -> LayerMemory:
        """Memory of final norm, logits and loss, multi-token prediction included."""
        m, s, t = self._cfg.model, self.sizes, self._cfg.parallel.tensor
        logits = 2 * s.tokens * m.vocab_size // t * self._fp32_factor
        hidden = 2 * s.local_tokens * m.hidden * self._fp32_factor
        fused = self._cfg.kernels.backend != "megatron" and (
            self._cfg.kernels.gradient_accumulation_fusion
        )
        weight = 0 if fused else 2 * m.vocab_size * m.hidden // t * self._fp32_factor
        # The gradient of the logits is written over them.
        return LayerMemory((1 + m.mtp_layers) * (logits + 2 * hidden), hidden * t + weight)

    def prediction_extra(self) -> int:
        """Bytes that a multi-token-prediction layer saves in addition: norms and projection."""
        return 8 * 2 * self.sizes.local_tokens * self._cfg.model.hidden * self._fp32_factor

    def _fp8_dense(self, fp8: bool | None) -> bool:
        """Do linear layers other than the routed experts follow the recipe?"""
        cfg = self._cfg
        on = quantizes(cfg) if fp8 is None else fp8
        return on and cfg.precision.dense == "fp8" and cfg.kernels.backend != "megatron"

    def _fp8_inputs(self, readers: int, *, instead: bool) -> int:
        """Extra bytes of FP8 copies of a norm's output, one for each linear layer that reads it.

        They are saved `instead` of the bf16 output or in addition to it. Every tensor parallel
        rank saves the full copy.
        """
        if not self._saves_fp8_inputs():
            return 0
        hidden, s = self._cfg.model.hidden, self.sizes
        copies = s.tokens * readers * fp8_row(hidden)
        return copies - (s.local_tokens * 2 * hidden if instead else 0)

    def _saves_fp8_inputs(self) -> bool:
        """Do linear layers save their inputs in FP8?"""
        return is_fp8(self._cfg) and self._cfg.precision.wgrad == "fp8"

    def _projections(self) -> int:
        """Extra bytes of FP8 inputs of attention's projections.

        Core attention saves the input of the output projection in bf16 too.
        """
        a, s = self._cfg.model.attention, self.sizes
        if not self._saves_fp8_inputs():
            return 0
        readers, latents, v = 1, list[int](), a.head_dim
        if a.kind == "mla":
            readers, v = 2, a.v_dim
            latents = [rank for rank in (a.q_lora_rank, a.kv_lora_rank) if rank]
        more = s.local_tokens * (fp8_row(a.heads * v) - 2 * sum(latents))
        more += s.tokens * sum(fp8_row(rank) for rank in latents)
        return self._fp8_inputs(readers, instead=True) + more

    def _layer(
        self, mlp: SavedTensors, backward: int, fp8: bool, more: int, linear: bool
    ) -> LayerMemory:
        """Memory of a layer whose MLP saves `mlp`, and `more` bytes of its input in FP8."""
        hidden = 2 * self.sizes.local_tokens * self._cfg.model.hidden * self._fp32_factor
        # Inputs and outputs of two norms; output of attention plus bias. Recomputing norms frees
        # their FP8 copies too.
        norms = 2 * hidden + more + (self._projections() if fp8 and not linear else 0)
        attention, in_backward = self._linear() if linear else (self._attention(), 0)
        backward = max(backward, in_backward)
        parts = attention | {"residual": 2 * hidden, "norm": norms} | mlp
        parts["bias"] = int(self._cfg.model.bias) * hidden
        run, offloaded = self._cfg.run, 0
        if "full" in run.recompute:
            offloaded = hidden if run.offload else 0
            held = sum(parts.values()) - hidden + backward
            return LayerMemory(hidden - offloaded, held, offloaded)
        recomputed = sum(parts.pop(part, 0) for name in run.recompute for part in _RECOMPUTED[name])
        offloaded = sum(parts.pop(part, 0) for name in run.offload for part in _OFFLOADED[name])
        return LayerMemory(sum(parts.values()), backward + recomputed, offloaded)

    def _linear(self) -> tuple[SavedTensors, int]:
        """Bytes saved and needed by flash-linear-attention and the modules around it.

        The same with context parallelism, where a rank has some heads over full sequences:
        gradients in flight between ranks take less than the kernels did before.
        """
        a, element = self._cfg.model.linear_attention, 2 * self._fp32_factor
        tokens = self.sizes.tokens // self._cfg.parallel.tensor
        keys, values = 2 * a.key_heads * HEAD_DIM, a.value_heads * HEAD_DIM
        # The input projection, of which the convolution's input is a part, and a copy of its gates;
        # normalised queries and keys, and values, as the kernels read them; solved systems; the
        # output, and the input of the output projection.
        channels = input_dim(a) + values + keys + values + a.value_heads * _CHUNK + 2 * values
        scalars = 4 * 6 * a.value_heads  # fp32: decays and their sums, beta, norms
        # States of all chunks and their gradients; gradients of queries and keys of every value
        # head, twice, and of values.
        states = 2 * a.value_heads * HEAD_DIM**2 // _CHUNK
        saved = tokens * (element * channels + scalars)
        return {"linear": saved}, tokens * element * (states + 6 * values)

    def _attention(self) -> SavedTensors:
        """Query, key and value as the kernel reads them, its output and statistics; latents."""
        a, s, t = self._cfg.model.attention, self.sizes, self._cfg.parallel.tensor
        latents = projected = down = 0
        if a.kind == "mla":
            qk, out = a.heads * (a.qk_nope_dim + a.qk_rope_dim), a.heads * a.v_dim
            kernel_inputs = 2 * qk + out
            # Down-projections and their norms' outputs, split along the sequence.
            latents = a.q_lora_rank + a.kv_lora_rank
            down = latents + a.qk_rope_dim
        else:
            q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
            kernel_inputs, out = q + 2 * kv, q
            if a.output_gate:
                projected += 2 * q  # the gate, and the output of core attention before it
            if a.qk_norm and a.qk_norm_over == "projection":
                projected += q + kv  # copies of query and key, saved by the norms
            elif 0 < a.rotary_dim < a.head_dim:
                # Unfused rotary embedding: the full projection, of which values are a view, and
                # with norms the query sliced out of it.
                projected += q + kv + (q + kv if a.qk_norm else 0)
            elif a.qk_norm and a.kv_heads >= t:
                # The full projection, of which values may be a view.
                if self._cfg.kernels.attention == "te":
                    projected += q + 2 * kv
                else:
                    kernel_inputs += q + kv
            elif a.qk_norm and self._cfg.kernels.norm == "te":
                projected += q + kv  # copies of query and key, saved by the norm
            elif a.qk_norm:
                projected += 2 * q + 2 * kv  # the full projection, and the query sliced out of it
            elif a.kv_heads < t and self._cfg.kernels.attention in ("sdpa", "flex", "fa4"):
                kernel_inputs += q + kv  # values are a view that keeps the full projection alive
        element = 2 * self._fp32_factor
        sizes = {
            "queries_keys_values": element * kernel_inputs,
            "latents": element * latents,
            "out": element * out + 4 * a.heads,
            "projected": element * (projected + down),
        }
        return {name: s.tokens * size // t for name, size in sizes.items()}

    def _mlp(self, ffn: int) -> int:
        """Saved bytes of a dense MLP: projection, activated gate, linear part, product."""
        parts = 2 * ACTIVATIONS[self._cfg.model.moe.activation].halves + 1
        return self.sizes.tokens * 2 * self._fp32_factor * parts * ffn // self._cfg.parallel.tensor

    def _shared(self, fp8: bool) -> int:
        """Saved bytes of shared experts: only the projection if expert kernels run them."""
        ffn, act = self._cfg.model.moe.shared_ffn, ACTIVATIONS[self._cfg.model.moe.activation]
        if not self._by_experts_kernels(ffn, fp8):
            return self._mlp(ffn)
        return self.sizes.tokens * 2 * self._fp32_factor * act.halves * ffn

    def _by_experts_kernels(self, ffn: int, fp8: bool) -> bool:
        """Is a dense MLP or shared expert of this width run by the kernels of routed experts?

        These recompute everything but the projection.
        """
        cfg, recipe = self._cfg, Fp8Block() if fp8 else None
        spec = MLPSpec(activation_of(cfg.model.moe), cfg.kernels.backend, recipe=recipe)
        return uses_expert_kernels(spec, ffn=ffn, tensor=cfg.parallel.tensor, bias=cfg.model.bias)

    def _experts(self, fp8: bool) -> SavedTensors:
        """Saved by router, dispatch and experts, without the input, which the norm saves."""
        m, e, s, p = self._cfg.model, self._cfg.model.moe, self.sizes, self._cfg.precision
        halves = ACTIVATIONS[e.activation].halves
        h = 2 * s.rows * halves * e.ffn * self._fp32_factor
        if fp8 and p.hidden == "fp8":
            h = s.rows * fp8_row(halves * e.ffn, halves)
        routing = s.local_tokens * (8 * e.experts + 16 * e.top_k) + 4 * s.received * e.top_k
        if self._cfg.kernels.backend == "megatron":
            # Rows as received and sorted by expert, the activated product, and with biases the
            # projection plus bias; in FP8 the transposed inputs of linear layers.
            x, a = (2 * s.rows * n * self._fp32_factor for n in (m.hidden, e.ffn))
            if fp8:
                x, a = s.rows * fp8_row(m.hidden), s.rows * fp8_row(e.ffn)
            return {"moe": routing + h * (2 if m.bias else 1) + x, "expert_a": a}
        sent = costs(self._cfg, self._world)
        received = sent.kept * 2 * m.hidden * self._fp32_factor
        if fp8 and "fp8" in (p.wgrad, p.dispatch):
            # An FP8 copy besides the bf16 tokens of router and transport. Exchanges that overlap
            # experts quantize once more the tokens that they send a second time.
            resent = overlaps(self._cfg, self._world)
            tokens = sent.kept if resent else max(sent.kept, self._received())
            received = tokens * fp8_row(m.hidden)
        replicas = self.replica_memory().saved
        return {"moe": routing + 8 * s.rows + received + replicas, "expert_h": h}

    def _received(self) -> int:
        """Received tokens; 0 if a transport for one rank stands in for a larger group.

        `moe.estimate.rows` compares such a layer with one of a group that sends tokens.
        """
        one_rank = TRANSPORTS[self._cfg.parallel.dispatch].one_rank
        alone = expert_parallel_size(self._cfg, self._world) == 1
        return 0 if one_rank and not alone else self.sizes.received

    def replica_slot_bytes(self) -> int:
        """Bytes of the replicas' weights and of their fp32 gradients."""
        e, replicas = self._cfg.model.moe, clone_slots(self._cfg, self._world)
        matrix = self._cfg.model.hidden * e.ffn
        element = 2 * self._fp32_factor + 4
        return replicas * (ACTIVATIONS[e.activation].halves + 1) * matrix * element

    def replica_memory(self) -> LayerMemory:
        """Memory of expert replication in one layer; zero without it.

        Weights and fp32 gradients of the replicas, and exchange buffers of the larger matrix,
        unless these are in memory of a one-sided transport; fp32 gradients of local experts if
        they have no buffer; one more copy of the larger matrix if a single call takes all experts.
        """
        e, replicas = self._cfg.model.moe, clone_slots(self._cfg, self._world)
        if not replicas:
            return LayerMemory(0, 0)
        ranks, element = expert_parallel_size(self._cfg, self._world), 2 * self._fp32_factor
        halves, matrix = ACTIVATIONS[e.activation].halves, self._cfg.model.hidden * e.ffn
        expert, local, k = (halves + 1) * matrix, e.experts // ranks, self._cfg.kernels
        saved = replicas * expert * element if self._cfg.parallel.save_x == "keep" else 0
        backward = 0
        if not costs(self._cfg, self._world).buffers:
            over_nodes = TRANSPORTS[self._cfg.parallel.dispatch].over_nodes
            owners = ranks // nodes(self._cfg, self._world) if over_nodes else ranks
            backward = self.replica_slot_bytes() + 3 * owners * replicas * halves * matrix * 4
        if not k.gradient_accumulation_fusion:
            backward += local * expert * 4
        if k.backend != "fused":
            backward += (local + replicas) * halves * matrix * element
        return LayerMemory(saved, backward)

    def _experts_backward(self) -> int:
        """Peak over the steps of `kernels.expert_mlp.custom_ops`, in their order."""
        m, e, s, k = self._cfg.model, self._cfg.model.moe, self.sizes, self._cfg.kernels
        halves = ACTIVATIONS[e.activation].halves
        factor, local = self._fp32_factor, e.experts // expert_parallel_size(self._cfg, self._world)
        row_d, row_f = 2 * s.rows * m.hidden * factor, 2 * s.rows * e.ffn * factor
        w1, w2 = (2 * local * n * m.hidden * e.ffn * factor for n in (halves, 1))
        dh, tokens = halves * row_f, 2 * s.received * m.hidden * factor
        copies = int(k.backend != "fused")  # gathered rows, bf16 weight gradients
        exchange = costs(self._cfg, self._world).backward * 2 * m.hidden * factor
        # In FP8 all operands of weight gradients are transposed while x's gradient is live.
        transposed = row_f + row_d if self._saves_fp8_inputs() and k.backend == "fused" else 0
        dw2 = w2 if k.backend == "megatron" or not k.gradient_accumulation_fusion else 0
        steps = (
            copies * row_d + row_f + dh + row_f * copies,
            copies * (row_d + w2) + dh + row_f,
            copies * (row_d + w1) + dh + dw2,
            dh + row_d + tokens + transposed + (w1 + w2 if dw2 else 0),
            tokens + w1 + w2,  # placeholders for autograd, or gradients
        )
        return max(steps) + exchange + self.replica_memory().backward
