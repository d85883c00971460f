"""Contract of an executor, and the one of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ....models.batch import LayerKV, SequenceRows, build_batch
from ....models.model import DecoderOutput, LanguageModel
from ....spec_decode.drafters.base import AdapterPreparer
from ...core.errors import EngineDeadError

Handles = Sequence[tuple[Any, int]]
"""(adapter, number of tokens or rows)."""


class Executor(Protocol):
    """Computes passes of the target. Not thread-safe."""

    @property
    def is_broken(self) -> bool:
        """True when it can compute nothing any more: a rank is gone."""
        ...

    def error(self) -> EngineDeadError:
        """Why."""

    def forward(self, rows: SequenceRows, handles: Handles, aux_layers: Sequence[int]) -> DecoderOutput:
        """Compute rows of tokens, whose KV is written; see `LanguageModel.forward`."""

    def logits(self, hidden: Tensor, handles: Handles) -> Tensor:
        """Logits [R, V] float32 of hidden [R, H]."""

    def release_memory(self) -> None:
        """Give the memory of the other ranks' KV back."""

    def close(self) -> None:
        """End the other ranks."""


class LocalExecutor:
    """Computes in this process."""

    is_broken = False

    def __init__(
        self, model: LanguageModel, kv: Sequence[LayerKV], prepare: AdapterPreparer, prepare_head: AdapterPreparer
    ) -> None:
        """`kv`: the target's layers; `prepare`, `prepare_head`: adapters of tokens, and of rows of logits."""
        self._model = model
        self._kv = kv
        self._prepare = prepare
        self._prepare_head = prepare_head

    def error(self) -> EngineDeadError:
        """See `Executor`."""
        raise AssertionError("this process cannot be gone")

    def forward(self, rows: SequenceRows, handles: Handles, aux_layers: Sequence[int]) -> DecoderOutput:
        """See `Executor`."""
        return self._model.forward(build_batch(rows, self._model, self._kv, self._prepare(handles)), aux_layers)

    def logits(self, hidden: Tensor, handles: Handles) -> Tensor:
        """See `Executor`."""
        return self._model.compute_logits(hidden, self._prepare_head(handles))

    def release_memory(self) -> None:
        """See `Executor`."""

    def close(self) -> None:
        """See `Executor`."""
