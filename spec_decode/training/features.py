"""The target's features of fixed batches, cached as far as memory allows, so that later epochs do not run the
target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .data import Sample, collate
from .target import Features, Target


class FeatureCache:
    """Features of batches of samples.

    Each batch always holds the same samples, so cached and recomputed features are equal: the cache's size affects the
    duration of a run, not its result.
    """

    def __init__(
        self,
        target: Target,
        samples: Sequence[Sample],
        batches: Sequence[Sequence[int]],
        limit: int,
        device: torch.device,
    ) -> None:
        """limit: bytes that are kept, in the host's memory."""
        self._target, self._samples, self._batches = target, samples, batches
        self._room, self._device = limit, device
        self._kept: dict[int, Features] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def tokens(self, number: int) -> int:
        """Tokens of a batch, without padding."""
        return sum(len(self._samples[i].token_ids) for i in self._batches[number])

    def __getitem__(self, number: int) -> Features:
        """Features of a batch."""
        kept = self._kept.get(number)
        if kept is not None:
            return _moved(kept, self._device)
        batch = collate([self._samples[i] for i in self._batches[number]], self._device)
        features = self._target.features(batch)
        size = sum(tensor.nbytes for tensor in _tensors(features))
        if size <= self._room:
            self._room -= size
            self._kept[number] = _moved(features, torch.device("cpu"))
        return features


def _tensors(features: Features) -> list[Tensor]:
    labels = features.labels
    return [features.ids, features.hidden, *features.aux, *labels]


def _moved(features: Features, device: torch.device) -> Features:
    ids, hidden, *rest = (tensor.to(device) for tensor in _tensors(features))
    aux, labels = tuple(rest[: len(features.aux)]), type(features.labels)(*rest[len(features.aux) :])
    return Features(ids, hidden, aux, labels, features.head)
