"""Language model as the engine, the drafters and the adapters see it. `Decoder` and `TransformersModel` implement it.

build_batch(rows, model, kv) --> forward --> hidden [T, H] --> compute_logits --> [R, vocab]
weight_slots: filled once by the loader;  linears, embedding: sites of adapters
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from .batch import PagedModel

if TYPE_CHECKING:
    from torch import Tensor

    from .batch import ForwardBatch, KVLayerSpec
    from .config import DecoderConfig
    from .layers.embedding import Embedding
    from .layers.linear import Linear
    from .layers.score_head import ScoreHead
    from .layers.weights import WeightSlot
    from .states.memory import StateSpec
    from .transformers_model.config import TransformersConfig


ModelConfig: TypeAlias = "DecoderConfig | TransformersConfig"
"""Sizes of a model."""


class DecoderOutput(NamedTuple):
    """Result of a forward pass."""

    hidden: Tensor
    """[T, H] hidden states after the final norm."""
    aux: tuple[Tensor, ...]
    """[T, H] each: hidden states that enter the requested layers; empty when they were copied."""


class LanguageModel(PagedModel, Protocol):
    """Causal language model over a paged cache."""

    @property
    def config(self) -> ModelConfig:
        """Sizes."""
        ...

    @property
    def kv_layers(self) -> list[KVLayerSpec]:
        """Cache of each layer for a token, in order."""
        ...

    @property
    def state_layers(self) -> list[StateSpec]:
        """State of each layer with a recurrent state for a sequence, in order."""
        ...

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; a tied head counts once."""
        ...

    @property
    def embedding(self) -> Embedding:
        """Token embeddings and the head."""
        ...

    @property
    def score(self) -> ScoreHead | None:
        """Score matrix of a classifier, which has no head; None: the model generates text."""
        ...

    def forward(self, batch: ForwardBatch, aux_layers: Sequence[int] = ()) -> DecoderOutput:
        """Compute a batch; the tokens' KV is written to `batch.kv`.

        Args:
            aux_layers: Layers whose entering hidden states are returned too; the number of layers means the output of
                the last one.
        """
        ...

    def compute_logits(self, hidden: Tensor, adapters: Any = None, out: Tensor | None = None) -> Tensor:
        """Logits [R, vocab_size] float32 of hidden [R, H], in `out` if given. `adapters` is the input of the head's
        LoRA site for these R rows alone; None when none of them has an adapter there."""
        ...

    def linears(self) -> list[Linear]:
        """Linear layers that adapters may target."""
        ...

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots of all tensors that the model needs, by their names in HF checkpoints."""
        ...
