"""A target that counts in a circle: every token follows from the one before, and none follows itself."""

from random import Random

import torch
from torch.nn import functional as F

from outrider.spec_decode.training.data import Sample

from .conftest import save_target

FIRST, AROUND = 6, 40


def after(token: int) -> int:
    """The target's token after one of the circle."""
    return FIRST + (token - FIRST + 1) % AROUND


def save_counting_target(folder) -> None:
    """A Llama whose layers add nothing, and whose lm_head knows a token by the embedding of the one before it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    save_target(folder)
    config = LlamaConfig.from_pretrained(folder, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.copy_(F.normalize(embedding, dim=-1))
        head.copy_(0.1 * embedding)
        for token in range(FIRST, FIRST + AROUND):
            head[after(token)] = 2 * embedding[token]
    model.save_pretrained(folder)


def counting_samples() -> list[Sample]:
    """Its text after prompts of one to four tokens."""
    rng, found = Random(0), []
    for _ in range(40):
        tokens, length = [rng.randrange(FIRST, FIRST + AROUND)], rng.randint(1, 4)
        while len(tokens) < length + 24:
            tokens.append(after(tokens[-1]))
        found.append(Sample(tokens, length))
    return found
