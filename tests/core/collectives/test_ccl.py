"""The collectives on whole tensors against their definitions: 1 to 4 ranks, dtypes, sizes, in place, groups."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import triton
from compiling import Case as StubCase
from compiling import StubContext
from host_collectives import COLLECTIVES, Case, check_call
from limits import short_limit
from ranks import Ranks, context, raised

from iris_core.collectives.config import Config
from iris_core.collectives.group import Group
from iris_core.collectives.launches import Launches
from iris_core.collectives.operands import Call

SIZES = [1, 64, 9000]  # elements of a part; the last takes three blocks of a program
REDUCED = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16]
REDUCED += [torch.int32, torch.int64]
MOVED = [torch.bool, torch.complex64, torch.float8_e4m3fn]


def run(rank: int, world_size: int, cases: list[Case]) -> None:
    ctx = context()
    for case in cases:
        check_call(ctx, case, ctx.ccl, list(range(world_size)), None)


@pytest.mark.parametrize("world_size", [1, 3, 4])  # two in `test_every_dtype`
@pytest.mark.parametrize("name", COLLECTIVES)
def test_gives_what_it_is_defined_to_give(ranks: Callable[[int], Ranks], name: str, world_size: int) -> None:
    cases = [Case(name, size, root=world_size - 1) for size in SIZES]
    cases += [Case(name, 1000, in_place=True), Case(name, 999, symmetric=True), Case(name, 0)]
    ranks(world_size).call(run, cases)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_dtype(ranks: Callable[[int], Ranks], name: str) -> None:
    dtypes = REDUCED if COLLECTIVES[name].reduces else [*REDUCED, *MOVED]
    ranks(2).call(run, [*(Case(name, 37, dtype) for dtype in dtypes), Case(name, 9000, root=1)])


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("name", [name for name, one in COLLECTIVES.items() if one.reduces])
def test_operations(ranks: Callable[[int], Ranks], name: str, op: str) -> None:
    ranks(3).call(run, [Case(name, 37, dtype, op=op) for dtype in (torch.bfloat16, torch.int32)])


def run_in_groups(rank: int, world_size: int) -> None:
    ctx = context()
    groups: list[Any] = [ctx.ccl.new_group(members) for members in ([2, 0], [1, 3], [1])]
    for name in COLLECTIVES:
        for group in groups:
            if rank in group.ranks:
                check_call(ctx, Case(name, 1500, root=group.ranks[-1]), ctx.ccl, list(group.ranks), group)
    x = ctx.full((1500,), 10.0**rank)
    large = Config(all_reduce_variant="gathered", reduce_scatter_variant="pipelined", all_to_all_variant="pipelined")
    for group in groups:
        if rank in group.ranks:
            for name in ("reduce_scatter", "all_to_all"):
                check_call(ctx, Case(name, 1500, options=(("config", large),)), ctx.ccl, group.ranks, group)
            ctx.ccl.all_reduce(x, group=group, config=large)
            ctx.backend.synchronize()
            if len(group.ranks) > 1:
                assert (x == sum(10.0**member for member in group.ranks)).all()
    ctx.barrier()


def test_groups(ranks: Callable[[int], Ranks]) -> None:
    ranks(4).call(run_in_groups)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("variant", ["one_shot", "two_shot", "ring"])
def test_variants_of_all_reduce(ranks: Callable[[int], Ranks], variant: str, world_size: int) -> None:
    config = (("config", Config(all_reduce_variant=variant, comm_sms=2)),)
    exact = torch.int32 if variant == "ring" else torch.float32  # which rounds at each rank
    cases = [Case("all_reduce", size, exact, options=config) for size in (1, 500, 9000)]
    ranks(world_size).call(run, [*cases, Case("all_reduce", 999, exact, in_place=True, options=config)])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["reduce_scatter", "all_to_all"])
def test_pipelined(ranks: Callable[[int], Ranks], name: str, world_size: int) -> None:
    options: Any = {"options": (("config", Config(**{f"{name}_variant": "pipelined"}, comm_sms=2)),)}
    cases = [Case(name, size, **options) for size in (1, 500, 36_007, 0)]
    cases.append(Case(name, 9000, torch.bfloat16, **options))
    if name == "reduce_scatter":
        cases.append(Case(name, 9000, op="max", in_place=True, **options))
    ranks(world_size).call(run, cases)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_reduce_that_is_gathered(ranks: Callable[[int], Ranks], world_size: int) -> None:
    """Sizes of no whole part, of parts alone, and of a rest."""
    options: Any = {"symmetric": True, "options": (("config", Config(all_reduce_variant="gathered", comm_sms=2)),)}
    cases = [Case("all_reduce", size, **options) for size in (1, 16 * world_size, 36_007, 0)]
    cases += [Case("all_reduce", 999, dtype, **options) for dtype in (torch.bfloat16, torch.int8)]
    ranks(world_size).call(run, [*cases, Case("all_reduce", 999, op="max", in_place=True, **options)])


@pytest.mark.parametrize("name", ["all_gather", "broadcast"])
def test_copy_engines(ranks: Callable[[int], Ranks], name: str) -> None:
    config = (("config", Config(**{f"{name}_variant": "copy_engine"})),)
    ranks(3).call(run, [Case(name, 999, symmetric=True, root=2, options=config), Case(name, 0)])


def exchange_messages(rank: int, world_size: int) -> None:
    """A chain, and answers; several sizes, so that slots are used again while the receiver is late."""
    ctx = context()
    ctx.ccl.prepare()
    for call, size in enumerate((1, 37, 9000, 500)):
        numbers = torch.arange(size, device=ctx.get_device()) + 1000.0 * call
        got, sent = torch.empty_like(numbers), numbers + rank
        if rank > 0:
            ctx.ccl.recv(got, rank - 1)
            assert torch.equal(got, numbers + rank - 1)
        if rank < world_size - 1:
            ctx.ccl.send(sent, rank + 1)
        if rank == world_size - 1:
            ctx.ccl.send(sent.half(), 0)
        elif rank == 0:
            last = got.half()
            ctx.ccl.recv(last, world_size - 1)
            assert torch.equal(last, (numbers + world_size - 1).half())


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages(ranks: Callable[[int], Ranks], world_size: int) -> None:
    ranks(world_size).call(exchange_messages)


def run_async(rank: int, world_size: int) -> None:
    ctx = context()
    given = torch.full((100,), rank + 1.0, device=ctx.get_device())
    output = torch.empty_like(given)
    work = ctx.ccl.all_reduce(output, given, async_op=True)
    total = given.clone()
    assert ctx.ccl.all_reduce(total) is None
    assert work is not None
    work.wait()
    assert torch.equal(output, total)


def test_async_calls_are_beside_others(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).call(run_async)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=context().get_device())


def make_mistakes(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    ctx = context()
    ccl, x = ctx.ccl, ones(4)
    pair = ccl.new_group([0, 1])
    alone = ccl.new_group([0])
    errors = {
        "device": raised(ccl.all_reduce, x.to("meta")),
        "dtype": raised(ccl.all_reduce, x.bool()),
        "two dtypes": raised(ccl.all_gather, ones(8), x.half()),
        "shape": raised(ccl.all_gather, ones(9), x),
        "parts": raised(ccl.all_to_all, ones(3), ones(3)),
        "strides": raised(ccl.broadcast, ones(4, 4).t()),
        "op": raised(ccl.all_reduce, x, op="mean"),
        "group": raised(ccl.all_reduce, x, group="all"),
        "root": raised(ccl.broadcast, x, src=2, group=pair),
        "no tensor": raised(ccl.all_reduce, [1.0]),
        "nowhere": raised(ccl.all_gather, ones(8), x, config=Config(all_gather_variant="copy_engine")),
        "not on the heap": raised(ccl.all_reduce, x, config=Config(all_reduce_variant="gathered")),
        "variant": raised(Config, all_reduce_variant="tree"),
        "self": raised(ccl.send, x, rank),
        "two shapes": raised(ccl.all_reduce, ones(2, 3), ones(3, 2)),
        "truth": raised(ccl.broadcast, x, src=True),
        "negated": raised(ccl.all_reduce, torch._neg_view(ones(4))),
        "ranks": raised(ccl.new_group, [0, 0]),
    }
    kind, message = errors["device"]
    errors["device"] = kind, message.replace(str(ctx.get_device()), "the context's")
    if rank == 1:
        errors["not in it"] = raised(ccl.all_reduce, x, group=alone)
    return errors


MISTAKES = {
    "device": ["meta", "it takes a tensor on the context's"],
    "dtype": ["bool", "it takes float16"],
    "two dtypes": ["float32", "float16", "alike"],
    "shape": ["(9,)", "(4,)", "2 times"],
    "parts": ["(3,)", "multiple of 2"],
    "strides": ["contiguous()"],
    "two shapes": ["(2, 3)", "(3, 2)", "of the shape of"],
    "truth": ["src is True"],
    "negated": ["output_tensor is negated or conjugated", "resolve_neg()"],
    "op": ["mean", "ReduceOp.SUM"],
    "group": ["'all'", "new_group"],
    "root": ["src is 2", "ranks 0, 1"],
    "no tensor": ["list"],
    "nowhere": ["copy_engine", "'direct' takes any", "ctx.empty"],
    "not on the heap": ["gathered", "'one_shot', 'two_shot', 'ring' take any"],
    "variant": ["tree", "'two_shot'"],
    "self": ["this rank", "copy_"],
    "ranks": ["[0, 0]", "0 to 1"],
    "not in it": ["rank 1", "Group([0])"],
}


def test_mistakes_are_refused(ranks: Callable[[int], Ranks]) -> None:
    found = ranks(2).call(make_mistakes)
    assert found[1].keys() == MISTAKES.keys()
    for errors in found:
        for what, (kind, message) in errors.items():
            assert kind == "ValueError", what
            for part in MISTAKES[what]:
                assert part in message, what


def differ(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx = context()
    ctx.debug_mode = True
    x = ones(4)
    errors = [
        raised(ctx.ccl.all_reduce, x if rank else x.half()),
        raised(ctx.ccl.all_reduce, ones(4 + rank)),
        raised(ctx.ccl.all_reduce if rank else ctx.ccl.broadcast, x),
        raised(ctx.ccl.all_reduce, x if rank else x.bool()),
    ]
    ctx.ccl.all_reduce(x)
    ctx.debug_mode = False
    assert (x == 2).all()
    return errors


def test_in_debug_mode_all_ranks_raise_what_differs(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).call(differ)
    for (kind, message), (_, same) in zip(first[:3], second[:3], strict=True):
        assert kind == "ValueError"
        assert message == same
        assert "the ranks' collectives differ: rank 0: " in message
    assert "float16" in first[0][1]
    assert "5 elements" in first[1][1]
    assert "broadcast" in first[2][1]
    assert "does not combine torch.bool" in first[3][1]
    assert "rank 0: all_reduce does not combine torch.bool" in second[3][1]


def wait_in_vain(rank: int, world_size: int, name: str) -> tuple[str, str]:
    ctx = context()
    ctx.ccl.prepare()
    x = ones(4)
    with short_limit(ctx):
        if rank == 0 and name == "all_reduce":
            ctx.ccl.all_reduce(x)
        elif rank == 0:
            ctx.ccl.recv(x, 1)
        ctx.backend.synchronize()
    error = raised(ctx.barrier)
    ctx.reset()
    ctx.ccl.all_reduce(x)  # works again
    return error


@pytest.mark.parametrize(("name", "what"), [("all_reduce", "a collective"), ("recv", "send or recv")])
def test_every_wait_is_bounded_and_named(ranks: Callable[[int], Ranks], name: str, what: str) -> None:
    for kind, message in ranks(2).call(wait_in_vain, name):
        assert kind == "TimeoutError"
        assert f"waiting for rank 1's part in {what} of ranks 0, 1, program 0: expected at least" in message


@pytest.mark.parametrize(("world_size", "mib"), [(2, 36), (4, 72), (8, 72), (3, 54)])
def test_staging_memory_of_a_group(world_size: int, mib: int) -> None:
    """What docs/writing_kernels.md says, for two ranks and from four on; all calls have 2 MiB on the way to a peer."""
    ctx: Any = StubContext(StubCase("none", "sm_90", world_size=world_size))
    ctx.is_interpreted, ctx.barrier = lambda: False, lambda: None
    group = Group(ctx, range(world_size))
    channels = (group.channel, group.async_channel, group.pair_channel)
    assert sum(channel.slots.nbytes for channel in channels) == mib << 20
    flights = [channel.programs * channel.slot_bytes for channel in (group.channel, group.async_channel)]
    assert flights == [min(2 << 20, (8 << 20) // triton.next_power_of_2(world_size))] * 2


@pytest.mark.parametrize(
    ("name", "mib", "world_size", "kind", "is_symmetric", "expected"),
    [
        ("all_reduce", 32, 2, "cuda", True, "gathered"),
        ("all_reduce", 31, 2, "cuda", True, "one_shot"),
        ("all_reduce", 64, 2, "cuda", False, "one_shot"),
        ("all_reduce", 22, 4, "cuda", True, "gathered"),
        ("all_reduce", 21, 4, "cuda", True, "two_shot"),
        ("all_reduce", 256, 1, "cuda", True, "one_shot"),
        ("all_reduce", 256, 2, "hip", True, "gathered"),
        ("reduce_scatter", 64, 2, "cuda", False, "pipelined"),
        ("reduce_scatter", 62, 2, "cuda", False, "direct"),
        ("reduce_scatter", 256, 1, "cuda", False, "direct"),
        ("reduce_scatter", 256, 2, "hip", False, "pipelined"),
        ("reduce_scatter", 43, 4, "cuda", False, "pipelined"),
        ("reduce_scatter", 42, 4, "cuda", False, "direct"),
        ("all_gather", 16, 2, "hip", True, "copy_engine"),
        ("all_gather", 16, 2, "cuda", False, "direct"),
        ("all_to_all", 64, 2, "cuda", True, "pipelined"),
        ("all_to_all", 62, 2, "cuda", True, "direct"),
    ],
)
def test_auto_goes_by_what_is_sent(
    name: str, mib: int, world_size: int, kind: str, is_symmetric: bool, expected: str
) -> None:
    """MiB of the larger tensor of a rank."""
    ctx: Any = SimpleNamespace(
        heap=SimpleNamespace(contains=lambda _: is_symmetric), backend=SimpleNamespace(name=kind)
    )
    whole = torch.empty(mib << 20, dtype=torch.uint8, device="meta")
    output, given = (
        whole[: whole.numel() // (world_size if is_part else 1)]
        for is_part in (name == "reduce_scatter", name == "all_gather")
    )
    call = Call(name, output, given)
    assert Launches(ctx).variant(call, cast("Group", SimpleNamespace(size=world_size)), Config()) == expected
