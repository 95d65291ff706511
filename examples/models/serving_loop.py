"""An inference engine's loop over sharded layers: continuous batching, chunks of prompts, captured steps of decoding.

Requests come with prompts of any length. Each step takes one token of every request that is being decoded, and a chunk
of at most one prompt. Its number of tokens is another one each time, but `prepare` has made room for all of them: the
heap does not grow. Steps without a chunk are padded to a bucket, for which a CUDA graph was captured; without a GPU
they are called as they are. All ranks have the same logits, and so choose the same tokens. Every answer is compared
with that of the whole model, in one go.

- python examples/models/serving_loop.py --ranks 4 --layers 8
- torchrun --nproc-per-node 4 examples/models/serving_loop.py
"""

import copy
import random
import time

import torch
from _command_line import command_line, run
from torch import nn

import iris_core
from iris_tensor_parallel import MergedColumnParallelLinear, RowParallelLinear, prepare

HEADS, KV_HEADS, VOCABULARY = 8, 4, 64  # heads: multiples of the ranks
SLOTS, LENGTH, CHUNK = 4, 32, 8  # requests at a time, tokens of one, tokens of a prompt in a step
BUCKETS = (1, 2, 4)  # how many requests a captured step decodes


class Several(nn.ModuleList):
    """Linear layers of one x."""

    def forward(self, x):
        return [layer(x) for layer in self]


class SeveralSharded(nn.Module):
    """The same, each rank with its features."""

    def __init__(self, ctx, layers):
        super().__init__()
        self.merged = MergedColumnParallelLinear.from_linears(ctx, list(layers))

    def forward(self, x):
        return self.merged.split(self.merged(x))


class Block(nn.Module):
    """Of a decoder; x is (tokens, width), of any requests."""

    def __init__(self, width, features):
        super().__init__()
        kv_width = width // HEADS * KV_HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.query_key_value = Several(nn.Linear(width, one, bias=False) for one in (width, kv_width, kv_width))
        self.out = nn.Linear(width, width, bias=False)
        self.gate_and_up = Several(nn.Linear(width, features, bias=False) for _ in range(2))
        self.down = nn.Linear(features, width, bias=False)
        self.head_width = width // HEADS

    def shard(self, ctx):
        """Leave this rank's heads and features."""
        self.query_key_value = SeveralSharded(ctx, self.query_key_value)
        self.out = RowParallelLinear.from_linear(ctx, self.out)
        self.gate_and_up = SeveralSharded(ctx, self.gate_and_up)
        self.down = RowParallelLinear.from_linear(ctx, self.down)

    def forward(self, x, cache, slots, positions):
        heads = [one.unflatten(-1, (-1, self.head_width)) for one in self.query_key_value(self.norms[0](x))]
        x = x + self.out(self.attend(*heads, cache, slots, positions))
        gate, up = self.gate_and_up(self.norms[1](x))
        return x + self.down(nn.functional.silu(gate) * up)

    def attend(self, query, key, value, cache, slots, positions):
        """Put the new keys and values into the cache, (2, slots, positions, heads, …); attend to what is there."""
        cache[0, slots, positions], cache[1, slots, positions] = key, value
        keys, values = (one[slots].transpose(1, 2) for one in cache)
        is_before = torch.arange(keys.shape[2], device=positions.device) <= positions[:, None]
        mask = is_before[:, None, None]
        mixed = nn.functional.scaled_dot_product_attention(
            query[:, :, None], keys, values, attn_mask=mask, enable_gqa=True
        )
        return mixed.flatten(1)


class Decoder(nn.Module):
    """Token numbers, (tokens,), each of some request's slot and at some position, to the next one's logits."""

    def __init__(self, layers, width, features):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block(width, features) for _ in range(layers))

    def caches(self, slots, kv_heads):
        """Return room for the keys and values of so many requests, a tensor for each block."""
        like = self.head.weight
        return [like.new_zeros(2, slots, LENGTH, kv_heads, block.head_width) for block in self.blocks]

    def forward(self, tokens, slots, positions, caches):
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, slots, positions)
        return self.head(x)


class Request:
    """A prompt, and what was made of it."""

    def __init__(self, draw):
        self.tokens = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, LENGTH // 2))]
        self.prompt, self.wanted = len(self.tokens), draw.randint(1, LENGTH // 2)
        self.done, self.slot, self.logits = 0, None, []  # tokens in the cache; where; of the answer's

    def take(self, most):
        """Return the next tokens, `most` at most, with their places."""
        positions = range(self.done, min(self.done + most, len(self.tokens)))
        self.done = positions.stop
        return [(self.tokens[position], self.slot, position) for position in positions]

    def give(self, logits):
        """Take the logits behind the last token, if that is the prompt's last or a later one."""
        if self.done == len(self.tokens):
            self.logits.append(logits.clone())
            self.tokens.append(int(logits.argmax()))

    @property
    def is_decoding(self):
        return len(self.tokens) > self.prompt

    @property
    def is_answered(self):
        return len(self.logits) == self.wanted


class Engine:
    """A decoder, and the requests that it is at."""

    def __init__(self, ctx, decoder, caches):
        self.ctx, self.decoder, self.caches, self.device = ctx, decoder, caches, ctx.get_device()
        self.steps = self.tokens = 0
        self.captured = {size: self.capture(size) for size in BUCKETS} if self.device.type == "cuda" else {}

    def inputs(self, places):
        return torch.tensor(places, device=self.device).unbind(1)

    def step(self, inputs):
        return self.decoder(*inputs, self.caches)

    def capture(self, size):
        """Return what decodes so many tokens by replaying a graph."""
        fixed = torch.tensor([(0, SLOTS, 0)] * size, device=self.device).T.contiguous()
        self.step(fixed)  # compiles what it launches
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a thread of NCCL's asks for events
            logits = self.step(fixed)

        def replay(inputs):
            fixed.copy_(torch.stack(inputs))
            graph.replay()
            return logits

        return replay

    def serve(self, requests, draw):
        """Answer requests, in the order in which they came, as slots are free."""
        waiting, running, slots = list(requests), [], list(range(SLOTS))
        while waiting or running:
            while waiting and slots:
                running.append(waiting.pop(0))
                running[-1].slot = slots.pop()
            taken = [(one, one.take(1)) for one in running if one.is_decoding]
            prefilled = next((one for one in running if not one.is_decoding), None)
            if prefilled:
                taken.append((prefilled, prefilled.take(draw.randint(1, CHUNK))))
            places = [place for _, some in taken for place in some]
            self.steps, self.tokens = self.steps + 1, self.tokens + len(places)
            padding = 0 if prefilled else min(size for size in BUCKETS if size >= len(places)) - len(places)
            inputs = self.inputs(places + [(0, SLOTS, 0)] * padding)  # in a slot that is nobody's
            step = self.step if prefilled else self.captured.get(len(places) + padding, self.step)
            logits, last = step(inputs), -1
            for one, some in taken:
                last += len(some)
                one.give(logits[last])
            self.ctx.check()  # logits of a step in which a wait failed are wrong
            slots += [one.slot for one in running if one.is_answered]
            running = [one for one in running if not one.is_answered]


def body(rank, world_size, layers, width, features, requests):
    ctx = iris_core.iris(heap_size=1 << 28)
    device, is_interpreted = ctx.get_device(), ctx.is_interpreted()
    dtype, tolerance = (torch.float32, 1e-4) if is_interpreted else (torch.bfloat16, 5e-2)
    width, features = width or (32 if is_interpreted else 4096), features or (64 if is_interpreted else 14336)
    torch.manual_seed(0)  # the same on every rank
    whole = Decoder(layers, width, features).to(device, dtype).eval()
    cut, draw = copy.deepcopy(whole), random.Random(0)
    for block in cut.blocks:
        block.shard(ctx)
    prepare(cut, max_tokens=SLOTS + CHUNK)
    batch = [Request(draw) for _ in range(requests)]
    with torch.inference_mode():
        engine = Engine(ctx, cut, cut.caches(SLOTS + 1, KV_HEADS // world_size))
        ctx.barrier()
        used, start = ctx.heap.allocator.used_bytes, time.perf_counter()
        engine.serve(batch, draw)
        ctx.barrier()
        seconds, grown = time.perf_counter() - start, ctx.heap.allocator.used_bytes - used
        assert grown == 0, f"rank {rank}: the heap grew by {grown} bytes"
        errors = []
        for one in batch:
            positions = range(len(one.tokens) - 1)  # the last one has no answer
            inputs = engine.inputs([(one.tokens[position], 0, position) for position in positions])
            expected = whole(*inputs, whole.caches(1, KV_HEADS))[one.prompt - 1 :].float()
            found = torch.stack(one.logits).float()
            errors.append(((found - expected).norm() / expected.norm()).item())
            assert errors[-1] < tolerance, f"rank {rank}: relative error {errors[-1]}"
    engine.captured.clear()  # NCCL's group cannot end while graphs hold its collectives
    ctx.close()
    if rank:
        return None
    how = "kernels interpreted on a CPU" if is_interpreted else "decoding replayed in CUDA graphs"
    rows = {
        "requests": requests,
        "steps": engine.steps,
        "tokens": engine.tokens,
        f"tokens/s, {how}": f"{engine.tokens / seconds:.0f}",
        "heap in use at the start, bytes": f"{used:,}",
        "heap in use at the end, bytes": f"{used + grown:,}",
        "largest relative error beside the whole model": f"{max(errors):.1e}",
    }
    return "\n".join(f"{name:<56}{value:>12}" for name, value in rows.items())


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, help="of the model; 32 on a CPU, else 4096")
    parser.add_argument("--features", type=int, help="of its MLPs; 64 on a CPU, else 14336")
    parser.add_argument("--requests", type=int, default=6)
    arguments = parser.parse_args()
    run(body, arguments, arguments.layers, arguments.width, arguments.features, arguments.requests)
