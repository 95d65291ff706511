"""Shape sets and explicit shapes."""

from __future__ import annotations

import pytest

from iris_bench.measure.shapes import EXPLICIT, SHAPE_SETS, Shape, every, layer_name, parse_shapes, problem_label
from iris_kernels.common.choice.measured import shipped_table


def parse(text: str, collective: str = "all_gather", world_size: int = 4) -> list[Shape]:
    return parse_shapes(text, collective=collective, world_size=world_size)


def test_sets_and_explicit_shapes_mix_in_order() -> None:
    shapes = parse("8x4x2, paper ,1X2x3")
    assert shapes[0] == Shape(8, 4, 2, EXPLICIT)
    assert [str(shape) for shape in shapes[1:3]] == ["8192x4096x12288", "8192x4096x14336"]
    assert shapes[-1] == Shape(1, 2, 3)


def test_a_layer_of_a_model_is_a_shape() -> None:
    assert parse("llama-3-70b:gate:300") == [Shape(300, 28672, 8192)]
    assert parse("Llama-3-70B:down:1,smoke", "reduce_scatter")[0] == Shape(1, 8192, 28672)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("llama:gate:8", "unknown model 'llama' in 'llama:gate:8'; known models: llama-3-8b"),
        ("llama-3-8b:down:8", "unknown layer .* layers of Llama-3-8B with an all-gather: gate, gate_up, qkv"),
        ("llama-3-8b:gate:0", "give MODEL:LAYER:M, M a positive integer"),
        ("llama-3-8b:gate", "give MODEL:LAYER:M"),
        ("llama-3-8b:gate:8:2", "give MODEL:LAYER:M"),
        ("8x8", "or a layer, e.g. llama-3-70b:down:8192"),
    ],
)
def test_a_layer_that_there_is_not_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)


def test_a_shape_comes_once() -> None:
    assert len(parse("smoke,smoke,33x37x41")) == len(parse("smoke"))


def test_llama_depends_on_the_collective() -> None:
    assert Shape(8192, 53248, 16384, "llama") in parse("llama")
    assert Shape(8192, 53248, 16384, "llama") not in parse("llama", "reduce_scatter")
    assert Shape(8192, 8192, 29568, "llama") in parse("llama", "reduce_scatter")


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_small_m_has_all_row_counts_of_every_llama_matrix(collective: str) -> None:
    llama = {(shape.n, shape.k) for shape in parse("llama", collective)}
    expected = {(m, n, k) for n, k in llama for m in (1, 8, 32, 64, 128, 256, 512)}
    assert {(shape.m, shape.n, shape.k) for shape in parse("small_m", collective)} == expected


def test_ragged_sizes_divide_nothing() -> None:
    shapes = parse("ragged", world_size=8)
    assert shapes[0] == Shape(4091 * 8, 5120, 1024, "ragged")
    assert any(shape.n % 8 for shape in shapes)
    assert any(shape.k % 2 for shape in shapes)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_nothing_was_tuned_by_what_is_held_out(collective: str) -> None:
    held_out = parse("held_out", collective)
    assert len(held_out) >= 60
    assert {1, 16384} < {shape.m for shape in held_out}
    weights = {(shape.n, shape.k) for shape in held_out}
    for name in SHAPE_SETS.keys() - {"held_out"}:
        assert not weights & {(shape.n, shape.k) for shape in parse(name, collective)}
    for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        assert not weights & {(key.n, key.k) for key in shipped_table(gpu)}


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_every_fourth_of_what_is_held_out_has_few_rows_and_many(collective: str) -> None:
    held_out = parse("held_out", collective)
    some = every(held_out, 4)
    assert len(some) == -(-len(held_out) // 4)
    assert len({shape.m for shape in some}) >= 17
    assert len({(shape.n, shape.k) for shape in some}) >= 7
    assert every(held_out, 1) == held_out


@pytest.mark.parametrize("text", ["", "papr", "1x2", "1x2x3x4", "0x4x5", "ax2x3", "-1x2x3", "smoke,,paper"])
def test_an_unknown_shape_is_named_with_what_would_work(text: str) -> None:
    with pytest.raises(ValueError, match="unknown shape") as error:
        parse(text)
    assert all(name in str(error.value) for name in (*SHAPE_SETS, "MxNxK"))


@pytest.mark.parametrize(
    ("collective", "sizes", "label"),
    [
        ("reduce_scatter", (8192, 8192, 28672), "Llama-3-70B down, M = 8192"),
        ("all_gather", (64, 28672, 8192), "Llama-3-70B gate, M = 64"),
        ("all_gather", (64, 57344, 8192), "Llama-3-70B gate_up, M = 64"),
        ("all_gather", (8192, 8192, 28672), "8192 × 8192 × 28672"),  # down, but nothing is gathered before it
    ],
)
def test_sizes_of_layers_have_their_names(collective: str, sizes: tuple[int, int, int], label: str) -> None:
    assert problem_label(collective, *sizes) == label


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("shape_set", ["layers", "llama", "small_m", "held_out"])
def test_every_shape_of_models_is_a_named_layer(collective: str, shape_set: str) -> None:
    assert all(layer_name(collective, shape.n, shape.k) for shape in parse(shape_set, collective))
