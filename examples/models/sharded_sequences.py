"""A Llama of transformers with its sequences sharded between layers: generated tokens, and gradients.

The prompt's products are all-gather + GEMM and GEMM + reduce-scatter. Those of a step of one token, which cannot be
cut, are GEMM and GEMM + all-reduce. The model is called as any other: tokens, cache and logits are whole. Needs
transformers.

- python examples/models/sharded_sequences.py --ranks 2
- torchrun --nproc-per-node 2 examples/models/sharded_sequences.py
"""

import copy

import torch
from _command_line import command_line, run

import iris_core
from iris_tensor_parallel import heap_bytes, parallelize, plan_of
from iris_tensor_parallel.styles import mesh_of

BATCH, PROMPT, STEPS = 2, 8, 3
TOLERANCE = 1e-4  # relative, over all elements; in fp32


def load():
    """Return a small model with random weights, in place of ``from_pretrained``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes))


def generate(model, prompt):
    """Return the logits of the next tokens: the first by the prompt, each further one by a step of one token."""
    options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "output_logits": True}
    options |= {"attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True}
    return torch.stack(model.generate(prompt, **options).logits)


def gradients(model, prompt):
    """Return the gradients of all parameters; sequences must be a multiple of the ranks."""
    logits = model(prompt).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), prompt.flatten()).backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]


def body(rank, world_size):
    torch.manual_seed(0)  # the same model and tokens on every rank
    whole, prompt = load(), torch.randint(256, (BATCH, PROMPT))
    most, cut_by = prompt.numel(), plan_of(whole, world_size, sequence_parallel=True)
    needed = heap_bytes(whole, cut_by, most, world_size=world_size, gradients=True)
    with iris_core.iris(heap_size=needed) as ctx:
        whole, prompt = whole.to(ctx.get_device()), prompt.to(ctx.get_device())
        model = copy.deepcopy(whole)
        # With torch's own mesh: parallelize(model, mesh["tp"], max_tokens=most, sequence_parallel=True).
        parallelize(model, mesh_of(ctx), max_tokens=most, gradients=True, sequence_parallel=True, ctx=ctx)
        found = [generate(model, prompt), *gradients(model, prompt)]
        expected = [generate(whole, prompt), *gradients(whole, prompt)]
        error = max(((one - to).norm() / to.norm()).item() for one, to in zip(found, expected, strict=True))
        assert error < TOLERANCE, f"rank {rank}: relative error {error}"
        families = sorted({operator.family for operator in ctx.operators.values()})
        return f"rank {rank}: relative error {error:.1e}, by {', '.join(families)}"


if __name__ == "__main__":
    run(body, command_line(__doc__).parse_args())
