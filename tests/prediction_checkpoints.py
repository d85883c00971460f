"""Checkpoints with a head for multi-token prediction: tiny models of each layout.

The reference is a second model of the family with the head's layers alone in transformers: its layers and its norm are
the head's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .tiny_families import FAMILIES, SIZES, Family, build

HIDDEN, VOCAB = SIZES["hidden_size"], SIZES["vocab_size"]


class Layout(NamedTuple):
    """A family's form of a head."""

    names: dict[str, str]
    """Its name of each module of the reference."""
    family: Family
    changes: Mapping[str, Any] = MappingProxyType({})
    """Options of a model with the head's layer alone."""
    chains_normed: bool = False
    hidden_first: bool = False
    architecture: str | None = None
    """Name in config.json, if transformers does not know the model."""


def modules(token_norm: str, hidden_norm: str, fc: str, norm: str, layer: str) -> dict[str, str]:
    return {
        "token_norm": token_norm, "hidden_norm": hidden_norm, "fc": fc, "model.norm": norm, "model.layers.0": layer
    }  # fmt: skip


APPENDED = modules(*(f"model.layers.3{part}" for part in (".enorm", ".hnorm", ".eh_proj", ".shared_head.norm", "")))
QWEN = modules("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0")
ERNIE = modules(
    *(f"model.mtp_{part}.0" for part in ("emb_norm", "hidden_norm", "linear_proj")), "model.norm", "model.mtp_block.0"
)
MIMO = modules(
    *(f"model.mtp_layers.0.{part}" for part in ("token_layernorm", "hidden_layernorm", "input_proj")),
    *("model.mtp_layers.0.final_layernorm", "model.mtp_layers.0"),
)


NEMOTRON = {
    **{name: f"mtp.layers.0.{theirs}" for name, theirs in {"token_norm": "enorm", "hidden_norm": "hnorm"}.items()},
    **{"fc": "mtp.layers.0.eh_proj", "backbone.norm_f": "mtp.layers.1.final_layernorm"},
    **{f"backbone.layers.{index}": f"mtp.layers.{index}" for index in range(2)},
}


def with_head(name: str) -> Family:
    """A family whose config.json says that there is a head, as published ones do."""
    return replace(FAMILIES[name], config={**FAMILIES[name].config, "num_nextn_predict_layers": 1})


FULL = {"layer_types": ["full_attention"]}
LAYOUTS = {
    "deepseek3": Layout(APPENDED, FAMILIES["deepseek3"], {"first_k_dense_replace": 0}),
    "deepseek3.2": Layout(APPENDED, with_head("deepseek3.2"), {"first_k_dense_replace": 0}),
    "glm4-moe": Layout(APPENDED, FAMILIES["glm4-moe"], {"first_k_dense_replace": 0}),
    "glm4-moe-lite": Layout(APPENDED, with_head("glm4-moe-lite"), {"mlp_layer_types": ["sparse"]}),
    "qwen3.5": Layout(QWEN, FAMILIES["qwen3.5"], FULL, chains_normed=True),
    "qwen3-next": Layout(QWEN, FAMILIES["qwen3-next"], FULL | {"mlp_only_layers": []}, chains_normed=True),
    "qwen3.5-moe": Layout(QWEN, FAMILIES["qwen3.5-moe"], FULL, chains_normed=True),
    "ernie4.5": Layout(ERNIE, FAMILIES["ernie4.5"]),
    "ernie4.5-moe": Layout(ERNIE, FAMILIES["ernie4.5-moe"], {"moe_layer_end_index": -1}),
    "nemotron-h": Layout(NEMOTRON, FAMILIES["nemotron-h"], {"layers_block_type": ["attention", "moe"]}, True),
    "mimo": Layout(MIMO, FAMILIES["qwen2"], {}, chains_normed=True, hidden_first=True, architecture="MiMoForCausalLM"),
}
TIE = 5e-3
"""Logits that differ by less may change their order: sums are made in another order than transformers'."""


class Checkpoint:
    """A tiny model with a head, in transformers and on disk. `exact`: the next token depends on the last one alone, and
    the head knows it."""

    def __init__(self, root: Path, layout: Layout, *, exact: bool = False) -> None:
        self.layout, self.folder = layout, root / "model"
        family = layout.family
        self.target = build(family)
        self.head = build(Family(family.prefix, {**family.config, "num_hidden_layers": 1, **layout.changes}))
        config = self.target.config
        eps = config.rms_norm_eps if hasattr(config, "rms_norm_eps") else config.layer_norm_epsilon
        make_norm = type(self.final_norm(self.head))
        self.token_norm, self.hidden_norm = make_norm(HIDDEN, eps=eps), make_norm(HIDDEN, eps=eps)
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        generator = torch.Generator().manual_seed(3)
        for module in (self.token_norm, self.hidden_norm, self.fc):
            module.weight.data = 0.3 * torch.randn(module.weight.shape, generator=generator) + (module is not self.fc)
        if layout.names.get("model.norm") == "model.norm":
            self.head.model.norm = self.target.model.norm
        if exact:
            self._make_exact()
        self.target.save_pretrained(self.folder)
        self.head.save_pretrained(root / "head")
        file = self.folder / "model.safetensors"
        save_file(load_file(file) | self._stored(load_file(root / "head" / file.name)), file, metadata={"format": "pt"})
        if layout.architecture is not None:
            config = json.loads((self.folder / "config.json").read_text())
            config |= {"architectures": [layout.architecture], "model_type": "unknown"}
            (self.folder / "config.json").write_text(json.dumps(config))

    def _make_exact(self) -> None:
        for model in (self.target, self.head):
            for name, parameter in model.named_parameters():
                if "o_proj" in name or "out_proj" in name or "down_proj" in name:
                    parameter.data.zero_()
        self.fc.weight.data = self._joined(torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN))
        self.token_norm.weight.data.zero_()
        if not self.token_norm(torch.ones(1, HIDDEN)).any():  # else the weight is added to 1
            self.token_norm.weight.data.fill_(1.0)
        self.final_norm(self.head).weight.data = self.final_norm(self.target).weight.data.clone()

    @staticmethod
    def final_norm(model: Any) -> Any:
        """Norm before a model's head."""
        return getattr(model.model, "norm", None) or model.model.norm_f

    def _joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((hidden, embedded) if self.layout.hidden_first else (embedded, hidden), -1)

    def _stored(self, head: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the head by the family's names, and copies that DeepSeek-V3 stores."""
        stored = head | {
            f"{name}.weight": getattr(self, name).weight.data for name in ("token_norm", "hidden_norm", "fc")
        }
        found = {}
        for ours, theirs in self.layout.names.items():
            found |= {f"{theirs}{name[len(ours) :]}": t for name, t in stored.items() if name.startswith(f"{ours}.")}
        if self.layout.names is APPENDED:
            found["model.layers.3.shared_head.head.weight"] = self.target.lm_head.weight.data.clone()
            found["model.layers.3.embed_tokens.weight"] = self.target.model.embed_tokens.weight.data.clone()
        return {name: tensor.contiguous() for name, tensor in found.items()}

    @torch.inference_mode()
    def logits(self, tokens: list[int], drafts: list[int]) -> list[Tensor]:
        """[V] before each of `drafts`, which follow `tokens`."""
        read, features = tokens[1:], self.target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        found: list[Tensor] = []
        outputs: list[Tensor] = []
        hook = self.head.model.layers[-1].register_forward_hook(
            lambda module, inputs, output: outputs.append(output[0] if isinstance(output, tuple) else output)
        )
        for draft in drafts:
            embedded = self.token_norm(self.target.get_input_embeddings()(torch.tensor(read)))
            x = self.fc(self._joined(embedded, self.hidden_norm(features)))
            normed = self.head.model(inputs_embeds=x[None]).last_hidden_state[0, -1]
            found.append(self.target.lm_head(normed))
            output = normed if self.layout.chains_normed else outputs[-1].view(len(x), -1)[-1]
            read, features = [*read, draft], torch.cat((features, output[None]))
        hook.remove()
        return found

    def misses(self, tokens: list[int], drafts: list[int]) -> int:
        """Number of drafts that are not the most likely tokens, up to rounding."""
        return sum(
            bool(logits[draft] < logits.max() - TIE)
            for logits, draft in zip(self.logits(tokens, drafts), drafts, strict=True)
        )
