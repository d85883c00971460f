"""Shares of ranks in layers with a recurrent state: each has some heads, or some channels, and their states.

Heads of Mamba-2 that share B and C may be on several ranks, which then have the same B and C.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ...platform.core.errors import InvalidRequestError
from ..families.state_layers import DeltaNet, Mamba2, ShortConv, StateLayers
from ..ranges import Range


class StateShare(NamedTuple):
    """Share of a rank in each layer with a state; ranges are of the whole layer."""

    linears: Mapping[str, Sequence[Range]]
    """Rows of each input projection, by the last part of its name: parts in order."""
    outputs: Mapping[str, Range]
    """Inputs of each output projection."""
    channels: Sequence[Range]
    """Channels of the convolution: parts in order."""
    vectors: Mapping[str, Range]
    """Elements of vectors, by the last part of their names."""
    num_groups: int = 1
    """Groups of heads that Mamba-2 normalises together."""
    group_sum: Callable[[Tensor], Tensor] | None = None
    """Function that adds a group's sums [T, 1, 1] of all ranks that have some of its heads; None: a group's heads are
    on one rank."""


@runtime_checkable
class SharedStates(Protocol):
    """Layer with states that ranks divide."""

    def divide(self, share: StateShare) -> None:
        """Take this rank's share, before anything is loaded."""


def rank_states(states: StateLayers, num_ranks: int, param: str) -> StateLayers:
    """Layers of one rank.

    Raises:
        InvalidRequestError: `num_ranks` does not divide the heads or channels; it names `param`.
    """
    if isinstance(states, ShortConv):
        sizes = {"hidden_size": states.channels}
    elif isinstance(states, DeltaNet):
        sizes = {"linear_num_key_heads": states.key_heads, "linear_num_value_heads": states.value_heads}
    else:
        sizes = {"heads of Mamba-2": states.heads}
    for name, size in sizes.items():
        if size % num_ranks:
            raise InvalidRequestError(f"{param} {num_ranks} does not divide {name} {size}", param=param)
    if isinstance(states, ShortConv):
        return dataclasses.replace(states, channels=states.channels // num_ranks)
    if isinstance(states, DeltaNet):
        keys, values = states.key_heads // num_ranks, states.value_heads // num_ranks
        return dataclasses.replace(states, key_heads=keys, value_heads=values)
    if states.groups % num_ranks and num_ranks % states.groups:
        raise InvalidRequestError(
            f"{param} {num_ranks} neither divides the groups of Mamba-2 {states.groups} nor is a multiple of them",
            param=param,
        )
    groups = max(1, states.groups // num_ranks)
    return dataclasses.replace(states, heads=states.heads // num_ranks, groups=groups)


def state_share(states: StateLayers, rank: int, size: int, gather: Callable[[Tensor], Tensor]) -> StateShare:
    """Share of a rank among `size` ranks in the whole `states`. `gather` puts the tensors of all ranks together."""
    if isinstance(states, ShortConv):
        part = _own(states.channels, rank, size)
        return StateShare({"conv_in": [part] * 3}, {"conv_out": part}, [part], {})
    if isinstance(states, DeltaNet):
        return _delta_share(states, rank, size)
    return _mamba_share(states, rank, size, gather)


def _own(total: int, rank: int, size: int, rows: int = 1) -> Range:
    return Range(total, rank * total // size, total // size, rows)


def _delta_share(states: DeltaNet, rank: int, size: int) -> StateShare:
    keys, heads = (_own(total, rank, size) for total in (states.key_heads, states.value_heads))
    key, value = keys.sized(states.key_dim), heads.sized(states.value_dim)
    vectors = {"A_log": heads, "dt_bias": heads.sized(states.key_dim) if states.by_element else heads}
    inputs = [key, key, value, value, heads, heads]
    if states.merged:
        shared = states.value_heads // states.key_heads
        inputs = [keys.sized(2 * (states.key_dim + shared * states.value_dim)), keys.sized(2 * shared)]
    linears: dict[str, Sequence[Range]] = {"delta_in": inputs}
    if states.by_element:
        whole = Range(1, 0, 1, states.key_dim)  # each rank has all inputs of the second products
        linears["delta_in"] = [key, key, value, whole, heads, whole]
        linears |= {"gate_b": [value], "decay_b": [heads.sized(states.key_dim)]}
    return StateShare(linears, {"delta_out": value}, [key, key, value], vectors)


def _mamba_share(states: Mamba2, rank: int, size: int, gather: Callable[[Tensor], Tensor]) -> StateShare:
    heads = _own(states.heads, rank, size)
    inner = heads.sized(states.head_dim)
    first, count = rank * states.groups // size, max(1, states.groups // size)
    group = Range(states.groups, first, count, states.state_dim)
    group_sum, copies = None, size // states.groups
    if copies > 1:

        def group_sum(sums: Tensor) -> Tensor:
            return gather(sums)[first * copies : (first + 1) * copies].sum(0)

    return StateShare(
        linears={"mamba_in": [inner, inner, group, group, heads]},
        outputs={"mamba_out": inner},
        channels=[inner, group, group],
        vectors={**dict.fromkeys(("A_log", "D", "dt_bias"), heads), "norm.weight": inner},
        num_groups=states.groups,
        group_sum=group_sum,
    )
