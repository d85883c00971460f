"""Contract of an executor, and the one of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ....models.batch import AdapterPreparer, LayerKV, SequenceRows, build_batch
from ....models.model import DecoderOutput, LanguageModel
from ....models.states.memory import LayerStates, release_states
from ...core.errors import EngineDeadError
from .captured import TargetPasses

Handles = Sequence[tuple[Any, int]]
"""(adapter, number of tokens or rows)."""


class Executor(Protocol):
    """Computes passes of the target. Not thread-safe."""

    @property
    def is_broken(self) -> bool:
        """True when it cannot compute any more: a rank is gone."""
        ...

    def error(self) -> EngineDeadError:
        """Reason why it `is_broken`."""

    def forward(self, rows: SequenceRows, handles: Handles, aux_layers: Sequence[int]) -> DecoderOutput:
        """Compute rows of tokens, whose KV is written; see `LanguageModel.forward`."""

    def replay(self, rows: SequenceRows, handles: Handles, *, verifies: bool) -> tuple[Tensor, ...] | None:
        """Do the same from a captured graph; None if `forward` must be called instead.

        Returns:
            Hidden states [T, H], and those that enter the drafter's layers; with `verifies` before them logits [T, V]
            float32. Valid until the next pass; entries beyond the rows' tokens are undefined.
        """

    def announce_captures(self) -> None:
        """Have the other ranks capture their shares of all passes, as this process then does."""

    def logits(self, hidden: Tensor, handles: Handles) -> Tensor:
        """Logits [R, V] float32 of hidden [R, H]."""

    def release_memory(self) -> None:
        """Return the memory of the other ranks' KV, and that of recurrent states, to the system."""

    def close(self) -> None:
        """Stop the other ranks."""


class LocalExecutor:
    """Computes in this process."""

    is_broken = False

    def __init__(
        self,
        model: LanguageModel,
        kv: Sequence[LayerKV],
        preparers: tuple[AdapterPreparer, AdapterPreparer],
        passes: TargetPasses | None = None,
        states: Sequence[LayerStates] = (),
    ) -> None:
        """Compute with a model and its layers of the cache.

        Args:
            model: The target.
            kv: Its layers.
            preparers: Of the adapters of tokens, and of rows of logits.
            passes: Captured passes; None: nothing is captured.
            states: Memory of its layers with a recurrent state.
        """
        self._model = model
        self._kv = kv
        self._prepare, self._prepare_head = preparers
        self._passes = passes
        self._states = states

    def error(self) -> EngineDeadError:
        """See `Executor`."""
        raise AssertionError("this process cannot be gone")

    def forward(self, rows: SequenceRows, handles: Handles, aux_layers: Sequence[int]) -> DecoderOutput:
        """See `Executor`."""
        batch = build_batch(rows, self._model, self._kv, self._prepare(handles), self._states)
        return self._model.forward(batch, aux_layers)

    def replay(self, rows: SequenceRows, handles: Handles, *, verifies: bool) -> tuple[Tensor, ...] | None:
        """See `Executor`."""
        return None if self._passes is None else self._passes.run(rows, handles, verifies=verifies)

    def announce_captures(self) -> None:
        """See `Executor`."""

    def logits(self, hidden: Tensor, handles: Handles) -> Tensor:
        """See `Executor`."""
        return self._model.compute_logits(hidden, self._prepare_head(handles))

    def release_memory(self) -> None:
        """See `Executor`."""
        release_states(self._states)

    def close(self) -> None:
        """See `Executor`."""
