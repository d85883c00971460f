"""Heads for multi-token prediction inside a model's checkpoint (DeepSeek-V3, DeepSeek-AI 2024, section 2.2).

A head has one layer of its family, or two if each has one part alone (Nemotron-H). It reads the embedding e of a token,
and the model's hidden state h after the final norm, one position before it:

    x = layer(projection([token_norm(e); hidden_norm(h)]));  logits = the model's head(norm(x))
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionHead:
    """Names of a head's modules in a family's checkpoint. `{head}` is the index of a head, `{layer}` the number of the
    model's layers plus that index."""

    layer: str
    """Prefix of the decoder layer."""
    second_layer: str | None = None
    """Prefix of the layer after it; None: there is none."""
    mixers: tuple[str, ...] = ()
    """Kind of each layer that has one part alone; (): the layer has two halves."""
    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    """Norm before the output head; it may be the model's own."""
    copies: tuple[str, ...] = ()
    """Copies of the model's embeddings and head, which are not read."""
    hidden_first: bool = False
    """True: the projection reads the hidden state first."""
    norm_output: bool = False
    """True: the next draft reads x after the norm."""

    def canonical_names(self, names: Collection[str], num_layers: int, head: int = 0) -> dict[str, str | None]:
        """Tensors of a head among `names`, and their canonical names: "model.layers.0." for the layer, None for a copy.
        Empty if the checkpoint has no such head."""
        modules: dict[str, str | None] = dict.fromkeys(self.copies)
        modules |= {
            self.token_norm: "token_norm",
            self.hidden_norm: "hidden_norm",
            self.projection: "fc",
            self.norm: "norm",
            self.layer: "model.layers.0",  # after the others: it may be a prefix of theirs
        }
        modules |= {} if self.second_layer is None else {self.second_layer: "model.layers.1"}
        prefixes = {f"{theirs.format(head=head, layer=num_layers + head)}.": ours for theirs, ours in modules.items()}
        found: dict[str, str | None] = {}
        for name in names:
            prefix = next(filter(name.startswith, prefixes), None)
            if prefix is not None:
                ours = prefixes[prefix]
                found[name] = None if ours is None else f"{ours}.{name.removeprefix(prefix)}"
        return found if any(name and name.startswith("fc.") for name in found.values()) else {}


_LAYER = "model.layers.{layer}"
APPENDED_LAYER = PredictionHead(
    layer=_LAYER,
    token_norm=f"{_LAYER}.enorm",
    hidden_norm=f"{_LAYER}.hnorm",
    projection=f"{_LAYER}.eh_proj",
    norm=f"{_LAYER}.shared_head.norm",
    copies=(f"{_LAYER}.shared_head.head", f"{_LAYER}.embed_tokens"),
)
"""Heads of DeepSeek-V3, as layers after the model's last."""
