"""Shape sets: which (M, N, K), sizes of the whole problem over all ranks, are measured under which name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """The sizes of a language model's linear layers.

    Args:
        name: as it is published.
        width: of the hidden state.
        features: of the feed-forward block; 0 where its layers are in no shape set.
        qkv: queries, keys and values of all heads together; 0 where their layer is in no shape set.
        is_gated: whether the feed-forward block has a gate beside `up`, of the same sizes.
        o: what heads give together, the input of `o`; None for `width` where there is a `qkv`, 0 for no such layer.
    """

    name: str
    width: int
    features: int
    qkv: int = 0
    is_gated: bool = True
    o: int | None = None

    @property
    def column_parallel(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the layers whose input is gathered, by name."""
        layers = {}
        if self.features:
            layers["gate" if self.is_gated else "up"] = (self.features, self.width)
        if self.features and self.is_gated:
            layers["gate_up"] = (2 * self.features, self.width)
        if self.qkv:
            layers["qkv"] = (self.qkv, self.width)
        return layers

    @property
    def row_parallel(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the layers whose output is summed over the ranks, by name."""
        layers = {"down": (self.width, self.features)} if self.features else {}
        heads = (self.width if self.qkv else 0) if self.o is None else self.o
        return layers | {"o": (self.width, heads)} if heads else layers

    def layers(self, collective: str) -> dict[str, tuple[int, int]]:
        """Return the (N, K) that go with a collective, "all_gather" or "reduce_scatter", by the layer's name."""
        return self.column_parallel if collective == "all_gather" else self.row_parallel


# In the order in which a size is named after them where several have it.
LLAMA_3_8B = Model("Llama-3-8B", 4096, 14336, qkv=6144)
LLAMA_3_70B = Model("Llama-3-70B", 8192, 28672, qkv=10240)
QWEN_72B = Model("Qwen2.5-72B", 8192, 29568, qkv=10240)
LLAMA_2_7B = Model("Llama-2-7B", 4096, 11008)
LLAMA_3_405B = Model("Llama-3-405B", 16384, 53248)
GEMMA_2_9B = Model("Gemma-2-9B", 3584, 14336)
GEMMA_2_27B = Model("Gemma-2-27B", 4608, 36864)
GPT_3 = Model("GPT-3", 12288, 49152, is_gated=False)
_MID_M_MODELS = (
    Model("Llama-2-13B", 5120, 13824),
    Model("Qwen2.5-7B", 3584, 18944),
    Model("Yi-34B", 7168, 20480),
    Model("Phi-3-mini", 3072, 8192),
    Model("Command-R", 8192, 22528),
)
# No constant was fitted to their layers, and no table of times has them: those `o` are left out that one has.
_HELD_OUT = (
    Model("Qwen3-14B", 5120, 17408, qkv=7168, o=0),
    Model("Qwen3-32B", 5120, 25600, qkv=10240, o=8192),
    Model("DeepSeek-V3", 7168, 18432, o=16384),
    Model("Mistral-Nemo", 5120, 14336, qkv=6144, o=4096),
    Model("Mistral-Large", 12288, 28672, qkv=14336, o=0),
    Model("Gemma-3-12B", 3840, 15360, qkv=8192, o=4096),
    Model("Gemma-3-27B", 5376, 21504, qkv=8192, o=4096),
    Model("gpt-oss-120b", 2880, 0, qkv=5120, o=4096),
)
_KNOWN = (LLAMA_3_8B, LLAMA_3_70B, QWEN_72B, LLAMA_2_7B, LLAMA_3_405B, GEMMA_2_9B, GEMMA_2_27B, GPT_3, *_MID_M_MODELS)
MODELS = (*_KNOWN, *_HELD_OUT)

_PAPER_NK = ((4096, 12288), (4096, 14336), (3584, 14336), (4608, 36864), (8192, 28672), (8192, 30720))
_SMALL_M = (1, 8, 32, 64, 128, 256, 512)
_MID_M = (96, 192, 320, 448, 768, 1280)
_LAYERS_M = (1, 16, 128, 512, 1024, 2048, 4096, 16384)
_HELD_OUT_M = (1, 5, 16, 33, 64, 96, 128, 200, 256, 300, 500, 777, 1024, 1500, 2048, 3001, 4096, 6000, 8192, 16384)
_FFN_MODELS = {
    "all_gather": (LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, LLAMA_3_405B, QWEN_72B, GPT_3),
    "reduce_scatter": (LLAMA_2_7B, LLAMA_3_8B, GEMMA_2_9B, GEMMA_2_27B, LLAMA_3_70B, QWEN_72B),
}

EXPLICIT = "explicit"  # the shape set of a shape that was given as MxNxK


@dataclass(frozen=True)
class Shape:
    """Sizes of a whole problem, and the name of the set they are from."""

    m: int
    n: int
    k: int
    shape_set: str = EXPLICIT

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


def layer_name(collective: str, n: int, k: int) -> str | None:
    """Return the model and layer that a family's B (k, n) is the weight of, e.g. "Llama-3-70B down"; None if of none.

    Args:
        collective: the family's, "all_gather" or "reduce_scatter".
        n, k: of the whole problem.
    """
    for model in MODELS:
        for layer, sizes in model.layers(collective).items():
            if sizes == (n, k):
                return f"{model.name} {layer}"
    return None


def problem_label(collective: str, m: int, n: int, k: int) -> str:
    """Return what a table or picture calls a problem: "Llama-3-70B down, M = 8192", or its sizes."""
    name = layer_name(collective, n, k)
    return f"{name}, M = {m}" if name else f"{m} × {n} × {k}"


def _paper(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    return [(8192, n, k) for n, k in _PAPER_NK]


def _square(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    return [(size, size, size) for size in (2048, 4096, 8192, 16384)]


def _ffn_nk(collective: str, models: Iterable[Model] = ()) -> list[tuple[int, int]]:
    return [next(iter(model.layers(collective).values())) for model in models or _FFN_MODELS[collective]]


def _llama(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    return [(8192, n, k) for n, k in _ffn_nk(collective)]


def _small_m(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    return [(m, n, k) for n, k in _ffn_nk(collective) for m in _SMALL_M]


def _mid_m(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    return [(m, n, k) for n, k in _ffn_nk(collective, _MID_M_MODELS) for m in _MID_M]


def _layers(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    models = (LLAMA_3_8B, LLAMA_3_70B, QWEN_72B)
    sizes = dict.fromkeys(nk for model in models for nk in model.layers(collective).values())
    return [(m, n, k) for m in (8192, 64) for n, k in sizes]


def _layers_by_m(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    return [(m, n, k) for n, k in LLAMA_3_70B.layers(collective).values() for m in _LAYERS_M]


def _held_out(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    """Every fourth number of rows for a layer, from another one on for the next: few and many for each."""
    layers = [model.layers(collective) for model in _HELD_OUT]
    sizes = dict.fromkeys(nk for named in layers for name, nk in named.items() if name != "gate_up")
    return [(m, n, k) for index, (n, k) in enumerate(sizes) for m in _HELD_OUT_M[index % 4 :: 4]]


def _ragged(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    few = [(257, 4099, 2055), (127, 1001, 333), (64, 8191, 4097), (8, 8191, 4097), (1, 4099, 8193)]
    return [(4091 * world_size, 5120, 1024), (8191, 5119, 1031), (8192, 8191, 4097), (2048, 4095, 8191), *few]


def _smoke(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    return [(64, 128, 64), (33, 37, 41), (1, 64, 32)]


@dataclass(frozen=True)
class ShapeSet:
    """A named list of (M, N, K); it may depend on the family's collective and on the number of ranks."""

    name: str
    summary: str
    sizes: Callable[[str, int], Iterable[tuple[int, int, int]]]


SHAPE_SETS = {
    shape_set.name: shape_set
    for shape_set in (
        ShapeSet("smoke", "small enough for the interpreter", _smoke),
        ShapeSet("paper", "the paper's, M 8192", _paper),
        ShapeSet("square", "M = N = K", _square),
        ShapeSet("layers", "qkv, gate, gate_up; o, down of Llama-3-8B, -70B and Qwen2.5-72B, M 8192 and 64", _layers),
        ShapeSet("layers_by_m", "those of Llama-3-70B, at other M from 1 to 16384", _layers_by_m),
        ShapeSet("llama", "gate (or up); down of eight language models, M 8192", _llama),
        ShapeSet("small_m", "the same layers, M 1 to 512", _small_m),
        ShapeSet("mid_m", "gate (or up); down of five other language models, M 96 to 1280", _mid_m),
        ShapeSet("held_out", "layers of eight language models that tuned nothing, M 1 to 16384", _held_out),
        ShapeSet("ragged", "sizes that divide nothing", _ragged),
    )
}
OLD_NAMES = {"decode": "small_m"}  # of shape sets, in CSVs


def parse_shapes(text: str, *, collective: str, world_size: int) -> list[Shape]:
    """Return the shapes of a list of set names, MxNxK and layers of models, with commas between; each once, in order.

    Args:
        text: e.g. ``"smoke,8192x4096x14336,llama-3-70b:down:8192"``, where the last is M.
        collective: "all_gather" or "reduce_scatter": which list of the sets that have two.
        world_size: the number of ranks.

    Raises:
        ValueError: a name that is no set, sizes that are not three positive integers, or a layer that there is not.
    """
    shapes: dict[tuple[int, int, int], Shape] = {}
    for part in (part.strip() for part in text.split(",")):
        if part in SHAPE_SETS:
            sizes = SHAPE_SETS[part].sizes(collective, world_size)
            found = [Shape(m, n, k, part) for m, n, k in sizes]
        else:
            found = [_of_layer(part, collective) if ":" in part else _explicit(part)]
        for shape in found:
            shapes.setdefault((shape.m, shape.n, shape.k), shape)
    return list(shapes.values())


def every(shapes: Sequence[Shape], step: int) -> list[Shape]:
    """Return each `step`-th shape in order of rows, from the first on: of a large set a few, with few rows and many."""
    return sorted(shapes, key=lambda shape: shape.m)[::step] if step > 1 else list(shapes)


def parse_sizes(text: str) -> tuple[int, int, int] | None:
    """Return three positive integers with an x between them; None for another text."""
    match = re.fullmatch(r"(\d+)[xX](\d+)[xX](\d+)", text)
    first, second, third = map(int, match.groups()) if match else (0, 0, 0)
    return (first, second, third) if first and second and third else None


def _explicit(text: str) -> Shape:
    sizes = parse_sizes(text)
    if sizes is None:
        raise ValueError(
            f"unknown shape {text!r}; give a shape set ({', '.join(SHAPE_SETS)}) "
            "or sizes as MxNxK, three positive integers, e.g. 8192x4096x14336, or a layer, e.g. llama-3-70b:down:8192"
        )
    return Shape(*sizes)


def _of_layer(text: str, collective: str) -> Shape:
    name, _, rest = text.partition(":")
    layer, _, rows = rest.partition(":")
    models = {model.name.lower(): model for model in MODELS}
    model = models.get(name.lower())
    if model is None:
        raise ValueError(f"unknown model {name!r} in {text!r}; known models: {', '.join(models)}")
    layers = model.layers(collective)
    if layer not in layers or not rows.isdecimal() or not int(rows):
        raise ValueError(
            f"unknown layer {text!r}; give MODEL:LAYER:M, M a positive integer; layers of {model.name} with "
            f"{'an all-gather' if collective == 'all_gather' else 'a reduction'}: {', '.join(layers)}"
        )
    return Shape(int(rows), *layers[layer])
