"""What tells one variant from another.

Three questions tell overlap patterns apart (after arXiv 2511.12500, section 4): arrangement, agent, sync. Main loop and
schedule are further axes: a pattern may have several implementations.
"""

from enum import Enum


class Arrangement(Enum):
    """How computation and communication are arranged in kernels and streams."""

    LIBRARY = "library calls, one after the other"
    SEQUENTIAL_KERNELS = "two kernels, one stream"
    CONCURRENT_KERNELS = "two kernels, two streams"
    FUSED_KERNEL = "one kernel"
    KERNEL_AND_COPIES = "one kernel and DMA copies, two streams"
    OTHERS = "another project's fused operator"
    CHOSEN = "as the variant it chooses"


class Agent(Enum):
    """Who moves the bytes between ranks."""

    LIBRARY = "NCCL or RCCL"
    ALL_SMS = "every SM, before or after the GEMM"
    COMM_KERNEL = "the SMs of a communication kernel"
    COMPUTING_PROGRAM = "the programs that compute, before or after a tile"
    COMM_PROGRAMS = "some programs of the same grid"
    COMM_WARPS = "some warps of every program"
    COPY_ENGINES = "the copy engines, no SM"
    OTHERS = "as in that operator"
    CHOSEN = "as in the variant it chooses"


class Sync(Enum):
    """What communication waits for, inside a rank."""

    STREAM_ORDER = "stream order"
    NONE = "nothing"
    TILE_FLAG = "a flag per tile"
    SHARED_MEMORY_BARRIER = "a barrier in shared memory per tile"
    SPLIT_FLAG = "a flag per split of a tile, between its programs"
    SHARD_COUNTER = "a counter a shard"
    SHARD_FLAG = "a flag per shard, or a chunk of it, set by the stream"
    CHUNK_COUNTER = "a counter a chunk of rows, awaited by the stream"
    OTHERS = "as in that operator"
    CHOSEN = "as in the variant it chooses"


class Mainloop(Enum):
    """What multiplies: operands to an fp32 accumulator. Those of ours are a part of a variant's name."""

    PORTABLE = "portable"  # Triton: pointers, or descriptors where the GPU has them
    SM90 = "sm90"  # Gluon: warps with different roles, for NVIDIA Hopper
    LIBRARY = "library"  # torch.mm: cuBLAS or hipBLASLt, beside communication of ours
    OWN = "its own"  # a library's, or another project's
    CHOSEN = "as the variant it chooses"


class Schedule(Enum):
    """Which part of which tile a program multiplies next. Those of ours are a part of a variant's name."""

    DATA_PARALLEL = "data_parallel"  # whole tiles, one per program; those of the last wave may be split along k
    STREAM_K = "stream_k"  # waves of whole tiles, then equal shares of the k steps of the rest
    OWN = "its own"
    CHOSEN = "as the variant it chooses"
