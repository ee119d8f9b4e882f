"""Gated DeltaNet in plain torch, gradients by autograd: for CPUs, for fp32, and as the reference.

The delta rule processes a sequence in chunks (arXiv 2412.06464, section 3.3). The value that a
token writes depends on those of the tokens before it in the chunk: a unit triangular system in each
chunk, solved for all chunks at once. The state is passed from chunk to chunk. All of it is at least
fp32.

Shape legend: B sequences, S positions, C channels, W taps, K key heads, V value heads, d channels
of a head; N chunks of L positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
EPS = 1e-6  # on the sum of squares, as flash-linear-attention and transformers do


def causal_conv(x_BSC: Tensor, weight_CW: Tensor, position_BS: Tensor | None) -> Tensor:
    """`gated_delta.causal_conv` in torch."""
    x, weight, taps = _at_least_fp32(x_BSC), _at_least_fp32(weight_CW), weight_CW.shape[1]
    total = x * weight[:, -1]
    for back in range(1, min(taps, x.shape[1])):
        earlier = F.pad(x[:, :-back], (0, 0, back, 0))
        if position_BS is not None:
            earlier = earlier.masked_fill((position_BS < back)[..., None], 0)
        total = total + earlier * weight[:, -1 - back]
    return F.silu(total).to(x_BSC.dtype)


def gated_rms_norm(x_BSVd: Tensor, gate_BSVd: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """`gated_delta.gated_rms_norm` in torch."""
    normed = F.rms_norm(_at_least_fp32(x_BSVd), weight_d.shape, _at_least_fp32(weight_d), eps)
    return (normed * F.silu(_at_least_fp32(gate_BSVd))).to(x_BSVd.dtype)


def gated_delta_rule(
    q_BSKd: Tensor,
    k_BSKd: Tensor,
    v_BSVd: Tensor,
    log_decay_BSV: Tensor,
    beta_BSV: Tensor,
    position_BS: Tensor | None,
) -> Tensor:
    """`gated_delta.gated_delta_rule` in torch."""
    inputs = q_BSKd, k_BSKd, v_BSVd, log_decay_BSV, beta_BSV
    return gated_delta_rule_and_state(*inputs, position_BS)[0]


def gated_delta_step(
    q_BKd: Tensor,
    k_BKd: Tensor,
    v_BVd: Tensor,
    log_decay_BV: Tensor,
    beta_BV: Tensor,
    state_BVdd: Tensor,
) -> tuple[Tensor, Tensor]:
    """The output [B, V, d] of one token, in the dtype of v, and the state behind it, fp32."""
    shared = v_BVd.shape[1] // q_BKd.shape[1]
    q, k = (_normalised(_at_least_fp32(x)).repeat_interleave(shared, 1) for x in (q_BKd, k_BKd))
    state = state_BVdd * _at_least_fp32(log_decay_BV).exp()[..., None, None]
    known = (k[..., None, :] @ state).squeeze(-2)
    written = (_at_least_fp32(v_BVd) - known) * _at_least_fp32(beta_BV)[..., None]
    state = state + k[..., :, None] * written[..., None, :]
    out_BVd = (q[..., None, :] @ state).squeeze(-2) * q.shape[-1] ** -0.5
    return out_BVd.to(v_BVd.dtype), state


def gated_delta_rule_and_state(
    q_BSKd: Tensor,
    k_BSKd: Tensor,
    v_BSVd: Tensor,
    log_decay_BSV: Tensor,
    beta_BSV: Tensor,
    position_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gated_delta.gated_delta_rule_and_state` in torch, of documents too."""
    shared, length = v_BSVd.shape[2] // q_BSKd.shape[2], v_BSVd.shape[1]
    q, k = (_normalised(_at_least_fp32(x)).repeat_interleave(shared, 2) for x in (q_BSKd, k_BSKd))
    q = q * q.shape[-1] ** -0.5
    v, beta, log_decay = (
        _at_least_fp32(v_BSVd),
        _at_least_fp32(beta_BSV)[..., None],
        _at_least_fp32(log_decay_BSV)[..., None],
    )
    # Padding changes no state: it decays nothing and writes nothing.
    q, k, v, beta, log_decay = (_chunks(x) for x in (q, k, v, beta, log_decay))
    cumulated = log_decay.cumsum(-2)  # BVNL1: decay since the start of the chunk, the token's too
    visible, carried, in_last, survives = _masks(position_BS, length, v.device)
    decay = (
        (cumulated - cumulated.mT).masked_fill(~visible, -torch.inf).exp()
    )  # BVNLL, from key to query
    since = cumulated.masked_fill(~carried, -torch.inf).exp()
    until = (cumulated[..., -1:, :] - cumulated).masked_fill(~in_last, -torch.inf).exp()
    over = cumulated[..., -1:, :].masked_fill(~survives, -torch.inf).exp()
    system = (k * beta) @ k.mT * decay  # its diagonal is not read
    solve = torch.linalg.solve_triangular
    written = solve(system, v * beta, upper=False, unitriangular=True)
    of_state = solve(system, k * beta * since, upper=False, unitriangular=True)
    inside, across, k = q @ k.mT * decay, q * since, k * until
    state = v.new_zeros(*v.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for n in range(v.shape[2]):
        new = written[:, :, n] - of_state[:, :, n] @ state
        outputs.append(across[:, :, n] @ state + inside[:, :, n] @ new)
        state = state * over[:, :, n] + k[:, :, n].mT @ new
    out_BVSd = torch.cat(outputs, 2)[:, :, :length]
    return out_BVSd.transpose(1, 2).to(v_BSVd.dtype), state


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normalised(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def _chunks(x_BSVc: Tensor) -> Tensor:
    """[B, V, N, L, c]; zeros follow the last position."""
    x_BVSc = x_BSVc.transpose(1, 2)
    x_BVSc = F.pad(x_BVSc, (0, 0, 0, -x_BVSc.shape[2] % CHUNK))
    return x_BVSc.unflatten(2, (-1, CHUNK))


def _masks(position_BS: Tensor | None, length: int, device: torch.device) -> tuple[Tensor, ...]:
    """Causal and document masks of chunks: bool, to be broadcast with [B, V, N, L, L].

    Keys that a query sees; queries that see the incoming state; keys that the outgoing state
    contains; and whether it contains anything of the incoming state.
    """
    causal_LL = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).tril()
    if position_BS is None:
        always = torch.ones(1, 1, dtype=torch.bool, device=device)
        return causal_LL, always, always, always
    starts_BS = F.pad(position_BS == 0, (0, -length % CHUNK))  # padding joins the last document
    number_BNL = starts_BS.unflatten(1, (-1, CHUNK)).cumsum(-1)[:, None]
    query, key = number_BNL[..., :, None], number_BNL[..., None, :]
    last = query[..., -1:, :]
    return causal_LL & (query == key), query == 0, query == last, last == 0
