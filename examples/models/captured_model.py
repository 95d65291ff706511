"""A Llama of transformers, sharded in one call, with linear layers in fp8, and its step captured in a CUDA graph.

A step is a prompt of a fixed shape, without a KV cache; serving_loop.py decodes with one. The head is sharded by
torch's own style: its output, a number for each token and word, then comes from torch's allocator, and the heap stays
small.
Without a GPU the step is called as it is. Needs transformers.

- python examples/models/captured_model.py --ranks 2
- torchrun --nproc-per-node 2 examples/models/captured_model.py
"""

import copy

import torch
from _command_line import command_line, run
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import parallel as torchs

import iris_core
from iris_tensor_parallel import Float8, heap_bytes, parallelize, plan_of
from iris_tensor_parallel.styles import mesh_of

BATCH, SEQUENCE, STEPS = 2, 8, 3
TOLERANCE = 0.15  # relative, over all logits: operands of fp8 have 4 bits, and errors of two layers add up


def load():
    """Return a small model with random weights, in place of ``from_pretrained(name, dtype=torch.bfloat16)``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def captured(step, tokens):
    """Return what replays a step with other tokens of the same shape; where there is no GPU, the step."""
    if tokens.device.type != "cuda":
        return step
    fixed = tokens.clone()
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step(fixed)  # compiles and makes what a capture cannot
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread that asks for events
        logits = step(fixed)

    def replay(tokens):
        fixed.copy_(tokens)
        graph.replay()
        return logits  # the same memory in every step

    return replay


def plan_in_fp8(model, world_size):
    """Return a model's plan with linear layers in fp8, except the head, which has torch's own style."""
    plan = plan_of(model, world_size, quantize=Float8())
    plan["lm_head"] = torchs.ColwiseParallel(output_layouts=Replicate())
    return plan


def captured_in_fp8(model, ctx, tokens, mask):
    """Shard a model in place, its linear layers in fp8, and return its step for tokens of this shape, captured."""
    plan = plan_in_fp8(model, ctx.get_num_ranks())
    parallelize(model, mesh_of(ctx), plan, max_tokens=tokens.numel(), ctx=ctx)
    return captured(lambda tokens: model(tokens, attention_mask=mask, use_cache=False).logits, tokens)


def body(rank, world_size):
    torch.manual_seed(0)  # the same model and tokens on every rank
    model, steps = load(), torch.randint(256, (STEPS, BATCH, SEQUENCE))
    most = BATCH * SEQUENCE
    plans = plan_of(model, world_size, quantize=Float8()), plan_in_fp8(model, world_size)
    with_head, needed = (heap_bytes(model, plan, most, world_size=world_size) for plan in plans)
    with iris_core.iris(heap_size=needed) as ctx, torch.no_grad():
        whole, steps = model.to(ctx.get_device()), steps.to(ctx.get_device())
        # A mask of its own: the model would look at positions to make one, for which the host waits.
        unseen = torch.full((SEQUENCE, SEQUENCE), float("-inf"), dtype=torch.bfloat16, device=steps.device)
        mask = unseen.triu(1).expand(BATCH, 1, SEQUENCE, SEQUENCE)

        sharded = copy.deepcopy(whole)  # stays: a graph reads the weights, and does not keep them
        step = captured_in_fp8(sharded, ctx, steps[0], mask)
        errors = []
        for tokens in steps:
            expected = whole(tokens, attention_mask=mask, use_cache=False).logits.float()
            errors.append(((step(tokens).float() - expected).norm() / expected.norm()).item())
            assert errors[-1] < TOLERANCE, f"rank {rank}: relative error {errors[-1]}"
        del step  # NCCL's group cannot end while a graph holds its collectives
        how = "replayed" if steps.is_cuda else "called, as there is no GPU to capture them for"
        saved = f"{with_head - needed:,} bytes of the heap saved"
        return f"rank {rank}: {STEPS} steps {how}; relative error {max(errors):.1e}; {saved}"


if __name__ == "__main__":
    run(body, command_line(__doc__).parse_args())
