"""An epilogue's ops, one of them defined here, are applied once to each element of C, by every variant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import triton
from checking import fault, make_data, poison
from epilogues import MARKS, finished_data, own_columns, own_operands, own_rows, register_ops
from families import FAMILIES, VARIANTS, make_problem, name
from gluon_emulator import OPS_LANGUAGE
from ranks import Ranks, context, raised
from torch_compiling import FUNCTIONS, are_close, sizes_of
from triton.runtime.jit import JITFunction

from iris_kernels.common.device import epilogue as ops
from iris_kernels.common.device.arguments import Tile
from iris_kernels.common.device.epilogue import ACTIVATIONS, EpilogueOp, epilogue_ops, register_epilogue_op
from iris_kernels.common.operators.operand_checks import checked_place
from iris_kernels.common.torch_product import product_for
from overlap_taxonomy import Mainloop, Variant, get_variant

SIZES = [(33, 37, 41), (70, 132, 32), (1, 2, 7)]  # one that divides nothing; more tiles than programs; empty ranks


# torch's product beside kernels of ours rounds as torch does, and has no epilogue where it is C itself.
FINISHING = [one for one in VARIANTS if not one.delegates and one.mainloop is not Mainloop.LIBRARY]
# Of each kind of operand one, and a number; the activations are functions of an element, tried below.
EPILOGUE = ("scale", "row_factors", "bias", "residual", "gelu", "marks")


def run(rank: int, world_size: int, family: str, variant: str) -> list[str]:
    """Call an operator with an epilogue, twice; return what was wrong."""
    register_ops()
    ctx, faults = context(), []
    for m, n, k in SIZES:
        problem = replace(make_problem(family, m, n, k, world_size, torch.float32), epilogue=EPILOGUE)
        found = get_variant(family, variant)
        if reason := found.unsupported_reason(problem, None):
            if reason not in raised(found.build, ctx, problem)[1]:
                faults.append(f"does not say {reason}")
            continue
        operator = found.build(ctx, problem)
        for seed in range(2):
            data = make_data(family, problem, rank, seed=seed, device=ctx.get_device())
            operands = own_operands(family, problem, rank)
            poison(operator)
            ctx.barrier()
            output = operator.as_matrix(operator(data.a, data.b, **operands))
            if wrong := fault(output, finished_data(data, family, problem, rank), problem.dtype):
                faults.append(f"{m}x{n}x{k}, rank {rank}: {wrong}")
        operator.close()
    return faults


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("variant", [one for one in VARIANTS if not one.delegates], ids=name)
def test_every_variant_applies_it(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    assert ranks(3).call(run, variant.family, variant.name) == [[]] * 3


def run_gated(rank: int, world_size: int, variant: str, dtype: torch.dtype) -> list[str]:
    """Call all-gather + GEMM with gates and ups side by side; return what was wrong."""
    ctx, faults, family = context(), [], "all_gather_gemm"
    for m, n, k in ((33, 36, 41), (70, 132, 32), (2, 4, 7)):
        problem = replace(make_problem(family, m, n, k, world_size, dtype), epilogue=("bias", "swiglu"))
        operator = get_variant(family, variant).build(ctx, problem)
        data = make_data(family, problem, rank, 0, ctx.get_device())
        poison(operator)
        ctx.barrier()
        output = operator(data.a, data.b, **own_operands(family, problem, rank))
        if wrong := fault(output, finished_data(data, family, problem, rank), dtype):
            faults.append(f"{m}x{n}x{k}, rank {rank}: {wrong}")
        operator.close()
    return faults


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", [one.name for one in FINISHING if one.family == "all_gather_gemm"])
def test_all_gather_multiplies_ups_by_their_gates(
    ranks: Callable[[int], Ranks], variant: str, dtype: torch.dtype
) -> None:
    assert ranks(3).call(run_gated, variant, dtype) == [[]] * 3


def differentiate_gated(rank: int, world_size: int) -> list[bool]:
    """Return whether the function's C, and gradients, are those of torch's own; and C without a gradient, too."""
    ctx, draw = context(), torch.Generator().manual_seed(1)
    problem = make_problem("all_gather_gemm", 18, 36, 16, world_size, torch.float32)
    a, b, grad = (torch.randn(*shape, generator=draw) for shape in ((18, 16), (16, 36), (18, 18)))
    leaves = [one.clone().requires_grad_() for one in (a, b)]
    gate, up = (leaves[0] @ leaves[1]).unflatten(1, (-1, 2)).unbind(-1)
    whole = torch.nn.functional.silu(gate) * up
    whole.backward(grad)
    columns = slice(*problem.columns(rank))
    halves = slice(columns.start // 2, columns.stop // 2)
    own = [one.clone().requires_grad_() for one in problem.shards(rank, a, b)]
    output = FUNCTIONS["all_gather_gemm"](ctx, *own, m=18, n=36, activation="swiglu")
    output.backward(grad[:, halves])
    without = FUNCTIONS["all_gather_gemm"](ctx, *(one.detach() for one in own), m=18, n=36, activation="swiglu")
    expected = [whole[:, halves], whole[:, halves], *problem.shards(rank, leaves[0].grad, leaves[1].grad)]
    return are_close([output, without, own[0].grad, own[1].grad], expected)


@pytest.mark.parametrize("device", ["cpu"])
def test_a_gated_activation_has_gradients(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(differentiate_gated) == [[True] * 4] * 2


def call_for_fp32(rank: int, world_size: int, family: str, variant: str) -> str | None:
    """Return what is wrong with an fp32 C of bf16 operands."""
    ctx, found = context(), get_variant(family, variant)
    problem = replace(make_problem(family, 70, 132, 32, world_size, torch.bfloat16), out_dtype=torch.float32)
    operator = found.build(ctx, problem)
    data = make_data(family, problem, rank, 0, ctx.get_device())
    poison(operator)
    ctx.barrier()
    wrong = fault(operator.as_matrix(operator(data.a, data.b)), data, problem.out_dtype)
    operator.close()
    return wrong


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("variant", FINISHING, ids=name)
def test_c_may_have_another_dtype(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    assert ranks(3).call(call_for_fp32, variant.family, variant.name) == [None] * 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_rounds_a_product_of_another_dtype_once(dtype: torch.dtype, device: str) -> None:
    """Sums of small whole numbers are exact in fp32, and most are not in 16 bits."""
    generator = torch.Generator(device).manual_seed(1)
    a, b = (torch.randint(-32, 33, (256, 256), device=device, generator=generator) for _ in range(2))
    found, exact = product_for(torch.float32, a.to(dtype), b.to(dtype)), a.double() @ b.double()
    assert torch.equal(found, exact.float())
    assert not torch.equal(found.to(dtype).double(), exact)


def call_functions(rank: int, world_size: int, family: str, activation: str) -> list[str | None]:
    """Return what is wrong with a function's output, with all that it takes for the epilogue, and with some of it."""
    ctx, faults = context(), []
    for m in (18, 7):
        for epilogue in (("scale", "bias", "residual", activation), (activation,), ("bias",), ("scale", "residual")):
            problem = replace(make_problem(family, m, 34, 16, world_size, torch.float32), epilogue=epilogue)
            data = make_data(family, problem, rank, m, ctx.get_device())
            operands = own_operands(family, problem, rank)
            options = operands | ({"activation": activation} if activation in epilogue else {})
            expected = finished_data(data, family, problem, rank)
            output = FUNCTIONS[family](ctx, data.a, data.b, **sizes_of(family, m, 34, 16), **options)
            faults.append(fault(output, expected, problem.dtype))
    return faults


def scale_and_cast(rank: int, world_size: int, family: str) -> str | None:
    """Return what is wrong with a C of a quarter of the product, in fp16; that is exact in both dtypes."""
    ctx = context()
    problem = replace(make_problem(family, 18, 34, 16, world_size, torch.float32), out_dtype=torch.float16)
    data = make_data(family, problem, rank, 0, ctx.get_device())
    options = {"scale": torch.tensor(0.25), "out_dtype": torch.float16}
    output = FUNCTIONS[family](ctx, data.a, data.b, **options, **sizes_of(family, 18, 34, 16))
    return fault(4 * output, data, problem.out_dtype)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(("family", "activation"), list(zip(FUNCTIONS, ACTIVATIONS, strict=True)))
def test_functions_take_what_operators_take(ranks: Callable[[int], Ranks], family: str, activation: str) -> None:
    assert ranks(2).call(call_functions, family, activation) == [[None] * 8] * 2


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("family", FUNCTIONS)
def test_a_scale_may_be_a_number_and_c_of_another_dtype(ranks: Callable[[int], Ranks], family: str) -> None:
    assert ranks(2).call(scale_and_cast, family) == [None] * 2


def differentiate(rank: int, world_size: int, family: str, backend: str | None) -> list[bool]:
    """Return whether the output and all gradients are those of torch's own product of the whole."""
    ctx = context()
    problem = make_problem(family, 18, 34, 16, world_size, torch.float32)
    shards, draw = FAMILIES[family], torch.Generator().manual_seed(1)
    whole_a, whole_b = (torch.randn(*shape, generator=draw) for shape in ((18, 16), (16, 34)))
    whole_scale, whole_bias, whole_residual, grad = (
        torch.randn(*shape, generator=draw) for shape in ((34,), (34,), (18, 34), (18, 34))
    )
    leaves = [one.clone().requires_grad_() for one in (whole_a, whole_b, whole_bias, whole_residual)]
    pre = leaves[0] @ leaves[1] * whole_scale + leaves[2] + leaves[3]
    torch.nn.functional.gelu(pre).backward(grad)
    rows, columns = own_rows(family, problem, rank), own_columns(family, problem, rank)
    scale = whole_scale[columns]

    def step(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        sizes = sizes_of(family, 18, 34, 16)
        return FUNCTIONS[family](ctx, a, b, scale=scale, bias=bias, residual=residual, activation="gelu", **sizes)

    parts = (
        shards.own_a(problem, rank, whole_a),
        shards.own_b(problem, rank, whole_b),
        whole_bias[columns],
        whole_residual[rows, columns],
    )
    own = [one.clone().requires_grad_() for one in parts]
    torch._dynamo.reset()
    output = (torch.compile(step, backend=backend, fullgraph=True) if backend else step)(*own)
    output.backward(shards.own_output(problem, rank, grad))
    of_residual = leaves[3].grad[rows, columns]
    expected = [
        shards.own_a(problem, rank, leaves[0].grad),
        shards.own_b(problem, rank, leaves[1].grad),
        of_residual.sum(0),  # of the rows that the rank has
        of_residual,
    ]
    return are_close([one.grad for one in own], expected)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("family", FUNCTIONS)
def test_gradients_are_those_of_torch(ranks: Callable[[int], Ranks], family: str, backend: str | None) -> None:
    assert ranks(2).call(differentiate, family, backend) == [[True] * 4] * 2


def refuse(rank: int, world_size: int) -> list[str]:
    ctx = context()
    a, b = torch.ones(4, 6), torch.ones(6, 5)
    problem = replace(make_problem("gemm_all_reduce", 4, 5, 6 * world_size, world_size, a.dtype), epilogue=("bias",))
    operator = get_variant("gemm_all_reduce", "workgroup_specialized:portable").build(ctx, problem)
    call, by_function = operator, FUNCTIONS["gemm_all_reduce"]
    refused = [
        raised(by_function, ctx, a, b, activation="tanh"),
        raised(replace, problem, epilogue=("bias", "tanh")),
        raised(replace, problem, epilogue=("swiglu",)),
        raised(replace, make_problem("all_gather_gemm", 4, 6, 8, 2, a.dtype), epilogue=("swiglu",)),
        raised(replace, problem, epilogue=("swiglu", "relu")),
        raised(replace, problem, out_dtype=torch.float64),
        raised(replace, problem, epilogue=("bias", "relu", "bias")),
        raised(call, a, b),
        raised(call, a, b, bias=torch.ones(4)),
        raised(call, a, b, bias=torch.ones(5, dtype=torch.float16)),
        raised(call, a, b, bias=torch.ones(5), marks=torch.ones(5)),
        raised(call, a, b, bias=[1.0] * 5),
        raised(by_function, ctx, a, b, residual=torch.ones(5, 4)),
        raised(by_function, ctx, a, b, scale=torch.ones(5).requires_grad_()),
        raised(register_epilogue_op, EpilogueOp("relu", MARKS.apply, torch.relu)),
    ]
    operator.close()
    return [message for _, message in refused]


@pytest.mark.parametrize("device", ["cpu"])
def test_what_makes_no_sense_is_named(ranks: Callable[[int], Ranks]) -> None:
    expected = [
        "activation is 'tanh'; it takes relu, gelu, gelu_tanh, silu, swiglu, or None",
        "there is no epilogue op 'tanh'; there are scale, bias, residual, relu, gelu, gelu_tanh, silu, swiglu",
        "swiglu makes C narrower than A @ B; all-gather + GEMM can do that, a GemmAllReduceProblem cannot",
        "n is 6, of which rank 0 has 3: both must be multiples of 2",
        "swiglu narrows C, so it must be the last op of the epilogue swiglu, relu",
        "out_dtype torch.float64 is not supported; supported: torch.bfloat16",
        "two ops of the epilogue bias, relu, bias read the same operand",
        "the operands are A, B; it takes A, B, bias",
        "bias is (4,) on rank",
        "bias is torch.float16; the operator was made for torch.float32",
        "the operands are A, B, bias, marks; it takes A, B, bias",
        "bias is a list; it must be a torch.Tensor",
        "residual is (5, 4) on rank",
        "scale requires a gradient, which is not computed: multiply B or C by it, in torch",
        "there is an epilogue op 'relu' already",
    ]
    for messages in ranks(2).call(refuse):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def test_prepared_calls_are_told_apart_by_all_operands() -> None:
    a, b, bias = torch.ones(2, 2), torch.ones(2, 2), torch.ones(4)
    given = [{"A": a, "B": b, **more} for more in ({}, {"bias": bias[:2]}, {"bias": bias[2:]})]
    places = [checked_place("this", operands, operands.keys()) for operands in given]
    assert len(set(places)) == 3


def test_a_kernels_cache_key_has_the_source_of_its_ops() -> None:
    @triton.jit
    def op(acc, rows, cols, operand):
        return acc

    keys = {Tile(32, 32, 32, 2, 0, 1, ops).cache_key for ops in ((), (op,), (op, MARKS.apply))}
    before = Tile(32, 32, 32, 2, 0, 1, (op,)).cache_key
    op._unsafe_update_src(op.src.replace("return acc", "return acc + 1"))
    assert len(keys | {before, Tile(32, 32, 32, 2, 0, 1, (op,)).cache_key}) == 4


APPROXIMATIONS = {"gelu": 2**-11.8, "gelu_tanh": 2**-12, "silu": 2**-12}


@pytest.mark.parametrize("relative", [2**-11, -(2**-11), 0.0])
@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_approximations_are_off_by_less_than_16_bits_are_rounded_by(name: str, relative: float) -> None:
    """With the largest error that PTX says its tanh may have, and without any."""

    def tanh(code: str, constraints: str, operands: list[torch.Tensor], **_: object) -> torch.Tensor:
        return torch.tanh(operands[0].double()).mul(1 + relative).clamp(-1, 1).float()

    (op,) = epilogue_ops([name])
    x = torch.cat([torch.linspace(-30, 30, 240_001), torch.tensor([-1e30, 1e30, 0.0, float("nan")])])
    with (
        mock.patch.object(ops, "tl", OPS_LANGUAGE),
        mock.patch.object(OPS_LANGUAGE, "inline_asm_elementwise", tanh),
        mock.patch.object(JITFunction, "__call__", lambda self, *args: self.fn(*args)),
    ):
        found = op.apply_fast(x, None, None, ())
    assert found[-1].isnan()
    off = (found.double() - op.reference(x.double())).abs()[:-1]
    most = APPROXIMATIONS[name] if relative else 2**-14.6
    assert (off <= (most + 2**-23) * x[:-1].abs()).all()  # and the roundings of fp32
    assert off.max() > 0


def test_approximations_are_for_16_bits_on_nvidia_gpus() -> None:
    for op in epilogue_ops(["gelu", "gelu_tanh", "silu", "swiglu"]):
        assert op.applied("sm_90", torch.bfloat16) == op.applied("sm_80", torch.float16) == op.apply_fast
        for arch, dtype in (("sm_90", torch.float32), ("gfx942", torch.bfloat16), ("cpu", torch.bfloat16)):
            assert op.applied(arch, dtype) == op.apply
    (relu,) = epilogue_ops(["relu"])
    assert relu.applied("sm_90", torch.bfloat16) == relu.apply
