"""The gated delta rule token by token, head by head: what implementations are compared with.

Written from arXiv 2412.06464, equation 10, in fp64.
"""

import torch
from torch import Tensor


def conv(x_BSC: Tensor, weight_CW: Tensor, position_BS: Tensor | None) -> Tensor:
    """SiLU of the sum over taps that reach no earlier document."""
    x, w = x_BSC.double(), weight_CW.double()
    rows = []
    for b in range(x.size(0)):
        for t in range(x.size(1)):
            total = torch.zeros_like(x[b, t])
            reach = t if position_BS is None else int(position_BS[b, t])
            for back in range(min(reach + 1, w.size(1))):
                total = total + x[b, t - back] * w[:, w.size(1) - 1 - back]
            rows.append(total / (1 + (-total).exp()))
    return torch.stack(rows).view_as(x)


def rule(
    q_BSKd: Tensor,
    k_BSKd: Tensor,
    v_BSVd: Tensor,
    log_decay_BSV: Tensor,
    beta_BSV: Tensor,
    position_BS: Tensor | None = None,
) -> Tensor:
    """[B, S, V, d] in fp64; differentiable."""
    q, k, v, log_decay, beta = (
        x.double() for x in (q_BSKd, k_BSKd, v_BSVd, log_decay_BSV, beta_BSV)
    )
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    d, shared = q.size(-1), v.size(2) // q.size(2)
    outputs = []
    for b in range(v.size(0)):
        for h in range(v.size(2)):
            state = torch.zeros(d, v.size(-1), dtype=torch.float64, device=v.device)
            for t in range(v.size(1)):
                if position_BS is not None and position_BS[b, t] == 0:
                    state = torch.zeros_like(state)
                key, write = k[b, t, h // shared], beta[b, t, h]
                state = state * log_decay[b, t, h].exp()
                state = state + torch.outer(key, write * (v[b, t, h] - key @ state))
                outputs.append(q[b, t, h // shared] @ state / d**0.5)
    B, S, V, _ = v.shape
    return torch.stack(outputs).view(B, V, S, -1).transpose(1, 2)


def norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over channels, weight, SiLU of the gate."""
    x, gate = x.double(), gate.double()
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return normed * gate / (1 + (-gate).exp())
