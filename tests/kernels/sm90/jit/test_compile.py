"""Shipped kernels compile for sm_90a without a GPU, to the machine code that is meant.

Worker processes compile the kernels; their CUDA runtime is that of `recording`, so that they also
report how each kernel would be launched. Kernels with a scheduler multiply, and are held to more.
"""

import dataclasses
import json
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from phalanx.kernels.sm90.fp8.act import Fp8Act, Fp8ActGrad
from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop
from phalanx.kernels.sm90.gemm.epilogues import Act, ActGrad, Linear
from phalanx.kernels.sm90.gemm.gemm import GemmConfig
from phalanx.kernels.sm90.jit.launch import compile_kernel
from phalanx.kernels.sm90.jit.pointers import arguments_of
from phalanx.kernels.sm90.jit.program import Program, export, symbols
from phalanx.kernels.sm90.jit.shipped import SHIPPED
from phalanx.kernels.sm90.wgrad.fp8 import Fp8Contraction
from phalanx.kernels.sm90.wgrad.kernel import WgradPairKernel
from tests.kernels.sm90 import recording, remembered
from tests.kernels.sm90.sass import disassembled, tool

REGISTERS = 65536
SMEM_BYTES = 228 * 1024
"""Shared memory of an SM, including the part that the system reserves for each thread block."""
KERNELS = SHIPPED
LABELS = [f"{kernel.__name__} {config}" for kernel, config in KERNELS]


def facets(kernel: type, config: Any, at: str = "") -> Iterator[tuple[Any, ...]]:
    """Properties that distinguish a kernel, but for the numbers of its configuration."""
    yield (kernel,)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from facets(kernel, value, f"{at}{field.name}.")
        elif "None" in str(field.type):
            yield kernel, at + field.name, value is None
        elif isinstance(value, bool | str):
            yield kernel, at + field.name, value


def cases() -> list[Any]:
    """Numbers of `KERNELS`: all slow but a few that have all facets among them, in turn the one
    that has most of those that are missing."""
    own = list[set[tuple[Any, ...]]]()
    for kernel, config in KERNELS:
        own.append(set(facets(kernel, config)))
        if isinstance(config, GemmConfig):  # which tell at another point of the epilogue
            signals = getattr(config.epilogue, "signals", False)
            own[-1].add((kernel, signals, config.loop.pingpong))
    missing, fast = set().union(*own), set()
    while missing:
        fast.add(most := max(range(len(own)), key=lambda number: len(own[number] & missing)))
        missing -= own[most]
    marks = [() if number in fast else pytest.mark.slow for number in range(len(own))]
    return [pytest.param(n, marks=marks[n], id=LABELS[n]) for n in range(len(own))]


@dataclass
class Code:
    """Compiled kernel class and configuration: one kernel or a few, launched in turn."""

    sass: str
    usage: dict[str, dict[str, int]]
    """Usage of each kernel: REG, STACK, SHARED and so on."""
    launches: list[dict[str, Any]]
    """How they would be launched with sizes of 512; empty without a C compiler."""


def compile_and_read(number: int) -> Code:
    """In a worker: compile a kernel, disassemble it, export it, load that and launch it."""
    kernel, config = KERNELS[number]
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_kernel(kernel, config, f"--keep-cubin --dump-dir {folder}")
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.artifacts.CUBIN)
        sass, usage = disassembled(cubin)
    program = Program(symbols(export(compiled, "k"), "k"), arguments_of(kernel).kinds)
    launches = []
    if recording.VARIABLE in os.environ:
        elements = arguments_of(kernel).values.values()
        values = [512 if e is None else 4096 * (n + 1) for n, e in enumerate(elements)]
        program(0, values, 7)
        launches = recording.Runtime().launches()
    facts = re.findall(r"Function (\S+?):\s*\n\s*(REG.*)", usage)
    return Code(
        sass,
        {name: {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)} for name, line in facts},
        launches,
    )


class Compiling:
    """The kernels of `KERNELS` in the making, those that are asked for and not remembered."""

    def __init__(self, wanted: set[int], library: Path | None, pool: ProcessPoolExecutor) -> None:
        made_by = ["launches" if library else "no C compiler", tool("nvdisasm"), tool("cuobjdump")]
        made_by += [Path(__file__), recording.SOURCE, Path(recording.__file__)]
        self._names = {n: remembered.name(*KERNELS[n], made_by) for n in sorted(wanted)}
        self._pending: dict[int, Future[Code]] = {
            number: pool.submit(compile_and_read, number)
            for number, name in self._names.items()
            if not remembered.cache().has(name)
        }

    def result(self, number: int) -> Code:
        """From disk, or from a worker."""

        def make() -> bytes:
            return json.dumps(dataclasses.asdict(self._pending[number].result())).encode()

        return Code(**json.loads(remembered.cache().fetch(self._names[number], make)))


@pytest.fixture(scope="module")
def compiling(request, tmp_path_factory) -> Iterator[Compiling]:
    """The kernels that selected tests ask for."""
    mine = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params["code"] for item in mine if hasattr(item, "callspec")}
    sharing = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    workers = min(len(wanted), max(1, len(os.sched_getaffinity(0)) // sharing))
    context = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(workers, context) as pool:
        if library := recording.build(tmp_path_factory.mktemp("runtime")):
            patch.setenv(recording.VARIABLE, str(library))
        yield Compiling(wanted, library, pool)
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module", params=cases())
def code(request, compiling) -> Code:
    return compiling.result(request.param)


@pytest.fixture
def config(request) -> Any:
    return KERNELS[request.node.callspec.params["code"]][1]


@pytest.fixture
def segments(request) -> int:
    """Sets of rows that are multiplied in turn, by instructions of their own."""
    kernel, _ = KERNELS[request.node.callspec.params["code"]]
    return 2 if kernel is WgradPairKernel else 1


@pytest.fixture
def launches(code) -> list[dict[str, Any]]:
    return code.launches or pytest.skip("needs a C compiler")


@pytest.fixture
def gemm(code, config) -> Code:
    return code if hasattr(config, "schedule") else pytest.skip("not a GEMM")


def _in_fp8(config: Any) -> bool:
    loop = getattr(config, "mainloop", None)
    return isinstance(loop, Fp8Mainloop) or isinstance(_math(config), Fp8Contraction)


def _math(config: Any) -> Any:
    """The product of a weight gradient."""
    return getattr(config, "math", None)


@pytest.fixture
def bf16(gemm, config) -> Code:
    return pytest.skip("in FP8") if _in_fp8(config) else gemm


@pytest.fixture
def grouped(code, config) -> Code:
    if not isinstance(config, GemmConfig) or _in_fp8(config):
        pytest.skip("not a grouped GEMM in bf16")
    return code


@pytest.fixture
def fp8(code, config) -> Code:
    return code if _in_fp8(config) else pytest.skip("not a GEMM in FP8")


@pytest.fixture
def fp8_grouped(fp8, config) -> Code:
    return fp8 if isinstance(config, GemmConfig) else pytest.skip("not a grouped GEMM in FP8")


@pytest.fixture
def fp8_wgrad(fp8, config) -> Code:
    return pytest.skip("a grouped GEMM") if isinstance(config, GemmConfig) else fp8


def _count(pattern: str, sass: str) -> int:
    return len(re.findall(pattern, sass))


def test_nothing_spills(code, config):
    """But `Fp8ActGrad`, whose epilogue needs some more registers than there are (42 at most)."""
    allowed = 168 if isinstance(getattr(config, "epilogue", None), Fp8ActGrad) else 0
    assert code.usage
    for name, usage in code.usage.items():
        assert usage["LOCAL"] == 0 and usage["STACK"] <= allowed, name
    product = re.search(r"\bQGMMA\b.*\bQGMMA\b", code.sass, re.S) if allowed else None
    assert not re.search(r"\b(STL|LDL)\b", product[0] if product else code.sass)


def test_a_thread_block_fits_an_sm(code, launches):
    assert {launch["name"] for launch in launches} == set(code.usage)
    for launch in launches:
        usage, (x, y, z) = code.usage[launch["name"]], launch["block"]
        assert usage["REG"] * x * y * z <= REGISTERS
        assert usage["SHARED"] + launch["smem"] <= SMEM_BYTES
        assert launch["stream"] == 7


def test_facts_of_the_configuration_hold(config, launches):
    for launch in launches:
        assert launch["block"][0] == getattr(config, "threads", launch["block"][0])
        assert launch["smem"] == getattr(config, "smem_bytes", launch["smem"])


def test_registers_fit_their_warp_groups(code):
    functions = re.split(r"\n\s*\.section\s+\.text\.", code.sass)[1:]
    assert len(functions) == len(code.usage)
    for function in functions:
        parts = re.split(r"USETMAXREG\.\w+.*?(0x[0-9a-f]+)", function)
        for limit, part in zip(parts[1::2], parts[2::2], strict=True):
            # The next group's code begins before it sets its own limit, after a jump of this one.
            part = re.split(r"\n[^@\n]*\b(?:BRA|EXIT)\b(?!.*\b(?:BRA|EXIT)\b)", part, flags=re.S)[0]
            assert max(int(r) for r in re.findall(r"\bR(\d+)\b", part)) < int(limit, 16)


def test_warp_groups_share_the_registers_of_a_thread_block(gemm, launches):
    """More together than it is started with, and they would wait for each other for ever."""
    limits = [int(n, 16) for n in re.findall(r"USETMAXREG\.\w+.*?(0x[0-9a-f]+)", gemm.sass)]
    (launch,), (usage,) = launches, gemm.usage.values()
    multiplying = launch["block"][0] // 128 - 1
    assert 128 * (min(limits) + multiplying * max(limits)) <= usage["REG"] * launch["block"][0]


def test_gemms_multiply_with_wgmma(bf16, config, segments):
    wgmma = _count(r"\bHGMMA\b", bf16.sass)
    assert wgmma >= 4
    assert _count(r"\bHGMMA\.64x\d+x16\.F32\.BF16", bf16.sass) == wgmma
    # One wait a stage and one a tile, also of tiles of at most 64 rows: they are not serialised.
    small = isinstance(config, GemmConfig) and config.loop.pingpong
    assert bf16.sass.count("WARPGROUP.DEPBAR") == segments * (4 if small else 2)


def test_gemms_load_by_tma(gemm, config, launches):
    assert "UTMALDG" in gemm.sass
    assert ".MULTICAST" not in gemm.sass and launches[0]["cluster"] == [1, 1, 1]
    assert "ATOMG" in gemm.sass


def test_no_fence_waits_for_the_whole_gpu(gemm, config):
    signals = isinstance(getattr(config, "epilogue", None), Linear) and config.epilogue.signals
    assert ("MEMBAR.ALL.GPU" in gemm.sass) == signals


def test_grouped_gemms_multiply_whole_tiles(grouped, config):
    """The first stage and a loop over the others, 4 steps of 16 each, for every 64 rows.

    A group that has a tile to itself can also multiply its upper half alone.
    """
    loop = config.mainloop
    shape = rf"HGMMA\.64x{loop.columns}x16\.F32\.BF16"
    assert _count(shape, grouped.sass) == (8 * (2 + 1) if loop.pingpong else 8)
    assert _count(r"HGMMA.*\.tnspB", grouped.sass) == (
        _count(shape, grouped.sass) if loop.b_transposed else 0
    )
    assert "tnspA" not in grouped.sass


def test_grouped_gemms_load_and_store_what_is_meant(grouped, config):
    loop, epilogue = config.mainloop, config.epilogue
    boxes = loop.columns // loop.box + (0 if loop.gather else 1)
    copies = 8 if loop.gather else 0
    num_gate_parts, steps = (
        getattr(epilogue, "num_gate_parts", 1),
        loop.group_rows // 64 * loop.columns,
    )
    loaded, stored = 0, steps // 64
    if isinstance(epilogue, Act):
        stored = steps // (32 * num_gate_parts) * (1 + num_gate_parts)
    if isinstance(epilogue, ActGrad):
        loaded, stored = steps // 32 * num_gate_parts, steps // 32 * (1 + num_gate_parts)
    # The loads of a tile are there twice: up to the claim's answer, and after it. Of a kernel that
    # waits, the compiler copies the first ones.
    loads = grouped.sass.count("UTMALDG") - (3 if config.waits else 2) * boxes
    loads += boxes if config.waits and loads < 0 else 0
    assert loads >= loaded if loaded else loads == 0  # the compiler copies some of those of h
    assert _count(r"LDGSTS\S*\.128", grouped.sass) == 2 * copies
    assert grouped.sass.count("UTMASTG") == stored


def test_registers_and_stages_of_grouped_gemms(grouped, config, launches):
    loop = config.mainloop
    limits = {int(n, 16) for n in re.findall(r"USETMAXREG\.\w+.*?(0x[0-9a-f]+)", grouped.sass)}
    assert limits == set(loop.registers)
    assert loop.stages >= 3
    used = loop.stages * loop.stage_bytes + config.epilogue.bytes(loop)
    assert used < launches[0]["smem"] <= 227 * 1024


def test_fp8_is_multiplied_block_by_block_and_promoted(fp8, config, segments):
    """4 steps of 32 channels into each temporary accumulator, a wait, one FFMA an accumulator."""
    loop = config.mainloop if _math(config) is None else _math(config).mainloop
    rows = loop.rows_format.upper()
    parts = segments * (loop.columns // loop.part)
    assert _count(r"\bQGMMA\b", fp8.sass) == 4 * parts
    shape = rf"QGMMA\.64x{loop.part}x32\.F32\.{rows}\.E4M3"
    assert _count(shape, fp8.sass) == 4 * parts
    assert fp8.sass.count("WARPGROUP.DEPBAR") == parts
    assert _count(r"\bFFMA\b", fp8.sass) >= loop.columns // 2
    assert not re.search(r"\b(FFMA|FMUL)\.FTZ\b", fp8.sass)  # a scale may be subnormal


def test_fp8_is_loaded_and_stored_as_meant(fp8_grouped, config):
    loop, epilogue = config.mainloop, config.epilogue
    boxes = 2 if loop.gather else 3
    of_h = 0  # the first two steps', and others in the way of a warp with rows and of one without
    if isinstance(epilogue, ActGrad):
        of_h = (2 + 2 * (loop.columns // 32 - 2)) * epilogue.num_gate_parts
    # Of a kernel that waits, the compiler may copy the first loads of a tile.
    of_weights = fp8_grouped.sass.count("UTMALDG.4D")  # two boxes, with parts and experts
    assert of_weights in ((4, 6) if config.waits else (4,))
    assert fp8_grouped.sass.count("UTMALDG") == of_weights // 2 * boxes + of_h
    assert _count(r"LDGSTS\S*\.128", fp8_grouped.sass) == (16 if loop.gather else 0)
    # Scales of the columns and of two rows, before the loop twice and in it; there are no others
    # than are wanted, and nobody who multiplies fences what was gathered.
    scales = (1 if loop.columns == 128 else 2) + (0 if config.waits else 2)
    assert _count(r"LDG\.E\.CONSTANT", fp8_grouped.sass) >= 3 * scales
    assert _count(r"LDG\.E\.STRONG\.GPU", fp8_grouped.sass) >= (6 if config.waits else 0)
    assert _count(r"@!?U?P\d+\s+LDG\.E\.CONSTANT", fp8_grouped.sass) >= scales
    (product,) = re.findall(r"\bQGMMA\b.*\bQGMMA\b", fp8_grouped.sass, re.S)
    assert "MEMBAR" not in product and "FENCE.VIEW" not in product
    stored = loop.columns // 64
    if isinstance(epilogue, Fp8Act):
        blocks = loop.columns // (128 * epilogue.num_gate_parts)
        stored = blocks * (4 * epilogue.keep_h * epilogue.num_gate_parts + 1)
        assert fp8_grouped.sass.count("STS.U16") == 32 * blocks
        assert _count(r"F2FP\.SATFINITE\.E4M3", fp8_grouped.sass) == 32 * blocks
    if isinstance(epilogue, Fp8ActGrad):
        blocks = loop.columns // 128
        stored = (epilogue.num_gate_parts + 1) * blocks
        assert fp8_grouped.sass.count("STS.U16") == 32 * stored
        grads = rf"F2FP\.SATFINITE\.{epilogue.grad_format.upper()}"
        assert _count(grads, fp8_grouped.sass) >= 32 * epilogue.num_gate_parts * blocks
        assert _count(r"F2FP\.SATFINITE\.E[45]M[23]", fp8_grouped.sass) == 32 * stored
    assert fp8_grouped.sass.count("UTMASTG") == stored


def test_registers_and_stages_in_fp8(fp8_grouped, config, launches):
    loop = config.mainloop
    limits = {int(n, 16) for n in re.findall(r"USETMAXREG\.\w+.*?(0x[0-9a-f]+)", fp8_grouped.sass)}
    assert limits == set(loop.registers)
    assert loop.stages >= (3 if isinstance(config.epilogue, ActGrad) else 4)
    used = loop.stages * loop.stage_bytes + config.epilogue.bytes(loop)
    assert used < launches[0]["smem"] <= 227 * 1024


def test_weight_gradients_in_fp8(fp8_wgrad, config, launches, segments):
    """Boxes of both operands, stored or added in blocks; as many stages as fit."""
    sass, loop, output = fp8_wgrad.sass, config.contraction.mainloop, config.output
    blocks = loop.columns // output.block
    # Products of scales: one for a row of 64 or 128 columns.
    products = loop.columns // (64 if loop.columns == 192 else 128)
    assert segments * products <= _count(r"\bFMUL\b", sass) < segments * (products + 8)
    loads = _count(r"UTMALDG\.3D", sass), _count(r"UTMALDG\.4D", sass)
    assert loads == (2 * segments, 4 * segments)
    assert _count(r"UTMAREDG\.3D\.ADD", sass) == (blocks if config.add else 0)
    stored = 0 if config.add else (1 + config.zeros) * blocks
    assert _count(r"UTMASTG\.3D", sass) == stored
    limits = {int(n, 16) for n in re.findall(r"USETMAXREG\.\w+.*?(0x[0-9a-f]+)", sass)}
    assert limits == set(loop.registers)
    assert loop.stages >= 4
    assert loop.stages * loop.stage_bytes + output.bytes < launches[0]["smem"] <= 227 * 1024
