"""All places of one model where adapters' rows apply, and the modules by whose names adapters know them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..adapter import LoraWeights, ModuleShape
from ..files.tensor_keys import EMBEDDING, LM_HEAD
from .arena import RowArena
from .dora import GainSites, of_head, of_slice, of_table
from .layers import EmbeddingSite, Live, LoraSite
from .layout import ModelLayout, PackedModules, Place, RowLayout
from .pool import Allocation

if TYPE_CHECKING:
    from ...models.layers.embedding import Embedding
    from ...models.layers.linear import Linear


class AdapterHooks(NamedTuple):
    """Parts that an engine has beside its target's linears."""

    embedding: Embedding | None = None
    """The target's embeddings and head; None: adapters on them are refused."""
    draft_method: str = ""
    """The method of speculation."""
    draft_linears: Sequence[Linear] = ()
    """Projections of the drafter's projections; none: draft weights are not read."""
    on_gone: Callable[[bytes], None] = lambda digest: None
    """Called with the digest of a content that no name and no request has any more."""
    before_evicting: Callable[[bytes], None] = lambda digest: None
    """Called with the digest of a content that is about to lose its rows on the device, while they are there."""
    batch_invariant: bool = False
    """True when what an adapter gives a token must not depend on the other tokens, bit for bit."""
    reader_process: bool = False
    """True when adapters are read in another process, where it can."""


class AdapterSites:
    """The sites of a target or of a drafter, whose rows are numbered alike."""

    def __init__(
        self, linears: Sequence[Linear], embedding: Embedding | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Find the modules; `allocate` gives the model its sites."""
        self.modules: dict[str, ModuleShape] = {}
        """Modules that adapters may target, by the checkpoint's names."""
        self._linears = list(linears)
        self._embedding = embedding
        self.layout = ModelLayout(RowLayout(dtype), RowLayout(dtype))
        self._rows, self._vocabulary = (RowArena(layout, device) for layout in self.layout)
        self._gains = GainSites(dtype, device)
        self._places = [self._reserve(linear) for linear in self._linears]
        if embedding is not None:
            vocab_size, hidden_size = embedding.vocab_size, embedding.hidden_size
            self._lookup = self.layout.vocabulary.reserve([EMBEDDING], vocab_size, [hidden_size])
            self._head = self.layout.vocabulary.reserve([LM_HEAD], hidden_size, [vocab_size])
            self.modules[EMBEDDING] = ModuleShape(
                vocab_size, hidden_size, embedding=True, is_base=embedding.is_table, base=of_table(embedding)
            )
            self.modules[LM_HEAD] = ModuleShape(
                hidden_size, vocab_size, is_base=embedding.is_head, base=of_head(embedding)
            )

    def _reserve(self, linear: Linear) -> Place:
        start = 0
        for name, size in linear.slices:
            self.modules[name] = ModuleShape(linear.in_features, size, base=of_slice(linear, start, size))
            start += size
        return self.layout.linears.reserve(
            [name for name, _ in linear.slices], linear.in_features, [size for _, size in linear.slices]
        )

    @property
    def row_bytes(self) -> int:
        """Device memory of one rank row over all linears; the vocabulary's rows, which are mostly unused, apart."""
        return self._rows.row_bytes

    def allocate(self, num_rows: int) -> None:
        """Memory for the rows, and a site for every linear, the embeddings and the head."""
        self._rows.allocate(num_rows)
        for linear, place in zip(self._linears, self._places, strict=True):
            linear.lora = _site(self._rows, place, linear.in_features, [size for _, size in linear.slices])
            linear.gains = self._gains.add(linear.slices)
        self._vocabulary.allocate(num_rows)
        if self._embedding is None:
            return
        vocab_size, hidden_size = self._embedding.vocab_size, self._embedding.hidden_size
        rows, (a, b, first) = self._vocabulary.rows, self._lookup
        self._embedding.lookup_lora = EmbeddingSite(
            rows[:, a : a + vocab_size], rows[:, b : b + hidden_size], *_live(self._vocabulary, first, 1)
        )
        self._embedding.head_lora = _site(self._vocabulary, self._head, hidden_size, [vocab_size])
        self._embedding.lookup_gains = self._gains.add([(EMBEDDING, hidden_size)])
        self._embedding.head_gains = self._gains.add([(LM_HEAD, vocab_size)])

    def pack(self, modules: Mapping[str, LoraWeights]) -> PackedModules:
        """An adapter's weights in the form in which they are copied. For any thread."""
        return self.layout.pack(modules)

    def write(self, allocation: Allocation, packed: PackedModules) -> None:
        """Fill an adapter's rows everywhere; clear them where it has no weights. For any thread, as long as nobody uses
        these rows."""
        self._rows.write(allocation, packed.linears)
        self._vocabulary.write(allocation, packed.vocabulary)
        self._gains.write(allocation, packed.gains)


def _site(arena: RowArena, place: Place, in_features: int, sizes: Sequence[int]) -> LoraSite:
    num_slices = len(sizes)
    a = arena.rows[:, place.a : place.a + num_slices * in_features].unflatten(1, (num_slices, in_features))
    b = arena.rows[:, place.b : place.b + sum(sizes)]
    return LoraSite(a, b, sizes, *_live(arena, place.first, num_slices))


def _live(arena: RowArena, first: int, count: int) -> tuple[Live, Tensor | None]:
    """Which rows have weights of `count` modules, for the host and for the device's kernels."""
    columns = slice(first, first + count)
    return arena.live[:, columns], None if arena.live_on_device is None else arena.live_on_device[:, columns]


def make_sites(
    linears: Sequence[Linear], hooks: AdapterHooks, dtype: torch.dtype, device: torch.device
) -> tuple[AdapterSites, AdapterSites]:
    """The target's sites and the drafter's, which has none when it has no projections; both are yet to be allocated."""
    return (
        AdapterSites(linears, hooks.embedding, dtype, device),
        AdapterSites(hooks.draft_linears, None, dtype, device),
    )
