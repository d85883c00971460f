"""Pooling of prompts: parameters and outputs, with vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .compat.unsupported_options import accepts_unsupported_options
from .compat.vllm_python import POOLING
from .errors import invalid
from .sampling_params import CLASSIFY, POOLINGS, SamplingParams, check_integer, quote_for_error

T = TypeVar("T")


@accepts_unsupported_options(POOLING)
@dataclass(slots=True)
class PoolingParams:
    """Parameters of one prompt's pooling.

    Wrong values raise `InvalidRequestError` with the field in `param`.
    """

    pooling: str | None = None
    """"last", "mean" or "cls" (the first token); None: as in the model's sentence-transformers files, else "last"."""
    normalize: bool | None = None
    """True if the vector is scaled to length 1; None: for `embed` and `score`, not for `encode`."""
    dimensions: int | None = None
    """Leading dimensions to keep, before the scaling, of models that were trained for that (Matryoshka)."""

    def __post_init__(self) -> None:
        if self.pooling is not None and not (isinstance(self.pooling, str) and self.pooling in POOLINGS):
            raise invalid("pooling", f"must be one of {', '.join(POOLINGS)}, got {quote_for_error(self.pooling)}")
        if not isinstance(self.normalize, bool | None):
            raise invalid("normalize", f"must be true or false, got {quote_for_error(self.normalize)}")
        if self.dimensions is not None:
            check_integer("dimensions", self.dimensions, 1)

    def sampling(self, default: str) -> SamplingParams:
        """Parameters of the request to the engine; `default` is the model's pooling."""
        return SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, pooling=self.pooling or default)

    def vector(self, pooled: Sequence[float], *, normalize: bool) -> list[float]:
        """The vector of pooled hidden states [H], with `normalize` as the default of these parameters.

        Raises:
            InvalidRequestError: the model has fewer dimensions.
        """
        kept = len(pooled) if self.dimensions is None else self.dimensions
        if kept > len(pooled):
            raise invalid("dimensions", f"is {kept}, and the model's vectors have {len(pooled)}")
        vector = list(pooled[:kept])
        if self.normalize if self.normalize is not None else normalize:
            length = math.hypot(*vector) or 1.0
            vector = [value / length for value in vector]
        return vector


def classifying() -> SamplingParams:
    """Parameters of a request for the probabilities of a classifier's labels."""
    return SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, pooling=CLASSIFY)


@dataclass(slots=True)
class PoolingOutput:
    """Pooled hidden states of one prompt."""

    data: list[float] = field(repr=False)


@dataclass(slots=True)
class EmbeddingOutput:
    """Embedding of one prompt."""

    embedding: list[float] = field(repr=False)

    @property
    def hidden_size(self) -> int:
        """Dimensions of the embedding."""
        return len(self.embedding)


@dataclass(slots=True)
class ScoringOutput:
    """Similarity of two texts."""

    score: float
    """Cosine of their embeddings, -1 to 1."""


@dataclass(slots=True)
class ClassificationOutput:
    """Labels of one prompt."""

    probs: list[float]
    """Probability of each label; a regression's scores as they are."""

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """Result for one prompt, or for one pair of texts."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    """Token ids of the prompt; of a pair those of both, one after the other."""
    num_cached_tokens: int | None = None
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Result of `embed` for one prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Result of `score` for one pair of texts."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Result of `classify` for one prompt."""
