"""The machine code of the device API on four GPUs: peers are reached by wide accesses, and orders are what they say."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from compiled_kernel import Compiled
from compiling import HEAP_SIZE, LOADS_OF_A_WAIT, NVIDIA_ACQUIRE, TARGETS, Case, StubContext, compile_kernel
from triton.compiler.errors import CompilationError

import iris_core
from iris_core.collectives.host_collectives import barrier_kernel

# The device API asks whose GPU it is and if that has an async proxy: sm_89 and sm_120 get what sm_80 and sm_100 do.
pytestmark = pytest.mark.parametrize("target", [target for target in TARGETS if target not in ("sm_89", "sm_120")])


@triton.jit
def copy_kernel(source_ptr, destination_ptr, rank, peer, heap_bases, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    iris_core.copy(source_ptr + offsets, destination_ptr + offsets, rank, peer, rank, heap_bases)


@triton.jit
def load_store_kernel(
    source_ptr, destination_ptr, rank, peer, heap_bases, BLOCK: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr
):
    offsets = tl.arange(0, BLOCK)
    value = iris_core.load(source_ptr + offsets, rank, peer, heap_bases, cache_modifier=LOAD)
    iris_core.store(destination_ptr + offsets, value, rank, peer, heap_bases, cache_modifier=STORE)


@triton.jit
def volatile_kernel(source_ptr, destination_ptr, rank, peer, heap_bases, VOLATILE: tl.constexpr, LOAD: tl.constexpr):
    value = iris_core.load(source_ptr, rank, peer, heap_bases, cache_modifier=LOAD, volatile=VOLATILE)
    tl.store(destination_ptr, value)


@triton.jit
def modified_get_kernel(
    source_ptr, destination_ptr, rank, peer, heap_bases, BLOCK: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr
):
    offsets = tl.arange(0, BLOCK)
    source, destination = source_ptr + offsets, destination_ptr + offsets
    iris_core.get(
        source, destination, rank, peer, heap_bases, load_cache_modifier=LOAD, store_cache_modifier=STORE, hint=16
    )


@triton.jit
def modified_put_kernel(
    source_ptr, destination_ptr, rank, peer, heap_bases, BLOCK: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr
):
    offsets = tl.arange(0, BLOCK)
    source, destination = source_ptr + offsets, destination_ptr + offsets
    iris_core.put(source, destination, rank, peer, heap_bases, load_cache_modifier=LOAD, store_cache_modifier=STORE)


@triton.jit
def modified_copy_kernel(
    source_ptr, destination_ptr, rank, peer, heap_bases, BLOCK: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr
):
    offsets = tl.arange(0, BLOCK)
    source, destination = source_ptr + offsets, destination_ptr + offsets
    iris_core.copy(
        source, destination, rank, peer, rank, heap_bases, load_cache_modifier=LOAD, store_cache_modifier=STORE
    )


LOOP = re.compile(r"^(\S+):.*\n((?:.*\n)*?).*bra\S*\s+\1;?$", re.MULTILINE)  # from a label back to it
MODIFIED = (load_store_kernel, modified_get_kernel, modified_put_kernel, modified_copy_kernel)


@triton.jit
def hinted_kernel(
    source_ptr, destination_ptr, row_stride, rank, peer, heap_bases, OPERATION: tl.constexpr, HINT: tl.constexpr
):
    """Copy a row, of which the compiler cannot know where it begins."""
    offsets = row_stride * tl.program_id(0) + tl.arange(0, 4096)
    source, destination = source_ptr + offsets, destination_ptr + offsets
    if OPERATION == "load, store":
        value = iris_core.load(source, rank, peer, heap_bases, hint=HINT)
        iris_core.store(destination, value, rank, peer, heap_bases, hint=HINT)
    elif OPERATION == "get":  # of which the store is the caller's to hint at
        destination = tl.max_contiguous(tl.multiple_of(destination, 16), 16)
        iris_core.get(source, destination, rank, peer, heap_bases, hint=HINT)
    elif OPERATION == "put":
        source = tl.max_contiguous(tl.multiple_of(source, 16), 16)
        iris_core.put(source, destination, rank, peer, heap_bases, hint=HINT)
    else:
        iris_core.copy(source, destination, peer, peer + 1, rank, heap_bases, hint=HINT)


@triton.jit
def hinted_tile_kernel(destination_ptr, row_stride, rank, peer, heap_bases, HINT: tl.constexpr):
    offsets = tl.arange(0, 64)[:, None] * row_stride + tl.arange(0, 64)[None, :]
    value = tl.zeros((64, 64), tl.bfloat16)
    iris_core.store(destination_ptr + offsets, value, rank, peer, heap_bases, hint=HINT)


@triton.jit
def hinted_atomic_kernel(pointer, rank, peer, heap_bases, OPERATION: tl.constexpr):
    offsets = tl.arange(0, 64)
    tl.store(pointer + offsets, OPERATION(pointer + offsets, 1, rank, peer, heap_bases, hint=32))


@triton.jit
def hinted_cas_kernel(pointer, rank, peer, heap_bases):
    tl.store(pointer + 1, iris_core.atomic_cas(pointer, 3, 4, rank, peer, heap_bases, hint=32))


@triton.jit
def atomic_kernel(pointer, rank, peer, heap_bases, OPERATION: tl.constexpr):
    tl.store(pointer + 1, OPERATION(pointer, 1, rank, peer, heap_bases))


@triton.jit
def cas_kernel(pointer, rank, peer, heap_bases):
    tl.store(pointer + 1, iris_core.atomic_cas(pointer, 3, 4, rank, peer, heap_bases))


@triton.jit
def message_kernel(flag_ptr, watchdog_ptr, SCOPE: tl.constexpr):
    iris_core.signal(flag_ptr, 1, scope=SCOPE)
    iris_core.wait(flag_ptr + 1, 1, watchdog_ptr, scope=SCOPE)


@triton.jit
def clear_kernel(flag_ptr, watchdog_ptr):
    iris_core.wait(flag_ptr, 1, watchdog_ptr)
    tl.store(flag_ptr, 0)


@triton.jit
def clear_each_kernel(flag_ptr, watchdog_ptr):
    flags = tl.arange(0, 4)
    iris_core.wait_each(flag_ptr + flags, 1, flags < 3, watchdog_ptr)
    tl.store(flag_ptr + flags, 0)


@triton.jit
def signal_kernel(flag_ptr):
    iris_core.signal(flag_ptr, 1)


@triton.jit
def signal_each_kernel(flag_ptr):
    iris_core.signal_each(flag_ptr + tl.arange(0, 4), 1, tl.arange(0, 4) < 3)


def compiled(kernel: Any, target: str, rank: int = 2, heap_size: int = HEAP_SIZE, **arguments: Any) -> Compiled:
    ctx = StubContext(Case("none", target, rank), heap_size)
    known = {
        "rank": rank,
        "peer": (rank + 1) % 4,
        "heap_bases": ctx.get_heap_bases(),
        "watchdog_ptr": ctx.get_watchdog(),
        "pointer": ctx.zeros(8, dtype=torch.int32),
        "flag_ptr": ctx.zeros(8, dtype=torch.int64),
        "state_ptr": ctx.zeros(8, dtype=torch.int64),
        "world_size": 4,
        "source_ptr": ctx.zeros(1 << 20, dtype=torch.bfloat16),
        "destination_ptr": ctx.zeros(1 << 20, dtype=torch.bfloat16),
        "row_stride": 1001,
    }
    wanted = {name: known[name] for name in kernel.arg_names if name in known}
    return compile_kernel(kernel, wanted | arguments, target)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_block_of_pointers_is_translated_without_narrowing(target: str, rank: int) -> None:
    # A thread has 16 bytes, unless the translation hides that they are neighbours and aligned.
    elements = 4 * TARGETS[target].gpu.warp_size * 8
    kernel = compiled(copy_kernel, target, rank, BLOCK=elements, num_warps=4)
    assert kernel.stores_by_file()["rma.py"] == {16: 1}
    assert kernel.scratch_bytes == 0


def test_the_distance_to_a_peer_is_never_cut_to_32_bits(target: str) -> None:
    """Where all heaps together are small, too: a peer's may lie before this rank's own."""
    kernel = compiled(copy_kernel, target, heap_size=64 << 20, BLOCK=1024)
    assert "to i32" not in kernel.ttgir
    assert kernel.count(r"buffer_(load|store)_") == 0


@pytest.mark.parametrize("kernel", MODIFIED, ids=lambda kernel: kernel.fn.__name__)
def test_modifiers_arrive_in_the_instructions(target: str, kernel: Any) -> None:
    def modifiers(load: str | None, store: str | None) -> list[str]:
        """What the instructions say that load and store a thread's elements, the only two of so many bytes."""
        code = compiled(kernel, target, BLOCK=512, LOAD=load, STORE=store).code
        if TARGETS[target].is_nvidia:
            return re.findall(r"\b(?:ld|st)\.global(?:\.(\w+))?\.v2\.b32", code)
        moves = re.findall(r"\b(?:global|buffer)_(?:load|store)_dword v(.*)", code)
        return [" ".join(re.findall(r"\b(?:sc0|sc1|nt)\b", move)) for move in moves]

    assert modifiers(None, None) == ["", ""]
    if TARGETS[target].is_nvidia:
        assert modifiers(".cg", ".wt") == ["cg", "wt"]
        assert modifiers(".ca", ".cs") == ["ca", "cs"]
    else:
        assert modifiers(".cg", ".wt") in (["nt", "sc0 sc1"], ["sc0 nt", "sc0 sc1"])  # the latter from this rank's own
        assert modifiers(".cv", ".cs") in (["sc0 sc1", "nt"], ["sc0 sc1", "sc0 nt"])


def test_a_volatile_load_is_one(target: str) -> None:
    """On NVIDIA GPUs: for AMD's Triton 3.6 takes no notice."""
    volatile = [compiled(volatile_kernel, target, VOLATILE=is_volatile, LOAD=None) for is_volatile in (False, True)]
    expected = [0, 1] if TARGETS[target].is_nvidia else [0, 0]
    assert [kernel.count(r"\bld\.volatile\.global") for kernel in volatile] == expected


@pytest.mark.parametrize("modifier", [".ca", ".cg", ".cv"])
def test_a_volatile_load_may_be_given_a_cache_modifier(target: str, modifier: str) -> None:
    """NVIDIA's ptxas refuses the two together."""
    kernel = compiled(volatile_kernel, target, VOLATILE=True, LOAD=modifier)
    assert kernel.count(r"\bld\.volatile\.global") == TARGETS[target].is_nvidia


@pytest.mark.parametrize("kernel", MODIFIED, ids=lambda kernel: kernel.fn.__name__)
@pytest.mark.parametrize("which", ["LOAD", "STORE"])
def test_a_modifier_that_there_is_not_is_named(target: str, kernel: Any, which: str) -> None:
    given = {"LOAD": None, "STORE": None, which: ".nonsense"}
    assert re.search(r"[Cc]ache modifier '?\.?nonsense\b", refusal(kernel, target, BLOCK=512, **given))


@pytest.mark.parametrize("operation", ["load, store", "get", "put", "copy"])
def test_a_hint_widens_accesses(target: str, operation: str) -> None:
    """All of them, up to what a thread can move at once, on the side that is translated."""

    def widths(hint: int | None) -> tuple[set[int], set[int]]:
        kernel = compiled(hinted_kernel, target, OPERATION=operation, HINT=hint)
        if TARGETS[target].is_nvidia:  # where the bases of the heaps are 64 bits wide
            loads = {int(count or 1) * int(bits) // 8 for count, bits in re.findall(_LOAD, kernel.code)}
        else:
            loads = {16 if wide else 2 for wide in re.findall(_AMD_LOAD, kernel.code)}
        return loads, set(kernel.stores_by_file()["rma.py"])

    narrow = {"get": ({2}, {16}), "put": ({16}, {2})}.get(operation, ({2}, {2}))
    assert widths(None) == narrow
    assert widths(16) == ({16}, {16})


_LOAD = r"\bld\.global(?:\.v(\d))?\.b(16|32)\b"
_AMD_LOAD = r"\b(?:global|buffer)_load_(?:ushort|short_d16\w*|(dwordx4)) v"


def test_a_tile_is_hinted_at_by_a_number_for_each_dimension(target: str) -> None:
    widths = [
        set(compiled(hinted_tile_kernel, target, HINT=hint).stores_by_file()["rma.py"]) for hint in (None, (1, 16))
    ]
    assert widths == [{2}, {16}]


@pytest.mark.parametrize("name", ["add", "sub", "xchg", "and", "or", "xor", "min", "max", "cas"])
def test_atomics_hand_on_their_hint(target: str, name: str) -> None:
    if name == "cas":
        kernel = compiled(hinted_cas_kernel, target)
    else:
        kernel = compiled(hinted_atomic_kernel, target, OPERATION=getattr(iris_core, f"atomic_{name}"))
    assert re.search(r"tt\.addptr .*tt\.divisibility = (dense<)?32", kernel.ttgir)


@pytest.mark.parametrize("name", ["add", "sub", "xchg", "and", "or", "xor", "min", "max"])
def test_atomics_are_acquire_release_over_the_system(target: str, name: str) -> None:
    kernel = compiled(atomic_kernel, target, OPERATION=getattr(iris_core, f"atomic_{name}"))
    check_acquire_release(kernel, target)


def test_compare_and_swap_is_acquire_release_over_the_system(target: str) -> None:
    if not TARGETS[target].is_nvidia:
        pytest.xfail("Triton 3.6 compiles atomic_cas for AMD with the scope of one device, whatever it is given")
    check_acquire_release(compiled(cas_kernel, target), target)


def check_acquire_release(kernel: Compiled, target: str) -> None:
    if TARGETS[target].is_nvidia:
        assert kernel.count(r"atom\.global\.(?:sys\.acq_rel|acq_rel\.sys)\.") == 1
    else:
        assert kernel.count(r"buffer_wbl2 sc0 sc1") == 1
        assert kernel.count(r"buffer_inv sc0 sc1") == 1


@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_signal_releases_and_wait_acquires(target: str, scope: str) -> None:
    kernel = compiled(message_kernel, target, SCOPE=scope)
    if TARGETS[target].is_nvidia:
        assert kernel.count(rf"atom\.global\.{scope}\.release\.exch") == 1
        assert kernel.count(NVIDIA_ACQUIRE.format(scope)) == LOADS_OF_A_WAIT
    else:
        bits = {"gpu": "sc1", "sys": "sc0 sc1"}[scope]
        assert kernel.count(rf"buffer_wbl2 {bits}\n") == 1
        assert kernel.count(rf"buffer_inv {bits}\n") == 1


def test_every_thread_that_gives_up_says_so(target: str) -> None:
    """On NVIDIA GPUs each has a verdict of its own, and Triton's stores are the first thread's alone."""
    kernel = compiled(message_kernel, target, SCOPE="sys", num_warps=4)
    by_each = re.findall(r"(@\S+ )?st\.relaxed\.sys\.global", kernel.code)
    assert by_each == (["", ""] if TARGETS[target].is_nvidia else [])  # the notice and the abort, unpredicated


@pytest.mark.parametrize("kernel", [clear_kernel, clear_each_kernel], ids=lambda kernel: kernel.fn.__name__)
def test_nothing_behind_a_wait_comes_before_every_threads_polls(target: str, kernel: Any) -> None:
    """Whoever zeroes a flag that he has awaited must not zero it under the polls of his other threads."""
    code = compiled(kernel, target, num_warps=4).code
    is_nvidia = TARGETS[target].is_nvidia
    acquired = [found.end() for found in re.finditer(NVIDIA_ACQUIRE.format("sys") if is_nvidia else "buffer_inv", code)]
    cleared = [found.start() for found in re.finditer(r"\bst\.global" if is_nvidia else "global_store", code)]
    assert ("bar.sync" if is_nvidia else "s_barrier") in code[acquired[-1] : cleared[-1]]


def test_a_wait_for_a_block_of_flags_has_a_barrier_of_its_own(target: str) -> None:
    """On AMD's GPUs, too, where Triton 3.6 hands the result of the acquiring atomic on through one."""
    ttgir = compiled(clear_each_kernel, target, num_warps=4).ttgir
    acquire = "ld.acquire" if TARGETS[target].is_nvidia else "tt.atomic_rmw add, acquire"
    behind = ttgir[ttgir.rfind(acquire) :]
    assert re.search(r"\b(?:gpu|ttg)\.barrier\b", behind[: behind.rfind("tt.store")])


@pytest.mark.parametrize(
    "kernel",
    [signal_kernel, clear_kernel, signal_each_kernel, clear_each_kernel, barrier_kernel],
    ids=lambda kernel: kernel.fn.__name__,
)
def test_flags_that_are_no_int64_words_are_refused(target: str, kernel: Any) -> None:
    """A wait loads 64 bits on NVIDIA GPUs, and so the neighbour of a narrower word, too."""
    flags = "state_ptr" if kernel is barrier_kernel else "flag_ptr"
    message = refusal(kernel, target, **{flags: torch.zeros(8, dtype=torch.int32)})
    assert "a flag is an int64 word; this one is given as pointer<int32>" in message
    assert "dtype=torch.int64" in message


def refusal(kernel: Any, target: str, **arguments: Any) -> str:
    """Compile what must be refused, and return what is said of it."""
    with pytest.raises(CompilationError) as refused:
        compiled(kernel, target, **arguments).ttgir_alone()
    causes: list[BaseException | None] = [refused.value]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__)
    return "".join(map(str, causes))


@pytest.mark.parametrize("kernel", [message_kernel, clear_each_kernel], ids=lambda kernel: kernel.fn.__name__)
def test_words_that_others_write_are_loaded_past_the_caches(target: str, kernel: Any) -> None:
    """The flag and the abort in every turn of a poll; whether another program has reported already."""
    scope = {"SCOPE": "sys"} if kernel is message_kernel else {}
    code = compiled(kernel, target, **scope)
    if TARGETS[target].is_nvidia:  # where the flag's loads acquire
        assert code.count(r"\bld\.volatile\.global") == 3
    else:
        acquire = 1  # an atomic that adds nothing, or such a load that the compiler makes of it
        assert code.count(r"\b(?:buffer|global)_(?:load_dwordx2|atomic_(?:add|or)_x2) .* sc0 sc1\n") == 6 + acquire


def test_waits_poll_without_an_atomic(target: str) -> None:
    """A read-modify-write in the loop would take the line from the writer at every turn."""
    kernel = compiled(message_kernel, target, SCOPE="sys")
    atomics = r"\batom\." if TARGETS[target].is_nvidia else r"(?:global|flat)_atomic"
    loops = [body for _, body in LOOP.findall(kernel.code)]
    assert any("globaltimer" in body or "s_memrealtime" in body for body in loops)  # the poll is among them
    assert not any(re.search(atomics, body) for body in loops)
    assert kernel.count(rf"{atomics}(?!_(?:add|or)_x2 )") == 1  # the signal's
    assert kernel.count(rf"{atomics}_(?:add|or)_x2 ") <= 1  # to add nothing is AMD's acquire


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_barrier_is_compiled_for_every_rank(target: str, rank: int) -> None:
    kernel = compiled(barrier_kernel, target, rank, num_warps=1)
    release = r"atom\.global\.sys\.release\.exch" if TARGETS[target].is_nvidia else r"buffer_wbl2 sc0 sc1"
    acquire = NVIDIA_ACQUIRE.format("sys") if TARGETS[target].is_nvidia else r"buffer_inv sc0 sc1"
    assert kernel.count(release) >= 1
    assert kernel.count(acquire) >= 1
    assert kernel.scratch_bytes == 0


def test_threads_of_a_barrier_agree_on_its_number(target: str) -> None:
    """One thread stores what all have loaded: a thread barrier is between, and one before the next call loads it."""
    code = compiled(barrier_kernel, target, 0, num_warps=4).code
    is_nvidia = TARGETS[target].is_nvidia
    meet = r"\bbar(?:rier)?\.sync\b" if is_nvidia else r"\bs_barrier\b"
    store = r"\bst\.global\S*\.b64\b" if is_nvidia else r"\bglobal_store_dwordx2\b"
    signal = r"atom\.global\.sys\.release\.exch" if is_nvidia else r"global_atomic_swap_x2"
    number = re.search(store, code)
    assert number
    assert re.search(meet, code[: number.start()])
    assert re.search(rf"{meet}.*?{signal}", code[number.end() :], re.DOTALL)
