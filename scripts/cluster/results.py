"""Results of a check of a cluster: one record a rank, and one of the job."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpu:
    """Answers of the driver about the GPU of a rank, under load; nothing is known of a CPU."""

    name: str
    driver: str = ""
    clock_mhz: float | None = None
    highest_mhz: float | None = None
    celsius: float | None = None
    watts: float | None = None
    slowed_by: list[str] = field(default_factory=list)
    """Reasons for which the hardware holds clocks back: heat, or power that is not delivered."""
    peers: int = 0  # GPUs of the host whose memory this one can write
    visible: int = 0  # GPUs of the host that this process sees
    memory_gib: float | None = None


@dataclass(frozen=True)
class Rank:
    """Findings of a rank. Rates are in units of 1e9 bytes a second, None where nothing was sent."""

    rank: int
    host: str
    node: str  # name of the host, or number of the pretended node (PHALANX_NODE_GPUS)
    gpu: Gpu
    versions: dict[str, str]
    tflops: float  # speed of a large matrix product
    node_gbs: float | None = None  # rate to the other ranks of the node, with all of them busy
    symmetric_memory: str = ""  # `yes`, or the reason against it; empty where there is none to have
    launch_us: float | None = None  # host time of a kernel's launch
    latency_us: float | None = None  # of a few bytes to another node and back, by the slowest pair


@dataclass(frozen=True)
class Rail:
    """Exchange between two nodes, all pairs of the same local rank at once and both ways."""

    nodes: tuple[str, str]
    gbs: float  # rate of a rank and direction, of the slowest pair
    ranks: tuple[int, int]  # the slowest pair


@dataclass(frozen=True)
class Skew:
    """Clock of a host against that of rank 0's."""

    host: str
    seconds: float  # time that it is ahead
    uncertainty: float  # half of the shortest round trip, in seconds


@dataclass(frozen=True)
class Cluster:
    """Results of all ranks."""

    ranks: list[Rank]
    all_reduce_gbs: float | None
    """Bus bandwidth of an all-reduce of all ranks, by the slowest; None for a single rank."""
    rails: list[Rail]
    skews: list[Skew]
