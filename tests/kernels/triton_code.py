"""Machine code of a Triton kernel as launched, compiled without a GPU, for sm_90 by default."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.sm90.sass import disassembled

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Code:
    """A compiled kernel, specialised for the arguments of a launch."""

    def __init__(
        self, kernel: Any, given: dict[str, Any], folder: Path, capability: int = 90
    ) -> None:
        names, options = kernel.arg_names, {k: given.pop(k) for k in _OPTIONS if k in given}
        alike = {p.name for p in kernel.params if p.do_not_specialize}
        constants = {n: v for n, v in given.items() if _type(v) == "constexpr" and n not in alike}
        constants |= {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
        types = {n: "i32" if n in alike else _type(given[n]) for n in names}
        signature = {n: "constexpr" if n in constants else types[n] for n in names}
        aligned = [
            (names.index(n),)
            for n, v in given.items()
            if n not in constants and n not in alike and (isinstance(v, Tensor) or v % 16 == 0)
        ]
        attributes = {at: [["tt.divisibility", 16]] for at in aligned}
        source = ASTSource(kernel, signature, constants, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        self.ptx, self.threads = made.asm["ptx"], 32 * made.metadata.num_warps
        cubin = folder / f"{kernel.__name__}.cubin"
        cubin.write_bytes(made.asm["cubin"])
        self.text, usage = disassembled(cubin)
        self.registers, self.stack = (
            int(re.search(rf"\b{name}:(\d+)", usage)[1])  # type: ignore[index]
            for name in ("REG", "STACK")
        )

    def count(self, pattern: str) -> int:
        """Instructions whose name starts with a pattern."""
        instruction = r"^\s+/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+ )?"
        return len(re.findall(instruction + rf"(?:{pattern})", self.text, re.MULTILINE))


def launched(
    module: ModuleType,
    name: str,
    call: Callable[[], None],
    folder: Path,
    capability: int = 90,
) -> Code:
    """Launches of the kernel `name` of a module by `call`; tensors may be on `meta`."""
    kernel, seen = getattr(module, name), list[dict[str, Any]]()

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                seen.append(dict(zip(kernel.arg_names, args, strict=False)) | kwargs)

            return launch

    setattr(module, name, Recorder())
    try:
        call()
    finally:
        setattr(module, name, kernel)
    (given,) = seen
    return Code(kernel, given, folder, capability)


def _type(value: Any) -> str:
    """Triton's specialisation of a launch argument: 1 is compiled in."""
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    return "i32" if isinstance(value, int) and value != 1 else "constexpr"
