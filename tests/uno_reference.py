"""UNO in transformers: the block of a target that drafts for itself, written from the paper (arXiv 2609.04010).

The text and the token after it are read by the request's model, the noise by the base model with the draft LoRA merged
into it. So each token sees keys and values of the model that computed them.
"""

import torch
from transformers import DynamicCache


class UnoReference:
    """`model`: of the request. `drafter`: base model with the draft LoRA. `noise(position)`: the token there."""

    def __init__(self, model, drafter, noise) -> None:
        self.model, self.drafter, self.noise = model, drafter, noise

    @torch.inference_mode()
    def logits(self, tokens: list[int], count: int) -> torch.Tensor:
        """[count, V] of the drafts after `tokens`."""
        cache = DynamicCache()
        first = self.model(torch.tensor([tokens]), cache=cache, use_cache=True).logits[0, -1:]
        if count == 1:
            return first
        places = range(len(tokens), len(tokens) + count - 1)
        noise = torch.tensor([[self.noise(place) for place in places]])
        return torch.cat((first, self.drafter(noise, cache=cache, use_cache=True).logits[0]))

    def check_greedy(self, tokens: list[int], drafts: list[int]) -> None:
        """Each draft is the most likely token, up to rounding."""
        for logits, draft in zip(self.logits(list(tokens), len(drafts)), drafts, strict=True):
            assert logits[draft] >= logits.max() - 1e-4
