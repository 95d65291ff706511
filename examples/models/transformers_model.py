"""A Llama of transformers, sharded over all ranks in one call, and compiled: whole, and block by block.

The model is loaded whole, without `tp_plan=`: `parallelize` shards it by its own plan. Needs transformers.

- python examples/models/transformers_model.py --ranks 2
- torchrun --nproc-per-node 2 examples/models/transformers_model.py
"""

import copy

import torch
from _command_line import command_line, run

import iris_core
from iris_tensor_parallel import heap_bytes, parallelize, plan_of
from iris_tensor_parallel.styles import mesh_of

BATCH, SEQUENCE = 2, 8
TOLERANCE = 2e-2  # relative, over all logits; in bf16


def load():
    """Return a small model with random weights, in place of ``from_pretrained(name, dtype=torch.bfloat16)``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def sharded(model, ctx, most):
    """Shard a model in place, make room for calls of up to so many tokens, and return it compiled."""
    # With torch's own mesh: parallelize(model, init_device_mesh(...)["tp"], max_tokens=most) makes a context.
    parallelize(model, mesh_of(ctx), max_tokens=most, ctx=ctx)
    return torch.compile(model, backend="aot_eager" if ctx.is_interpreted() else "inductor")


def compiled_by_block(model, ctx):
    """Compile a sharded model's decoder layers in place: layers of the same sizes share a graph."""
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager" if ctx.is_interpreted() else "inductor")
    return model


def body(rank, world_size):
    torch.manual_seed(0)  # the same model and tokens on every rank
    model, tokens = load(), torch.randint(256, (BATCH, SEQUENCE))
    most = tokens.numel()
    with iris_core.iris(heap_size=heap_bytes(model, plan_of(model, world_size), most, world_size=world_size)) as ctx:
        model, tokens = model.to(ctx.get_device()), tokens.to(ctx.get_device())
        with torch.no_grad():
            expected = copy.deepcopy(model)(tokens).logits.float()
            whole = sharded(model, ctx, most)(tokens).logits.float()
            torch.compiler.reset()
            by_block = compiled_by_block(model, ctx)(tokens, use_cache=False).logits.float()
        errors = [((logits - expected).norm() / expected.norm()).item() for logits in (whole, by_block)]
        assert all(error < TOLERANCE for error in errors), f"rank {rank}: relative errors {errors}"
        chosen = sorted({str(operator) for operator in ctx.operators.values()})
        return f"rank {rank}: relative error {max(errors):.1e}, by {', '.join(chosen)}"


if __name__ == "__main__":
    run(body, command_line(__doc__).parse_args())
