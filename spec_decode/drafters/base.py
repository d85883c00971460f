"""The contract of drafters: what the engine gives them and asks of them. `factory` chooses one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ...platform.core.request import NO_DRAFTS, Drafts, Request, Tokens

if TYPE_CHECKING:
    from ...kernels.device_outcome import DeviceOutcome
    from ...models.batch import KVLayerSpec, LayerKV
    from ...models.layers.linear import Linear

AdapterPreparer = Callable[[Sequence[tuple[Any, int]]], Any]
"""From each row's (adapter handle, number of tokens) to what the adapters' layers need for one forward pass."""


def no_adapters(rows: Sequence[tuple[Any, int]]) -> None:
    """The `AdapterPreparer` of an engine whose adapters bring no draft weights."""


class Adapters(NamedTuple):
    """What an `AdapterPreparer` gave, for projections of some rows where no whole `ForwardBatch` is needed."""

    adapters: Any


class DraftRow(NamedTuple):
    """One request after a step."""

    request: Request
    tokens: Tokens
    """The sequence after this step: prompt, accepted tokens and the newly sampled one. For a row that did not reach its
    end: all tokens of the request. Not to be changed."""
    num_valid: int
    """Of `tokens`, how many have valid KV in the target after this step."""
    num_draft_valid: int
    """The same for the proposer's layers: what it answered last (`Proposal.num_draft_computed`), clipped to the drafts
    that were accepted."""
    max_drafts: int
    """Drafts that may be proposed: there are KV blocks for them. 0: propose nothing."""
    block_table: list[int]
    sampled: bool
    """The row reached its end: a new token was sampled."""
    start: int = 0
    """First position that the target computed in this step..."""
    first_index: int = 0
    """...and where it lies among the step's tokens: position p is row `first_index + p - start` of `TargetOutput`.
    Positions from `num_valid` on hold rejected drafts."""
    num_drafts: int = 0
    """Drafts that this step verified..."""
    num_accepted: int = 0
    """...and how many of them were right."""
    drafter: int = 0
    """Index of the drafter that is asked for `max_drafts`, where several are composed."""
    seen: Any = None
    """What edits of logits have instead of its tokens, where the host does not know all of them; opaque here."""


class TargetOutput(NamedTuple):
    """What the target computed in this step, for drafters that read it. The tensors may be kept, and not changed."""

    hidden: Tensor | None = None
    """[T, H] after the final norm."""
    aux: tuple[Tensor, ...] = ()
    """[T, H] each: the hidden states entering the layers of `DrafterNeeds.aux_layers`, in that order."""


class Proposal(NamedTuple):
    """What a proposer answers for one row."""

    drafts: Drafts
    num_draft_computed: int
    """Leading positions of `tokens` and then the drafts, as proposed, whose KV is valid in the proposer's own layers;
    whoever accepts fewer drafts clips it. A proposer without layers says: all of `tokens`."""


class DrafterNeeds(NamedTuple):
    """What a drafter needs of the engine, known once it is built."""

    kv_layers: tuple[KVLayerSpec, ...] = ()
    """The KV layers it owns: further layers of the shared block table. Empty for most."""
    aux_layers: tuple[int, ...] = ()
    """Target layers whose entering hidden states it reads; the number of layers stands for what leaves the last."""
    linears: tuple[Linear, ...] = ()
    """Its projections that adapters' draft weights may target."""
    max_drafts: int = sys.maxsize
    """Most drafts that it makes for a row."""
    max_positions: int = sys.maxsize
    """Most positions of a sequence that it drafts for, drafts included."""
    drafts_on_device: bool = False
    """Whether it has `propose_late`: it drafts before the host knows what the step has brought."""


class Drafter:
    """Proposes tokens that the target verifies. A new drafter implements `propose`, and what else it needs.

    One object serves all requests of an engine; what it knows of one request never reaches another with another
    `Request.text_namespace`. Where `needs.drafts_on_device` holds, `propose_late` and `watch_late` may be called in
    another thread than the other verbs, but never at the same time.
    """

    @property
    def needs(self) -> DrafterNeeds:
        """Layers, hidden states and projections."""
        return DrafterNeeds()

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Take its layers of the shared cache, once, before the first step; the cache belongs to the engine.
        `prepare_adapters` makes `ForwardBatch.adapters` for its own passes (None when no row has draft weights)."""

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Drafts for the next step: one `Proposal` for each of `rows`, with at most `max_drafts` drafts. `rows` are all
        rows of the step; a drafter that lags behind may answer with none and catch up later."""
        raise NotImplementedError

    def watch(self, rows: Sequence[DraftRow], target: TargetOutput) -> None:
        """Take in a step after which no drafts are wanted: keep what would be lost otherwise. It should cost nothing
        beside the step."""

    def propose_late(self, rows: Sequence[DraftRow], target: TargetOutput, late: DeviceOutcome) -> list[Proposal]:
        """`propose` on the device, for decodes and verifications alone: a row has logits for each of its 1 + k tokens,
        and what the drafter keeps of it lags by no more than these.

        Args:
            rows: As if all drafts were right: of `tokens` only the number means anything, `num_accepted` is not known.
            late: What the device knows of the step.

        Returns:
            exactly `max_drafts` drafts for each row. `num_draft_computed` is the number of `tokens`, to be taken for
            that of the true ones, or 0 where nothing was computed: then it is what it was.
        """
        raise NotImplementedError

    def watch_late(self, rows: Sequence[DraftRow], target: TargetOutput, overshoot: tuple[Tensor | None, int]) -> None:
        """`watch` before the host knows the outcome, of rows as if all drafts were right.

        Args:
            overshoot: [B] int64 on the device, by how many positions they begin before that (None: nowhere), and the
                most that it can be.
        """

    def forget_adapter(self, digest: bytes) -> None:
        """Drop what was learned from an adapter's requests: its content is gone from the engine."""

    def adapter_leaves(self, digest: bytes) -> None:
        """Compute now what needs this adapter's rows on the device, which are about to go. Called where no step is
        under way, and not at all where steps overlap."""


class NoDrafter(Drafter):
    """No speculation, through the same path."""

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """No drafts."""
        return [Proposal(NO_DRAFTS, len(row.tokens)) for row in rows]
