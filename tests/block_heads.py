"""DFlash and DSpark drafters in both public formats, and their plain dense forward pass in float64.

Written from the papers (arXiv 2602.06036, 2607.05147) and the formats, without the code that is tested.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [T, heads, D] at `positions` [T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None].double() / theta ** (torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class BlockHead:
    """One drafter: its tensors by the public names, its config.json, and its dense forward pass.

    The target has `vocab_size`, `num_layers`, `hidden_size`, `embedding` and `head`, and `states(tokens)` gives what
    enters each layer.
    """

    heads, kv_heads, head_dim, inner, theta = 4, 2, 8, 40, 10000.0

    def __init__(self, target, method: str = "dflash", **options) -> None:
        self.target, self.method, self.options = target, method, options
        self.hidden = options.get("hidden", target.hidden_size)
        self.draft_vocab = options.get("draft_vocab", target.vocab_size)
        self.num_layers = options.get("layers", 2)
        self.aux = options.get("aux", (1, 3))
        """Target layers whose output is read."""
        self.block_size = options.get("block_size", 5)
        self.mask = options.get("mask", 7)
        self.from_anchor = options.get("from_anchor", method == "dspark")
        self.rank, self.kind = (6, options.get("kind", "vanilla")) if method == "dspark" else (0, "vanilla")
        self.kinds = options.get("layer_types", ["full_attention"] * self.num_layers)
        self.window = options.get("window")
        generator = torch.Generator().manual_seed(options.get("seed", 5))
        self.weights = self._weights(generator)
        self.mask_embedding = None
        if options.get("mask_embedding"):
            self.mask_embedding = torch.randn(self.hidden, generator=generator)

    def _weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        h, option = self.hidden, self.options.get

        def matrix(rows: int, columns: int, scale: float = 1.5) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * columns**-0.5 * scale

        def vector(size: int) -> Tensor:
            return 1 + 0.3 * torch.randn(size, generator=generator)

        w = {"fc.weight": matrix(h, len(self.aux) * self.target.hidden_size)}
        w |= {"hidden_norm.weight": vector(h), "norm.weight": vector(h)}
        for i in range(self.num_layers):
            attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            for name, count in {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}.items():
                w[f"{attention}.{name}_proj.weight"] = matrix(count * self.head_dim, h)
                if option("attention_bias"):
                    w[f"{attention}.{name}_proj.bias"] = 0.3 * vector(count * self.head_dim)
            w[f"{attention}.o_proj.weight"] = matrix(h, self.heads * self.head_dim)
            if option("attention_bias"):
                w[f"{attention}.o_proj.bias"] = 0.3 * vector(h)
            w |= {f"{attention}.{name}_norm.weight": vector(self.head_dim) for name in "qk"}
            w |= {f"{mlp}.{name}_proj.weight": matrix(self.inner, h) for name in ("gate", "up")}
            w[f"{mlp}.down_proj.weight"] = matrix(h, self.inner)
            w |= {f"layers.{i}.{name}_layernorm.weight": vector(h) for name in ("input", "post_attention")}
        if option("own_embedding"):
            w["embed_tokens.weight"] = matrix(self.target.vocab_size, h)
        if option("own_head") or self.draft_vocab != self.target.vocab_size:
            w["lm_head.weight"] = matrix(self.draft_vocab, h)
        if self.draft_vocab != self.target.vocab_size:
            ids = torch.randperm(self.target.vocab_size, generator=generator)[: self.draft_vocab].sort().values
            w["d2t"] = ids - torch.arange(self.draft_vocab)
            w["t2d"] = torch.zeros(self.target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        if self.rank:
            r = self.rank
            w["markov_head.markov_w1.weight"] = torch.randn(self.target.vocab_size, r, generator=generator)
            w["markov_head.markov_w2.weight"] = matrix(self.draft_vocab, r)
            if self.kind == "gated":
                w["markov_head.gate_proj.weight"] = matrix(r, h + r)
                w["markov_head.gate_proj.bias"] = 0.3 * vector(r)
            if self.kind == "rnn":
                w["markov_head.joint_proj.weight"] = matrix(3 * r, h + 2 * r)
                w["markov_head.joint_proj.bias"] = 0.3 * vector(3 * r)
            size = h + r * option("confidence_reads_markov", True)
            w["confidence_head.proj.weight"] = matrix(1, size)
            w["confidence_head.proj.bias"] = torch.zeros(1)
        return w

    def config(self) -> dict:
        layers = {
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.target.vocab_size,
            "max_position_embeddings": self.options.get("max_positions", 256),
            "rms_norm_eps": EPS,
            "rope_theta": self.theta,
            "hidden_act": "silu",
            "attention_bias": bool(self.options.get("attention_bias")),
            "layer_types": self.kinds,
            "sliding_window": self.window,
        }
        markov = {
            "markov_rank": self.rank,
            "markov_head_type": self.kind,
            "enable_confidence_head": True,
            "confidence_head_with_markov": self.options.get("confidence_reads_markov", True),
        }
        markov = markov if self.rank else {}
        sizes = {"target_hidden_size": self.target.hidden_size} if self.hidden != self.target.hidden_size else {}
        if self.options.get("speculators"):
            return {
                "speculators_model_type": self.method,
                "architectures": ["DFlashSpeculator" if self.method == "dflash" else "DSparkSpeculator"],
                "transformer_layer_config": layers,
                "draft_vocab_size": self.draft_vocab,
                "block_size": self.block_size,
                "aux_hidden_state_layer_ids": [index + 1 for index in self.aux],
                "mask_token_id": self.mask,
                "sample_from_anchor": self.from_anchor,
                "speculators_config": {"algorithm": self.method},
                **markov,
                **sizes,
            }
        known = {"num_target_layers": self.target.num_layers, "block_size": self.block_size, **sizes}
        if self.draft_vocab != self.target.vocab_size:
            known["draft_vocab_size"] = self.draft_vocab
        fields = {"mask_token_id": self.mask, "target_layer_ids": list(self.aux), **self.options.get("fields", {})}
        if self.options.get("deepspec"):
            return {"architectures": ["Qwen3DSparkModel"], **layers, **known, **fields, "markov_rank": 0, **markov}
        name = "DFlashDraftModel" if self.method == "dflash" else "DSparkDraftModel"
        return {"architectures": [name], **layers, **known, **markov, "dflash_config": fields}

    def save(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config()))
        prefix = self.options.get("prefix", "")
        save_file(
            {prefix + name: t.clone().contiguous() for name, t in self.weights.items()}, path / "model.safetensors"
        )
        if self.mask_embedding is not None:
            torch.save({"mask_token_id": self.mask, "embedding": self.mask_embedding[None]}, path / "mask_embedding.pt")
        return path

    @property
    def max_drafts(self) -> int:
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def target_ids(self) -> Tensor:
        """The target's id of each draft token."""
        ids = torch.arange(self.draft_vocab)
        return ids + self.weights["d2t"] if "d2t" in self.weights else ids

    @torch.inference_mode()
    def hidden_states(self, tokens: list[int], count: int) -> Tensor:
        """[count, H] of the `count` drafts after `tokens`, of which the target has computed all but the last."""
        w = {name: tensor.double() for name, tensor in self.weights.items()}
        states = self.target.states(tokens[:-1])
        joined = torch.cat([states[index + 1] for index in self.aux], -1).double()
        context = rms(joined @ w["fc.weight"].T, w["hidden_norm.weight"])
        masks = count - 1 if self.from_anchor else count
        embedding = w.get("embed_tokens.weight", self.target.embedding.double())
        x = embedding[torch.tensor([tokens[-1], *[self.mask] * masks])].clone()
        if self.mask_embedding is not None:
            x[1:] = self.mask_embedding.double()
        for i in range(self.num_layers):
            x = self._layer(i, x, context, w)
        found = rms(x, w["norm.weight"])
        return found if self.from_anchor else found[1:]

    def _layer(self, i: int, x: Tensor, context: Tensor, w: dict[str, Tensor]) -> Tensor:
        def project(y: Tensor, name: str, heads: int) -> Tensor:
            key = f"layers.{i}.self_attn.{name}_proj"
            return F.linear(y, w[f"{key}.weight"], w.get(f"{key}.bias")).view(len(y), heads, -1)

        normed = rms(x, w[f"layers.{i}.input_layernorm.weight"])
        there, here = len(context), torch.arange(len(context), len(context) + len(x))
        everywhere = torch.arange(there + len(x))
        q = rotate(rms(project(normed, "q", self.heads), w[f"layers.{i}.self_attn.q_norm.weight"]), here, self.theta)
        read = torch.cat((context, normed))
        k = rms(project(read, "k", self.kv_heads), w[f"layers.{i}.self_attn.k_norm.weight"])
        fold = self.heads // self.kv_heads
        k = rotate(k, everywhere, self.theta).repeat_interleave(fold, 1)
        v = project(read, "v", self.kv_heads).repeat_interleave(fold, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.head_dim**0.5
        if self.kinds[i] == "sliding_attention" or self.options.get("fields", {}).get("causal"):
            hidden = everywhere > here[:, None]
            if self.kinds[i] == "sliding_attention":
                hidden |= everywhere <= here[:, None] - self.window
            scores = scores.masked_fill(hidden, -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        key = f"layers.{i}.self_attn.o_proj"
        x = x + F.linear(attended, w[f"{key}.weight"], w.get(f"{key}.bias"))
        y = rms(x, w[f"layers.{i}.post_attention_layernorm.weight"])
        gate, up, down = (w[f"layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T

    @torch.inference_mode()
    def outputs(self, tokens: list[int], drafts: list[int]) -> tuple[list[Tensor], list[float]]:
        """[V] logits before each of `drafts`, which follow `tokens`, and the confidence of each."""
        if not drafts:
            return [], []
        w = {name: tensor.double() for name, tensor in self.weights.items()}
        hidden = self.hidden_states(tokens, len(drafts))
        head = w.get("lm_head.weight", self.target.head.double())
        found, confidence, state = [], [], torch.zeros(self.rank, dtype=torch.float64)
        for h, before in zip(hidden, [tokens[-1], *drafts], strict=False):
            logits = head @ h
            if self.rank:
                embedded = w["markov_head.markov_w1.weight"][before]
                read = embedded
                if self.kind == "gated":
                    gate = w["markov_head.gate_proj.weight"] @ torch.cat((h, embedded))
                    read = (gate + w["markov_head.gate_proj.bias"]).sigmoid() * embedded
                if self.kind == "rnn":
                    joint = w["markov_head.joint_proj.weight"] @ torch.cat((state, embedded, h))
                    g, c, o = (joint + w["markov_head.joint_proj.bias"]).chunk(3)
                    state, read = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh(), o.tanh()
                logits = logits + w["markov_head.markov_w2.weight"] @ read
                reads = torch.cat((h, embedded)) if self.options.get("confidence_reads_markov", True) else h
                score = w["confidence_head.proj.weight"][0] @ reads + w["confidence_head.proj.bias"][0]
                confidence.append(float(score.sigmoid()))
            wide = torch.full((self.target.vocab_size,), -torch.inf, dtype=torch.float64)
            wide[self.target_ids] = logits
            found.append(wide)
        return found, confidence

    def logits(self, tokens: list[int], drafts: list[int]) -> list[Tensor]:
        """[V] before each of `drafts`."""
        return self.outputs(tokens, drafts)[0]

    def check_greedy(self, tokens: list[int], drafts: list[int]) -> None:
        """Each draft is the most likely token, up to rounding."""
        for logits, draft in zip(self.logits(list(tokens), list(drafts)), drafts, strict=True):
            assert logits[draft] >= logits.max() - 1e-4
