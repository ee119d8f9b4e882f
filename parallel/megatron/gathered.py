"""Weights of modules that are not called."""

from typing import Any


def gathered(module: Any) -> Any:
    """The module, its own weights as the last step of the optimizer left them.

    Megatron-Core gathers weights while earlier layers run, and waits for those of a module in a
    hook before its forward pass. Whoever computes with a module's weights without calling it asks
    here first.
    """
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
    return module
