"""A decoder block as in Llama, its weights loaded from a whole one's, with a cache of keys and values, for inference.

Heads are sharded over the ranks, and with them the cache: each rank attends with its own. Prompts and single tokens,
all of them on all ranks.

- python examples/models/llama_block.py --ranks 4
- torchrun --nproc-per-node 4 examples/models/llama_block.py
"""

import torch
from _command_line import command_line, run
from torch import nn

import iris_core
from iris_tensor_parallel import MergedColumnParallelLinear, RowParallelLinear, load_whole

HEADS, KV_HEADS = 8, 4  # multiples of the ranks
TOLERANCE = 1e-4  # relative, over all elements; in fp32


class WholeBlock(nn.Module):
    """The block on one GPU, as a checkpoint has it; x is (tokens, width)."""

    def __init__(self, width, features):
        super().__init__()
        kv_width = width // HEADS * KV_HEADS
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, kv_width, bias=False), nn.Linear(width, kv_width, bias=False)
        self.gate, self.up = nn.Linear(width, features, bias=False), nn.Linear(width, features, bias=False)
        self.down = nn.Linear(features, width, bias=False)

    def forward(self, x, cache):
        normed = self.attention_norm(x)
        x = x + self.out(attend(self.query(normed), self.key(normed), self.value(normed), HEADS, cache))
        normed = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class CutBlock(nn.Module):
    """The same, each rank with its heads and its features: x is gathered by nobody, and summed twice."""

    def __init__(self, ctx, width, features):
        super().__init__()
        kv_width = width // HEADS * KV_HEADS
        self.heads = HEADS // ctx.get_num_ranks()  # this rank's
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query_key_value = MergedColumnParallelLinear(ctx, width, (width, kv_width, kv_width), bias=False)
        self.out = RowParallelLinear(ctx, width, width, bias=False)
        self.gate_and_up = MergedColumnParallelLinear(ctx, width, (features, features), bias=False)
        self.down = RowParallelLinear(ctx, features, width, bias=False)

    def forward(self, x, cache):
        query, key, value = self.query_key_value.split(self.query_key_value(self.attention_norm(x)))
        x = x + self.out(attend(query, key, value, self.heads, cache))
        gate, up = self.gate_and_up.split(self.gate_and_up(self.mlp_norm(x)))
        return x + self.down(nn.functional.silu(gate) * up)


def attend(query, key, value, heads, cache):
    """Attend to what is in the cache, and to the new tokens, which are added to it."""
    head_width = query.shape[-1] // heads
    query, key, value = (one.unflatten(-1, (-1, head_width)).transpose(0, 1) for one in (query, key, value))
    cache[:] = (
        [torch.cat([old, new], 1) for old, new in zip(cache, (key, value), strict=True)] if cache else [key, value]
    )
    before = cache[0].shape[1] - query.shape[1]
    mask = torch.ones(query.shape[1], cache[0].shape[1], dtype=torch.bool, device=query.device).tril(before)
    mixed = nn.functional.scaled_dot_product_attention(query, *cache, attn_mask=mask, enable_gqa=True)
    return mixed.transpose(0, 1).flatten(1)


def merged(state):
    """Return a whole block's weights under the cut one's names."""
    state = dict(state)
    for name, parts in {"query_key_value": ("query", "key", "value"), "gate_and_up": ("gate", "up")}.items():
        state[f"{name}.weight"] = torch.cat([state.pop(f"{part}.weight") for part in parts])
    return state


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 28)
    width, features = (64, 96) if ctx.is_interpreted() else (4096, 14336)
    torch.manual_seed(0)  # the same on every rank
    whole = WholeBlock(width, features).to(ctx.get_device())
    cut = CutBlock(ctx, width, features).to(ctx.get_device())
    load_whole(cut, merged(whole.state_dict()))
    errors, caches = [], ([], [])
    with torch.inference_mode():
        for tokens in (7, 1, 1, 3):  # a prompt, two steps, and another prompt after them
            x = torch.randn(tokens, width, device=ctx.get_device())
            expected, found = whole(x, caches[0]), cut(x, caches[1])
            errors.append(((found - expected).norm() / expected.norm()).item())
            assert errors[-1] < TOLERANCE, f"rank {rank}, {tokens} tokens: relative error {errors[-1]}"
    ctx.close()
    return f"rank {rank}: {len(errors)} calls as the whole block's, largest relative error {max(errors):.1e}"


if __name__ == "__main__":
    run(body, command_line(__doc__).parse_args())
