"""The loss of a language model of transformers without its logits, while it trains.

The models compute `logits = lm_head(hidden)` and then `loss_function(logits, labels, ...)`. In a
call with labels of a model that trains, the head computes `linear_cross_entropy` in place of the
logits, inside of its own call, so that hooks of FSDP and others see what they always see; the loss
function passes the result on. If anything happens between the two, as a soft cap, the loss function
gets another tensor than the head returned: then the call is repeated as it was, and the model keeps
its logits from then on.
"""

import inspect
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.parametrize import is_parametrized
from transformers.loss.loss_utils import ForCausalLMLoss

from phalanx.kernels.api import linear_cross_entropy

_OPTIONS = ("num_items_in_batch", "shift_labels", "ignore_index")


class _LogitsChanged(Exception):
    """Logits of a model do not go to the loss as its head computes them."""


@dataclass
class _Call:
    """A call of a model that computes its loss in the head."""

    labels: Tensor
    options: dict[str, Any]
    loss: Tensor | None = None
    version: int = 0


def fuse_loss(model: Any) -> str | None:
    """Compute the loss without logits; the reason why not, or None.

    Outputs of training calls with labels then have no logits (None); all others are unchanged.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if why := _unfit(head):
        return why
    if "_phalanx_forward" in model.__dict__:
        return None
    if model.loss_function is not ForCausalLMLoss:
        return "has a loss function of its own"
    parameters = inspect.signature(model.forward).parameters
    if "labels" not in parameters or "kwargs" not in parameters:
        return f"{type(model).__name__}.forward takes no labels and options of a loss"
    model.__dict__["_phalanx_forward"] = model.__dict__.get("forward")
    forward = partial(_forward, model)
    model.__dict__["_phalanx_names"] = tuple(parameters)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters.values()]
    forward.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]
    model.forward = forward
    model.loss_function = partial(_loss, model)
    return None


def _unfit(head: Any) -> str | None:
    """Reason why a head cannot compute a loss, or None."""
    if type(head) is not nn.Linear or is_parametrized(head):
        return f"its head is a {type(head).__name__}, not a linear layer" if head else "has no head"
    if head.bias is not None:
        return "its head has a bias"
    return None if type(head.weight.data) is Tensor else "the weight of its head is distributed"


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    inner = model.__dict__["_phalanx_forward"] or partial(type(model).forward, model)
    given = {**dict(zip(model.__dict__["_phalanx_names"], args, strict=False)), **kwargs}
    head, labels = model.get_output_embeddings(), given.get("labels")
    kept = given.get("logits_to_keep", 0)
    if labels is None or not model.training or not (isinstance(kept, int) and kept == 0):
        return inner(*args, **kwargs)
    if model.__dict__.get("_phalanx_left") or _unfit(head):
        return inner(*args, **kwargs)
    options = {key: kwargs[key] for key in _OPTIONS if kwargs.get(key) is not None}
    call = head.__dict__["_phalanx_call"] = _Call(labels, options)
    head.forward = partial(_head, head)
    asked = kwargs.get("return_dict")
    try:
        out = inner(*args, **{**kwargs, "return_dict": True})
        if call.loss is None:
            return out
    except Exception as error:
        if call.loss is None:
            raise
        _leave(model, error)
        out = None
    finally:
        del head.forward, head.__dict__["_phalanx_call"]
    if out is None:
        return inner(*args, **kwargs)
    out = type(out)(**{key: value for key, value in out.items() if key != "logits"})
    as_dict = model.config.return_dict if asked is None else asked
    return out if as_dict else out.to_tuple()


def _head(head: Any, hidden: Tensor) -> Tensor:
    """The loss of the call, in place of logits."""
    call: _Call = head.__dict__["_phalanx_call"]
    if call.loss is not None:  # another use of the head, as by layers that predict further ahead
        return linear(hidden, head.weight)
    options = dict(call.options)
    items, ignored = options.get("num_items_in_batch"), options.get("ignore_index", -100)
    targets = options.get("shift_labels")
    if targets is None:  # tokens before n predict n
        targets = nn.functional.pad(call.labels, (0, 1), value=ignored)[..., 1:]
    targets = targets.reshape(hidden.shape[:-1]).to(hidden.device)
    call.loss = linear_cross_entropy(
        hidden, head.weight, targets, ignore_index=ignored, num_items=items
    )
    call.version = call.loss._version
    return call.loss


def _loss(model: Any, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`ForCausalLMLoss`, or what the head has computed."""
    call: _Call | None = model.get_output_embeddings().__dict__.get("_phalanx_call")
    if call is None:
        out: Tensor = ForCausalLMLoss(logits, labels, *args, **kwargs)
        return out
    same = logits is call.loss and labels is call.labels and logits._version == call.version
    given = {key: kwargs[key] for key in _OPTIONS if kwargs.get(key) is not None}
    if not same or given.keys() != call.options.keys():
        raise _LogitsChanged
    if any(given[key] is not call.options[key] for key in given):
        raise _LogitsChanged
    return logits


def _leave(model: Any, error: Exception) -> None:
    """Keep the logits of a model whose forward pass does more with them; say so once."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    model.__dict__["_phalanx_left"] = True
    warnings.warn(
        f"{type(model).__name__} changes its logits before their loss, which is computed from "
        "whole logits therefore: apply(model, loss=False)",
        stacklevel=4,
    )
