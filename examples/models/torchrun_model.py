"""The whole program of a model of transformers under torchrun: loaded by its name, sharded, and asked for tokens.

Without a name it makes a small model of its own, and compares its tokens with those of the whole model. Needs
transformers.

- torchrun --nproc-per-node 2 examples/models/torchrun_model.py --model meta-llama/Llama-3.1-8B
- python examples/models/torchrun_model.py --ranks 2
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.run
from _command_line import command_line
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from iris_tensor_parallel import parallelize


def generate(name, prompt):
    """Return a prompt, and the tokens that follow it by a model that is sharded over all ranks."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device)
    with parallelize(model, mesh["tp"], max_tokens=8192):  # in place; from here on a model as any other
        return model.generate(prompt.to(device), max_new_tokens=16, do_sample=False)


def small_model(folder):
    """Write a small model with random weights, in place of one that is downloaded."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes)).save_pretrained(folder)


def body(name):
    torch.manual_seed(0)  # the same model and tokens on every rank
    prompt = torch.randint(256, (1, 8))
    with tempfile.TemporaryDirectory() as folder:
        if name is None:
            small_model(folder)
        tokens = generate(name or folder, prompt).cpu()
        rank = dist.get_rank()
        if name is None:
            expected = AutoModelForCausalLM.from_pretrained(folder).generate(prompt, max_new_tokens=16, do_sample=False)
            assert torch.equal(tokens, expected), f"rank {rank}: {tokens} is not {expected}"
    dist.destroy_process_group()
    return f"rank {rank}: {tokens[0, prompt.shape[1] :].tolist()}"


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--model", help="a name, or a folder")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        print(body(arguments.model))
    else:
        if arguments.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        of_model = ["--model", arguments.model] if arguments.model else []
        torch.distributed.run.main(["--standalone", "--nproc-per-node", str(arguments.ranks), __file__, *of_model])
