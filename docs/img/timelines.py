"""The time line of each variant, named as its file, a panel per family. An illustration: every length is chosen, none
is measured. draw_timelines.py makes the pictures.
"""

from dataclasses import dataclass, field

# From top to bottom; a picture has those that its pattern uses. "comm SMs" are those that a variant sets apart, or that
# the library's collective takes.
LANES = ("multiply warps", "load warp", "program 0", "program 1", "compute SMs", "comm SMs", "copy engine", "link")
# The chunks of a rank's work, in the order in which they are computed, and how long each takes.
# All-gather begins with the rank's own shard and reduce-scatter ends with it; it is not sent, or not awaited.
BLOCKS = ("1", "2", "3", "4")
GATHERED = ("own", "2", "3", "4")
REDUCED = ("1", "2", "3", "own")
COMPUTE = 1.0
COMPUTE_ON_FEWER_SMS = 1.08
SEND = 0.8
STORE = 0.3  # an epilogue's stores, until the program goes on to its next tile
SUM = 0.25  # an epilogue that adds the peers' partials
SUBTILES = 3  # in which a load warp sends a tile, paced by the main loop of the next one


@dataclass
class Timeline:
    """What happens on the lanes of one rank during a call.

    Args:
        bars: (lane, kind, start, length, text).
        arrows: (from lane, time, to lane, time): a signal, or a store or load that crosses the link.
        kernels: (name, first lane, last lane, start, stop): outlines of kernels, and of a stream of copies.
    """

    bars: list[tuple[str, str, float, float, str]] = field(default_factory=list)
    arrows: list[tuple[str, float, str, float]] = field(default_factory=list)
    kernels: list[tuple[str, str, str, float, float]] = field(default_factory=list)

    def add(self, lane: str, kind: str, start: float, length: float, text: str) -> float:
        """Add a bar; return when it ends."""
        self.bars.append((lane, kind, start, length, text))
        return start + length

    @property
    def end(self) -> float:
        return max(start + length for _, _, start, length, _ in self.bars)


Panels = dict[str, Timeline]  # by family
ALL_SCATTER, ALL_GATHER = "gemm_all_scatter", "all_gather_gemm"
REDUCE_SCATTER, ALL_REDUCE = "gemm_reduce_scatter", "gemm_all_reduce"
FAMILIES = (ALL_SCATTER, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)


def library() -> Panels:
    panels = {family: Timeline() for family in FAMILIES}
    for family, chunks, sent in ((ALL_SCATTER, BLOCKS, 4), (REDUCE_SCATTER, REDUCED, 3), (ALL_REDUCE, BLOCKS, 6)):
        line = panels[family]
        end = _compute(line, chunks)[-1]
        _collective(line, "comm SMs", end, min(sent, 4), "collective", f"1 – {min(sent, 4)}")
        line.kernels.append(("torch.mm", "compute SMs", "compute SMs", 0, end))
        line.kernels.append(("NCCL's kernel", "comm SMs", "comm SMs", end, line.end))
    gather = panels[ALL_GATHER]
    start = _collective(gather, "comm SMs", 0, 3, "collective", "2 – 4")
    end = _compute(gather, GATHERED, start=start)[-1]
    gather.kernels.append(("torch.mm", "compute SMs", "compute SMs", start, end))
    gather.kernels.append(("NCCL's kernel", "comm SMs", "comm SMs", 0, start))
    return panels


def bulk_synchronous(multiplies: str = "GEMM kernel") -> Panels:
    panels = {family: Timeline() for family in FAMILIES}
    for family, chunks, sent, text in (
        (ALL_SCATTER, BLOCKS, 4, "all SMs push"),
        (REDUCE_SCATTER, REDUCED, 3, "all SMs pull and add"),
        (ALL_REDUCE, REDUCED, 4, "all SMs pull, add and push sums"),
    ):
        line = panels[family]
        end = _compute(line, chunks)[-1]
        _collective(line, "compute SMs", end, sent, text, "1 – 3, Σ" if family == ALL_REDUCE else f"1 – {sent}")
        line.kernels.append((multiplies, "compute SMs", "compute SMs", 0, end))
        line.kernels.append(("second kernel", "compute SMs", "compute SMs", end, line.end))
    gather = panels[ALL_GATHER]
    start = _collective(gather, "compute SMs", 0, 3, "all SMs push", "2 – 4")
    end = _compute(gather, GATHERED, start=start)[-1]
    gather.kernels.append(("push kernel", "compute SMs", "compute SMs", 0, start))
    gather.kernels.append((multiplies, "compute SMs", "compute SMs", start, end))
    return panels


def bulk_synchronous_library() -> Panels:
    return bulk_synchronous("torch.mm")


def producer_consumer() -> Panels:
    scatter, gather, reduce = (Timeline() for _ in range(3))
    computed = _compute_and_send(scatter, BLOCKS, "comm SMs", "push", COMPUTE_ON_FEWER_SMS)
    scatter.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, computed[-1]))
    scatter.kernels.append(("push kernel, stream 2", "comm SMs", "comm SMs", 0, scatter.end))
    sent = _gather_and_compute(gather, "comm SMs", "push", COMPUTE_ON_FEWER_SMS)
    gather.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, gather.end))
    gather.kernels.append(("push kernel, stream 2", "comm SMs", "comm SMs", 0, sent))
    computed = _compute_and_send(reduce, REDUCED[:3], "comm SMs", "push", COMPUTE_ON_FEWER_SMS)
    sent = reduce.end
    end = _sum_own(reduce, computed[-1], sent, COMPUTE_ON_FEWER_SMS)
    reduce.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, computed[-1]))
    reduce.kernels.append(("sum kernel", "compute SMs", "compute SMs", computed[-1], end))
    reduce.kernels.append(("push kernel, stream 2", "comm SMs", "comm SMs", 0, sent))
    return {ALL_SCATTER: scatter, ALL_GATHER: gather, REDUCE_SCATTER: reduce}


def fused_sequential() -> Panels:
    scatter, reduce = Timeline(), Timeline()
    _compute_and_store(scatter, BLOCKS)
    _sum_own(reduce, *_compute_and_store(reduce, REDUCED[:3]), COMPUTE)
    panels = {ALL_SCATTER: scatter, REDUCE_SCATTER: reduce}
    for line in panels.values():
        end = max(start + length for lane, _, start, length, _ in line.bars if lane == "compute SMs")
        line.kernels.append(("one kernel", "compute SMs", "compute SMs", 0, end))
    return panels


def workgroup_specialized() -> Panels:
    scatter, gather, reduce, all_reduce = (Timeline() for _ in FAMILIES)
    _compute_and_send(scatter, BLOCKS, "comm SMs", "push", COMPUTE_ON_FEWER_SMS)
    _gather_and_compute(gather, "comm SMs", "push", COMPUTE_ON_FEWER_SMS)
    for line in (reduce, all_reduce):
        computed = _compute_and_send(line, REDUCED[:3], "comm SMs", "push", COMPUTE_ON_FEWER_SMS)
        _sum_own(line, computed[-1], line.end, COMPUTE_ON_FEWER_SMS)
    end = all_reduce.end
    all_reduce.arrows.append(("compute SMs", end, "link", end))
    all_reduce.add("compute SMs", "push", end, STORE, "")
    all_reduce.add("link", "link", end, SEND, "Σ")
    panels = {ALL_SCATTER: scatter, ALL_GATHER: gather, REDUCE_SCATTER: reduce, ALL_REDUCE: all_reduce}
    for line in panels.values():
        line.kernels.append(("one kernel", "compute SMs", "comm SMs", 0, line.end))
    return panels


def copy_engine() -> Panels:
    scatter, gather, reduce = (Timeline() for _ in range(3))
    computed = _compute_and_send(scatter, BLOCKS, "copy engine", "copy", COMPUTE)
    scatter.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, computed[-1]))
    scatter.kernels.append(("copies, stream 2", "copy engine", "copy engine", computed[0], scatter.end))
    sent = _gather_and_compute(gather, "copy engine", "copy", COMPUTE)
    gather.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, gather.end))
    gather.kernels.append(("copies, stream 2", "copy engine", "copy engine", 0, sent))
    computed = _compute_and_send(reduce, REDUCED[:3], "copy engine", "copy", COMPUTE)
    sent = reduce.end
    end = _sum_own(reduce, computed[-1], sent, COMPUTE)
    reduce.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, computed[-1]))
    reduce.kernels.append(("sum kernel", "compute SMs", "compute SMs", computed[-1], end))
    reduce.kernels.append(("copies, stream 2", "copy engine", "copy engine", computed[0], sent))
    return {ALL_SCATTER: scatter, ALL_GATHER: gather, REDUCE_SCATTER: reduce}


def workgroup_specialized_sm90() -> Panels:
    gather = Timeline()
    now = gather.add("multiply warps", "compute", 0, COMPUTE_ON_FEWER_SMS, GATHERED[0])
    arrived = 0.0
    for shard in GATHERED[1:]:
        for chunk in ("a", "b"):  # of columns: a tile is multiplied as they come
            gather.add("comm SMs", "push", arrived, SEND / 2, "")
            arrived = gather.add("link", "link", arrived, SEND / 2, shard + chunk)
            start = max(now, arrived)
            gather.arrows.append(("link", arrived, "multiply warps", start))
            now = gather.add("multiply warps", "compute", start, COMPUTE_ON_FEWER_SMS / 2, shard + chunk)
    gather.kernels.append(("one kernel", "multiply warps", "comm SMs", 0, gather.end))
    return {ALL_GATHER: gather}


def warp_specialized_sm90() -> Panels:
    scatter, reduce, all_reduce = (Timeline() for _ in range(3))
    _multiply_and_send(scatter, BLOCKS)
    _multiply_and_send(reduce, ("1", "2", "own", "3", "own"))
    _multiply_and_send(all_reduce, ("1", "2", "own", "3", "own"), sends_sums=True)
    panels = {ALL_SCATTER: scatter, REDUCE_SCATTER: reduce, ALL_REDUCE: all_reduce}
    for line in panels.values():
        line.kernels.append(("one kernel", "multiply warps", "load warp", 0, line.end))
    return panels


def copy_engine_sm90() -> Panels:
    gather = Timeline()
    now = gather.add("multiply warps", "compute", 0, COMPUTE, GATHERED[0])
    arrived = 0.0
    chunks = [(shard, 1.0) for shard in GATHERED[1:3]] + [("4a", 0.5), ("4b", 0.5)]
    for chunk, share in chunks:
        gather.add("copy engine", "copy", arrived, share * SEND, "own" if share == 1 else "")
        arrived = gather.add("link", "link", arrived, share * SEND, chunk)
        start = max(now, arrived)
        gather.arrows.append(("link", arrived, "multiply warps", start))
        now = gather.add("multiply warps", "compute", start, share * COMPUTE, chunk)
    gather.kernels.append(("one kernel, stream 1", "multiply warps", "multiply warps", 0, now))
    gather.kernels.append(("copies, stream 2", "copy engine", "copy engine", 0, arrived))
    return {ALL_GATHER: gather}


def copy_engine_library() -> Panels:
    gather = Timeline()
    now = gather.add("compute SMs", "compute", 0, COMPUTE, GATHERED[0])
    arrived = 0.0
    for shard in GATHERED[1:]:
        gather.add("copy engine", "copy", arrived, SEND, "own")
        arrived = gather.add("link", "link", arrived, SEND, shard)
    start = max(now, arrived)
    gather.arrows.append(("link", arrived, "compute SMs", start))
    behind = GATHERED[1:]
    end = gather.add("compute SMs", "compute", start, len(behind) * COMPUTE, f"{behind[0]} to {behind[-1]}")
    for begin, stop in ((0.0, now), (start, end)):
        gather.kernels.append(("torch.mm, stream 1", "compute SMs", "compute SMs", begin, stop))
    gather.kernels.append(("copies, stream 2", "copy engine", "copy engine", 0, arrived))
    return {ALL_GATHER: gather}


def fused_sequential_stream_k() -> Panels:
    panels = {family: Timeline() for family in FAMILIES}
    for family, line in panels.items():
        start = 0.0
        if family == ALL_GATHER:
            for program in ("program 0", "program 1"):
                line.add(program, "push", 0, SEND, "push")
            start = line.add("link", "link", 0, SEND, "all of A")
            for program in ("program 0", "program 1"):
                line.arrows.append(("link", start, program, start))
        line.add("program 1", "compute", start, 2 * COMPUTE, "tile 1, second part of k")
        left = line.add("program 1", "push", start + 2 * COMPUTE, SUM, "")
        now = line.add("program 0", "compute", start, left - start, "tile 1, first part of k")
        line.arrows.append(("program 1", left, "program 0", now))
        now = line.add("program 0", "sum", now, SUM, "+")
        if family == ALL_GATHER:
            continue
        line.arrows.append(("program 0", now, "link", now))
        line.add("program 0", "push", now, STORE, "")
        sent = line.add("link", "link", now, SEND, "to all" if family == ALL_REDUCE else "tile 1")
        if family in (REDUCE_SCATTER, ALL_REDUCE):
            line.arrows.append(("link", sent, "program 0", sent))
            line.add("program 0", "sum", sent, SUM, "+")
    for line in panels.values():
        line.kernels.append(("one kernel", "program 0", "program 1", 0, line.end))
    return panels


def _compute(line: Timeline, chunks: tuple[str, ...], length: float = COMPUTE, start: float = 0.0) -> list[float]:
    """Add the multiplication of chunks, one after the other; return when each is done."""
    return [
        line.add("compute SMs", "compute", start + index * length, length, chunk) for index, chunk in enumerate(chunks)
    ]


def _collective(line: Timeline, lane: str, start: float, chunks: int, text: str, sent: str) -> float:
    """Add a collective on everything at once; return when it is done."""
    line.add("link", "link", start, chunks * SEND, sent)
    return line.add(lane, "push", start, chunks * SEND, text)


def _compute_and_send(line: Timeline, chunks: tuple[str, ...], lane: str, kind: str, length: float) -> list[float]:
    """Add chunks that another lane sends when each is computed; return when each is computed."""
    computed = _compute(line, chunks, length)
    now = 0.0
    for chunk, done in zip(chunks, computed, strict=True):
        start = max(done, now)
        line.arrows.append(("compute SMs", done, lane, start))
        now = line.add(lane, kind, start, SEND, chunk)
        line.add("link", "link", start, SEND, chunk)
    return computed


def _compute_and_store(line: Timeline, chunks: tuple[str, ...]) -> tuple[float, float]:
    """Add chunks that are sent by whom they are computed; return when that is done, and when the link is."""
    now = link_free = 0.0
    for chunk in chunks:
        now = line.add("compute SMs", "compute", now, COMPUTE, chunk)
        start = max(now, link_free)
        line.arrows.append(("compute SMs", now, "link", start))
        now = line.add("compute SMs", "push", now, STORE, "")
        link_free = line.add("link", "link", start, SEND, chunk)
    return now, link_free


def _multiply_and_send(line: Timeline, chunks: tuple[str, ...], *, sends_sums: bool = False) -> None:
    """Add tiles whose load warp sends each by subtiles while the next is multiplied; own ones are summed."""
    now = 0.0
    waiting = ""  # the tile that leaves during the next one's main loop
    for chunk in (*chunks, ""):
        length = COMPUTE / 2 if chunk == "own" else COMPUTE
        if waiting:
            step = length / SUBTILES if chunk else SEND / SUBTILES
            for subtile in range(SUBTILES):
                start = now + subtile * step
                line.add("load warp", "push", start, min(step, SEND / SUBTILES), waiting)
                line.add("link", "link", start, min(step, SEND / SUBTILES), waiting)
            line.arrows.append(("multiply warps", now, "load warp", now))
        if not chunk:
            return
        now = line.add("multiply warps", "compute", now, length, chunk)
        waiting = chunk
        if chunk == "own":
            line.arrows.append(("link", now, "multiply warps", now))
            now = line.add("multiply warps", "sum", now, SUM, "+")
            waiting = "Σ" if sends_sums else ""


def _gather_and_compute(line: Timeline, lane: str, kind: str, length: float) -> float:
    """Add shards that are multiplied as they come, while the own one goes out; return when that is done."""
    now = line.add("compute SMs", "compute", 0, length, GATHERED[0])
    arrived = 0.0
    for shard in GATHERED[1:]:
        line.add(lane, kind, arrived, SEND, "own")
        arrived = line.add("link", "link", arrived, SEND, shard)
        start = max(now, arrived)
        line.arrows.append(("link", arrived, "compute SMs", start))
        now = line.add("compute SMs", "compute", start, length, shard)
    return arrived


def _sum_own(line: Timeline, start: float, arrived: float, length: float) -> float:
    """Add the own shard, whose epilogue adds what has arrived from the peers; return when that is done."""
    computed = line.add("compute SMs", "compute", start, length, REDUCED[-1])
    start = max(computed, arrived)
    line.arrows.append(("link", arrived, "compute SMs", start))
    return line.add("compute SMs", "sum", start, SUM, "+")


PATTERNS = (
    library,
    bulk_synchronous,
    bulk_synchronous_library,
    producer_consumer,
    fused_sequential,
    workgroup_specialized,
    copy_engine,
    copy_engine_library,
    warp_specialized_sm90,
    workgroup_specialized_sm90,
    copy_engine_sm90,
    fused_sequential_stream_k,
)
