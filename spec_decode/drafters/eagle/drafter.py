"""EAGLE heads as drafters: chains of drafts from layers that read the target's hidden states.

The first layer pairs a token with the target's hidden state g one position *before* it:

    position    0    1    2   ...  n           what is kept at position p of the sequence, in the blocks of all layers
    token       t0   t1   t2  ...  tn (new)
    target's         g0   g1  ...  gn-1        of the layers: the KV of the pair (t_p, g_p-1), rotated as at p - 1
    store       g0   g1   g2  ...              of the store: g_p

So a block's content depends only on the tokens up to its end: blocks are shared through the prefix cache as the
target's are. Position 0 has no pair, and no query reads it. The pair (tn, gn-1) predicts the first draft d0. The next
pairs are (d0, x0), (d1, x1), ... with the head's own output x in place of g. They are computed again when the target's
g is known: only KV computed from the target's g counts (`Proposal.num_draft_computed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import numpy as np
import torch
from torch import Tensor

from ....kernels.staging import to_device
from ....models.batch import (
    AdapterPreparer,
    ForwardBatch,
    KVLayerSpec,
    LayerKV,
    PagedModel,
    SequenceRows,
    build_batch,
)
from ....models.pass_graphs import PassOptions
from ....platform.core.request import Request
from ...verify.draft_sampling import DraftVocabulary, PassOutput, most_likely_ids
from ..autoregressive import TokenDrafter, TokenDrafterOptions
from ..base import DrafterNeeds, DraftRow, Proposal, TargetOutput
from .head import LastRows
from .hidden_store import HiddenStore

if TYPE_CHECKING:
    from ....models.config import DecoderConfig
    from ....models.layers.linear import Linear
    from ....models.pass_graphs import PassInputs
    from ...learning.learner import Learner


class HeadConfig(Protocol):
    """Sizes of a head."""

    @property
    def layer(self) -> DecoderConfig:
        """Its layers; `hidden_size` is the head's own."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Columns of its logits."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """See `DrafterNeeds`; empty: it reads the target's hidden states after the final norm."""
        ...


class StateHead(PagedModel, Protocol):
    """Layers that read a token and a hidden state before it: `EagleHead`, `MtpHead`."""

    @property
    def config(self) -> HeadConfig:
        """Sizes."""
        ...

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """Vocabulary of its logits; None: the target's."""
        ...

    @property
    def kv_layers(self) -> tuple[KVLayerSpec, ...]:
        """KV that each layer keeps of a token."""
        ...

    def linears(self) -> list[Linear]:
        """Projections that draft weights may target."""
        ...

    def fuse(self, states: Sequence[Tensor], adapters: Any) -> Tensor:
        """See `EagleHead.fuse`, as for the next two."""
        ...

    def forward(self, batch: ForwardBatch, hidden: Tensor, last: LastRows | None) -> Tensor: ...

    def logits(self, state: Tensor, out: Tensor | None = None) -> Tensor: ...


class EagleDrafter(TokenDrafter):
    """Drafts by an EAGLE head, or another `StateHead`, with each request's own sampling parameters."""

    first_position = 1
    drafts_count = False
    reads_states = True

    def __init__(self, head: StateHead, **options: Unpack[TokenDrafterOptions]) -> None:
        """`head` belongs to the drafter."""
        super().__init__(head, head.config.draft_vocab_size, **options)
        self._head = head
        layer = head.config.layer
        self.pass_options = PassOptions(first_key=1, state_size=layer.hidden_size, state_dtype=layer.dtype)
        self._learner: Learner | None = None
        self._store = HiddenStore(layer.hidden_size, head.fuse, head.device, adapts=bool(head.config.aux_layers))

    @property
    def weights(self) -> Sequence[Any]:
        """See `Drafter`."""
        return (self._head,)

    @property
    def needs(self) -> DrafterNeeds:
        """The head's layers and the store of hidden states; the target layers that it reads; its projections."""
        return DrafterNeeds(
            kv_layers=(*self._head.kv_layers, self._store.spec),
            aux_layers=self._head.config.aux_layers,
            linears=tuple(self._head.linears()),
            max_positions=self._head.config.layer.max_position_embeddings + 1,
            drafts_on_device=True,
        )

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Its layers of the engine's cache."""
        super().bind(kv[:-1], prepare_adapters)
        self._store.bind_layer(kv[-1], prepare_adapters)

    @torch.inference_mode()
    def watch(self, rows: Sequence[DraftRow], target: TargetOutput) -> None:
        """Keep the step's hidden states."""
        step = target.on_device
        self._store.defer(rows, self._states(target), None if step is None else step.overshoot)
        if self._learner is not None:
            self._learner.observe(rows, self._store)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """See `TokenDrafter`."""
        proposals = super().propose(rows, target)
        if self._learner is not None:
            self._learner.observe(rows, self._store)
            self._learner.drafted(rows, proposals)
        return proposals

    def learn(self, learner: Learner) -> None:
        """Draft with the weights of a learner, and record traffic for it."""
        self._learner = learner

    def forget_adapter(self, digest: bytes) -> None:
        """Drop what was learnt from the adapter's requests."""
        if self._learner is not None:
            self._learner.forget(digest)

    def _adapter(self, request: Request) -> Any:
        return super()._adapter(request) if self._learner is None else self._learner.weights(request)

    @torch.inference_mode()
    def flush(self) -> None:
        """Write the hidden states of earlier steps."""
        self._store.flush()

    def _keep(self, rows: Sequence[DraftRow], target: TargetOutput) -> Tensor:
        """Write the step's hidden states; returns them as they are kept, [T, H]."""
        step = target.on_device
        return self._store.write(rows, self._states(target), None if step is None else step.overshoot)

    def _states(self, target: TargetOutput) -> tuple[Tensor, ...]:
        if self._head.config.aux_layers:
            return target.aux
        assert target.hidden is not None
        return (target.hidden,)

    def _known_states(self, rows: SequenceRows) -> Tensor:
        return self._store.read(rows.block_tables, [start - 1 for start in rows.starts], rows.query_lens)

    def _sampled_states(self, rows: SequenceRows, kept: Tensor) -> Tensor:
        # The states before a row's new tokens are the step's, in the same order.
        if len(rows.token_ids) != len(kept):
            kept = kept.index_select(0, to_device(np.asarray(rows.device_tokens[0].origins), kept.device))
        return kept

    def _draw_from(self, output: PassOutput) -> tuple[Tensor, DraftVocabulary | None]:
        logits = self._head.logits(output.hidden) if output.logits is None else output.logits
        return logits, self._head.vocabulary

    def _run(self, rows: SequenceRows, handles: list[tuple[Any, int]], states: Tensor | None) -> PassOutput:
        """Compute a pass, with the hidden states [T, H] before its tokens."""
        assert states is not None
        adapters = self._prepare_adapters(handles)
        batch = build_batch(rows, self._head, self._kv, adapters)
        return PassOutput(self._head.forward(batch, states, self._last(rows, handles, adapters)))

    def _compute(self, batch: ForwardBatch, inputs: PassInputs) -> tuple[Tensor, ...]:
        """Compute a `PassOutput` of all rows, in a graph."""
        assert inputs.states is not None
        hidden = self._head.forward(batch, inputs.states, None).index_select(0, inputs.last)
        logits = self._head.logits(hidden, out=self._logits[: len(hidden)])
        return hidden, logits, most_likely_ids(logits, self._head.vocabulary)

    def _last(self, rows: SequenceRows, handles: list[tuple[Any, int]], adapters: Any) -> LastRows | None:
        if len(rows.token_ids) == len(rows.query_lens):
            return None
        if adapters is None:
            return LastRows(rows, lambda: None)
        return LastRows(rows, lambda: self._prepare_adapters([(handle, 1) for handle, _ in handles]))
