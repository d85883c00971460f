"""The contract of drafters: `Drafter`, and the types that it exchanges with the engine.

A drafter proposes tokens, the target verifies them all in its next step. For each step of the engine, after the target:

    propose(rows, target) -> proposals     if a row may have drafts: for all rows of the step, also those without
    watch(rows, target)                    after every other step

When steps overlap, the host may not have a step's results yet. A drafter that can draft from tokens and lengths on the
device declares `DrafterNeeds.drafts_on_device`; `TargetOutput.on_device` is set when it must.

A new drafter is a file or a folder next to this one, and its name in the lists that CONTRIBUTING.md names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ...platform.core.request import NO_DRAFTS, Drafts, Request

if TYPE_CHECKING:
    from ...kernels.device_outcome import DeviceOutcome
    from ...models.batch import AdapterPreparer, KVLayerSpec, LayerKV
    from ...models.layers.linear import Linear
    from ..learning.learner import Learner


def no_adapters(rows: Sequence[tuple[Any, int]], *, always: bool = False) -> None:
    """The `AdapterPreparer` of an engine whose adapters bring no draft weights."""


class PreparedAdapters(NamedTuple):
    """Result of an `AdapterPreparer`, for projections of some rows without a whole `ForwardBatch`."""

    adapters: Any


class DraftRow(NamedTuple):
    """One request after a step. If only the device knows the outcome (`TargetOutput.on_device`), all fields are as
    if every draft had been accepted."""

    request: Request
    tokens: Sequence[int]
    """The request's tokens after this step. Read only. With `TargetOutput.on_device` only their number is valid."""
    num_valid: int
    """Number of leading `tokens` that have valid KV in the target after this step."""
    num_draft_valid: int
    """Number of leading `tokens` that have valid KV in the drafter's layers: the drafter's last
    `Proposal.num_draft_computed`, clipped to the accepted drafts."""
    max_drafts: int
    """Drafts that may be proposed: there are KV blocks for them. 0: propose nothing."""
    block_table: Sequence[int]
    sampled: bool
    """True when the row reached its end: a new token was sampled."""
    start: int = 0
    """First position that the target computed in this step."""
    first_index: int = 0
    """Index of `start` among the step's tokens: position p is row `first_index + p - start` of `TargetOutput`.
    Positions from `num_valid` on hold rejected drafts."""
    num_drafts: int = 0
    """Drafts that this step verified."""
    num_accepted: int = 0
    """Accepted drafts of this step; unknown (0) with `TargetOutput.on_device`."""
    drafter: int = 0
    """Index of the drafter to use, if several are composed."""
    is_rated: bool = False
    """True if the host reads the drafts' confidence, if the drafter has one."""
    seen: Any = None
    """Tokens for edits of logits, if the host does not know all of them; opaque here."""


class DeviceStep(NamedTuple):
    """The outcome of a step, on the device."""

    outcome: DeviceOutcome | None
    """Tokens and accepted drafts of all rows, each of which reaches its end; None if no row may have drafts."""
    overshoot: Tensor | None
    """[B] int64, number of positions by which each row starts before `DraftRow.start`; None: all 0."""


class TargetOutput(NamedTuple):
    """Output of the target in this step, for drafters that read it. The tensors may be kept, but not changed."""

    hidden: Tensor | None = None
    """[T, H] after the final norm."""
    aux: tuple[Tensor, ...] = ()
    """[T, H] each: the hidden states entering the layers of `DrafterNeeds.aux_layers`, in that order."""
    on_device: DeviceStep | None = None
    """The outcome, if the host does not have it yet."""


class Proposal(NamedTuple):
    """Drafts for one row."""

    drafts: Drafts
    num_draft_computed: int
    """Leading positions of `tokens` and then the drafts, as proposed, whose KV is valid in the drafter's own layers;
    the engine clips it to the accepted drafts. A drafter that never lags returns len(tokens). With
    `TargetOutput.on_device`: len(tokens), which stands for the true number, or 0 if nothing was computed."""


class DrafterNeeds(NamedTuple):
    """Needs of a drafter, known once it is built."""

    kv_layers: tuple[KVLayerSpec, ...] = ()
    """The KV layers it owns: further layers of the shared block table. Empty for most."""
    aux_layers: tuple[int, ...] = ()
    """Target layers whose input hidden states it reads; the number of layers means the output of the last."""
    linears: tuple[Linear, ...] = ()
    """Its projections that adapters' draft weights may target."""
    max_drafts: int = sys.maxsize
    """Most drafts that it makes for a row."""
    max_positions: int = sys.maxsize
    """Longest sequence that it drafts for, drafts included."""
    never_lags: bool = False
    """True when its layers hold what it needs of a position wherever the target's hold theirs, also after `watch`."""
    more_slots: int = 0
    """Positions that a proposal of k drafts writes after the step's last one, beyond k; of drafters with layers."""
    target_draft: Path | None = None
    """PEFT folder of the LoRA through which the target drafts for itself: `bind` gets the target's layers, and draft
    weights are for the target's projections (`DraftWeights`). None: the drafter has a network of its own, or none."""
    drafts_on_device: bool = False
    """True when it can propose before the host knows the outcome of a step."""

    @property
    def lags(self) -> bool:
        """True when its layers may lack what they need of a position that the target has computed."""
        return bool(self.kv_layers) and not self.never_lags


class Drafter:
    """Proposes tokens. One object serves all requests of an engine. Text of a request never reaches one with another
    `Request.text_namespace`."""

    @property
    def needs(self) -> DrafterNeeds:
        """Layers, hidden states and projections; none by default."""
        return DrafterNeeds()

    @property
    def weights(self) -> Sequence[Any]:
        """Objects that hold its own weights, for `models.weight_copy.copy_weights`; none by default."""
        return ()

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Set its layers of the shared cache (`target_draft`: the target's), once, before the first step; the cache
        belongs to the engine.
        `prepare_adapters` makes `ForwardBatch.adapters` for its own passes (None when no row has draft weights)."""

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Make drafts for the next step: one `Proposal` for each of `rows`, all rows of the step, with at most
        `max_drafts` drafts. A drafter that lags may return none and catch up later.

        With `target.on_device` each row has logits for its 1 + k tokens, the drafter's own layers lag by no more than
        these, and it must return exactly `max_drafts` drafts for each row.
        """
        raise NotImplementedError

    def watch(self, rows: Sequence[DraftRow], target: TargetOutput) -> None:
        """Observe a step after which nothing is drafted, to keep states that would be lost otherwise; cheap. By default
        nothing is kept."""

    def learn(self, learner: Learner) -> None:
        """Use draft weights that `learner` trains, and record traffic for it; only for methods that may `learn`."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write deferred states of `watch` to its layers; called before KV blocks are copied. By default there are
        none."""

    def forget_adapter(self, digest: bytes) -> None:
        """Drop all state of requests of an adapter whose content is gone from the engine. By default nothing outlives a
        request."""


class NoDrafter(Drafter):
    """No speculation: proposes nothing."""

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Return no drafts for every row."""
        return [Proposal(NO_DRAFTS, len(row.tokens)) for row in rows]
