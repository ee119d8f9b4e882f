"""The published architectures in plain PyTorch, as a statement to compare Phalanx with.

Nothing of Megatron-Core and no kernel: a function of a ModelConfig and a state dict (parameter
names and layouts of GPTModel), written from the papers and the published configurations of
DeepSeek-V3, GPT-OSS, Qwen3, GLM-4.5, OLMoE and Qwen3-Next. Speed and memory are no concern; run it
in fp64.

Conventions of stored weights: `linear_qkv` holds, for each key-value head, its query heads, with an
output gate the gates of these, its key and its value. `in_proj` of linear attention holds queries,
keys, values, gates of the output, beta and alpha, each of all heads. Rotary channels of
grouped-query attention pair c with c + d/2 (Llama, GPT-OSS, Qwen3); those of latent attention pair
2c with 2c + 1 (DeepSeek). Gated MLPs hold [gate; up].

Shape legend: B sequences, S positions, D hidden, H heads, d channels, E experts, V vocabulary,
N = B * S.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.configs.arithmetic.layers import is_dense
from phalanx.configs.schema import AttentionConfig, ModelConfig, MoEConfig
from tests.extras.linear_attention import recurrent


def correction_index(rotations: float, context: int, theta: float, d: int) -> float:
    """The (real) index c at which a position `context` tokens away has turned `rotations` times.

    context * theta^(-2c/d) = 2 pi * rotations, solved for c.
    """
    return d / 2 * math.log(context / (2 * math.pi * rotations)) / math.log(theta)


def frequencies(a: AttentionConfig, d: int) -> Tensor:
    """Radians per position of each rotary channel pair, [d / 2]; YaRN is arXiv 2309.00071.

    As in the published models, the ramp from kept to divided frequencies is linear in the index.
    """
    f = torch.tensor([a.rope_theta ** (-2 * c / d) for c in range(d // 2)], dtype=torch.float64)
    y = a.yarn
    if y.factor <= 1:
        return f
    kept = correction_index(y.beta_fast, y.original_context, a.rope_theta, d)
    divided = correction_index(y.beta_slow, y.original_context, a.rope_theta, d)
    if y.truncate:
        kept, divided = math.floor(kept), math.ceil(divided)
    kept, divided = max(kept, 0), min(divided, d - 1)
    for c in range(d // 2):
        ramp = min(1.0, max(0.0, (c - kept) / (divided - kept)))
        f[c] *= (1 - ramp) + ramp / y.factor
    return f


def temperature(factor: float, coefficient: float) -> float:
    """YaRN's attention factor 0.1 * ln(s) + 1, with DeepSeek's coefficient on the logarithm."""
    return 0.1 * coefficient * math.log(factor) + 1 if factor > 1 else 1.0


def rotate(x_BSHd: Tensor, a: AttentionConfig, *, adjacent: bool) -> Tensor:
    """Turn each channel pair, as a complex number, by position * frequency, with YaRN's size."""
    d, y = x_BSHd.size(-1), a.yarn
    angle = torch.outer(torch.arange(x_BSHd.size(1), dtype=torch.float64), frequencies(a, d))
    size = temperature(y.factor, y.mscale) / temperature(y.factor, y.mscale_all_dim)
    turn = torch.polar(torch.full_like(angle, size), angle)[:, None]
    if adjacent:
        return torch.view_as_real(
            torch.view_as_complex(x_BSHd.unflatten(-1, (-1, 2)).contiguous()) * turn
        ).flatten(-2)
    real, imaginary = x_BSHd.chunk(2, -1)
    z = torch.complex(real.contiguous(), imaginary.contiguous()) * turn
    return torch.cat([z.real, z.imag], -1)


def attend(
    q_BSHd: Tensor,
    k_BSGd: Tensor,
    v_BSGv: Tensor,
    scale: float,
    window: int,
    sinks_H: Tensor | None,
) -> Tensor:
    """[B, S, H * v]: causal attention, head by head."""
    S, H, G = q_BSHd.size(1), q_BSHd.size(2), k_BSGd.size(2)
    age = torch.arange(S)[:, None] - torch.arange(S)[None]
    seen = (age >= 0) & (age < window) if window else age >= 0
    heads = []
    for h in range(H):
        g = h // (H // G)
        logits = q_BSHd[:, :, h] @ k_BSGd[:, :, g].mT * scale
        weight = logits.exp() * seen
        sink = sinks_H[h].exp() if sinks_H is not None else 0.0
        heads.append(weight / (weight.sum(-1, keepdim=True) + sink) @ v_BSGv[:, :, g])
    return torch.cat(heads, -1)


def gated(h: Tensor, e: MoEConfig) -> Tensor:
    """The activation of experts, dense and shared MLPs."""
    if e.activation == "squared_relu":
        return torch.where(h > 0, h * h, 0.0)
    gate, up = h.chunk(2, -1)
    if e.activation_limit:
        gate = torch.minimum(gate, torch.tensor(e.activation_limit))
        up = up.clamp(-e.activation_limit, e.activation_limit)
    if e.activation == "swiglu":
        gate = gate / (1 + (-gate).exp())
    elif e.activation == "geglu":
        gate = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    elif e.activation == "quick_geglu":
        gate = gate / (1 + (-e.activation_alpha * gate).exp())
    else:
        raise ValueError(f"tests/moe/model/plain_model.py has no formula for {e.activation}")
    return gate * (up + e.activation_offset)


class PlainModel:
    """`logits` and `losses` of a decoder of the given architecture with the given weights."""

    def __init__(self, m: ModelConfig, state: dict[str, Tensor]) -> None:
        self.m, self.state = m, state

    def hidden(self, ids_BS: Tensor) -> Tensor:
        """[B, S, D] after the final norm."""
        x = self.embed(ids_BS)
        for i in range(self.m.layers):
            x = self.layer(x, f"decoder.layers.{i}", i + 1, dense=is_dense(self.m, i))
        return self.norm(x, "decoder.final_layernorm")

    def head(self, x_BSD: Tensor) -> Tensor:
        tied = (
            "embedding.word_embeddings.weight" if self.m.tie_embeddings else "output_layer.weight"
        )
        return x_BSD @ self.state[tied].T

    def logits(self, ids_BS: Tensor) -> Tensor:
        """[B, S, V]."""
        return self.head(self.hidden(ids_BS))

    def losses(self, ids_BS: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Mean next-token loss, and mean loss of the token after it by multi-token prediction.

        DeepSeek-V3, section 2.2: position i joins its hidden state with the embedding of the next
        token and predicts the token after that one, which is the next position's label. The last
        position has no such token.
        """
        x = self.hidden(ids_BS)
        main = F.cross_entropy(self.head(x).flatten(0, 1), labels_BS.flatten())
        if not self.m.mtp_layers:
            return main, main.new_zeros(())
        p = "mtp.layers.0"
        known = self.norm(x[:, :-1], f"{p}.hnorm")
        following = self.norm(self.embed(ids_BS[:, 1:]), f"{p}.enorm")
        x = torch.cat([following, known], -1) @ self.state[f"{p}.eh_proj.weight"].T
        dense = is_dense(self.m, self.m.layers)
        x = self.layer(x, f"{p}.mtp_model_layer", 0, dense=dense)  # 0: one with full attention
        x = self.norm(x, f"{p}.final_layernorm")
        return main, F.cross_entropy(self.head(x).flatten(0, 1), labels_BS[:, 1:].flatten())

    def embed(self, ids_BS: Tensor) -> Tensor:
        return self.state["embedding.word_embeddings.weight"][ids_BS]

    def norm(self, x: Tensor, p: str) -> Tensor:
        mean_square = (x * x).mean(-1, keepdim=True)
        weight = self.state[f"{p}.weight"] + (1 if self.m.norm_zero_centered else 0)
        return x / (mean_square + self.m.norm_eps).sqrt() * weight

    def linear(self, x: Tensor, p: str) -> Tensor:
        y = x @ self.state[f"{p}.weight"].T
        return y + self.state[f"{p}.bias"] if f"{p}.bias" in self.state else y

    def layer(self, x: Tensor, p: str, number: int, *, dense: bool) -> Tensor:
        a = self.m.attention
        full = a.window_every > 1 and number % a.window_every == 0
        attention = self.latent if a.kind == "mla" else self.grouped
        if number % self.m.linear_attention.full_attention_interval:
            attention = self.linear_attention
        x = x + attention(
            self.norm(x, f"{p}.input_layernorm"), f"{p}.self_attention", 0 if full else a.window
        )
        mlp = self.dense if dense else self.experts
        return x + mlp(self.norm(x, f"{p}.pre_mlp_layernorm"), f"{p}.mlp")

    def grouped(self, x: Tensor, p: str, window: int) -> Tensor:
        a = self.m.attention
        by_group = self.linear(x, f"{p}.linear_qkv").unflatten(-1, (a.kv_heads, -1, a.head_dim))
        q, k, v = by_group[..., :-2, :], by_group[..., -2, :], by_group[..., -1, :]
        gate = torch.tensor(math.inf)
        if a.output_gate:
            q, gate = q.chunk(2, -2)
            gate = gate.flatten(2)
        q = q.flatten(2, 3)
        if a.qk_norm and a.qk_norm_over == "projection":  # before the rotation, over all heads
            q, k = q.flatten(2), k.flatten(2)
        if a.qk_norm:  # or over the channels of each head
            q, k = self.norm(q, f"{p}.q_layernorm"), self.norm(k, f"{p}.k_layernorm")
        q, k = (x.reshape(*x.shape[:2], -1, a.head_dim) for x in (q, k))
        turned = a.rotary_dim or a.head_dim
        q, k = (
            torch.cat([rotate(x[..., :turned], a, adjacent=False), x[..., turned:]], -1)
            for x in (q, k)
        )
        sinks = self.state[f"{p}.core_attention.softmax_offset"] if a.sinks else None
        o = attend(q, k, v, 1 / math.sqrt(a.head_dim), window, sinks) * gate.sigmoid()
        return self.linear(o, f"{p}.linear_proj")

    def linear_attention(self, x: Tensor, p: str, window: int) -> Tensor:
        """Gated DeltaNet (arXiv 2412.06464), token by token."""
        a, d = self.m.linear_attention, 128
        keys, values = a.key_heads * d, a.value_heads * d
        qkv, gate, beta, alpha = self.linear(x, f"{p}.in_proj").split(
            [2 * keys + values, values, a.value_heads, a.value_heads], -1
        )
        qkv = recurrent.conv(qkv, self.state[f"{p}.conv1d.weight"][:, 0], None)
        q, k, v = (y.unflatten(-1, (-1, d)) for y in qkv.split([keys, keys, values], -1))
        softplus = (1 + (alpha + self.state[f"{p}.dt_bias"]).exp()).log()
        log_decay = -self.state[f"{p}.A_log"].exp() * softplus
        o = recurrent.rule(q, k, v, log_decay, beta.sigmoid())
        weight, eps = self.state[f"{p}.out_norm.weight"], self.m.norm_eps
        o = recurrent.norm(o, gate.unflatten(-1, (-1, d)), weight, eps)
        return self.linear(o.flatten(2), f"{p}.out_proj")

    def latent(self, x: Tensor, p: str, window: int) -> Tensor:
        """Multi-head latent attention: DeepSeek-V3, section 2.1.1."""
        a = self.m.attention
        split = [a.qk_nope_dim, a.qk_rope_dim]
        if a.q_lora_rank:
            q = self.norm(self.linear(x, f"{p}.linear_q_down_proj"), f"{p}.q_layernorm")
            q = self.linear(q, f"{p}.linear_q_up_proj")
        else:
            q = self.linear(x, f"{p}.linear_q_proj")
        q_content, q_rotary = q.unflatten(-1, (a.heads, -1)).split(split, -1)
        latent, k_rotary = self.linear(x, f"{p}.linear_kv_down_proj").split(
            [a.kv_lora_rank, a.qk_rope_dim], -1
        )
        kv = self.linear(self.norm(latent, f"{p}.kv_layernorm"), f"{p}.linear_kv_up_proj")
        k_content, v = kv.unflatten(-1, (a.heads, -1)).split([a.qk_nope_dim, a.v_dim], -1)
        k_rotary = rotate(k_rotary[:, :, None], a, adjacent=True)  # one for all heads
        q = torch.cat([q_content, rotate(q_rotary, a, adjacent=True)], -1)
        k = torch.cat([k_content, k_rotary.expand(-1, -1, a.heads, -1)], -1)
        scale = temperature(a.yarn.factor, a.yarn.mscale_all_dim) ** 2 / math.sqrt(sum(split))
        return self.linear(attend(q, k, v, scale, window, None), f"{p}.linear_proj")

    def dense(self, x: Tensor, p: str) -> Tensor:
        return self.linear(gated(self.linear(x, f"{p}.linear_fc1"), self.m.moe), f"{p}.linear_fc2")

    def experts(self, x_BSD: Tensor, p: str) -> Tensor:
        """Every expert on every token, weighted by a matrix that is zero where not chosen."""
        x_ND, w = x_BSD.flatten(0, 1), self.state
        weight_NE = self.route(x_ND, f"{p}.router")
        out = torch.zeros_like(x_ND)
        for e in range(self.m.moe.experts):
            h = x_ND @ w[f"{p}.experts.w1"][e].T
            if self.m.bias:
                h = h + w[f"{p}.experts.b1"][e]
            y = gated(h, self.m.moe) @ w[f"{p}.experts.w2"][e].T
            if self.m.bias:
                y = y + w[f"{p}.experts.b2"][e]
            out = out + weight_NE[:, e : e + 1] * y
        if self.m.moe.shared_ffn:
            shared = self.dense(x_ND, f"{p}.shared_experts")
            if self.m.moe.shared_gate:
                shared = shared * (x_ND @ w[f"{p}.shared_experts.gate_weight"].T).sigmoid()
            out = out + shared
        return out.view_as(x_BSD)

    def route(self, x_ND: Tensor, p: str) -> Tensor:
        r, moe = self.m.moe.router, self.m.moe
        rows = []
        for logits_E in self.linear(x_ND, p):
            score = logits_E.sigmoid() if r.score == "sigmoid" else logits_E.softmax(-1)
            judged = score.detach() + self.state.get(f"{p}.expert_bias", 0)
            if r.groups > r.group_topk:
                groups = judged.view(r.groups, -1)
                worth = groups.sort(-1, descending=True).values[
                    :, : max(1, moe.top_k // r.group_topk)
                ]
                best = worth.sum(-1).topk(r.group_topk).indices.tolist()
                judged = torch.cat([g if i in best else g - math.inf for i, g in enumerate(groups)])
            chosen = judged.topk(moe.top_k).indices
            if r.score == "softmax" and r.softmax_over == "topk":
                value = logits_E[chosen].softmax(-1)
            else:
                value = score[chosen] / (score[chosen].sum() if r.normalize else 1)
            rows.append(torch.zeros_like(score).index_put((chosen,), value * r.scale))
        return torch.stack(rows)
