"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): N ranks compute a decoder, each a share of every layer.

    qkv, gate_up   column parallel: a rank has the output rows of its heads, or of its part of the inner size (GPT: up)
    o, down        row parallel: a rank has the matching input columns; the ranks' results are summed
    experts        a rank has some experts as a whole, and all ranks the router; the ranks' results are summed
    embeddings     a rank has a range of tokens; embeddings are summed, logits put side by side
    latents        every rank has all (DeepSeek-V2); q_b and kv_b are column parallel, by heads
    states         a rank has the states of its heads, or of its channels (`states/shares.py`)
    wide norms     over all heads (OLMo 2): a rank has every head's queries and keys while it normalises its own

With fewer KV heads than ranks, several ranks have the same one. The first rank adds what is added once: the
bias of a row parallel layer and the residual stream. An adapter's B is divided as the rows of a column parallel layer,
its A as the columns of a row parallel one, so each delta is that of one process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.quantized_linear import QuantizedWeight
from ..platform.core.errors import InvalidRequestError
from .config import DecoderConfig
from .decoder import Decoder
from .decoder_layer import DecoderLayer, GeneralLayer
from .families.varied_layers import VariedLayers
from .gpt_layer import GPTLayer
from .layers.experts import SparseMlp
from .layers.mlp import GatedMlp
from .layers.weights import Weight
from .ranges import Range, Rows, rows_of_tensors
from .states.shares import SharedStates, rank_states, state_share
from .varied_layer import VariedLayer

_PARAM = "tensor_parallel_size"


class Ranks(Protocol):
    """Processes that compute one model together, as one of them sees it."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0 on."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Sum of every rank's x, in place of it."""

    def gather(self, x: Tensor) -> Tensor:
        """[N, *x.shape]: every rank's x."""


class LinearPart:
    """Share of one rank in a linear layer."""

    def __init__(
        self,
        ranks: Ranks,
        whole: Sequence[tuple[str, int]],
        in_features: int,
        *,
        rows: Mapping[str, Sequence[slice]] | None = None,
        columns: slice | None = None,
        summed: bool = True,
    ) -> None:
        """Describe a share.

        Args:
            ranks: The ranks.
            whole: (module, rows) of the undivided layer.
            in_features: Its input size.
            rows: By module the rows that this rank has; None: all.
            columns: The columns that this rank has; None: all.
            summed: False if the caller sums what the ranks computed of `columns`.
        """
        self.slices = list(whole)
        """(module, rows) of the whole layer."""
        self.in_features = in_features
        """Input size of the whole layer."""
        self._ranks = ranks
        self._rows = rows
        self._columns = columns
        self._summed = summed
        # Inputs of the whole layer that this rank's columns belong to, if the weight has them in another order.
        self._order: Tensor | None = None

    def weight(self, module: str, weight: Weight) -> Weight:
        """This rank's part of a module's weight [out, in].

        Raises:
            InvalidRequestError: it is quantised, and cannot be divided between inputs.
        """
        if isinstance(weight, Tensor):
            return self._chosen(module, weight, 0) if self._columns is None else weight[:, self._columns].contiguous()
        if self._columns is None:
            assert self._rows is not None
            return QuantizedWeight.cat([weight.rows(part.start, part.stop) for part in self._rows[module]])
        if weight.order is not None:
            self._order, weight = weight.order[self._columns], dataclasses.replace(weight, order=None)
        try:
            return weight.columns(self._columns.start, self._columns.stop)
        except ValueError as error:
            raise InvalidRequestError(
                f"{_PARAM} {self._ranks.size} does not divide the quantized weight of {module}: {error}", param=_PARAM
            ) from error

    def bias(self, module: str, tensor: Tensor) -> Tensor:
        """This rank's part of a module's bias [out]."""
        if self._columns is None:
            return self._chosen(module, tensor, 0)
        return tensor if self._ranks.rank == 0 else torch.zeros_like(tensor)

    def lora(self, module: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of an adapter's A [r, in] and B [r, out]."""
        if self._columns is None:
            return a, self._chosen(module, b, 1)
        return a[:, self._columns if self._order is None else self._order.to(a.device)], b

    def gain(self, module: str, gain: Tensor) -> Tensor:
        """This rank's part of an adapter's gains [out]: a row parallel layer's are factors of what each rank adds."""
        return self._chosen(module, gain, 0) if self._columns is None else gain

    def inputs(self, x: Tensor) -> Tensor:
        """Inputs [T, in] of this rank's weight, from this rank's x: groups of inputs that lie apart (`desc_act`) are of
        all ranks' x."""
        if self._order is None:
            return x
        self._order = self._order.to(x.device)  # a copy the first time
        whole = self._ranks.gather(x).transpose(0, 1).reshape(len(x), self.in_features)
        return whole.index_select(1, self._order)

    def residual(self, residual: Tensor | None) -> Tensor | None:
        """`residual` on the rank that adds it; None on the others."""
        return residual if self._columns is None or self._ranks.rank == 0 else None

    def total(self, y: Tensor) -> Tensor:
        """The layer's result from this rank's."""
        return self._ranks.sum(y) if self._columns is not None and self._summed else y

    def _chosen(self, module: str, tensor: Tensor, dim: int) -> Tensor:
        assert self._rows is not None
        parts = [tensor.narrow(dim, part.start, part.stop - part.start) for part in self._rows[module]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class ExpertsPart:
    """Share of one rank in a layer of experts."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def residual(self, residual: Tensor | None) -> Tensor | None:
        """`residual` on the rank that adds it; None on the others."""
        return residual if self._ranks.rank == 0 else None

    def total(self, y: Tensor) -> Tensor:
        """The layer's result from this rank's."""
        return self._ranks.sum(y)


class NormPart:
    """Share of one rank in a norm over all heads, of queries or of keys."""

    def __init__(self, ranks: Ranks, heads: Range) -> None:
        """`heads`: those of this rank; several ranks may have the same ones."""
        self.size = heads.length
        """Elements of all ranks."""
        self._ranks = ranks
        self._heads = heads

    def whole(self, x: Tensor) -> Tensor:
        """Elements [T, size] of all ranks, from this rank's."""
        found = self._ranks.gather(x)  # [N, T, own]
        copies = self._ranks.size * self._heads.count // self._heads.total
        return found[::copies].transpose(0, 1).reshape(len(x), self.size)

    def own(self, x: Tensor) -> Tensor:
        """This rank's elements of x [T, size]."""
        return x[:, self._heads.rows(0)]


class VocabularyPart:
    """Share of one rank in the token embeddings and the head."""

    def __init__(self, ranks: Ranks, vocab_size: int) -> None:
        self._ranks = ranks
        self._vocab_size = vocab_size
        self._most = -(-vocab_size // ranks.size)
        self.rows = slice(*(min(rank * self._most, vocab_size) for rank in (ranks.rank, ranks.rank + 1)))
        """Tokens of this rank."""

    @property
    def size(self) -> int:
        """Number of this rank's tokens."""
        return int(self.rows.stop - self.rows.start)

    def lookup(self, rows: Callable[[Tensor], Tensor], input_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of token ids [T], from this rank's `rows` of the table and the others'."""
        places = input_ids - self.rows.start
        inside = (places >= 0) & (places < self.size)
        return self._ranks.sum(rows(places.clamp(0, self.size - 1)).masked_fill_(~inside[:, None], 0))

    def join(self, logits: Tensor) -> Tensor:
        """Logits [R, vocab] from this rank's."""
        parts = self._ranks.gather(F.pad(logits, (0, self._most - self.size)))  # [N, R, most]
        return parts.transpose(0, 1).reshape(len(logits), -1)[:, : self._vocab_size].contiguous()


def rank_config(config: object, num_ranks: int) -> DecoderConfig:
    """Config of the decoder that each rank has: its heads and its part of the inner size.

    Raises:
        InvalidRequestError: the model cannot be divided so, or is not served divided; `param` is the option.
    """
    if not isinstance(config, DecoderConfig):
        raise InvalidRequestError(
            f"{_PARAM} {num_ranks}: a model that transformers' code computes is not divided", param=_PARAM
        )
    experts, varied = config.experts, config.varied
    sizes = [("num_attention_heads", config.num_heads)]
    if experts is None or len(experts.layers) < config.num_layers:
        sizes += [
            ("intermediate_size", size) for size in (config.intermediate_size, *(varied.inner_sizes if varied else ()))
        ]
    if experts is not None and experts.shared_size is not None:
        sizes.append(("shared_expert_intermediate_size", experts.shared_size))
    for name, size in sizes:
        if size % num_ranks:
            raise InvalidRequestError(f"{_PARAM} {num_ranks} does not divide {name} {size}", param=_PARAM)
    for heads in (config.num_kv_heads, *(varied.kv_heads if varied else ())):
        if heads % num_ranks and num_ranks % heads:
            raise InvalidRequestError(
                f"{_PARAM} {num_ranks} neither divides num_key_value_heads {heads} nor is a multiple of it",
                param=_PARAM,
            )
    if -(-config.vocab_size // num_ranks) * (num_ranks - 1) >= config.vocab_size:
        raise InvalidRequestError(f"{_PARAM} {num_ranks} is too large for vocab_size {config.vocab_size}", param=_PARAM)
    for some in (experts, None if varied is None else varied.experts):
        if some is not None and some.num_experts < num_ranks:
            raise InvalidRequestError(f"{_PARAM} {num_ranks} exceeds num_experts {some.num_experts}", param=_PARAM)
    if experts is not None:
        shared = None if experts.shared_size is None else experts.shared_size // num_ranks
        experts = dataclasses.replace(experts, shared_size=shared)
    return dataclasses.replace(
        config,
        experts=experts,
        states=None if config.states is None else rank_states(config.states, num_ranks, _PARAM),
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=max(1, config.num_kv_heads // num_ranks),
        varied=None if varied is None else _rank_varied(varied, num_ranks),
        intermediate_size=config.intermediate_size // num_ranks,
    )


def _rank_varied(varied: VariedLayers, num_ranks: int) -> VariedLayers:
    """Sizes of each layer of one rank."""
    return dataclasses.replace(
        varied,
        kv_heads=tuple(max(1, heads // num_ranks) for heads in varied.kv_heads),
        inner_sizes=tuple(size // num_ranks for size in varied.inner_sizes),
    )


def divided_decoder(config: DecoderConfig, ranks: Ranks, device: torch.device | str) -> Decoder:
    """This rank's decoder, without weights; its slots take the whole model's tensors.

    Raises:
        InvalidRequestError: see `rank_config`.
    """
    model = Decoder(rank_config(config, ranks.size), device)
    model.whole_config = config
    for index, layer in enumerate(model.layers):
        _divide(layer, config.of_layer(index), ranks)
    model.embedding.part = VocabularyPart(ranks, config.vocab_size)
    return model


def _divide(layer: DecoderLayer | GPTLayer, config: DecoderConfig, ranks: Ranks) -> None:
    """Give the linear layers of `layer` their shares of those in the whole model of `config`."""
    rank, heads, kv_heads = ranks.rank, config.num_heads // ranks.size, config.num_kv_heads
    num_kv, first_kv = max(1, kv_heads // ranks.size), rank * kv_heads // ranks.size
    mlp, hidden = config.intermediate_size, config.hidden_size
    if isinstance(layer.mlp, SparseMlp):
        assert config.experts is not None
        mlp = config.experts.shared_size or 0
        layer.mlp.divide(ExpertsPart(ranks), _held(config.experts.num_experts, ranks))
    if isinstance(layer.mlp, GatedMlp):
        layer.mlp.gather = ranks.gather
    if isinstance(layer, VariedLayer) and layer.experts is not None:
        layer.experts.divide(ExpertsPart(ranks), _held(layer.experts.num_experts, ranks))

    # Rows of the parts that each layer merges: their number, and those of this rank in units of `size`.
    def of_heads(size: int) -> Range:
        return Range(config.num_heads, rank * heads, heads, size)

    key = Range(kv_heads, first_kv, num_kv, config.head_dim)
    gate = Range(ranks.size, rank, 1, mlp // ranks.size)
    query = of_heads(2 * config.head_dim if config.gated_attention else config.head_dim)
    parts: dict[str, Sequence[Range]] = {"qkv": [query, key, key], "gate_up": [gate, gate], "up": [gate]}
    columns = {"o": of_heads(config.head_dim), "down": gate}
    if (latent := config.latent) is not None:  # `key` is the one vector of a token, of which each rank has a copy
        parts |= {"qkv": [of_heads(latent.query_dim), key], "q_b": [of_heads(latent.query_dim)]}
        parts["kv_b"] = [of_heads(latent.plain_dim + latent.value_dim)]
        columns["o"] = of_heads(latent.value_dim)
        if latent.query_rank is not None:
            del parts["qkv"]  # whole on each rank
    if config.states is not None:
        share = state_share(config.states, rank, ranks.size, ranks.gather)
        parts |= share.linears
        columns |= share.outputs
        if isinstance(layer, SharedStates):
            layer.divide(share)
    if isinstance(layer, GeneralLayer):
        layer.sink_part = config.num_heads, slice(rank * heads, (rank + 1) * heads)
        for (norm, _), of_norm in zip(layer.wide_norms, (of_heads(config.head_dim), key), strict=False):
            norm.part = NormPart(ranks, of_norm)
    for linear in layer.linears():
        kind, names = linear.name.rsplit(".", 1)[1], [name for name, _ in linear.slices]
        if linear.expert or kind not in (*parts, *columns):
            continue  # whole, on one rank or on each
        if kind in columns:
            chosen = columns[kind]
            whole = [(name, hidden) for name in names]
            summed = ".shared." not in linear.name  # else with the experts
            linear.part = LinearPart(ranks, whole, chosen.length, columns=chosen.rows(0), summed=summed)
            continue
        own = list(rows_of_tensors(parts[kind], [rows for _, rows in linear.slices]))
        if kind == "qkv" and config.block is not None and config.block.by_head:
            own = [Rows(own[0].total, _rows_by_head(config, of_heads(config.head_dim), key))]
        whole = [(name, rows.total) for name, rows in zip(names, own, strict=True)]
        rows_of = {name: rows.slices for name, rows in zip(names, own, strict=True)}
        linear.part = LinearPart(ranks, whole, linear.in_features, rows=rows_of)


def _held(num_experts: int, ranks: Ranks) -> range:
    """Experts of this rank."""
    return range(ranks.rank * num_experts // ranks.size, (ranks.rank + 1) * num_experts // ranks.size)


def _rows_by_head(config: DecoderConfig, query: Range, key: Range) -> list[slice]:
    """Rows of a rank's heads in a projection that has, for each KV head, its queries, its key and its value."""
    dim, group = config.head_dim, config.num_heads // config.num_kv_heads
    if query.count >= group:
        return [Range(key.total, key.first, key.count, (group + 2) * dim).rows(0)]
    start = key.first * (group + 2)  # in heads; the rank has some of this group's queries
    heads = [(query.first % group, query.count), (group, 1), (group + 1, 1)]
    return [slice((start + first) * dim, (start + first + count) * dim) for first, count in heads]
