"""What the engine asks of a drafter. `factory` chooses one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ...platform.core.request import NO_DRAFTS, Drafts, Request, Tokens

if TYPE_CHECKING:
    from ...kernels.device_outcome import DeviceOutcome
    from ...models.batch import KVLayerSpec, LayerKV
    from ...models.layers.linear import Linear
    from ...platform.core.batch import RowPlan

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
    seen: Any = None
    """What edits of logits have instead of its tokens, where the host does not know all of them; opaque here."""


class StateMemory(Protocol):
    """A drafter's memory for hidden states of steps after which it is not asked (`Resting`), on a CPU."""

    def take(self, num_tokens: int) -> int:
        """A place for those of the next such step, which computes so many tokens; -1: there is none. With the step's
        `TargetOutput` it is the drafter's again; that of a step that fails comes free with the places before it."""
        ...

    def copies(self, place: int) -> Mapping[int, int]:
        """For each of `ProposerNeeds.aux_layers` the address where its entering hidden states [T, H] are to be."""
        ...


class TargetOutput(NamedTuple):
    """What the target computed in this step, for drafters that read it. The tensors may be kept, and not changed."""

    hidden: Tensor | None = None
    """[T, H] after the final norm."""
    aux: tuple[Tensor, ...] = ()
    """[T, H] each: the hidden states entering the layers of `ProposerNeeds.aux_layers`, in that order."""
    seconds: float = 0.0
    """What the step took up to here: forward, sampling and verification."""
    place: int = -1
    """In `ProposerNeeds.memory`, where what `aux` would be is; `hidden` and `aux` are empty then, as they are where
    nobody reads them."""


class Proposal(NamedTuple):
    """What a proposer answers for one row."""

    drafts: Drafts
    num_draft_computed: int
    """Leading positions of `tokens` and then the drafts, as proposed, whose KV is valid in the proposer's own layers;
    whoever accepts fewer drafts clips it. A proposer without layers says: all of `tokens`."""


class ProposerNeeds(NamedTuple):
    """What a drafter needs of the engine, known once it is built."""

    kv_layers: tuple[KVLayerSpec, ...] = ()
    """The KV layers it owns: further layers of the shared block table. Empty for most."""
    aux_layers: tuple[int, ...] = ()
    """Target layers whose entering hidden states it reads; the number of layers stands for what leaves the last."""
    memory: StateMemory | None = None
    """Where the target may copy these while it computes, instead of handing them over, after steps without drafts: it
    costs less than tensors that live on."""
    watches_rests: bool = False
    """Whether it wants to be told of steps after which it was not asked (`Drafter.watch_rests`)..."""
    reads_rests: bool = False
    """...and reads what the target computed in them."""
    linears: tuple[Linear, ...] = ()
    """Its projections that adapters' draft weights may target."""
    max_drafts: int = sys.maxsize
    """That it makes for a row."""
    max_positions: int = sys.maxsize
    """Of a sequence that it drafts for, drafts included."""


class Proposer(Protocol):
    """A drafter. One object serves all requests of an engine; what it knows of one request never reaches another with
    another `Request.text_namespace`."""

    @property
    def needs(self) -> ProposerNeeds:
        """Layers, hidden states and projections."""
        ...

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Its layers of the shared cache, once, before the first step; the cache belongs to the engine.
        `prepare_adapters` makes `ForwardBatch.adapters` for its own passes (None when no row has draft weights)."""
        ...

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Drafts for the next step: one `Proposal` for each of `rows`, with at most `max_drafts` drafts. `rows` are all
        rows of the step; a drafter that lags behind may answer with none and catch up later."""
        ...

    def forget_adapter(self, digest: bytes) -> None:
        """An adapter's content is gone from the engine: drop what was learned from its requests."""
        ...


class RestedSteps(NamedTuple):
    """Steps one after another, after which nobody was asked for drafts."""

    rows: Sequence[RowPlan]
    """Of the first one. In each that follows, the same sequences computed one token each."""
    tables: list[list[int]]
    """Block tables of the rows, as they were then; they may have grown."""
    targets: list[TargetOutput]
    """Of each step."""


class Drafter(Proposer, Protocol):
    """A proposer that the adaptive one may compose: it need not be asked in steps where nothing is to be drafted."""

    def watch(self, rows: Sequence[DraftRow], target: TargetOutput) -> None:
        """Stands in for `propose` in a step that asks for no drafts: take in what would be lost otherwise."""
        ...

    def watch_rests(self, spells: Sequence[RestedSteps]) -> None:
        """`watch` of steps after which nobody was asked for anything (`Resting`), oldest first, maybe some later; of a
        drafter that `ProposerNeeds.watches_rests`.
        Requests may have finished meanwhile, and adapters have left the device (but see `DefersAdapters`)."""
        ...


@runtime_checkable
class Resting(Proposer, Protocol):
    """A proposer that says when it need not be asked, and drafts need not be planned for: such a step is one without
    speculation."""

    @property
    def rest(self) -> int:
        """For how many of the next steps, as far as is known now: looked at after each of them. None of their rows has
        drafts; sequences may come and go meanwhile."""
        ...

    def rested(self, rows: Sequence[RowPlan], target: TargetOutput) -> None:
        """Stands in for `propose` in such a step: take in what would be lost otherwise, and see who runs. The sequences
        are still as before the step; what the proposer's own layers have of them stays what it is."""
        ...


@runtime_checkable
class DefersAdapters(Protocol):
    """A proposer that may compute what adapters have a part in later than in the steps of their requests: where steps
    do not overlap."""

    def adapter_leaves(self, digest: bytes) -> None:
        """The adapter with this content is about to lose its rows on the device: what needs them is computed now.
        Called where no step is under way, and not at all where steps overlap."""
        ...


@runtime_checkable
class LateDrafter(Proposer, Protocol):
    """A proposer that drafts where the target computes, before the host knows what a step has brought."""

    def propose_late(self, rows: Sequence[DraftRow], target: TargetOutput, late: DeviceOutcome) -> list[Proposal]:
        """`propose`, for decodes and verifications alone: a row has logits for each of its 1 + k tokens, its sequence
        reads no tokens, and what the proposer keeps of it lags by no more than these.

        Args:
            rows: As if all drafts were right: of `tokens` only the number means anything, `num_accepted` is not known.
            late: What the device knows of it.

        Returns:
            exactly `max_drafts` drafts for each row. `num_draft_computed` is the number of `tokens`, to be taken for
            that of the true ones, or 0 where nothing was computed: then it is what it was.
        """
        ...

    def watch_late(self, rows: Sequence[DraftRow], target: TargetOutput, overshoot: tuple[Tensor | None, int]) -> None:
        """Stands in for `propose_late` in a step that asks for no drafts, whose rows may be any: take in what would be
        lost otherwise.

        Args:
            rows: As if all drafts were right.
            overshoot: [B] int64 on the device, by how many positions they begin before that (None: nowhere), and the
                most that it can be.
        """
        ...


@runtime_checkable
class LateChooser(Protocol):
    """A late drafter that decides how many drafts there are: when a step is planned, of what it knows by then."""

    def choose(self, rows: Sequence[RowPlan]) -> bool:
        """Asked once for each step that is planned, before any `propose` for it: lower its rows' `max_new_drafts` to
        what is wanted of `propose_late`. False: `propose` is to be asked, and nothing is lowered."""
        ...

    def landed(self, rows: Sequence[DraftRow], target: TargetOutput, proposals: Sequence[Proposal]) -> None:
        """What came of a step for which `propose_late` (or `watch_late`) was asked and gave `proposals`. Steps come in
        their order, those for which `propose` is asked among them."""
        ...


class NoProposer:
    """No speculation: proposes nothing, through the same path, and is not asked."""

    @property
    def rest(self) -> int:
        """For ever."""
        return sys.maxsize

    @property
    def needs(self) -> ProposerNeeds:
        """Nothing."""
        return ProposerNeeds()

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Nothing to bind."""

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """No drafts."""
        return [Proposal(NO_DRAFTS, len(row.tokens)) for row in rows]

    def watch(self, rows: Sequence[DraftRow], target: TargetOutput) -> None:
        """Nothing to learn."""

    def rested(self, rows: Sequence[RowPlan], target: TargetOutput) -> None:
        """Nothing to learn."""

    def watch_rests(self, spells: Sequence[RestedSteps]) -> None:
        """Nothing to learn."""

    def forget_adapter(self, digest: bytes) -> None:
        """Nothing was learned."""
