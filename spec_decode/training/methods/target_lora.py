"""UNO (arXiv 2609.04010): a LoRA through which the target reads noise and guesses what it would say next.

A block starts at an *anchor*, a token of the text. Noise stands in the places of the tokens after it; the j-th noise
sees the text up to the anchor, as the target has read it, and the noise before it. It guesses the token after its own
place, and learns the target's distribution there. The token after the anchor is the target's own next one, and needs no
guess.

N texts of T tokens, A anchors each, K drafts of a block, of which K - 1 are guesses, H hidden size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...drafters.uno import LOWEST, noise_token
from ..options import wrong
from ..output_files import write_model
from ..target import Features, Target
from .base import Step, TrainedDrafter, build_wanted, greedy_tokens, soft_cross_entropy
from .block_head import ANCHORS, draw_anchors, guessed_labels, label_index
from .draft_lora import PREFIX, PROJECTIONS, adapter_config


class _Pair(nn.Module):
    """B(A x) * scale, of one projection."""

    def __init__(self, in_features: int, out_features: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.lora_A = nn.Linear(in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self.scale * self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))


class TargetLora(TrainedDrafter):
    """A LoRA of every projection of the target's layers, which only noise goes through."""

    def __init__(self, target: Target, drafts: int, rank: int, alpha: float, base_name: str) -> None:
        """`drafts`: K.

        Raises:
            InvalidRequestError: the target has none of the projections.
        """
        super().__init__()
        self._target, self.drafts = target, drafts  # its modules are none of this one
        self._rank, self._alpha, self._base_name = rank, alpha, base_name
        self._reads_noise = False
        parameters = inspect.signature(type(target.decoder).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # of newer and older transformers
        found = {
            name: module
            for name, module in target.decoder.named_modules()
            if name.rpartition(".")[2] in PROJECTIONS and not name.endswith(".base_layer")
        }
        if not found:
            raise wrong("model", f"has none of the projections {', '.join(PROJECTIONS)}, on which uno trains a LoRA")
        self._names = list(found)
        self.pairs = nn.ModuleList(
            _Pair(module.in_features, module.out_features, rank, alpha / rank) for module in found.values()
        )
        for module, pair in zip(found.values(), self.pairs, strict=True):
            module.register_forward_hook(self._hook(pair))

    def _hook(self, pair: nn.Module) -> Any:
        def add(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if not self._reads_noise:
                return output
            plain = module.base_layer(*inputs) if hasattr(module, "base_layer") else output  # without the adapter
            delta: Tensor = pair(inputs[0])
            return plain + delta.to(plain.dtype)

        return add

    @contextmanager
    def _noise(self) -> Iterator[None]:
        self._reads_noise = True
        try:
            yield
        finally:
            self._reads_noise = False

    @torch.no_grad()
    def read(self, features: Features) -> Any:
        """The target's keys and values [N, T] of the texts, of all layers."""
        from transformers import DynamicCache

        context = DynamicCache()
        self._target.decoder(input_ids=features.ids, use_cache=True, **{self._cache_name: context})
        return context

    def states(self, context: Any, length: int, anchors: Tensor, drafts: int) -> Tensor:
        """[N, A, drafts - 1, H] as the output head reads them, of the noise after `anchors` [N, A]. `context`: of
        `read`, for texts of `length`; the noise's keys and values are added to it."""
        positions = (anchors[:, :, None] + torch.arange(1, drafts, device=anchors.device)).flatten(1)
        with self._noise():
            output = self._target.decoder(
                input_ids=self._draw_noise(positions),
                position_ids=positions,
                attention_mask=_mask(anchors, length, drafts - 1, self._target.lm_head.dtype),
                use_cache=True,
                **{self._cache_name: context},
            )
        hidden: Tensor = output.last_hidden_state
        return hidden.unflatten(1, (anchors.shape[1], drafts - 1))

    def _draw_noise(self, positions: Tensor) -> Tensor:
        """Tokens that stand at `positions`: any in training, else those of `UnoDrafter`."""
        stop = self._target.config.vocab_size
        if self.training:
            return torch.randint(LOWEST, stop, positions.shape, device=positions.device)
        served = [noise_token(position, stop) for position in range(int(positions.max()) + 1)]
        return torch.tensor(served, device=positions.device)[positions]

    def steps(self, features: Features, context: Any, anchors: Tensor, drafts: int) -> list[Step]:
        """For each noise of the blocks its inputs of the output head, and the labels that it guesses; `anchors` [N, A]
        are ascending, and 0 if there is none. `context`: see `states`."""
        hidden = self.states(context, features.ids.shape[1], anchors, drafts)
        index = label_index(features.labels, features.ids)
        found = []
        for draft in range(1, drafts):
            kept, number = guessed_labels(index, anchors, draft)
            found.append(Step(hidden[:, :, draft - 1][kept], number))
        return found

    def loss(self, features: Features) -> Tensor:
        """Mean cross entropy of the guesses with the target's distributions, each further one weighted less."""
        anchors = draw_anchors(features.labels, features.ids, ANCHORS)
        steps = self.steps(features, self.read(features), anchors, self.drafts)
        return soft_cross_entropy(steps, self._target.lm_head, build_wanted(features))

    def guesses(self, features: Features, k: int) -> Tensor:
        """As in `TrainedDrafter`. The first draft is the target's own token."""
        labels, weight = features.labels, self._target.lm_head
        found = labels.positions.new_full((len(labels.positions), k), -1)
        found[labels.positions > 0, 0] = features.head.greedy(labels.states[labels.positions > 0])
        drafts = min(k, self.drafts)
        if drafts < 2:
            return found
        anchors = draw_anchors(labels, features.ids, None, before=drafts - 1)
        context = self.read(features)
        for some in anchors.split(ANCHORS, dim=1):
            for draft, (states, index) in enumerate(self.steps(features, context, some, drafts), start=1):
                found[index, draft] = greedy_tokens(
                    lambda rows: nn.functional.linear(rows.to(weight.dtype), weight), states, len(weight)
                )
            context.crop(-some.shape[1] * (drafts - 1))
        return found

    def export(self, folder: Path) -> None:
        """adapter_config.json and adapter_model.safetensors in PEFT's format."""
        tensors = {}
        for name, pair in zip(self._names, self.pairs, strict=True):
            for part, matrix in pair.named_parameters():
                tensors[f"{PREFIX}model.{name}.{part}"] = matrix
        modules = list(dict.fromkeys(name.rpartition(".")[2] for name in self._names))
        config = adapter_config(self._rank, self._alpha, modules, self._base_name)
        write_model(folder, config | {"task_type": "CAUSAL_LM"}, tensors, "adapter_")


def _mask(anchors: Tensor, length: int, size: int, dtype: torch.dtype) -> Tensor:
    """[N, 1, A · size, length + A · size] what is added to the scores of the keys, of the text and then of the noise:
    0 for those up to the anchor, and for noise of the same block that is not later."""
    number, device = anchors.shape[1], anchors.device
    text = (torch.arange(length, device=device) <= anchors[:, :, None]).repeat_interleave(size, 1)
    place = torch.arange(number * size, device=device)
    own = (place[:, None] // size == place // size) & (place <= place[:, None])
    seen = torch.cat((text, own.expand(len(anchors), -1, -1)), -1)[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)
