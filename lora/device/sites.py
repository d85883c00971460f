"""Sites: all projections of one model to which adapters apply, with their rank rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ...kernels.experts import on_triton
from ...kernels.lora.groups import is_grouped
from ..files.tensor_keys import ModelModules, ModuleShape
from .arena import RowArena
from .dora import head_weight, slice_weight, table_weight
from .expert_rows import ExpertSites
from .layers import EmbeddingSite, Live, LoraSite
from .layout import LM_HEAD, SCORE, LoraWeights, ModelLayout, PackedModules, RowLayout
from .own_rows import OwnRowSites
from .pool import Allocation
from .vectors import VectorSites

if TYPE_CHECKING:
    from ...models.layers.embedding import Embedding
    from ...models.layers.linear import Linear
    from ...models.layers.score_head import ScoreHead


class AdapterHooks(NamedTuple):
    """Parts of an engine that adapters need, in addition to its target's linears."""

    embedding: Embedding | None = None
    """The target's embeddings and head; None: adapters on them are refused."""
    draft_method: str = ""
    """The method of speculation."""
    draft_linears: Sequence[Linear] = ()
    """The drafter's linears; none: draft weights are not read, unless there is a `target_draft`."""
    target_draft: Path | None = None
    """Folder of the LoRA through which the target drafts for itself; adapters' draft weights are for the target too."""
    on_gone: Callable[[bytes], None] = lambda digest: None
    """Called with the digest of an adapter without names and requests."""
    batch_invariant: bool = False
    """True when no bit of a token's delta may depend on the other tokens."""
    reader_process: bool = False
    """True when another process reads adapters, if possible."""
    num_readers: int = 1
    """Number of adapters that are read at once, each in a thread."""
    on_write: Callable[[Allocation, PackedModules], None] | None = None
    """Called before an adapter's rows are written, so that other ranks write theirs; None: there are none."""
    on_free: Callable[[Allocation], None] = lambda allocation: None
    """Called when an adapter's rows are free again."""
    score: ScoreHead | None = None
    """Score matrix of a classifier."""
    learnt_rank: int = 0
    """Rank of draft weights that are learnt while serving."""
    num_learners: int = 0
    """Number of such weights that are on the device at once."""


class RowSites(Protocol):
    """Sites of a model, or of one part of its weights."""

    @property
    def model(self) -> ModelModules:
        """Modules that weights may be for, and the layout of their rows."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of a rank row."""
        ...

    def allocate(self, num_rows: int) -> None:
        """Allocate the rows."""

    def write(self, allocation: Allocation, packed: PackedModules) -> None:
        """Write weights to their rows."""


class AdapterSites:
    """The sites of a target or of a drafter, whose rows are numbered alike."""

    def __init__(
        self,
        linears: Sequence[Linear],
        embedding: Embedding | None,
        dtype: torch.dtype,
        device: torch.device,
        score: ScoreHead | None = None,
    ) -> None:
        """Reserve the columns of all modules. `allocate` gives the model its sites."""
        shapes: dict[str, ModuleShape] = {}
        self._embedding, self._score = embedding, score
        pinned = device.type == "cuda"
        layout = ModelLayout(RowLayout(dtype, pinned=pinned), RowLayout(dtype, pinned=pinned))
        self.model = ModelModules(shapes, layout)
        """Modules that adapters may target, and the layout of their rows."""
        self._is_divided = embedding is not None and embedding.part is not None
        self._layout = ModelLayout(RowLayout(dtype), RowLayout(dtype)) if self._is_divided else layout
        """Layout of the rows that this process holds: several ranks have their share of each matrix."""
        self._rows, self._vocabulary = (RowArena(part, device) for part in self._layout)
        self._vectors = VectorSites(dtype, device)
        self._own_rows = None if embedding is None else OwnRowSites(embedding)
        if embedding is not None:
            vocab_size, hidden_size = embedding.vocab_size, embedding.hidden_size
            layout.vocabulary.reserve([embedding.names.table], vocab_size, [hidden_size])
            layout.vocabulary.reserve([LM_HEAD], hidden_size, [vocab_size])
            shapes[embedding.names.table] = ModuleShape(
                vocab_size, hidden_size, embedding=True, is_base=embedding.is_table, base=table_weight(embedding)
            )
            shapes[LM_HEAD] = ModuleShape(
                hidden_size,
                vocab_size,
                is_base=embedding.is_head,
                base=head_weight(embedding),
                tied=embedding.tied,
            )
            if score is not None:
                num_labels, hidden_size = score.shape
                shapes[SCORE] = ModuleShape(hidden_size, num_labels, is_base=score.is_weight)
            if embedding.part is not None:
                self._layout.vocabulary.reserve([embedding.names.table], vocab_size, [hidden_size])
                self._layout.vocabulary.reserve([LM_HEAD], hidden_size, [embedding.part.size])
        # The rows of all experts would fill a device's memory; on a CPU only written pages take memory.
        apart = _on_gpu(dtype, device)
        experts = [linear for linear in linears if linear.expert and apart]
        here = [linear for linear in experts if not linear.is_elsewhere]
        is_served = bool(experts) and _serves(here)
        self._num_columns = self._layout.vocabulary.width if experts else None
        self._experts = ExpertSites(here, device) if is_served else None
        reserved = [linear for linear in linears if is_served or not (linear.expert and apart)]
        self._elsewhere = {name for linear in reserved if linear.is_elsewhere for name, _ in linear.slices}
        self._linears = [linear for linear in reserved if not (linear.is_elsewhere or (linear.expert and apart))]
        for linear in reserved:
            _reserve(linear, self.model)
            if self._is_divided and not linear.is_elsewhere:
                names, sizes = zip(*linear.slices, strict=True)
                own = self._layout.vocabulary if linear.expert else self._layout.linears
                own.reserve(names, linear.in_features, sizes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one rank row without the vocabulary and without experts, which are mostly unused."""
        return self._rows.row_bytes

    def allocate(self, num_rows: int) -> None:
        """Allocate the rows, and give a site to every linear, the embeddings and the head."""
        self._rows.allocate(num_rows)
        self._vocabulary.allocate(num_rows, self._num_columns)
        for linear in self._linears:
            linear.lora = _site(self._vocabulary if linear.expert else self._rows, linear.in_features, linear.slices)
            linear.gains = None if linear.expert else self._vectors.add(linear.slices)
        if self._embedding is None:
            return
        hidden_size, part = self._embedding.hidden_size, self._embedding.part
        head = [(LM_HEAD, self._embedding.vocab_size if part is None else part.size)]
        table = self._embedding.names.table
        index = self._vocabulary.layout.modules[table]
        a, b = (self._vocabulary.rows[:, columns] for columns in self._vocabulary.layout.pieces[index])
        self._embedding.own_rows = self._own_rows
        if self._score is not None:
            self._score.own = self._own_rows
        self._embedding.lookup_lora = EmbeddingSite(a, b, *_live(self._vocabulary, index, 1))
        self._embedding.head_lora = _site(self._vocabulary, hidden_size, head)
        self._embedding.lookup_gains = self._vectors.add([(table, hidden_size)])
        self._embedding.head_gains = self._vectors.add(head)

    def write(self, allocation: Allocation, packed: PackedModules) -> None:
        """Write an adapter's rows at all sites, and clear them if it has no weights there. Thread-safe while no step
        uses these rows."""
        if self._is_divided:
            packed = self._share_of(packed)
        self._rows.write(allocation, packed.linears)
        self._vocabulary.write(allocation, packed.vocabulary)
        self._vectors.write(allocation, packed.gains, packed.biases)
        if self._own_rows is not None:
            self._own_rows.write(allocation, packed.own_rows)
        if self._experts is not None:
            self._experts.write(allocation, packed.vocabulary)

    def _share_of(self, packed: PackedModules) -> PackedModules:
        """Return this rank's share of an adapter. Own rows are not divided."""
        embedding = self._embedding
        assert embedding is not None
        assert embedding.part is not None
        parts = {name: linear.part for linear in self._linears for name, _ in linear.slices}
        found: dict[str, LoraWeights] = {}
        for name, (a, b, gain) in packed.modules().items():
            if name in self._elsewhere:
                continue
            part = parts.get(name)
            if part is not None:
                a, b = part.lora(name, a, b)
                gain = gain if gain is None else part.gain(name, gain)
            elif name == LM_HEAD:
                b = b[:, embedding.part.rows]
                gain = gain if gain is None else gain[embedding.part.rows]
            found[name] = LoraWeights(a, b, gain)
        biases = dict(packed.biases)
        for name, bias in biases.items():
            part = parts.get(name)
            if part is not None:
                biases[name] = part.bias(name, bias)
            elif name == LM_HEAD:
                biases[name] = bias[embedding.part.rows]
        share = self._layout.pack(found)
        return share._replace(biases=biases, own_rows=packed.own_rows, invocation=packed.invocation)


class TargetDraftSites:
    """The target's sites for weights with which it drafts: they lie in rows of their own (`Allocation.draft`), and not
    on embeddings and heads."""

    row_bytes = 0

    def __init__(self, target: AdapterSites) -> None:
        self._target = target
        shapes = {
            name: shape
            for name, shape in target.model.shapes.items()
            if not shape.embedding and name not in (LM_HEAD, SCORE)
        }
        self.model = ModelModules(shapes, target.model.layout)
        """The target's projections."""

    def allocate(self, num_rows: int) -> None:
        """The target has allocated them."""

    def write(self, allocation: Allocation, packed: PackedModules) -> None:
        """Write an adapter's draft weights, if it has any."""
        if allocation.draft is not None:
            self._target.write(allocation.draft, packed)


def _on_gpu(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cuda" or is_grouped(dtype, device)


def _serves(experts: Sequence[Linear]) -> bool:
    """Return whether the kernels that add adapters to experts serve all of these."""
    first, last = ([linear for linear in experts if linear.name.endswith(kind)] for kind in (".gate_up", ".down"))
    return all(on_triton([linear.packed for linear in linears]) for linears in (first, last))


def _reserve(linear: Linear, model: ModelModules) -> None:
    """Reserve a linear's columns, and record the shapes of its modules."""
    start, whole = 0, linear if linear.part is None else linear.part
    for name, size in whole.slices:
        base = None if linear.expert else slice_weight(linear, start, size, name)
        model.shapes[name] = ModuleShape(whole.in_features, size, base=base)
        start += size
    names, sizes = [name for name, _ in whole.slices], [size for _, size in whole.slices]
    layout = model.layout.vocabulary if linear.expert else model.layout.linears
    layout.reserve(names, whole.in_features, sizes)


def _site(arena: RowArena, in_features: int, modules: Sequence[tuple[str, int]]) -> LoraSite:
    """Return the site of a projection; `modules` has (name, rows) of each module merged into it."""
    first, sizes = arena.layout.modules[modules[0][0]], [size for _, size in modules]
    a, b = (columns.start for columns in arena.layout.pieces[first])
    return LoraSite(
        arena.rows[:, a : a + len(sizes) * in_features].unflatten(1, (len(sizes), in_features)),
        arena.rows[:, b : b + sum(sizes)],
        sizes,
        *_live(arena, first, len(sizes)),
    )


def _live(arena: RowArena, first: int, count: int) -> tuple[Live, Tensor | None]:
    """Return which rows have weights of `count` modules, for the host and for the device's kernels."""
    columns = slice(first, first + count)
    return arena.live[:, columns], None if arena.live_on_device is None else arena.live_on_device[:, columns]


def make_sites(
    linears: Sequence[Linear], hooks: AdapterHooks, dtype: torch.dtype, device: torch.device
) -> tuple[AdapterSites, RowSites]:
    """Make the sites of the target and of the drafter, which may have none. Both are still to be allocated."""
    target = AdapterSites(linears, hooks.embedding, dtype, device, hooks.score)
    if hooks.target_draft is not None:
        return target, TargetDraftSites(target)
    return target, AdapterSites(hooks.draft_linears, None, dtype, device)
