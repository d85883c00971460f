"""Score matrix of a classifier: a prompt's last hidden state to one number for each label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..config_values import positive, shown, wrong
from .weights import Weight, WeightSlot

_SCORE = "score.weight"
_ACTIVATIONS = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}
_LABELS = 2
"""Labels of a config.json that names none: transformers writes only other numbers."""


class ScoreConfig(NamedTuple):
    """Labels of a classifier."""

    num_labels: int
    activation: str
    """"softmax", "sigmoid" or "none", by which scores become probabilities; "none" is a regression's."""


def read_score(values: Mapping[str, Any]) -> ScoreConfig:
    """Labels of a classifier's config.json; softmax if it names no `problem_type`, and sigmoid for a single label.

    Raises:
        UnsupportedModelError: a wrong value; `param` names the field.
    """
    labels, problem = values.get("id2label"), values.get("problem_type", "single_label_classification")
    if labels is not None and not (isinstance(labels, dict) and labels):
        raise wrong("id2label", f"must map numbers to labels, got {shown(labels)}")
    if not isinstance(problem, str) or problem not in _ACTIVATIONS:
        raise wrong("problem_type", f"must be one of {', '.join(_ACTIVATIONS)}, got {shown(problem)}")
    num_labels = positive(values, "num_labels", _LABELS) if labels is None else len(labels)
    activation = _ACTIVATIONS[problem]
    return ScoreConfig(num_labels, "sigmoid" if activation == "softmax" and num_labels == 1 else activation)


class ScoreSite(Protocol):
    """Score matrices that adapters bring themselves."""

    def score(self, adapters: Any) -> Tensor | None:
        """Score matrix [labels, H] float32 of a batch of one row; None if its adapter has none."""


class ScoreHead:
    """Probabilities of labels. It is computed in float32."""

    def __init__(self, config: ScoreConfig, hidden_size: int, device: torch.device) -> None:
        self.config = config
        self.own: ScoreSite | None = None
        """Site of adapters, set by the adapter manager."""
        self.shape = (config.num_labels, hidden_size)
        self._device = device
        self._weight: Tensor | None = None

    def probs(self, hidden: Tensor, adapters: Any = None) -> Tensor:
        """Probabilities [labels] float32 of a hidden state [H]; a regression's scores as they are. `adapters` belongs
        to this row."""
        own = None if self.own is None or adapters is None else self.own.score(adapters)
        weight = self._weight if own is None else own
        assert weight is not None, "the loader left no slot empty"
        scores = weight @ hidden.float()
        if self.config.activation == "softmax":
            return scores.softmax(-1)
        return scores.sigmoid() if self.config.activation == "sigmoid" else scores

    def is_weight(self, tensor: Tensor) -> bool:
        """True when `tensor` [labels, H] is the score matrix."""
        return torch.equal(tensor.to(self._device, torch.float32), self._weight)  # type: ignore[arg-type]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names."""
        return {_SCORE: WeightSlot(self.shape, self._load, self.shape[1] ** -0.5)}

    def _load(self, weight: Weight) -> None:
        assert isinstance(weight, Tensor), "the slot takes no quantised weight"
        self._weight = weight.to(self._device, torch.float32, copy=True)
