"""`PersistentKernel`: one CTA an SM, whose warp groups have roles: base of `gemm.Gemm` and of
`wgrad.kernel.WgradKernel`.

A CTA lays out its shared memory, starts its barriers, and splits into a group that loads and two
that multiply. Each group then goes from tile to tile on its own, by the records of a `Scheduler`,
until there are none left; barriers in shared memory are all that the groups share:

    all threads     storage: records and barriers first, then stages, each at its alignment
    warp 0          prefetch TMA descriptors; initialise the barriers of all pipelines
    all threads     fence, barrier of the CTA
    group 0         give registers up; `load`: stages of tile after tile
    groups 1, 2     take them; `compute`: stages to accumulators, and those to the output
    all threads     barrier of the CTA
"""

from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, THREADS
from phalanx.kernels.sm90.gemm.tensors import struct

SMEM_BYTES = 227 * 1024
_RESERVED_BYTES = 1024 + 1024  # barriers and records, and the alignment of what follows them


def stages_beside(bytes_: int, stage_bytes: int) -> int:
    """Number of stages that fit into shared memory beside so many bytes of an output."""
    return (SMEM_BYTES - _RESERVED_BYTES - bytes_) // stage_bytes


class PersistentKernel:
    """Device side. Subclasses create the tensors and have the hooks below.

    What hooks get: `arguments` of the launch, a NamedTuple; `storage` with the fields of `fields`;
    and `shared`, the result of `start` in the same thread. `load` and `compute` can also have the
    storage in `shared`: what they get is carried by the branches of the roles, by which registers
    are allocated. Change one for the other only with a measurement.
    """

    warpgroups: ClassVar[bool] = True

    registers: Any  # of a thread in the loading and in a multiplying warp group
    fields: Any  # () -> fields of the shared memory of a CTA, in their order
    start: Any  # (arguments, storage, rank), all threads, before the barriers are initialised
    descriptors: Any  # (arguments) -> TMA atoms that the kernel uses
    init_barriers: Any  # (storage, shared), warp 0: of all pipelines
    load: Any  # (arguments, storage, shared, warp), group 0: all tiles of the CTA to stages
    compute: Any  # (arguments, storage, shared, group), groups 1 and 2: stages to the output

    def __init__(self, config: Any) -> None:
        self.config = config

    def rank(self) -> Any:
        """The CTA's rank in its cluster of one, if the kernel uses it: 0, which the compiler does
        not know."""
        return None

    def launch(self, arguments: Any, ctas: Int32, stream: cuda.CUstream) -> None:
        """Host side."""
        self.kernel(arguments).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[1, 1, 1],
            # One CTA an SM: it takes all of the registers, and its stages all of the shared memory.
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, arguments: Any) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP_THREADS)
        rank = self.rank()
        storage = cutlass.utils.SmemAllocator().allocate(struct(**self.fields()))
        shared = self.start(arguments, storage, rank)
        if warp == 0:
            # Descriptors lie among the parameters of the kernel: without this the first TMA of each
            # would wait until its own is fetched.
            for descriptor in self.descriptors(arguments):
                cpasync.prefetch_descriptor(descriptor)
            self.init_barriers(storage, shared)
        # Barriers must be visible to all threads, and to TMA, before anybody waits at one.
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        fewer, more = self.registers
        if group == 0:
            # Accumulators take 128 or 192 registers of a multiplying thread; those come from the
            # loading group, which needs few.
            cute.arch.setmaxregister_decrease(fewer)
            self.load(arguments, storage, shared, warp)
            storage = storage  # the compiler carries what a branch assigns
        else:
            cute.arch.setmaxregister_increase(more)
            self.compute(arguments, storage, shared, group)
        # As measured: the storage lasts until the last warp has ended in any case.
        cute.arch.sync_threads()
