"""Placement of a small decoder's weights in a large one that computes the same function. Used by `inflate.py`.

Every vector of the large model holds the small model's vector in known places; the rest is zero or never read:

    residual stream   [x, 0]: whatever writes to it (embedding, o_proj, down_proj) writes zeros to the new part
    RMSNorm           over [x, 0] of H' instead of H entries: weight * sqrt(H / H') and eps * H / H' give norm(x) again
    heads, MLP        new ones compute on random weights; o_proj's and down_proj's columns for them are zero
    queries, keys     if they are normalised too (Qwen3), with the same eps: scaled by sqrt(H / H')
    layers            new ones compute on random weights; o_proj and down_proj are zero, so the residual passes

Weights that need not be zero are random, as large as the weights next to them. So no work can be skipped, and no number
is denormal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


class GrowthError(ValueError):
    """Error of a size or a tensor that cannot be grown; the message is for the user."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like decoder, or of a head's layer."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Shape:
        """Read the sizes from a config.json.

        Raises:
            GrowthError: a size is missing, or is no size.
        """
        needed = ("num_attention_heads", "hidden_size", "num_hidden_layers", "intermediate_size")
        for name in (*needed, "num_key_value_heads", "head_dim"):
            value = config.get(name)
            if (value is not None or name in needed) and (type(value) is not int or value < 1):
                raise GrowthError(f"config.json: {name} must be a positive integer, got {value!r}")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            hidden=hidden,
            layers=config["num_hidden_layers"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
        )

    def scaled(self, old: Shape, new: Shape) -> Shape:
        """This shape, grown by the factors from `old` to `new`."""

        def grown(name: str) -> int:
            return -(-getattr(self, name) * getattr(new, name) // getattr(old, name))

        sizes = {name: grown(name) for name in ("hidden", "layers", "intermediate", "kv_heads")}
        group = max(-(-grown("heads") // sizes["kv_heads"]), self.heads // self.kv_heads)
        return replace(self, **sizes, heads=group * sizes["kv_heads"])

    def fields(self) -> dict[str, int]:
        """Fields of a config.json."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }


class Axis(NamedTuple):
    """One axis of a weight."""

    places: Tensor
    """Places of the old entries: [old size] int64."""
    size: int
    zero: bool
    """True when the new entries are zero; else they are random."""


def same(size: int) -> Axis:
    """An axis that does not grow."""
    return Axis(torch.arange(size), size, zero=False)


def joined(axis: Axis, count: int) -> Axis:
    """Axis that consists of `count` such axes, one after the other."""
    places = torch.cat([axis.places + axis.size * i for i in range(count)])
    return Axis(places, axis.size * count, axis.zero)


_LAYER = re.compile(r"^(?P<before>(?:.*\.)?layers\.)(?P<index>\d+)(?P<after>\..+)$")
_MEDUSA_BLOCK = re.compile(r"^(?:medusa_head\.)?\d+\.\d+\.linear$")
_MEDUSA_HEAD = re.compile(r"^(?:medusa_head\.)?\d+\.\d+$")
_LORA = re.compile(r"^(?P<module>.+)\.lora_(?P<part>embedding_A|embedding_B|A|B)(?:\.weight)?$")
_UNCHANGED = ("d2t", "t2d")
_WRITES_RESIDUAL = ("o_proj", "down_proj")


class Growth:
    """Growth from one shape to a larger one."""

    def __init__(
        self, old: Shape, new: Shape, seed: int = 0, *, keep_layers: bool = False, qk_norm: bool = False
    ) -> None:
        """`keep_layers` is for draft heads, whose one layer stays one. `qk_norm`: queries and keys are normalised.

        Raises:
            GrowthError: the new shape cannot hold the old one.
        """
        self.old, self.new = old, replace(new, layers=old.layers) if keep_layers else new
        _check(old, self.new)
        self.norm_scale = math.sqrt(old.hidden / self.new.hidden)
        self.layer_places = [i * self.new.layers // old.layers for i in range(old.layers)]
        """New indices of the old layers: spread evenly, the first one first."""
        self._normalised = ("q_proj", "k_proj") if qk_norm else ()
        self._random = torch.Generator().manual_seed(seed)

    def layer_with_input_of(self, layer: int) -> int:
        """New layer with the input of old `layer`. The number of layers stands for the output of the last one."""
        return self.layer_places[layer] if layer < self.old.layers else self.new.layers

    # --- axes -----------------------------------------------------------------------------------------------------

    @cached_property
    def _written(self) -> Axis:
        return Axis(torch.arange(self.old.hidden), self.new.hidden, zero=True)

    def _read(self, size: int) -> Axis:
        """Input axis of readers of the residual stream, or of several side by side: its new part is zero already."""
        count, rest = divmod(size, self.old.hidden)
        if rest or not count:
            raise GrowthError(f"an input of {size} is no multiple of the hidden size {self.old.hidden}")
        return joined(self._written._replace(zero=False), count)

    def _heads(self, *, zero: bool) -> Axis:
        """Axis of query heads: each stays with its key and value head."""
        old, new, size = self.old, self.new, self.old.head_dim
        group, wide = old.heads // old.kv_heads, new.heads // new.kv_heads
        starts = [(head // group * wide + head % group) * size for head in range(old.heads)]
        places = torch.cat([torch.arange(start, start + size) for start in starts])
        return Axis(places, new.heads * size, zero)

    def axes(self, module: str, out_size: int, in_size: int) -> tuple[Axis, Axis]:
        """Axes (out, in) of a linear's or an embedding's weight [out_size, in_size].

        Raises:
            GrowthError: an unknown module.
        """
        name = module.rsplit(".", 1)[-1]
        kv = Axis(
            torch.arange(self.old.kv_heads * self.old.head_dim), self.new.kv_heads * self.new.head_dim, zero=False
        )
        inner = Axis(torch.arange(self.old.intermediate), self.new.intermediate, zero=False)
        if name == "q_proj":
            return self._heads(zero=False), self._read(in_size)
        if name in ("k_proj", "v_proj"):
            return kv, self._read(in_size)
        if name == "o_proj":
            return self._written, self._heads(zero=True)
        if name in ("gate_proj", "up_proj"):
            return inner, self._read(in_size)
        if name == "down_proj":
            return self._written, inner._replace(zero=True)
        if name == "embed_tokens":
            return same(out_size), self._written
        if name == "fc" or _MEDUSA_BLOCK.match(module):
            return self._written, self._read(in_size)
        if name == "lm_head" or _MEDUSA_HEAD.match(module):
            return same(out_size), self._read(in_size)
        raise GrowthError(f"the module {module!r} is of no kind that can be grown")

    # --- tensors --------------------------------------------------------------------------------------------------

    def tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Grown form of one tensor, and its counterparts in the new layers after its own."""
        found = _LAYER.match(name)
        grown = self.grow(name, tensor)
        if found is None or self.new.layers == self.old.layers:
            yield name, grown
            return
        index = int(found["index"])
        first = self.layer_places[index]
        yield f"{found['before']}{first}{found['after']}", grown
        for place in range(first + 1, self.layer_with_input_of(index + 1)):
            yield f"{found['before']}{place}{found['after']}", self._fresh(name, grown)

    def grow(self, name: str, tensor: Tensor) -> Tensor:
        """Grow a tensor of a checkpoint or of a PEFT adapter, by its name there.

        Raises:
            GrowthError: the name is unknown.
        """
        lora = _LORA.match(name)
        if lora is not None:
            return self._grow_lora(lora["module"].removeprefix("base_model.model."), lora["part"], tensor)
        module, _, part = name.rpartition(".")
        last = module.rsplit(".", 1)[-1]
        if name in _UNCHANGED or last in ("q_norm", "k_norm"):
            return tensor
        if "norm" in module and part == "weight":
            axis = self._read(len(tensor))
            grown = torch.full((axis.size,), self.norm_scale, dtype=torch.float32)
            grown[axis.places] = tensor.float() * self.norm_scale
            return grown.to(tensor.dtype)
        if last in self._normalised:
            tensor = tensor * self.norm_scale
        if part == "bias":
            return self._place(tensor, [self.axes(module, len(tensor), self.old.hidden)[0]])
        return self._place(tensor, list(self.axes(module, *tensor.shape)))

    def _grow_lora(self, module: str, part: str, tensor: Tensor) -> Tensor:
        if part == "A":
            return self._place(tensor, [same(tensor.shape[0]), self.axes(module, 0, tensor.shape[1])[1]])
        if part == "B":
            if module.endswith(self._normalised):
                tensor = tensor * self.norm_scale
            return self._place(tensor, [self.axes(module, len(tensor), self.old.hidden)[0], same(tensor.shape[1])])
        if part == "embedding_B":
            return self._place(tensor, [self._written, same(tensor.shape[1])])
        return tensor

    def _place(self, tensor: Tensor, axes: Sequence[Axis]) -> Tensor:
        """Put `tensor` at its indices among random entries and zeros."""
        grown = self._noise([axis.size for axis in axes], tensor)
        for dim, axis in enumerate(axes):
            if tensor.shape[dim] != len(axis.places):
                raise GrowthError(f"a tensor {list(tensor.shape)}; {len(axis.places)} entries were expected")
            if axis.zero:
                fresh = torch.ones(axis.size, dtype=torch.bool)
                fresh[axis.places] = False
                grown.index_fill_(dim, fresh.nonzero().flatten(), 0.0)
        if len(axes) == 1:
            grown[axes[0].places] = tensor
        else:
            grown[axes[0].places[:, None], axes[1].places[None, :]] = tensor
        return grown

    def _fresh(self, name: str, grown: Tensor) -> Tensor:
        """Tensor of a new layer; `grown` is the tensor of an old layer."""
        if "norm" in name:
            return grown.clone()
        writes = any(f".{module}." in name for module in _WRITES_RESIDUAL)
        if writes and not name.endswith(("lora_A.weight", "lora_A")):
            return torch.zeros_like(grown)
        return self._noise(list(grown.shape), grown)

    def _noise(self, sizes: Sequence[int], like: Tensor) -> Tensor:
        """Random entries as large as those of `like` (0.01 when all are zeros), never denormal."""
        scale = float(like.float().square().mean().sqrt()) or 0.01
        noise = torch.randn(list(sizes), generator=self._random)
        return (noise.sign() * noise.abs().clamp_(min=1e-3) * scale).to(like.dtype)


def _check(old: Shape, new: Shape) -> None:
    for name in Shape.__dataclass_fields__:
        if getattr(new, name) < getattr(old, name):
            raise GrowthError(f"{name} would shrink from {getattr(old, name)} to {getattr(new, name)}")
    if new.head_dim != old.head_dim:
        raise GrowthError(f"head_dim must stay {old.head_dim}: rotary embeddings depend on it")
    if new.heads % new.kv_heads:
        raise GrowthError(f"{new.kv_heads} KV heads do not divide {new.heads} heads")
    if new.heads // new.kv_heads < old.heads // old.kv_heads:
        raise GrowthError(
            f"{new.heads} heads for {new.kv_heads} KV heads: fewer for each than the {old.heads // old.kv_heads} of now"
        )
