"""The loss of a linear output layer, without the logits of all tokens in memory.

Tokens are taken in chunks. Where the factor of each loss is known, which it is for a mean or a sum,
a chunk's logits become their gradient at once, and its products with the weight and with x are the
gradients of x and of the weight: three products in all, and the backward pass only multiplies by
the gradient of the loss. Losses of single tokens (`reduction="none"`) recompute the logits in the
backward pass instead, which is a fourth product.

On Hopper a kernel reads the logits once for loss and gradient (`kernels.sm90.loss`), on other GPUs
two do (`kernels.elementwise.cross_entropy`), elsewhere operations of PyTorch. Statistics are fp32.
The gradient of a weight over several chunks is summed in fp32.

PyTorch 2.11 has no such function. Liger (arXiv 2410.10989) has one, whose chunks have fewer tokens,
so that the gradient of the weight is summed more often.

Legend: N tokens, C tokens of a chunk, D hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.expert_mlp.expert_plan import is_debugging
from phalanx.kernels.functional.copies import scaled
from phalanx.kernels.functional.options import (
    check_devices,
    check_floats,
    check_integers,
    check_sizes,
    check_tensor,
)
from phalanx.kernels.tracing import outside_graphs

_REDUCTIONS = ("mean", "sum", "none")
_LOGITS = 5 << 27  # of a chunk: 1.25 GiB in bf16, 4,416 tokens of Qwen3's vocabulary
_ONE_CHUNK = 2 * _LOGITS  # sums in fp32 of more chunks take as much memory, and 2 ms on an H200
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@outside_graphs
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    num_items: Tensor | float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Cross entropy of the logits `x @ weight.T`, of which a chunk exists at a time.

    Differentiable, once, in x and weight. Nothing is read on the host, so that a CUDA graph
    captures it. Under `torch.autocast` its dtype computes, as for `torch.nn.functional.linear`.

    >>> import torch
    >>> from phalanx.kernels.api import linear_cross_entropy
    >>> x, weight = torch.zeros(3, 4), torch.ones(5, 4)
    >>> linear_cross_entropy(x, weight, torch.tensor([0, -100, 4])).item() # log(5)
    1.6094379425048828

    Args:
        x: [..., D] fp32, bf16, fp16 or fp64. There may be no tokens.
        weight: [V, D] in the dtype of x.
        labels: [...] integers: tokens from 0 to V - 1, or `ignore_index`. On a GPU others are
            checked with PHALANX_DEBUG=1 alone, and their logits count as 0.
        reduction: `mean` over the labels that are not ignored, `sum`, or `none`. As with
            `torch.nn.functional.cross_entropy`, the mean over no label is NaN, and its gradient 0.
        num_items: the sum of the losses is divided by it, and `reduction` does not count: what
            the loss functions of transformers name `num_items_in_batch`.
        chunk: C; by default all tokens if their logits have 2.5 GiB in bf16, else parts of 1.25.

    Returns:
        fp32 (fp64 for fp64): a scalar, or with `reduction="none"` losses [...], 0 where ignored.

    Raises:
        ValueError: shapes, dtypes, devices, options or labels that do not fit.
    """
    _check(x, weight, labels, reduction, chunk)
    kind = x.device.type
    if kind == "cpu" or is_debugging():
        _check_tokens(labels, len(weight), ignore_index)
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        x, weight = (t.to(torch.get_autocast_dtype(kind)) for t in (x, weight))
    if weight.dtype != x.dtype:
        raise ValueError(f"weight is {weight.dtype}, x is {x.dtype}: give them one dtype")
    x_ND, labels_N = x.reshape(-1, x.shape[-1]), labels.reshape(-1).long()
    chunk = chunk or _chunk(len(x_ND), len(weight))
    with torch.autocast(kind, enabled=False):
        if reduction == "none" and num_items is None:
            out: Tensor = _TokenLosses.apply(x_ND, weight, labels_N, ignore_index, chunk)
            return out.view(labels.shape)
        dtype = torch.promote_types(x.dtype, torch.float32)
        count = torch.ones((), dtype=dtype, device=x.device)
        if isinstance(num_items, Tensor):
            count = num_items.to(x.device, dtype).reshape(())
        elif num_items is not None:
            count *= num_items
        elif reduction == "mean":
            count = (labels_N != ignore_index).sum().to(dtype)
        summed: Tensor = _SummedLoss.apply(x_ND, weight, labels_N, count, ignore_index, chunk)
        return summed


def _chunk(tokens: int, vocabulary: int) -> int:
    """Tokens of a chunk."""
    if tokens * vocabulary <= _ONE_CHUNK:
        return max(1, tokens)
    return max(1, _LOGITS // vocabulary)


def _check(x: Tensor, weight: Tensor, labels: Tensor, reduction: str, chunk: int | None) -> None:
    check_floats("x", x, channels=True)
    check_floats("weight", weight, channels=True)
    check_tensor("labels", labels)
    check_integers("labels", labels, "tokens")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight must be [V, {x.shape[-1]}] as x has {x.shape[-1]} channels, not "
            f"{list(weight.shape)}"
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels must be {list(x.shape[:-1])} as x is {list(x.shape)}, not {list(labels.shape)}"
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction={reduction} is unknown: use {', '.join(_REDUCTIONS)}")
    if chunk is not None:
        check_sizes(chunk=chunk)
        if chunk < 1:
            raise ValueError(f"chunk={chunk} must be at least 1 token")
    check_devices(x, weight=weight, labels=labels)


def _check_tokens(labels: Tensor, vocabulary: int, ignored: int) -> None:
    wrong = labels[(labels != ignored) & ((labels < 0) | (labels >= vocabulary))]
    if len(wrong):
        raise ValueError(
            f"labels has {int(wrong[0])}, which is no token from 0 to {vocabulary - 1} and not "
            f"ignore_index={ignored}"
        )


class _SummedLoss(torch.autograd.Function):
    """Sum of the losses over `count`; gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight: Tensor, labels_N: Tensor, count: Tensor, *rest: int
    ) -> Tensor:
        ignore_index, chunk = rest
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        # A mean over no label has a gradient of 0, not of 0 / 0.
        factor = torch.where(count == 0, torch.ones_like(count), count).reciprocal()
        kept_N = labels_N != ignore_index
        total = torch.zeros_like(count)
        dx_ND = torch.empty_like(x_ND) if needs_dx else None
        dw = _WeightGradient(weight, sums=len(x_ND) > chunk) if needs_dw else None
        for begin in range(0, len(x_ND), chunk):
            at = slice(begin, begin + chunk)
            logits_CV = x_ND[at] @ weight.T
            if not (needs_dx or needs_dw):
                total += (_losses(logits_CV, labels_N[at]) * kept_N[at]).sum()
                continue
            loss_C = _losses_and_gradient_(logits_CV, labels_N[at], kept_N[at], factor)
            total += (loss_C * kept_N[at]).sum()
            if dx_ND is not None:
                torch.mm(logits_CV, weight, out=dx_ND[at])
            if dw is not None:
                dw.add(logits_CV, x_ND[at])
            del logits_CV  # before those of the next chunk
        ctx.save_for_backward(dx_ND, None if dw is None else dw.total)
        ctx.weight_dtype = weight.dtype
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx_ND, dw_VD = ctx.saved_tensors
        dx = None if dx_ND is None else scaled(dx_ND, grad, dx_ND.dtype)
        dw = None if dw_VD is None else scaled(dw_VD, grad, ctx.weight_dtype)
        return dx, dw, None, None, None, None


class _TokenLosses(torch.autograd.Function):
    """The loss of each token, 0 where it is ignored; the backward pass recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight: Tensor, labels_N: Tensor, ignore_index: int, chunk: int
    ) -> Tensor:
        ctx.save_for_backward(x_ND, weight, labels_N)
        ctx.ignore_index, ctx.chunk = ignore_index, chunk
        dtype = torch.promote_types(x_ND.dtype, torch.float32)
        loss_N = torch.empty(len(x_ND), dtype=dtype, device=x_ND.device)
        for begin in range(0, len(x_ND), chunk):
            at = slice(begin, begin + chunk)
            loss_N[at] = _losses(x_ND[at] @ weight.T, labels_N[at])
        return loss_N.masked_fill_(labels_N == ignore_index, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight, labels_N = ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        grad_N = grad_N * (labels_N != ctx.ignore_index)
        dx_ND = torch.empty_like(x_ND) if needs_dx else None
        dw = _WeightGradient(weight, sums=len(x_ND) > ctx.chunk) if needs_dw else None
        for begin in range(0, len(x_ND), ctx.chunk):
            at = slice(begin, begin + ctx.chunk)
            logits_CV = x_ND[at] @ weight.T
            _gradient_(logits_CV, labels_N[at], grad_N[at])
            if dx_ND is not None:
                torch.mm(logits_CV, weight, out=dx_ND[at])
            if dw is not None:
                dw.add(logits_CV, x_ND[at])
            del logits_CV
        return dx_ND, None if dw is None else dw.total.to(weight.dtype), None, None, None


class _WeightGradient:
    """dlogits^T x of a chunk, in the dtype of the weight, or of several (`sums`), fp32 at least."""

    def __init__(self, weight: Tensor, *, sums: bool) -> None:
        self._wide = sums and weight.dtype.itemsize < 4
        self._empty = True
        self.total = weight.new_zeros(()).expand_as(weight)

    def add(self, dlogits_CV: Tensor, x_CD: Tensor) -> None:
        a_VC, options = dlogits_CV.T, dict[str, Any]()
        if self._wide and a_VC.is_cuda:
            options["out_dtype"] = torch.float32
        elif self._wide:
            a_VC, x_CD = a_VC.float(), x_CD.float()
        if self._empty:
            self.total = torch.mm(a_VC, x_CD, **options)
        else:
            torch.addmm(self.total, a_VC, x_CD, out=self.total, **options)
        self._empty = False


def _losses(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    """Loss of each row; the logits stay."""
    most_C, sum_C, hit_C = _statistics(logits_CV, labels_C)
    return most_C + sum_C.log() - hit_C


def _losses_and_gradient_(
    logits_CV: Tensor, labels_C: Tensor, kept_C: Tensor, factor: Tensor
) -> Tensor:
    """Loss of each row; logits become its gradient times `factor`, or 0 where it is not kept."""
    if _in_one_pass(logits_CV):
        from phalanx.kernels.elementwise.cross_entropy import rescale_
        from phalanx.kernels.sm90.loss.cross_entropy import cross_entropy_

        loss_C = cross_entropy_(logits_CV, labels_C, factor)
        rescale_(logits_CV, factor * kept_C, factor)  # touches the rows that are not kept
        return loss_C
    most_C, sum_C, hit_C = _statistics(logits_CV, labels_C)
    lse_C = most_C + sum_C.log()
    _gradient_(logits_CV, labels_C, factor * kept_C, lse_C)
    return lse_C - hit_C


def _in_one_pass(logits_CV: Tensor) -> bool:
    if logits_CV.dtype != torch.bfloat16 or not logits_CV.is_cuda:
        return False
    if torch.cuda.get_device_capability(logits_CV.device) != (9, 0):
        return False
    from phalanx.kernels.sm90.loss.cross_entropy import configured

    return configured(logits_CV.shape[1]) is not None


def _statistics(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit, sum of exp(logit - largest) and the label's logit, or 0 without one."""
    if logits_CV.is_cuda and logits_CV.dtype in _KERNEL_DTYPES:
        from phalanx.kernels.elementwise.cross_entropy import statistics

        return statistics(logits_CV, labels_C, 0)
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    most_C = wide_CV.amax(1)
    sum_C = (wide_CV - most_C[:, None]).exp_().sum(1)
    at_C, here_C = _columns(labels_C, logits_CV)
    return most_C, sum_C, wide_CV.gather(1, at_C[:, None])[:, 0] * here_C


def _gradient_(
    logits_CV: Tensor, labels_C: Tensor, grad_C: Tensor, lse_C: Tensor | None = None
) -> None:
    """Logits become grad * (softmax - one-hot of the label)."""
    if lse_C is None:
        most_C, sum_C, _ = _statistics(logits_CV, labels_C)
        lse_C = most_C + sum_C.log()
    if logits_CV.is_cuda and logits_CV.dtype in _KERNEL_DTYPES:
        from phalanx.kernels.elementwise.cross_entropy import gradient_

        gradient_(logits_CV, labels_C, lse_C, grad_C.contiguous(), 0)
        return
    softmax_CV = (logits_CV.to(lse_C.dtype) - lse_C[:, None]).exp_()
    at_C, here_C = _columns(labels_C, logits_CV)
    softmax_CV.scatter_add_(1, at_C[:, None], -here_C.to(softmax_CV.dtype)[:, None])
    logits_CV.copy_(softmax_CV * grad_C[:, None])


def _columns(labels_C: Tensor, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of labels, 0 for those that are none, and which are one."""
    here_C = (labels_C >= 0) & (labels_C < logits_CV.shape[1])
    return labels_C.where(here_C, 0), here_C
