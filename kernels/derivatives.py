"""Derivatives of custom ops: of first order in reverse mode, and errors by name for all others.

torch's registration of a custom op loses the tangents of forward mode without a word, and takes no
part in torch.func. So outside of torch.compile an op is called by an autograd function, which has
`torch.func.grad`, `vjp`, `jacrev` and `vmap`, and refuses the rest.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from phalanx.kernels.custom_op import CustomOp
from phalanx.kernels.tracing import constant_in_graphs


def first_order(
    op: CustomOp,
    name: str,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """The op as a function of the same arguments that is differentiable once.

    It raises RuntimeError, with `name`, for derivatives of second order, and for those in forward
    mode. `backward` and `setup_context` are those of `torch.library.register_autograd`; without
    them the op is itself a derivative, and has none.
    """

    def refuse_second(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError(
            f"{name} has first derivatives only: leave out create_graph, torch.func.hessian and "
            "derivatives of derivatives"
        )

    def refuse_forward(ctx: Any, *_: Any) -> NoReturn:
        refuse_forward_mode(name)

    backward, setup_context = backward or refuse_second, setup_context or _save_nothing
    op.register_autograd(backward, setup_context)
    run = op.overload
    methods = dict(
        forward=lambda *args: op.overload(*args),
        setup_context=setup_context,
        backward=backward,
        jvp=refuse_forward,
    )
    members: dict[str, Any] = {key: staticmethod(method) for key, method in methods.items()}
    title = op.overload.name()
    function: Any = type(title, (torch.autograd.Function,), members | {"generate_vmap_rule": True})

    def call(*args: Any) -> Any:
        # torch.compile does not trace functions that have a rule for forward mode.
        if torch.compiler.is_compiling():
            _refuse_in_graph(name)
            return run(*args)
        # The op alone costs less of the host's time.
        return function.apply(*args) if transformed() or _has_tangent(args) else run(*args)

    return call


def refuse_forward_mode(name: str) -> NoReturn:
    """Raise RuntimeError for tangents that nobody would propagate."""
    raise RuntimeError(
        f"{name} has no derivatives in forward mode (torch.func.jvp, jacfwd, linearize, "
        "torch.autograd.forward_ad): use torch.func.vjp or jacrev"
    )


def in_backward() -> bool:
    """True inside a backward pass of autograd, also in what it recomputes."""
    return torch._C._current_graph_task_id() != -1


def transformed() -> bool:
    """True inside of torch.func.grad, vjp, vmap and their like, but not in torch.compile."""
    return not torch.compiler.is_compiling() and bool(_transforms())


def refuse_transforms(name: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError for derivatives of `tensors` other than those of torch.autograd."""
    if transformed():
        raise RuntimeError(
            f"{name} does not work inside of torch.func (grad, vjp, jacrev, vmap, jvp): use "
            "torch.autograd.grad or backward()"
        )
    if _has_tangent(tensors):
        refuse_forward_mode(name)


@constant_in_graphs
def _refuse_in_graph(name: str) -> None:
    applied = _transforms()
    if "Jvp" in applied:
        refuse_forward_mode(name)
    if "Grad" in applied:
        raise RuntimeError(
            f"{name} has no gradient of torch.func inside of torch.compile: compile the function, "
            "and not its gradient"
        )


def _transforms() -> frozenset[str]:
    """Names of the transforms that are being applied: `Grad`, `Jvp`, `Vmap`."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return frozenset([interpreter.key().name for interpreter in stack])


def _has_tangent(args: Iterable[Any]) -> bool:
    if forward_ad._current_level < 0:  # there are none
        return False
    tensors = (arg for arg in args if isinstance(arg, Tensor))
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass
