"""EAGLE heads for tests: random tensors in public formats, and their plain dense forward pass."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-5


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def attend(x: Tensor, w: dict[str, Tensor], name: str, heads: int, kv_heads: int, theta: float) -> Tensor:
    """Causal attention of [T, in], written out; `name`: of the layer."""
    q, k, v = (linear(x, w, f"{name}.self_attn.{n}_proj") for n in "qkv")
    q, k, v = q.view(len(x), heads, -1), k.view(len(x), kv_heads, -1), v.view(len(x), kv_heads, -1)
    if f"{name}.self_attn.q_norm.weight" in w:
        q, k = rms(q, w[f"{name}.self_attn.q_norm.weight"]), rms(k, w[f"{name}.self_attn.k_norm.weight"])
    half = q.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] / theta ** (torch.arange(half) / half)

    def rotate(y: Tensor) -> Tensor:
        a, b = y[..., :half], y[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    q, k = rotate(q), rotate(k).repeat_interleave(heads // kv_heads, 1)
    v = v.repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    scores += torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), -1)


class Head:
    """One EAGLE head: its tensors by canonical names, its config.json, and its dense forward pass in float64."""

    def __init__(self, target: Any, method: str, **options) -> None:
        self.target, self.method, self.options = target, method, options
        self.hidden = options.get("hidden", target.hidden_size)
        self.draft_vocab = options.get("draft_vocab", target.vocab_size)
        self.heads, self.kv_heads, self.head_dim = 4, options.get("kv_heads", 2), 8
        self.aux = options.get("aux", (2, target.num_layers // 2, target.num_layers - 3))
        self.theta = options.get("theta", 10000.0)
        self.num_layers, self.mask_token = options.get("layers", 1), options.get("mask_token")
        self.weights = self._weights(torch.Generator().manual_seed(5))

    def _weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        eagle3, h, inner = self.method == "eagle3", self.hidden, 40
        option = self.options.get

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * columns**-0.5 * 1.5

        def vector(size: int) -> Tensor:
            return 1 + 0.3 * torch.randn(size, generator=generator)

        qkv_in, fused = (2 * h, len(self.aux) * self.target.hidden_size) if eagle3 else (h, 2 * h)
        w = {"fc.weight": matrix(h, fused)}
        sizes = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        for i in range(self.num_layers):
            layer = f"layers.{i}"
            w[f"{layer}.post_attention_layernorm.weight"] = vector(h)
            for name, count in sizes.items():
                w[f"{layer}.self_attn.{name}_proj.weight"] = matrix(count * self.head_dim, h if i else qkv_in)
            w[f"{layer}.self_attn.o_proj.weight"] = matrix(h, self.heads * self.head_dim)
            w[f"{layer}.mlp.gate_proj.weight"], w[f"{layer}.mlp.up_proj.weight"] = matrix(inner, h), matrix(inner, h)
            w[f"{layer}.mlp.down_proj.weight"] = matrix(h, inner)
            if i:
                w[f"{layer}.input_layernorm.weight"] = vector(h)
            if option("qk_norm"):
                w |= {f"{layer}.self_attn.{n}_norm.weight": vector(self.head_dim) for n in "qk"}
        if self.mask_token is not None:
            w["mask_hidden"] = torch.randn(*option("mask_shape", (1, 1)), fused, generator=generator)
        if eagle3:
            for name in ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm"):
                w[f"{name}.weight"] = vector(h)
        if option("norm_before_fc"):
            w["input_norm.weight"] = vector(len(self.aux) * self.target.hidden_size)
        if option("fc_norm"):
            w |= {f"fc_norm.{i}.weight": vector(self.target.hidden_size) for i in range(len(self.aux))}
        if option("fc_bias"):
            w["fc.bias"] = vector(h)
        if option("attention_bias"):
            w |= {f"layers.0.self_attn.{n}_proj.bias": vector(sizes[n] * self.head_dim) for n in "qkv"}
            w["layers.0.self_attn.o_proj.bias"] = vector(h)
        if option("own_embedding"):
            w["embed_tokens.weight"] = matrix(self.target.vocab_size, h)
        if option("own_head") or self.draft_vocab != self.target.vocab_size:
            w["lm_head.weight"] = matrix(self.draft_vocab, h)
        if self.draft_vocab != self.target.vocab_size or option("d2t"):
            ids = torch.randperm(self.target.vocab_size, generator=generator)[: self.draft_vocab].sort().values
            w["d2t"] = ids - torch.arange(self.draft_vocab)
        return w

    def config(self) -> dict:
        layer = {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": 40,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.target.vocab_size,
            "max_position_embeddings": self.options.get("max_positions", 256),
            "rms_norm_eps": EPS,
            "hidden_act": "silu",
        }
        if "theta" in self.options:
            layer["rope_theta"] = self.theta
        if self.options.get("attention_bias"):
            layer["attention_bias"] = True
        if self.method == "eagle":
            return layer | {"architectures": ["LlamaForCausalLM"]}
        own = {"draft_vocab_size": self.draft_vocab}
        own |= {n: True for n in ("norm_before_residual", "norm_before_fc", "norm_output") if self.options.get(n)}
        own |= {"fc_norm": True} if self.options.get("fc_norm") else {}
        if self.hidden != self.target.hidden_size:
            own["target_hidden_size"] = self.target.hidden_size
        if self.mask_token is not None and not self.options.get("speculators"):
            own |= {self.options.get("mask_field", "ptd_token_id"): self.mask_token, "parallel_drafting": True}
        if self.options.get("speculators"):
            kind, name = ("eagle3", "Eagle3") if self.mask_token is None else ("peagle", "PEagle")
            own |= {} if self.mask_token is None else {"mask_token_id": self.mask_token}
            verifier = {"name_or_path": "x", "architectures": ["LlamaForCausalLM"]}
            ids = {"eagle_aux_hidden_state_layer_ids": list(self.aux)} if "aux" in self.options else {}
            return {
                "architectures": [f"{name}Speculator"],
                "speculators_model_type": kind,
                "speculators_config": {
                    "algorithm": kind,
                    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                    "verifier": verifier,
                },
                "transformer_layer_config": layer,
                "target_hidden_size": None,
                **own,
                **ids,
            }
        if "aux" in self.options:
            own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(self.aux)}
        return layer | {"architectures": [self.options.get("architecture", "LlamaForCausalLMEagle3")]} | own

    def save(self, path: Path) -> Path:
        """Write the directory in the format of the options."""
        path.mkdir(exist_ok=True, parents=True)
        (path / "config.json").write_text(json.dumps(self.config()))
        midlayer = self.method == "eagle3" and not self.options.get("speculators") and not self.options.get("layers0")
        names = {n: n.replace("layers.0.", "midlayer.") if midlayer else n for n in self.weights}
        tensors = {self.options.get("prefix", "") + names[n]: t.clone() for n, t in self.weights.items()}
        if "d2t" in self.weights:
            tensors["t2d"] = torch.zeros(self.target.vocab_size, dtype=torch.bool)
        if self.options.get("bin"):
            torch.save(tensors, path / "pytorch_model.bin")
        elif self.options.get("sharded"):
            half = sorted(tensors)[::2]
            parts = {"a.safetensors": half, "b.safetensors": [n for n in tensors if n not in half]}
            for file, kept in parts.items():
                save_file({n: tensors[n] for n in kept}, path / file)
            weight_map = {n: file for file, kept in parts.items() for n in kept}
            (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        else:
            save_file(tensors, path / "model.safetensors")
        return path

    # --- the dense forward pass ---

    @property
    def target_ids(self) -> Tensor:
        """[draft vocabulary] the target's id of each."""
        return torch.arange(self.draft_vocab) + self.weights.get("d2t", torch.zeros(1, dtype=torch.int64))

    @property
    def _exact(self) -> dict[str, Tensor]:
        shared = {"embed_tokens.weight": self.target.embedding, "lm_head.weight": self.target.head}
        return {n: t.double() for n, t in (shared | self.weights).items() if n != "d2t"}

    def fuse(self, states: list[Tensor]) -> Tensor:
        """Part of the target's hidden states that the first layer reads."""
        return states[-1].double() if self.method == "eagle" else self._fused([states[i].double() for i in self.aux])

    def _fused(self, picked: list[Tensor]) -> Tensor:
        w = self._exact
        if self.options.get("fc_norm"):
            picked = [rms(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(picked)]
        joined = torch.cat(picked, -1)
        if self.options.get("norm_before_fc"):
            joined = rms(joined, w["input_norm.weight"])
        return linear(joined, w, "fc")

    def mask_states(self, count: int) -> Tensor:
        """State [count, H] of the masks of a P-EAGLE head."""
        return self._fused([*self._exact["mask_hidden"].view(len(self.aux), -1)]).expand(count, -1)

    def forward(self, tokens: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the next step, [T, H], and the logits over the target's vocabulary, [T, V]."""
        w = self._exact
        embedded = F.embedding(torch.tensor(tokens), w["embed_tokens.weight"])
        if self.method == "eagle":
            x = read = linear(torch.cat((embedded, features), -1), w, "fc")
        else:
            normed = rms(features, w["layers.0.hidden_norm.weight"])
            x = normed if self.options.get("norm_before_residual") else features
            read = torch.cat((rms(embedded, w["layers.0.input_layernorm.weight"]), normed), -1)
        for i in range(self.num_layers):
            layer = f"layers.{i}"
            if i:
                read = rms(x, w[f"{layer}.input_layernorm.weight"])
            attended = attend(read, w, layer, self.heads, self.kv_heads, self.theta)
            x = x + linear(attended, w, f"{layer}.self_attn.o_proj")
            y = rms(x, w[f"{layer}.post_attention_layernorm.weight"])
            inner = F.silu(linear(y, w, f"{layer}.mlp.gate_proj")) * linear(y, w, f"{layer}.mlp.up_proj")
            x = x + linear(inner, w, f"{layer}.mlp.down_proj")
        normed = x if self.method == "eagle" else rms(x, w["norm.weight"])
        logits = torch.full((len(x), self.target.vocab_size), -torch.inf, dtype=x.dtype)
        logits[:, self.target_ids] = normed @ w["lm_head.weight"].T
        return (normed if self.options.get("norm_output") else x), logits

    @torch.inference_mode()
    def logits(self, tokens: list[int], drafts: list[int]) -> list[Tensor]:
        """[V] before each of `drafts`, which follow `tokens`; the target has computed all but the last of `tokens`."""
        features = self.fuse(self.target.states(tokens[:-1]))
        read, found = tokens[1:], []
        if self.mask_token is not None and drafts:
            masks = len(drafts) - 1
            features = torch.cat((features, self.mask_states(masks)))
            _, logits = self.forward([*read, *[self.mask_token] * masks], features)
            return [*logits[-len(drafts) :].float()]
        for draft in drafts:
            output, logits = self.forward(read, features)
            found.append(logits[-1].float())
            read, features = [*read, draft], torch.cat((features, output[-1:]))
        return found

    def check_greedy(self, tokens: list[int], drafts: list[int]) -> None:
        """Each draft is the most likely token, up to rounding."""
        for logits, draft in zip(self.logits(tokens, drafts), drafts, strict=True):
            assert logits[draft] >= logits.max() - 1e-4
