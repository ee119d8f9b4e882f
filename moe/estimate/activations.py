"""Bytes that a micro-batch keeps for its backward pass, and that this needs on top.

Counted from what the modules save, and checked against allocations on an H200
(tests/moe/estimate/test_memory.py), with Transformer Engine's attention and norms. Tensors that two
operations share count once. bf16 unless said.

Legend: T tokens of a rank before sequence parallelism cuts them, N received tokens, S expert rows,
L experts of a rank, D hidden, F expert width, H = 2F if gated.
"""

from dataclasses import dataclass, replace
from itertools import product

import torch

from phalanx.configs.activations import ACTIVATIONS
from phalanx.configs.formats import fp8_row, is_fp8, quantizes, width
from phalanx.configs.layout import expert_parallel_size, replica_slots
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
    """Of one rank's micro-batch."""

    tokens: int
    """T."""
    local_tokens: int
    """Where sequence parallelism has cut them over tensor ranks, as experts get them."""
    received: int
    """N."""
    rows: int
    """S kept."""
    worst_rows: int
    """S if all tokens of the expert-parallel group went to this rank."""


def sizes(cfg: Config, world: int) -> Sizes:
    """Of a rank, with the budget of expert rows at `parallel.capacity_factor`."""
    e, p, d = cfg.model.moe, cfg.parallel, cfg.data
    tokens = d.micro_batch * d.sequence_length // p.context
    local = tokens // p.tensor
    ranks = expert_parallel_size(cfg, world)
    held = slots(e.router, experts=e.experts, top_k=e.top_k)
    places = e.experts // ranks + replica_slots(cfg, world)
    worst = held.max_rows(local, ranks, places)
    if cfg.kernels.backend == "megatron":  # it takes what comes; balanced here
        rows = min(worst, local * e.top_k)
    else:
        budget = Budget(max(1.0, p.capacity_factor), torch.device("cpu"))
        pairs = budget.rows(local, e.top_k, ranks, places, most=worst)
        backend = cfg.kernels.backend
        rows, worst = (rows_for(n, places, backend) for n in (pairs, worst))
    return Sizes(tokens, local, ranks * local, rows, worst)


@dataclass(frozen=True)
class Layer:
    """Bytes of one layer."""

    saved: int
    """From the forward pass until the backward pass of the layer."""
    backward: int
    """Most that its backward pass holds beside what is saved, recomputation included."""
    moved: int = 0
    """In host memory meanwhile (`run.offload`); in neither of the others."""


Parts = dict[str, int]
"""Bytes that a layer keeps, by what they are of."""

_AGAIN: dict[str, tuple[str, ...]] = {
    "norm": ("norm",),
    "mla_up": ("queries_keys_values", "latents"),
    "attention": ("out",),
    "mlp": ("dense", "shared"),
    "expert_h": ("expert_h",),
    "moe_act": ("expert_a",),
    "moe": ("shared", "expert_h", "expert_a", "moe"),
}
"""What a layer keeps no more where that is computed again; with `full` nothing but its input."""

_MOVED: dict[str, tuple[str, ...]] = {
    "residual": ("residual",),
    "attention": ("queries_keys_values", "out"),
    "expert_h": ("expert_h",),
}


class Activations:
    """Of the layers and the ends of a model on one rank.

    Args:
        cfg: valid; `kernels.backend`, `kernels.attention` and `parallel.dispatch` are resolved.
        world: ranks.
        rows: S, instead of what `sizes` says.
    """

    def __init__(self, cfg: Config, world: int, rows: int | None = None) -> None:
        self._cfg, self._world = cfg, world
        self.sizes = sizes(cfg, world)
        if rows is not None:
            self.sizes = replace(self.sizes, rows=rows)
        self._wide = width(cfg) // 2
        """fp32 doubles all that is bf16 otherwise."""

    def by_kind(self) -> dict[LayerKind, Layer]:
        """Of layers of every kind."""
        both = (False, True)
        found = {}
        for fp8, linear in product(both, both):
            found[LayerKind(True, fp8, linear)] = self.dense_layer(fp8, linear)
            found[LayerKind(False, fp8, linear)] = self.moe_layer(fp8, linear)
        return found

    def dense_layer(self, fp8: bool | None = None, linear: bool = False) -> Layer:
        """A layer with a dense MLP; by the recipe (`fp8`) or not, as most layers are by default."""
        fp8_dense = self._fp8_dense(fp8)
        ffn = self._cfg.model.dense_ffn
        gradients = self.sizes.tokens * 2 * self._wide * 3 * ffn // self._cfg.parallel.tensor
        act = ACTIVATIONS[self._cfg.model.moe.activation]
        saved = self._mlp(ffn)
        more = self._fp8_inputs(1, instead=True) if fp8_dense else 0
        if self._by_experts_kernels(ffn, fp8_dense):
            saved = self.sizes.tokens * 2 * self._wide * act.halves * ffn
        return self._layer({"dense": saved}, gradients, fp8_dense, more, linear)

    def moe_layer(self, fp8: bool | None = None, linear: bool = False) -> Layer:
        """A layer with experts; by the recipe (`fp8`) or not, as most layers are by default."""
        fp8_dense, shared = self._fp8_dense(fp8), self._cfg.model.moe.shared_ffn
        parts = self._experts(is_fp8(self._cfg) and fp8 is not False)
        parts["shared"] = self._shared(fp8_dense)
        more = self._fp8_inputs(1, instead=False) if fp8_dense and shared else 0
        return self._layer(parts, self._experts_backward(), fp8_dense, more, linear)

    def freed(self, kind: LayerKind, name: str) -> int:
        """What computing `name` again frees in a layer that keeps all else."""
        run = self._cfg.run
        sizes = []
        for again in ([], [name]):
            changed = replace(self._cfg, run=replace(run, recompute=again, offload=[]))
            other = Activations(changed, self._world, self.sizes.rows)
            sizes.append(other.by_kind()[kind].saved)
        return sizes[0] - sizes[1]

    def head(self) -> Layer:
        """Final norm, logits and loss; those of multi-token prediction as well."""
        m, s, t = self._cfg.model, self.sizes, self._cfg.parallel.tensor
        logits = 2 * s.tokens * m.vocab_size // t * self._wide
        hidden = 2 * s.local_tokens * m.hidden * self._wide
        fused = self._cfg.kernels.backend != "megatron" and (
            self._cfg.kernels.gradient_accumulation_fusion
        )
        weight = 0 if fused else 2 * m.vocab_size * m.hidden // t * self._wide
        # The gradient of the logits takes their place.
        return Layer((1 + m.mtp_layers) * (logits + 2 * hidden), hidden * t + weight)

    def prediction_extra(self) -> int:
        """Saved by a multi-token-prediction layer beside a layer: norms, and what joins them."""
        return 8 * 2 * self.sizes.local_tokens * self._cfg.model.hidden * self._wide

    def _fp8_dense(self, fp8: bool | None) -> bool:
        """Whether linear layers beside the routed experts follow the recipe."""
        cfg = self._cfg
        on = quantizes(cfg) if fp8 is None else fp8
        return on and cfg.precision.dense == "fp8" and cfg.kernels.backend != "megatron"

    def _fp8_inputs(self, readers: int, *, instead: bool) -> int:
        """What the output of a norm takes more in FP8, kept by each linear layer that reads it,
        `instead` of in bf16 or beside that. Tensor parallel ranks each keep the whole."""
        if not self._keeps_fp8():
            return 0
        hidden, s = self._cfg.model.hidden, self.sizes
        kept = s.tokens * readers * fp8_row(hidden)
        return kept - (s.local_tokens * 2 * hidden if instead else 0)

    def _keeps_fp8(self) -> bool:
        """Linear layers keep their inputs in FP8."""
        return is_fp8(self._cfg) and self._cfg.precision.wgrad == "fp8"

    def _projections(self) -> int:
        """What inputs of attention's projections take more in FP8.

        Core attention keeps the input of the last one in bf16 too.
        """
        a, s = self._cfg.model.attention, self.sizes
        if not self._keeps_fp8():
            return 0
        readers, latents, v = 1, list[int](), a.head_dim
        if a.kind == "mla":
            readers, v = 2, a.v_dim
            latents = [rank for rank in (a.q_lora_rank, a.kv_lora_rank) if rank]
        more = s.local_tokens * (fp8_row(a.heads * v) - 2 * sum(latents))
        more += s.tokens * sum(fp8_row(rank) for rank in latents)
        return self._fp8_inputs(readers, instead=True) + more

    def _layer(self, mlp: Parts, backward: int, fp8: bool, more: int, linear: bool) -> Layer:
        """A layer whose MLP saves `mlp`, and of its input `more` in FP8."""
        hidden = 2 * self.sizes.local_tokens * self._cfg.model.hidden * self._wide
        # Inputs and outputs of two norms; output of attention plus bias. Who computes norms again
        # keeps no inputs in FP8.
        norms = 2 * hidden + more + (self._projections() if fp8 and not linear else 0)
        attention, in_backward = self._linear() if linear else (self._attention(), 0)
        backward = max(backward, in_backward)
        parts = attention | {"residual": 2 * hidden, "norm": norms} | mlp
        parts["bias"] = int(self._cfg.model.bias) * hidden
        run, moved = self._cfg.run, 0
        if "full" in run.recompute:
            moved = hidden if run.offload else 0
            return Layer(hidden - moved, sum(parts.values()) - hidden + backward, moved)
        again = sum(parts.pop(part, 0) for name in run.recompute for part in _AGAIN[name])
        moved = sum(parts.pop(part, 0) for name in run.offload for part in _MOVED[name])
        return Layer(sum(parts.values()), backward + again, moved)

    def _linear(self) -> tuple[Parts, int]:
        """What flash-linear-attention and the modules around it save and need, in chunks of 64.

        As much where context ranks have some heads over whole sequences: gradients on their way
        between ranks take less than the kernels did before.
        """
        a, wide = self._cfg.model.linear_attention, 2 * self._wide
        tokens = self.sizes.tokens // self._cfg.parallel.tensor
        keys, values = 2 * a.key_heads * HEAD_DIM, a.value_heads * HEAD_DIM
        # The input projection, of which the convolution's input is a part, and a copy of its gates;
        # normalised queries and keys, and values, as the kernels read them; solved systems; the
        # output, and what the last projection reads.
        kept = input_dim(a) + values + keys + values + a.value_heads * _CHUNK + 2 * values
        numbers = 4 * 6 * a.value_heads  # decays and their sums, beta, norms
        # States of all chunks and their gradients; gradients of queries and keys of every value
        # head, twice, and of values.
        states = 2 * a.value_heads * HEAD_DIM**2 // _CHUNK
        saved = tokens * (wide * kept + numbers)
        return {"linear": saved}, tokens * wide * (states + 6 * values)

    def _attention(self) -> Parts:
        """Query, key and value as the kernel takes them, its output and statistics; latents."""
        a, s, t = self._cfg.model.attention, self.sizes, self._cfg.parallel.tensor
        latents = kept = down = 0
        if a.kind == "mla":
            qk, out = a.heads * (a.qk_nope_dim + a.qk_rope_dim), a.heads * a.v_dim
            taken = 2 * qk + out
            # Down-projections and their norms' outputs, cut along the sequence.
            latents = a.q_lora_rank + a.kv_lora_rank
            down = latents + a.qk_rope_dim
        else:
            q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
            taken, out = q + 2 * kv, q
            if a.output_gate:
                kept += 2 * q  # the gate, and what core attention made before it
            if a.qk_norm and a.qk_norm_over == "projection":
                kept += q + kv  # copies of query and key, which the norms save
            elif 0 < a.rotary_dim < a.head_dim:
                # Steps of their own: the projection whole, of which values are a view, and with
                # norms the query cut out of it.
                kept += q + kv + (q + kv if a.qk_norm else 0)
            elif a.qk_norm and a.kv_heads >= t:
                # The projection whole, of which values may be a view.
                if self._cfg.kernels.attention == "te":
                    kept += q + 2 * kv
                else:
                    taken += q + kv
            elif a.qk_norm and self._cfg.kernels.norm == "te":
                kept += q + kv  # copies of query and key, which the norm saves
            elif a.qk_norm:
                kept += 2 * q + 2 * kv  # the projection whole, and the query cut out of it
            elif a.kv_heads < t and self._cfg.kernels.attention in ("sdpa", "flex", "fa4"):
                taken += q + kv  # values are a view of the projection, which stays whole
        wide = 2 * self._wide
        sizes = {
            "queries_keys_values": wide * taken,
            "latents": wide * latents,
            "out": wide * out + 4 * a.heads,
            "projected": wide * (kept + down),
        }
        return {name: s.tokens * size // t for name, size in sizes.items()}

    def _mlp(self, ffn: int) -> int:
        """Of a dense MLP: projection, activated half, linear half, product."""
        parts = 2 * ACTIVATIONS[self._cfg.model.moe.activation].halves + 1
        return self.sizes.tokens * 2 * self._wide * parts * ffn // self._cfg.parallel.tensor

    def _shared(self, fp8: bool) -> int:
        """Of shared experts: the projection alone by the kernels of the routed ones, which make the
        rest again."""
        ffn, act = self._cfg.model.moe.shared_ffn, ACTIVATIONS[self._cfg.model.moe.activation]
        if not self._by_experts_kernels(ffn, fp8):
            return self._mlp(ffn)
        return self.sizes.tokens * 2 * self._wide * act.halves * ffn

    def _by_experts_kernels(self, ffn: int, fp8: bool) -> bool:
        """A dense MLP or shared experts run by the kernels of the routed ones."""
        cfg, recipe = self._cfg, Fp8Block() if fp8 else None
        spec = MLPSpec(activation_of(cfg.model.moe), cfg.kernels.backend, recipe=recipe)
        return uses_expert_kernels(spec, ffn=ffn, tensor=cfg.parallel.tensor, bias=cfg.model.bias)

    def _experts(self, fp8: bool) -> Parts:
        """Saved by route, dispatch and experts, without the input, which attention's norm saves."""
        m, e, s, p = self._cfg.model, self._cfg.model.moe, self.sizes, self._cfg.precision
        halves = ACTIVATIONS[e.activation].halves
        h = 2 * s.rows * halves * e.ffn * self._wide
        if fp8 and p.hidden == "fp8":
            h = s.rows * fp8_row(halves * e.ffn, halves)
        routing = s.local_tokens * (8 * e.experts + 16 * e.top_k) + 4 * s.received * e.top_k
        if self._cfg.kernels.backend == "megatron":
            # Rows as they came and sorted by expert, the activated product, and with biases the
            # projection plus bias; of FP8 what linear layers save, transposed.
            x, a = (2 * s.rows * n * self._wide for n in (m.hidden, e.ffn))
            if fp8:
                x, a = s.rows * fp8_row(m.hidden), s.rows * fp8_row(e.ffn)
            return {"moe": routing + h * (2 if m.bias else 1) + x, "expert_a": a}
        sent = costs(self._cfg, self._world)
        received = sent.saved * 2 * m.hidden * self._wide
        if fp8 and "fp8" in (p.wgrad, p.dispatch):
            # A copy beside what router and transport have in bf16; under exchanges that overlap
            # experts, what is sent again is quantized again.
            resent = overlaps(self._cfg, self._world)
            kept = sent.saved if resent else max(sent.saved, self._arriving())
            received = kept * fp8_row(m.hidden)
        replicas = self.replicas().saved
        return {"moe": routing + 8 * s.rows + received + replicas, "expert_h": h}

    def _arriving(self) -> int:
        """Tokens; none to compare with those of a group that sends some (`moe.estimate.rows`)."""
        one_rank = TRANSPORTS[self._cfg.parallel.dispatch].one_rank
        alone = expert_parallel_size(self._cfg, self._world) == 1
        return 0 if one_rank and not alone else self.sizes.received

    def replica_bytes(self) -> int:
        """Bytes of replicas' weights and of their gradients in fp32."""
        e, slots = self._cfg.model.moe, replica_slots(self._cfg, self._world)
        one = self._cfg.model.hidden * e.ffn
        return slots * (ACTIVATIONS[e.activation].halves + 1) * one * (2 * self._wide + 4)

    def replicas(self) -> Layer:
        """Of a layer whose hot experts are replicated: replicas' weights, their gradients in fp32,
        and what is exchanged of the larger matrix, unless they are in memory of the exchanges; own
        gradients in fp32 if they have no buffer, and, where one call takes all experts, their
        larger matrix once more."""
        e, slots = self._cfg.model.moe, replica_slots(self._cfg, self._world)
        if not slots:
            return Layer(0, 0)
        ranks, wide = expert_parallel_size(self._cfg, self._world), 2 * self._wide
        halves, one = ACTIVATIONS[e.activation].halves, self._cfg.model.hidden * e.ffn
        expert, own, k = (halves + 1) * one, e.experts // ranks, self._cfg.kernels
        kept = slots * expert * wide if self._cfg.parallel.save_x == "keep" else 0
        backward = 0
        if not costs(self._cfg, self._world).buffers:
            over_nodes = TRANSPORTS[self._cfg.parallel.dispatch].over_nodes
            lenders = ranks // nodes(self._cfg, self._world) if over_nodes else ranks
            backward = self.replica_bytes() + 3 * lenders * slots * halves * one * 4
        if not k.gradient_accumulation_fusion:
            backward += own * expert * 4
        if k.backend != "fused":
            backward += (own + slots) * halves * one * wide
        return Layer(kept, backward)

    def _experts_backward(self) -> int:
        """Most of the steps of `kernels.expert_mlp.custom_ops`, in their order."""
        m, e, s, k = self._cfg.model, self._cfg.model.moe, self.sizes, self._cfg.kernels
        halves = ACTIVATIONS[e.activation].halves
        wide, local = self._wide, e.experts // expert_parallel_size(self._cfg, self._world)
        row_d, row_f = 2 * s.rows * m.hidden * wide, 2 * s.rows * e.ffn * wide
        w1, w2 = (2 * local * n * m.hidden * e.ffn * wide for n in (halves, 1))
        dh, tokens = halves * row_f, 2 * s.received * m.hidden * wide
        copies = int(k.backend != "fused")  # gathered rows, bf16 weight gradients
        around = costs(self._cfg, self._world).backward * 2 * m.hidden * wide
        # In FP8 all operands of weight gradients are transposed beside x's gradient.
        beside = row_f + row_d if self._keeps_fp8() and k.backend == "fused" else 0
        kept = w2 if k.backend == "megatron" or not k.gradient_accumulation_fusion else 0
        steps = (
            copies * row_d + row_f + dh + row_f * copies,
            copies * (row_d + w2) + dh + row_f,
            copies * (row_d + w1) + dh + kept,
            dh + row_d + tokens + beside + (w1 + w2 if kept else 0),
            tokens + w1 + w2,  # placeholders for autograd, or gradients
        )
        return max(steps) + around + self.replicas().backward
