"""GPUs that `run.dry_run` knows: memory, and rates that training reaches on them.

Rates are what we measured on H200s and what is published for H100s: sustained GEMM rates at the
clocks of a long run, copies between GPUs with all of them busy. Line rates of links are those of
the data sheets (NVLink 4, one port of 400 Gb/s a GPU): for bounds.
"""

from dataclasses import dataclass
from pkgutil import resolve_name

MEMORY_ERROR = 0.02  # part of it by which estimated memory may be exceeded (docs/operations.md)


def with_margin(room: int) -> int:
    """Bytes that may be needed by an estimate so that they fit `room` if it is exceeded."""
    return int(room / (1 + MEMORY_ERROR))


@dataclass(frozen=True)
class Machine:
    """One GPU and its links. Rates are per GPU and direction."""

    name: str
    memory_gib: float  # memory that the driver reports
    dense_tflops: float  # large bf16 matrix products of attention and dense layers
    head_tflops: float  # bf16 products of the output layer, which are the largest
    expert_tflops: float  # grouped products of experts, with what is fused into them
    dense_fp8_tflops: float  # large FP8 products in blocks, of operands that are quantized already
    expert_fp8_tflops: float  # the same in FP8, without the quantization of rows
    attention_tflops: float
    """Core attention beside linear attention, its causal half counted. Other models have it by the
    shape of their heads (`configs.arithmetic.rates`), as on an H200, times this over an H200's."""
    memory_gbs: float  # elementwise work: bytes read and written a second, in units of 1e9
    node_gbs: float  # exchange with the other GPUs of a host
    network_gbs: float  # exchange with GPUs of other hosts
    node_line_gbs: float = 450.0  # line rate of the links inside a host
    network_line_gbs: float = 50.0  # line rate of the network
    host_gbs: float = 50.0
    """Copies to host memory and from it at once, all GPUs busy: an assumption, of 63 of PCIe 5 x16.
    """
    host_gib: float = 200.0  # pinned memory of a rank; an assumption: hosts of 2 TiB
    node_gpus: int = 8  # GPUs of a host
    reserved_gib: float = 4.0  # CUDA context, NCCL, workspaces, fragmentation
    latency_us: float = 0.0  # of an exchange over the network, beside its bytes
    launch_us: float = 5.0  # host time of a kernel's launch: an assumption
    only_memory: bool = False  # no rate is known: a dry run estimates its memory alone
    measured: frozenset[str] = frozenset()
    """Fields that were measured on such GPUs, or by a file on its cluster; others are assumed."""

    @property
    def room(self) -> int:
        return int((self.memory_gib - self.reserved_gib) * 2**30)

    @property
    def safe_room(self) -> int:
        """Bytes that a rank of a layout that is proposed may need by an estimate."""
        return with_margin(self.room)

    @property
    def host_room(self) -> int:
        """Bytes of pinned host memory that a rank may need."""
        return int(self.host_gib * 2**30)


@dataclass(frozen=True)
class Rates:
    """Rates by which copies of experts are weighed."""

    expert_tflops: float
    node_gbs: float
    copies_us: float = 400
    """Fixed cost of copies for a layer: launches for few rows, and rows that travel by themselves.
    The time of layers of Qwen3-30B-A3B and DeepSeek-V3 on two H200s beyond that of the rows and
    weights that moved (docs/dispatch.md)."""


CPU_RANKS = Rates(expert_tflops=0.02, node_gbs=1.0, copies_us=0)
"""Processes of one host with gloo: a core's bf16 products in fp32, copies by way of memory."""


def rates_of(device: str, otherwise: str) -> Rates:
    """Return the rates of the GPU with this CUDA name, or else of a machine.

    They are constants, so that a resumed run copies the same experts.
    """
    machine = machine_named(machine_of(device, otherwise))
    return Rates(machine.expert_tflops, machine.node_gbs)


def machine_of(device: str, otherwise: str) -> str:
    """Return the key in `MACHINES` of the GPU with this CUDA name, or else `otherwise`."""
    known = (key for key, m in MACHINES.items() if m.name.split()[0] in device.split())
    return next(known, otherwise)


OTHERS = "phalanx.extras.clusters.described:machine"
"""`(name) -> Machine` of a kind of GPU besides `MACHINES` or of a YAML file, or ValueError."""


def machine_named(name: str) -> Machine:
    """The machine of `run.machine`: a kind of GPU or a YAML file; ValueError: neither."""
    found: Machine = MACHINES[name] if name in MACHINES else resolve_name(OTHERS)(name)
    return found


_ON_ONE_HOST = frozenset(
    {"memory_gib", "dense_tflops", "expert_tflops", "attention_tflops", "node_gbs"}
)
MACHINES: dict[str, Machine] = {
    "h200": Machine(
        name="H200",
        memory_gib=139.8,
        dense_tflops=650,
        head_tflops=785,  # 785 of Moonlight's and 795 of GPT-OSS-20B's in their steps
        expert_tflops=560,
        # cuBLASLt's 1x128 by 128x128 at K 2048; of experts fitted to docs/measured/kernels/fp8.json
        # together with the bytes of quantization (moe.plan.cost.work).
        dense_fp8_tflops=1035,
        expert_fp8_tflops=795,
        attention_tflops=350,
        memory_gbs=3000,
        node_gbs=335,
        network_gbs=40,
        measured=_ON_ONE_HOST
        | {"head_tflops", "memory_gbs", "dense_fp8_tflops", "expert_fp8_tflops"},
    ),
    "h100": Machine(
        name="H100 SXM",
        memory_gib=79.1,
        dense_tflops=620,
        head_tflops=750,  # as much above `dense_tflops` as of an H200
        expert_tflops=530,
        dense_fp8_tflops=985,  # as much below an H200 as in bf16
        expert_fp8_tflops=753,
        attention_tflops=340,
        memory_gbs=2100,  # as much below the data sheet as of an H200
        node_gbs=335,
        network_gbs=40,
        measured=_ON_ONE_HOST,
    ),
}
