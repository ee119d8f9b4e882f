"""Fixtures that let benchmarks of Hopper kernels run on a CPU."""

import importlib
import pkgutil
import sys
from typing import Any

import pytest
import torch

from phalanx.scripts.lab.bench.clocks import Cpu


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting garbage before every suite would take most of the time in a process of tests."""
    monkeypatch.setattr(Cpu, "free", lambda self: None)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """(kernel, configuration) of every launch of an sm90 kernel, which is checked and not run."""
    pytest.importorskip("cutlass")
    from phalanx.kernels import sm90

    # All at once: a module that is first imported below would keep the replacements.
    for module in pkgutil.walk_packages(sm90.__path__, f"{sm90.__name__}."):
        importlib.import_module(module.name)
    from phalanx.kernels.sm90.jit import launch as jit
    from phalanx.scripts.lab.bench.kernels import (  # noqa: F401
        fp8_gemms,
        host,
        layer,
        operations,
        tune,
        wgrad_pairs,
    )

    seen: list[tuple[str, Any]] = []

    def launch(kernel: Any, config: Any, /, **arguments: Any) -> None:
        known = jit.arguments_of(kernel)
        assert arguments.keys() == known.parameters.keys()
        values = [arguments[name] for name in known.parameters]
        given = [x for v in values for x in (v if isinstance(v, tuple) else [v])]
        pairs = [*zip(known.values.items(), given, strict=True)]
        assert all(isinstance(value, int) == (element is None) for (_, element), value in pairs)
        if kernel.__name__ == "PlanKernel":  # its results are indices
            for value in [value for (_, element), value in pairs if element is not None][2:]:
                value.zero_()
        seen.append((kernel.__name__, config))

    def check(device: Any, name: str, tensor: Any, dtype: Any, shape: Any) -> None:
        if tensor is not None:
            assert tensor.dtype == dtype and tensor.is_contiguous(), name
            assert shape is None or tensor.shape == shape, (name, tensor.shape, shape)

    counter = torch.zeros(1, dtype=torch.int32)
    for original, replacement in (
        (jit.launch, launch),
        (jit.check, check),
        (jit.sms, lambda _: 132),
        (jit.counter_of, lambda _: counter),
    ):
        for name, module in list(sys.modules.items()):
            if name.startswith(("phalanx.kernels.sm90", "phalanx.scripts.lab.bench")):
                for key, value in list(vars(module).items()):
                    if value is original:
                        monkeypatch.setattr(module, key, replacement)
    return seen
