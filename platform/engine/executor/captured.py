"""Passes of the target that are replayed from captured graphs; see `models.pass_graphs`.

With several ranks each captures its own share, sums over ranks included. Rank 0 decides whether a pass is replayed
or launched kernel by kernel, and the others do the same: they hold the same graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ....kernels.graphs import Captured, GraphBackend, Work
from ....models.batch import AdapterPreparer, ForwardBatch, LayerKV, SequenceRows
from ....models.model import LanguageModel
from ....models.pass_graphs import PassGraphs, PassInputs, PassOptions
from ...core.errors import EngineDeadError


class TargetPasses:
    """Passes of few tokens: decodes and verifications, which have logits of all tokens, and those with prompts."""

    def __init__(
        self,
        graphs: PassGraphs,
        model: LanguageModel,
        kv: Sequence[LayerKV],
        preparers: tuple[AdapterPreparer, AdapterPreparer],
        aux_layers: Sequence[int],
        logits: Tensor | None = None,
    ) -> None:
        """Prepare passes over the target's layers `kv`; its attention can be captured.

        Args:
            preparers: Of the adapters of tokens, and of rows of logits.
            aux_layers: See `LanguageModel.forward`.
            logits: `PassGraphs.token_logits`; None: each graph has memory of its own.
        """
        self.limits = graphs.limits
        self.aux_layers = aux_layers
        self._model = model
        self._logits = logits
        self._prepare_head = preparers[1]
        verifying, others = PassOptions(prompts=False, has_base=True), PassOptions(decodes=False, has_base=True)
        self._verifying = graphs.of(model, kv, self._compute, preparers, verifying)
        self._others = graphs.of(model, kv, self._compute_hidden, preparers[:1], others)

    def run(
        self,
        rows: SequenceRows,
        handles: Sequence[tuple[Any, int]],
        *,
        verifies: bool,
        begin: Callable[[], None] | None = None,
    ) -> tuple[Tensor, ...] | None:
        """See `Executor.replay`; for `begin` see `GraphedPass.run`. Verifications too large for their own shapes, as of
        many forced tokens of a grammar, take one of prompts; their logits are launched separately.
        """
        assert self._verifying is not None, "the attention can be captured"
        assert self._others is not None, "the attention can be captured"
        if verifies and (found := self._verifying.run(rows, handles, begin=begin, counts=False)) is not None:
            return found
        found = self._others.run(rows, handles, begin=begin)
        if found is None or not verifies:
            return found
        return self._model.compute_logits(found[0][: len(rows.token_ids)], self._prepare_head(handles)), *found

    def _compute(self, batch: ForwardBatch, inputs: PassInputs) -> tuple[Tensor, ...]:
        hidden, *aux = self._compute_hidden(batch, inputs)
        out = None if self._logits is None else self._logits[: len(hidden)]
        return self._model.compute_logits(hidden, inputs.adapters[1], out=out), hidden, *aux

    def _compute_hidden(self, batch: ForwardBatch, inputs: PassInputs) -> tuple[Tensor, ...]:
        output = self._model.forward(batch, self.aux_layers)
        return output.hidden, *output.aux


class AgreedGraphs:
    """Graphs that all ranks have captured. Implements `GraphBackend`: all ranks have the same recordings."""

    def __init__(self, backend: GraphBackend, agree: Callable[[bool], bool]) -> None:
        """`agree`: `ProcessRanks.agree`."""
        self._backend, self._agree = backend, agree

    def capture(self, work: Work) -> Captured:
        """See `GraphBackend`. EngineDeadError: the first run failed, while other ranks wait for this one's share."""
        num_runs = 0

        def counted() -> tuple[Tensor, ...]:
            nonlocal num_runs
            outputs = work()
            num_runs += 1
            return outputs

        captured: Captured | None = None
        failure = RuntimeError("another rank could not")
        try:
            captured = self._backend.capture(counted)
        except RuntimeError as error:
            if not num_runs:
                raise EngineDeadError(f"a pass failed while it was captured: {error}") from error
            failure = error
        if self._agree(captured is not None) and captured is not None:
            return captured
        raise failure
