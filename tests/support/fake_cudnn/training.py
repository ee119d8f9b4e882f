"""Training on a CPU with the experts of `kernels=cudnn`, which `kernels=auto` then selects."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tests.support import fake_cudnn


@contextmanager
def experts_on_cpu(rank: int = 0) -> Iterator[None]:
    """In a process of a run, replace the package by the fake and accept the CPU."""
    from phalanx.kernels import registry

    def unavailable(facts: registry.Facts) -> str | None:
        return registry._cudnn_runs(
            replace(facts, packages=facts.packages | {"nvidia_cudnn_frontend"})
        )

    op = registry._OPS["grouped_mlp"]
    backends = tuple(
        replace(b, unavailable=unavailable) if b.name == "cudnn" else b for b in op.backends
    )
    before = sys.modules.get("cudnn")
    sys.modules["cudnn"] = fake_cudnn
    registry._OPS["grouped_mlp"] = replace(op, backends=backends)
    try:
        yield
    finally:
        registry._OPS["grouped_mlp"] = op
        del sys.modules["cudnn"]
        if before is not None:
            sys.modules["cudnn"] = before
