"""Two layers cut over all ranks, for inference, under torch.compile: one graph, in which a call is one step.

The operators are made beforehand, of a size each; what the compiler makes of the rest goes around them.

- python examples/compiled_layers.py --ranks 4
- torchrun --nproc-per-node 4 examples/compiled_layers.py
"""

import argparse
import os

import torch

import iris_core
from iris_kernels import all_gather_gemm, gemm_reduce_scatter
from overlap_taxonomy import get_variant

TOLERANCE = 2e-2  # relative, over all elements; each is rounded to bf16 at every layer


class Layers(torch.nn.Module):
    """Tokens x (m/W, k) of every rank to (m/W, k): up to (m, f/W), this rank's features, and down again."""

    def __init__(self, heap, tokens, up, down):
        super().__init__()
        self.up = torch.nn.Buffer(up)
        self.down = torch.nn.Buffer(down)
        world_size, (width, features) = heap.get_num_ranks(), up.shape
        sizes = tokens, features * world_size, width
        into = all_gather_gemm.Problem(*sizes, world_size, up.dtype)
        out_of = gemm_reduce_scatter.Problem(tokens, width, features * world_size, world_size, up.dtype)
        self.into = get_variant("all_gather_gemm", "auto").build(heap, into)
        self.out_of = get_variant("gemm_reduce_scatter", "auto").build(heap, out_of)

    def forward(self, x):
        hidden = torch.nn.functional.silu(self.into(x, self.up))
        return x + self.out_of(hidden, self.down)


def body(rank, world_size, backend):
    heap = iris_core.iris(heap_size=1 << 28)
    tokens, width, features = (64, 48, 96) if heap.is_interpreted() else (4096, 4096, 16384)
    generator = torch.Generator().manual_seed(0)  # the same on every rank

    def draw(rows, columns):
        values = torch.randn(rows, columns, generator=generator) / rows**0.5
        return values.to(heap.get_device(), torch.bfloat16)

    up, down = draw(width, features), draw(features, width)
    layers = Layers(heap, tokens, up.chunk(world_size, 1)[rank], down.chunk(world_size, 0)[rank])
    compiled = torch.compile(layers, backend=backend, fullgraph=True)
    errors = []
    with torch.inference_mode():
        for _ in range(3):
            x = draw(tokens, width)
            found = compiled(x.chunk(world_size)[rank])
            expected = x + torch.nn.functional.silu(x @ up) @ down
            expected = expected.chunk(world_size)[rank].float()
            error = ((found.float() - expected).norm() / expected.norm()).item()
            assert error < TOLERANCE, f"rank {rank}: relative error {error}"
            errors.append(error)
    heap.close()
    return f"rank {rank}: three calls of one graph, largest relative error {max(errors):.1e}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--backend", help="of torch.compile; without GPUs one that needs no C++ compiler")
    arguments = parser.parse_args()
    on_gpus = arguments.device != "cpu" and torch.cuda.is_available()
    backend = arguments.backend or ("inductor" if on_gpus else "aot_eager")
    if "RANK" in os.environ:  # under torchrun
        print(body(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), backend))
    else:
        print(*iris_core.launch(body, arguments.ranks, arguments.device, (backend,)), sep="\n")
