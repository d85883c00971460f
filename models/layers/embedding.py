"""Token embeddings, and the head that turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.linear import Packed, pack
from ...kernels.paged_attention import soft_cap
from ...kernels.quantized_linear import QuantizedWeight, RowSource, pack_table
from .linear import GainSite, LoraSite, pack_weights
from .weights import Weight, WeightSlot, whole_weight

if TYPE_CHECKING:
    from ..parallel import VocabularyPart

EMBEDDING = "model.embed_tokens"
"""Usual name of the table's module."""
LM_HEAD = "lm_head.weight"
"""Usual name of the head's tensor."""

# Rows of the table that are summed at once.
_ROWS = 4096
# Rows of the head that `is_head` recovers at once.
_PROBES = 64
# Largest loss of a value that a checkpoint stores in float16: half of float16's smallest step.
_SAME = 2.0**-25


class EmbeddingSite(Protocol):
    """Rank rows of the adapters for the token embeddings."""

    def add(self, y: Tensor, input_ids: Tensor, adapters: Any) -> None:
        """y [T, H] += each token's adapter looked up at input_ids [T]; y is mutated."""


class OwnRowSite(Protocol):
    """Rows of the embeddings and of the head that adapters bring themselves."""

    def __len__(self) -> int:
        """Return the number of adapters with such rows."""
        ...

    def lookup(self, y: Tensor, input_ids: Tensor, adapters: Any) -> None:
        """Replace y [T, H] of each token whose adapter has a row for it; y is mutated."""

    def logits(self, y: Tensor, hidden: Tensor, adapters: Any) -> Tensor:
        """Logits of the adapters' own rows in place of y [R, vocab], or after it: an adapter may have more tokens."""
        ...

    def mask(self, y: Tensor, adapters: Any) -> None:
        """Set logits y [R, W] to -inf for tokens that a row's adapter does not have."""


class VocabularyNames(NamedTuple):
    """Names of the modules in the checkpoint."""

    table: str = EMBEDDING
    head: str = LM_HEAD.removesuffix(".weight")
    head_bias: bool = False
    """True: the head has a bias."""


USUAL_NAMES = VocabularyNames()


class EmbeddingScales(NamedTuple):
    """Factors of token embeddings and logits."""

    embedding: float = 1.0
    logits: float = 1.0
    logit_cap: float | None = None
    """Cap c: a logit x, times its factor, becomes c · tanh(x / c)."""

    @property
    def changes_logits(self) -> bool:
        """False: the logits are the head's products."""
        return self.logits != 1.0 or self.logit_cap is not None


UNSCALED = EmbeddingScales()


class Embedding:
    """Token embeddings and the LM head. A tied head has its own packed copy: a lookup needs plain rows.

    Adapters on one of the two leave the other alone, tied or not, as in PEFT.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: bool,
        scales: EmbeddingScales = UNSCALED,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
        names: VocabularyNames = USUAL_NAMES,
    ) -> None:
        self.names = names
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.lookup_lora: EmbeddingSite | None = None
        """Site of adapters, set by the adapter manager, as is `head_lora`."""
        self.head_lora: LoraSite | None = None
        self.own_rows: OwnRowSite | None = None
        self.lookup_gains: GainSite | None = None
        self.head_gains: GainSite | None = None
        self.head_squares: Tensor | None = None
        """[vocab] float32, once loaded: squared norm of each row of the head's weight."""
        self._shape = (vocab_size, hidden_size)
        self.tied = tied
        """True when the head's weight is the table."""
        self.quantize: Callable[[Tensor], QuantizedWeight] | None = None
        """Function that quantises table and head when they are loaded, set before loading."""
        self.single_copy = False
        """True: no copy of a tied table is kept next to the head if that can be avoided, though lookups are slower;
        set before it is loaded."""
        self.part: VocabularyPart | None = None
        """Share of this process, set before it is loaded; None: the whole."""
        self.whole: dict[str, Callable[[], Tensor]] = {}
        """Functions that read the whole table and head of a divided one again, on the CPU, by their modules' names."""
        self.num_bytes = 0
        """Bytes of table and head, once loaded."""
        self._scales = scales
        self._dtype = dtype
        self.device = device
        self._batch_invariant = batch_invariant
        self._table: Tensor | RowSource | None = None
        self._parts: dict[str, Weight] = {}
        self._bias: Tensor | None = None  # of the whole head
        self._head: Packed | None = None

    def lookup(self, input_ids: Tensor, adapters: Any = None) -> Tensor:
        """Hidden states [T, H] of token ids [T]. `adapters` is that of `ForwardBatch` for these tokens."""
        own = self.own_rows if self.own_rows and adapters is not None else None
        known = input_ids if own is None else input_ids.clamp(max=self.vocab_size - 1)  # an adapter may have more
        embedded = self._look_up(known)
        if self.lookup_lora is not None and adapters is not None:
            if own is not None:
                own.lookup(embedded, input_ids, adapters)
            if self.lookup_gains is not None:
                self.lookup_gains.scale(embedded, adapters)
            self.lookup_lora.add(embedded, known, adapters)
        return embedded if self._scales.embedding == 1.0 else embedded.mul_(self._scales.embedding)

    def logits(self, hidden: Tensor, adapters: Any = None, out: Tensor | None = None) -> Tensor:
        """Logits [R, vocab] float32 of hidden [R, H], in `out` if given. `adapters` belongs to these R rows; with an
        adapter that has more tokens there are more columns."""
        own = self.own_rows if self.own_rows and adapters is not None else None
        logits = self._head(hidden)  # type: ignore[misc]
        if self.head_lora is not None and adapters is not None:
            if self.head_gains is not None:
                self.head_gains.scale(logits, adapters, self._held_bias)
            self.head_lora.add(logits, hidden, adapters)
        if self.part is not None:
            logits = self.part.join(logits.float())
        if own is not None:
            logits = own.logits(logits, hidden, adapters)
        out = logits.float() if out is None else out.copy_(logits)
        if self._scales.changes_logits:
            self._scaled(out)
        self.mask(out, adapters)
        return out

    def mask(self, logits: Tensor, adapters: Any) -> None:
        """Set logits [R, W] to -inf for tokens that a row's adapter does not have. `logits` does this already; needed
        once more if the model scales them afterwards."""
        if self.own_rows and adapters is not None:
            self.own_rows.mask(logits, adapters)

    def _scaled(self, logits: Tensor) -> Tensor:
        """Logits with their factor and cap, in place."""
        if self._scales.logits != 1.0:
            logits.mul_(self._scales.logits)
        cap = self._scales.logit_cap
        return logits if cap is None else soft_cap(logits, cap)

    @property
    def head(self) -> Packed | None:
        """The head's product; None before it is loaded."""
        return self._head

    @property
    def head_bias(self) -> Tensor | None:
        """Bias [vocab] of the head, if it has one."""
        return self._bias

    @property
    def _held_bias(self) -> Tensor | None:
        """Bias of the logits that this process computes."""
        return self._bias if self._bias is None or self.part is None else self._bias[self.part.rows].contiguous()

    def pack_head(self, weight: Tensor, index: Tensor | None, bias: Tensor | None = None) -> Packed:
        """Pack rows [n, H] of an adapter's head, as the head itself is packed, for the tokens `index` or 0 to n - 1.
        `bias`: theirs; None for the head's."""
        if bias is not None:
            bias = bias.to(self.device, self._dtype)
        elif self._bias is not None:
            index = torch.arange(len(weight)) if index is None else index
            added = max(0, int(index.max()) + 1 - self.vocab_size)
            bias = F.pad(self._bias, (0, added))[index.to(self.device)]
        return pack(weight.to(self.device, self._dtype), bias, batch_invariant=self._batch_invariant)

    def _look_up(self, input_ids: Tensor) -> Tensor:
        return self._held_rows(input_ids) if self.part is None else self.part.lookup(self._held_rows, input_ids)

    def _held_rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] of the table that this process holds."""
        table = self._table
        if isinstance(table, Tensor):
            return F.embedding(ids, table)
        return table.rows(ids)  # type: ignore[union-attr]  # the loader left no slot empty

    def _table_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Some rows of the table [n, H] at a time."""
        for ids in torch.arange(self.vocab_size, device=self.device).split(_ROWS):
            yield slice(int(ids[0]), int(ids[-1]) + 1), self._look_up(ids)

    def table_squares(self) -> Tensor:
        """Squared norm of each column of the table: [H] float32."""
        squares = torch.zeros(self.hidden_size, dtype=torch.float32, device=self.device)
        for _, rows in self._table_rows():
            squares += torch.linalg.vector_norm(rows, dim=0, dtype=torch.float32).square_()
        return squares

    def project_table(self, x: Tensor) -> Tensor:
        """Product of x [n, vocab] and the table: [n, H]."""
        if isinstance(self._table, Tensor):
            return x @ self._table
        return sum(x[:, ids].float() @ rows.float() for ids, rows in self._table_rows()).to(x.dtype)  # type: ignore[union-attr]

    def project_head(self, x: Tensor) -> Tensor:
        """Product of x [n, H] and the head's weight: [n, vocab] in the model's dtype, without adapters."""
        return self._head.without_bias(x)  # type: ignore[union-attr]

    def is_table(self, tensor: Tensor) -> bool:
        """True when `tensor` [vocab, H] is the table, rounded as that is."""
        if tensor.shape != self._shape:
            return False
        if self.part is not None:
            return self._same_rows(tensor, self.whole[self.names.table]())
        return all(self._same(self._rounded(tensor[ids]).to(self.device), rows) for ids, rows in self._table_rows())

    @torch.inference_mode()
    def is_head(self, tensor: Tensor) -> bool:
        """True when `tensor` [vocab, H] is the head's weight, rounded as that is."""
        if self.tied or tensor.shape != self._shape:
            return self.tied and self.is_table(tensor)
        if self.part is not None:
            return self._same_rows(tensor, self.whole[self.names.head]())
        assert self._head is not None
        weight = tensor if self.quantize is None else self.quantize(tensor)
        for start in range(0, self.hidden_size, _PROBES):  # packed, it shows its columns only in products
            end = min(start + _PROBES, self.hidden_size)
            probes = torch.zeros(end - start, self.hidden_size, dtype=self._dtype, device=self.device)
            probes[:, start:end].fill_diagonal_(1)
            columns = weight[:, start:end] if isinstance(weight, Tensor) else weight.columns(start, end).dequantized()
            if not self._same(columns.t().to(self.device, self._dtype), self._head.without_bias(probes)):
                return False
        return True

    def _rounded(self, tensor: Tensor) -> Tensor:
        return whole_weight(lambda: tensor, self.quantize, self._dtype)

    def _same(self, a: Tensor, b: Tensor) -> bool:
        """True when two weights in the model's dtype are the same; quantised ones are rounded to it in several ways."""
        rtol = 0.0 if self.quantize is None else torch.finfo(self._dtype).eps
        return torch.allclose(a, b, rtol=rtol, atol=_SAME)

    def _same_rows(self, a: Tensor, b: Tensor) -> bool:
        """`_same` of `a`, rounded, and `b`, some rows at a time."""
        pairs = zip(a.split(_ROWS), b.split(_ROWS), strict=True)
        return all(self._same(self._rounded(mine), theirs) for mine, theirs in pairs)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots by the checkpoint's tensor names; a tied head has none."""
        scale = self._shape[1] ** -0.5
        slots = {f"{self.names.table}.weight": WeightSlot(self._shape, self._load_table, scale, self._load_table)}
        if not self.tied:
            slots[f"{self.names.head}.weight"] = WeightSlot(self._shape, self._load_head, scale, self._load_head)
        if self.part is not None:
            slots = {name: replace(slot, remember=partial(self._remember, name)) for name, slot in slots.items()}
        if self.names.head_bias:
            slots[f"{self.names.head}.bias"] = WeightSlot(self._shape[:1], self._load_bias, scale)
        return slots

    def _remember(self, name: str, read: Callable[[], Weight]) -> None:
        self.whole[name.removesuffix(".weight")] = partial(whole_weight, read, self.quantize, self._dtype)

    def _load_table(self, weight: Weight) -> None:
        self._set_table(self._form(weight))

    def _load_head(self, weight: Weight) -> None:
        self._set_head("weight", self._form(weight))

    def _load_bias(self, tensor: Tensor) -> None:
        self._set_head("bias", tensor.to(self.device, self._dtype, copy=True))

    def _form(self, weight: Weight) -> Weight:
        """A weight as it is held, maybe in the memory of the argument."""
        rows = slice(0, self.vocab_size) if self.part is None else self.part.rows
        if isinstance(weight, QuantizedWeight):
            return weight.rows(rows.start, rows.stop).to(self.device)
        if self.quantize is not None:
            return self.quantize(weight[rows].to(self.device))
        return weight[rows].to(self.device, self._dtype).contiguous()

    def _set_table(self, weight: Weight) -> None:
        """Keep rows for lookups; of a tied head the packed rows serve if they can be read."""
        if self.tied:
            self._set_head("weight", weight)
        is_plain = isinstance(weight, Tensor)
        if self.tied and isinstance(self._head, RowSource) and (self.single_copy or not is_plain):
            self._table = self._head
        elif isinstance(weight, Tensor):
            self._table = weight.clone()
            self.num_bytes += weight.nbytes
        else:
            self._table = table = pack_table(weight, self._dtype)
            self.num_bytes += table.num_bytes

    def _set_head(self, part: str, tensor: Weight) -> None:
        self._parts[part] = tensor
        if len(self._parts) == 1 + self.names.head_bias:
            weight, bias = self._parts["weight"], self._parts.get("bias")
            self._parts = {}
            self._bias = bias if isinstance(bias, Tensor) else None
            self._head, self.head_squares = pack_weights([weight], self._held_bias, self._dtype, self._batch_invariant)
            self.num_bytes += self._head.num_bytes
