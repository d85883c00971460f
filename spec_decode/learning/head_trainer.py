"""Trains draft LoRAs of the EAGLE-3 head that is served, whose weights stay as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.checkpoint.json_files import read_json
from ...models.checkpoint.paths import resolve_model_path
from ...models.model import LanguageModel
from ...platform.core.errors import InvalidRequestError, OutriderError
from ...platform.core.speculative_config import SpeculativeConfig
from ..drafters.checkpoint import PARAM
from ..drafters.eagle.config import head_tensors, read_eagle_config, with_tensors
from ..training.build import StoredHead, load_head
from ..training.methods.base import STEP_DECAY
from ..training.target import Features, Labels
from .traffic import Sample

ModuleWeights = Mapping[str, tuple[Tensor, Tensor]]
"""A [r, in] and B [r, out], with the scale folded in, of each module."""
_UNROLL = 2
"""Drafts in a row that a pass trains: the first from the target's state, the next from the head's own."""


class _ServedTarget:
    """Embeddings and LM head of the served model, as `load_head` reads them of a `Target`."""

    def __init__(self, model: LanguageModel) -> None:
        self._embedding = model.embedding
        self._dtype = getattr(torch, str(model.config.dtype).removeprefix("torch."))

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids to [..., H]."""
        return self._embedding.lookup(ids.flatten()).clone().float().unflatten(0, ids.shape)

    @property
    def embeddings(self) -> Tensor:
        """[V, H]."""
        return self.embed(torch.arange(self._embedding.vocab_size))

    @property
    def lm_head(self) -> Tensor:
        """[V, H], from the packed weights."""
        identity = torch.eye(self._embedding.hidden_size, dtype=self._dtype)
        return self._embedding.project_head(identity).float().t().contiguous()


class _AdaptedLinear(nn.Module):
    """base(x) + (x Aᵀ) B, of the weights that are set for one pass."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.pair: tuple[Tensor, Tensor] | None = None

    @property
    def added(self) -> tuple[Tensor, Tensor] | None:
        """A [r, in] and B [out, r] of these."""
        return None if self.pair is None else (self.pair[0], self.pair[1].t())

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        y: Tensor = self.base(x)
        return y if self.pair is None else y + (x @ self.pair[0].t()) @ self.pair[1]


class DraftLora:
    """A draft LoRA in training, and its optimizer."""

    def __init__(self, pairs: dict[str, tuple[Tensor, Tensor]], learning_rate: float) -> None:
        self.pairs = pairs
        self.optimizer = torch.optim.AdamW(
            [part for pair in pairs.values() for part in pair], lr=learning_rate, weight_decay=0.0
        )

    def weights(self) -> ModuleWeights:
        """A copy of the weights."""
        return {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in self.pairs.items()}


class HeadTrainer:
    """The frozen head in float32, shared by all draft LoRAs."""

    def __init__(self, config: SpeculativeConfig, model: LanguageModel, rank: int, learning_rate: float) -> None:
        """Read the head of `config` once more, in float32.

        Raises:
            InvalidRequestError: it is of a variant that is not trained.
        """
        folder = resolve_model_path(
            config.model or "", draft=True, revision=config.revision, cache_dir=config.download_dir
        )
        tensors, target = head_tensors(folder), _ServedTarget(model)
        sizes = read_eagle_config(read_json(folder / "config.json"), config.method, model.config)
        head_config = with_tensors(sizes, tensors)
        shaped: Any = target
        try:
            with torch.inference_mode(False):
                head = load_head(StoredHead(folder, head_config, tensors), shaped, _UNROLL)
        except OutriderError as error:
            raise InvalidRequestError(f"{PARAM}: learn: {error.message}", param=PARAM) from error
        self._head: Any = head.requires_grad_(False).eval()
        self._head.fc = nn.Identity()  # states are fused when they are recorded
        self._rank, self._learning_rate = rank, learning_rate
        self._modules: dict[str, _AdaptedLinear] = {}
        for name, linear in list(head.named_modules()):
            if isinstance(linear, nn.Linear) and name.startswith("layers."):
                parent, _, leaf = name.rpartition(".")
                self._modules[name] = _AdaptedLinear(linear)
                setattr(head.get_submodule(parent), leaf, self._modules[name])
        vocabulary, size = head.vocabulary, head_config.layer.vocab_size
        self._draft_ids = torch.arange(size)
        if vocabulary is not None:
            self._draft_ids = torch.full((size,), -1).index_copy_(0, vocabulary, torch.arange(len(vocabulary)))

    def fits(self, weights: ModuleWeights) -> bool:
        """True if training can start from these draft weights."""
        return all(len(a) <= self._rank for a, _ in weights.values())

    def start(self, weights: ModuleWeights) -> DraftLora:
        """A LoRA of every projection of the layer that computes what `weights` do, of the full rank."""
        pairs = {}
        with torch.inference_mode(False):
            for name, module in self._modules.items():
                a = torch.empty(self._rank, module.base.in_features)
                nn.init.kaiming_uniform_(a, a=math.sqrt(5))
                b = torch.zeros(self._rank, module.base.out_features)
                if name in weights:
                    for whole, part in zip((a, b), weights[name], strict=True):
                        whole[: len(part)] = part.float()
                pairs[name] = (a.requires_grad_(), b.requires_grad_())
            return DraftLora(pairs, self._learning_rate)

    def step(self, lora: DraftLora, sample: Sample) -> None:
        """One step of the optimizer, on all labels of a sample."""
        with torch.inference_mode(False), torch.enable_grad():
            for name, module in self._modules.items():
                module.pair = lora.pairs[name]
            lora.optimizer.zero_grad()
            self._loss(sample).backward()
            lora.optimizer.step()

    def _loss(self, sample: Sample) -> Tensor:
        """Mean cross entropy with the target's tokens, a further draft weighted less."""
        ids, states = sample.ids[None], sample.states[None].float()
        positions = torch.arange(sample.first_label - 1, len(sample.ids) - 1)
        none: Any = None
        features = Features(ids, none, (states,), Labels(torch.zeros_like(positions), positions, none), none)
        wanted = self._draft_ids[sample.ids[positions + 1]]
        total = states.new_zeros(())
        for step, (hidden, index) in enumerate(self._head.steps(features, _UNROLL)):
            logits = F.linear(self._head.normed(hidden), self._head.lm_head_weight)
            loss = F.cross_entropy(logits, wanted[index], ignore_index=-1, reduction="sum")
            total = total + STEP_DECAY**step * loss / max(1, len(index))
        return total
