"""What the engine asks of a drafter, and the one place where drafters are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..platform.core.config import SpeculativeConfig
from ..platform.core.request import NO_DRAFTS, Drafts, Request

if TYPE_CHECKING:
    from ..models.batch import KVLayerSpec, LayerKV


class DraftRow(NamedTuple):
    """One request after a step."""

    request: Request
    tokens: list[int]
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


class Proposal(NamedTuple):
    """What a proposer answers for one row."""

    drafts: Drafts
    num_draft_computed: int
    """Leading positions of `tokens` and then the drafts, as proposed, whose KV is valid in the proposer's own layers;
    whoever accepts fewer drafts clips it. A proposer without layers says: all of `tokens`."""


class Proposer(Protocol):
    """A drafter. One object serves all requests of an engine; what it knows of one request never reaches another."""

    @property
    def kv_layers(self) -> list[KVLayerSpec]:
        """The KV layers it owns: further layers of the shared block table. Empty for most."""
        ...

    def bind(self, kv: list[LayerKV]) -> None:
        """Its layers of the shared cache, once, before the first step. The cache belongs to the engine."""
        ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """Drafts for the next step: one `Proposal` for each of `rows`, with at most `max_drafts` drafts. `rows` are all
        rows of the step; a drafter that lags behind may answer with none and catch up later."""
        ...


class NoProposer:
    """No speculation: proposes nothing, through the same path."""

    @property
    def kv_layers(self) -> list[KVLayerSpec]:
        """None."""
        return []

    def bind(self, kv: list[LayerKV]) -> None:
        """Nothing to bind."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """No drafts."""
        return [Proposal(NO_DRAFTS, len(row.tokens)) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerContext:
    """What drafters are built from, beside their own configuration."""

    vocab_size: int
    """The target's: drafts are token ids of the target."""
    device: str
    dtype: str
    """"float32", "bfloat16" or "float16"."""
    load_format: str = "auto"
    """"auto" or "dummy"."""
    seed: int = 0
    """Of dummy weights."""
    progress: bool = False
    """Whether to show a progress bar while weights load."""
    max_num_batched_tokens: int = 2048
    """Most tokens that a drafter with layers computes in one pass."""


def _ngram(config: SpeculativeConfig, context: ProposerContext) -> Proposer:
    from .ngram import NgramProposer

    return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)


def _draft_model(config: SpeculativeConfig, context: ProposerContext) -> Proposer:
    from .draft_model import load_draft_model

    return load_draft_model(config, context)


# method of `speculative_config` -> factory; what it needs is imported on use.
_FACTORIES: dict[str, Callable[[SpeculativeConfig, ProposerContext], Proposer]] = {
    "ngram": _ngram,
    "draft_model": _draft_model,
}


def make_proposer(config: SpeculativeConfig | None, context: ProposerContext) -> Proposer:
    """The drafter that `config` asks for; None is no speculation.

    Raises:
        InvalidRequestError: the drafter does not fit the target; `param` is "speculative_config".
        NotFoundError: its model does not exist.
    """
    if config is None:
        return NoProposer()
    return _FACTORIES[config.method](config, context)
