"""Small decoders of transformers, the same on every process."""

from __future__ import annotations

from typing import Any

import torch
from meshes import whole

VOCABULARY = 18


def decoder(kind: str, *, is_tied: bool = False, keys: int = 2) -> Any:
    """Return a model with random weights."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=keys,
        head_dim=4,
        tie_word_embeddings=is_tied,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def tokens(batch: int, sequence: int) -> torch.Tensor:
    """Return random tokens."""
    return torch.randint(VOCABULARY, (batch, sequence), generator=torch.Generator().manual_seed(sequence))


def step(model: Any, batch: int = 2, sequence: int = 6) -> list[torch.Tensor]:
    """Return the logits of a step, and all gradients."""
    given = tokens(batch, sequence)
    logits = model(given).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), given.flatten()).backward()
    return [logits.detach().double(), *(whole(one.grad).double() for one in model.parameters())]


def off(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Return how far tensors are from what they must be, the farthest, in parts of its norm."""
    return max(((one - to).norm() / to.norm()).item() for one, to in zip(found, exact, strict=True))
