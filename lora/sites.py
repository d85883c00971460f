"""All places of one model where adapters' rows apply, and the modules by whose names adapters know them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from .adapter import EMBEDDING, LM_HEAD, LoraWeights, ModuleShape
from .layers import EmbeddingSite, LoraSite
from .pool import Allocation

if TYPE_CHECKING:
    from ..models.layers.embedding import Embedding
    from ..models.layers.linear import Linear


class AdapterHooks(NamedTuple):
    """What an engine has beside its target's linears."""

    embedding: Embedding | None = None
    """The target's embeddings and head; None: adapters on them are refused."""
    draft_method: str = ""
    """The method of speculation..."""
    draft_linears: Sequence[Linear] = ()
    """...and the drafter's projections; none: draft weights are not read."""
    on_gone: Callable[[bytes], None] = lambda digest: None
    """Called with the digest of a content that no name and no request has any more."""
    batch_invariant: bool = False
    """Whether what an adapter gives a token must not depend on the other tokens, bit for bit."""


class AdapterSites:
    """The sites of a target or of a drafter; both kinds share one row pool."""

    def __init__(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.modules: dict[str, ModuleShape] = {}
        """What adapters may target, by the checkpoint's names."""
        self._num_rows = num_rows
        self._dtype = dtype
        self._device = device
        self._sites: list[tuple[LoraSite | EmbeddingSite, list[str]]] = []

    def add_linears(self, linears: Sequence[Linear]) -> None:
        """Give every linear its site."""
        for linear in linears:
            sizes = [size for _, size in linear.slices]
            linear.lora = LoraSite(linear.in_features, sizes, self._num_rows, self._dtype, self._device)
            self._sites.append((linear.lora, [name for name, _ in linear.slices]))
            self.modules.update((name, ModuleShape(linear.in_features, size)) for name, size in linear.slices)

    def add_embedding(self, embedding: Embedding) -> None:
        """Give the token embeddings and the head their sites."""
        vocab_size, hidden_size = embedding.vocab_size, embedding.hidden_size
        lookup = EmbeddingSite(vocab_size, hidden_size, self._num_rows, self._dtype, self._device)
        head = LoraSite(hidden_size, [vocab_size], self._num_rows, self._dtype, self._device)
        embedding.lookup_lora, embedding.head_lora = lookup, head
        self._sites += [(lookup, [EMBEDDING]), (head, [LM_HEAD])]
        self.modules[EMBEDDING] = ModuleShape(vocab_size, hidden_size, embedding=True, is_base=embedding.is_table)
        self.modules[LM_HEAD] = ModuleShape(hidden_size, vocab_size, is_base=embedding.is_head)

    def write(self, allocation: Allocation, modules: Mapping[str, LoraWeights]) -> None:
        """Fill an adapter's rows everywhere; clear them where it has no weights."""
        for site, names in self._sites:
            site.write(allocation, [modules.get(name) for name in names])


def make_sites(
    linears: Sequence[Linear], hooks: AdapterHooks, num_rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[AdapterSites, AdapterSites]:
    """The target's sites and the drafter's, which has none when it has no projections."""
    target, draft = (AdapterSites(num_rows, dtype, device) for _ in range(2))
    target.add_linears(linears)
    if hooks.embedding is not None:
        target.add_embedding(hooks.embedding)
    draft.add_linears(hooks.draft_linears)
    return target, draft
