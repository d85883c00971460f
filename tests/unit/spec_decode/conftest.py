"""A tiny target in transformers, draft heads for it in public formats, and their plain dense forward passes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, LAYERS, HIDDEN, EPS = 97, 5, 32, 1e-5


class Target:
    """The target, as transformers has it and on disk."""

    vocab_size, num_layers, hidden_size = VOCAB, LAYERS, HIDDEN

    def __init__(self, path: Path) -> None:
        torch.manual_seed(11)
        config = LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCAB,
            max_position_embeddings=512,
            initializer_range=0.3,
            rms_norm_eps=EPS,
            tie_word_embeddings=False,
        )
        self.path = path
        self.model = LlamaForCausalLM(config).float().eval()
        self.model.save_pretrained(path)

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> list[Tensor]:
        """[T, H] entering each layer, and last the one after the final norm."""
        output = self.model.model(torch.tensor([tokens]), output_hidden_states=True)
        return [state[0] for state in output.hidden_states]

    @property
    def embedding(self) -> Tensor:
        return self.model.model.embed_tokens.weight.detach()

    @property
    def head(self) -> Tensor:
        return self.model.lm_head.weight.detach()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def attend(x: Tensor, w: dict[str, Tensor], heads: int, kv_heads: int, theta: float) -> Tensor:
    """Causal attention of [T, in], written out."""
    q, k, v = (linear(x, w, f"layers.0.self_attn.{n}_proj") for n in "qkv")
    q, k, v = q.view(len(x), heads, -1), k.view(len(x), kv_heads, -1), v.view(len(x), kv_heads, -1)
    half = q.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] / theta ** (torch.arange(half) / half)

    def rotate(y: Tensor) -> Tensor:
        a, b = y[..., :half], y[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    q, k = rotate(q), rotate(k).repeat_interleave(heads // kv_heads, 1)
    v = v.repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    scores += torch.full((len(x), len(x)), -torch.inf).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), -1)


class Head:
    """One EAGLE head: its tensors by canonical names, its config.json, and its dense forward pass."""

    def __init__(self, target: Target, method: str, **options) -> None:
        self.target, self.method, self.options = target, method, options
        self.hidden = options.get("hidden", HIDDEN)
        self.draft_vocab = options.get("draft_vocab", VOCAB)
        self.heads, self.kv_heads, self.head_dim = 4, options.get("kv_heads", 2), 8
        self.aux = options.get("aux", (2, LAYERS // 2, LAYERS - 3))
        self.theta = options.get("theta", 10000.0)
        self.weights = self._weights(torch.Generator().manual_seed(5))

    def _weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        eagle3, h, inner = self.method == "eagle3", self.hidden, 40
        option = self.options.get

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * columns**-0.5 * 1.5

        def vector(size: int) -> Tensor:
            return 1 + 0.3 * torch.randn(size, generator=generator)

        qkv_in, fused = (2 * h, len(self.aux) * HIDDEN) if eagle3 else (h, 2 * h)
        w = {"fc.weight": matrix(h, fused), "layers.0.post_attention_layernorm.weight": vector(h)}
        sizes = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        for name, count in sizes.items():
            w[f"layers.0.self_attn.{name}_proj.weight"] = matrix(count * self.head_dim, qkv_in)
        w["layers.0.self_attn.o_proj.weight"] = matrix(h, self.heads * self.head_dim)
        w["layers.0.mlp.gate_proj.weight"], w["layers.0.mlp.up_proj.weight"] = matrix(inner, h), matrix(inner, h)
        w["layers.0.mlp.down_proj.weight"] = matrix(h, inner)
        if eagle3:
            for name in ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm"):
                w[f"{name}.weight"] = vector(h)
        if option("norm_before_fc"):
            w["input_norm.weight"] = vector(len(self.aux) * HIDDEN)
        if option("fc_norm"):
            w |= {f"fc_norm.{i}.weight": vector(HIDDEN) for i in range(len(self.aux))}
        if option("fc_bias"):
            w["fc.bias"] = vector(h)
        if option("attention_bias"):
            w |= {f"layers.0.self_attn.{n}_proj.bias": vector(sizes[n] * self.head_dim) for n in "qkv"}
            w["layers.0.self_attn.o_proj.bias"] = vector(h)
        if option("own_embedding"):
            w["embed_tokens.weight"] = matrix(VOCAB, h)
        if option("own_head") or self.draft_vocab != VOCAB:
            w["lm_head.weight"] = matrix(self.draft_vocab, h)
        if self.draft_vocab != VOCAB or option("d2t"):
            ids = torch.randperm(VOCAB, generator=generator)[: self.draft_vocab].sort().values
            w["d2t"] = ids - torch.arange(self.draft_vocab)
        return w

    def config(self) -> dict:
        layer = {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": 40,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": VOCAB,
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
        if self.hidden != HIDDEN:
            own["target_hidden_size"] = HIDDEN
        if self.options.get("speculators"):
            verifier = {"name_or_path": "x", "architectures": ["LlamaForCausalLM"]}
            ids = {"eagle_aux_hidden_state_layer_ids": list(self.aux)} if "aux" in self.options else {}
            return {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "speculators_config": {
                    "algorithm": "eagle3",
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
            tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
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

    def fuse(self, states: list[Tensor]) -> Tensor:
        """Part of the target's hidden states that the layer reads."""
        if self.method == "eagle":
            return states[-1]
        w, picked = self.weights, [states[i] for i in self.aux]
        if self.options.get("fc_norm"):
            picked = [rms(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(picked)]
        joined = torch.cat(picked, -1)
        if self.options.get("norm_before_fc"):
            joined = rms(joined, w["input_norm.weight"])
        return linear(joined, w, "fc")

    def layer(self, tokens: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the next step, [T, H], and the logits over the target's vocabulary, [T, V]."""
        w = self.weights
        embedded = F.embedding(torch.tensor(tokens), w.get("embed_tokens.weight", self.target.embedding))
        if self.method == "eagle":
            x = read = linear(torch.cat((embedded, features), -1), w, "fc")
        else:
            normed = rms(features, w["layers.0.hidden_norm.weight"])
            x = normed if self.options.get("norm_before_residual") else features
            read = torch.cat((rms(embedded, w["layers.0.input_layernorm.weight"]), normed), -1)
        attended = attend(read, w, self.heads, self.kv_heads, self.theta)
        x = x + linear(attended, w, "layers.0.self_attn.o_proj")
        y = rms(x, w["layers.0.post_attention_layernorm.weight"])
        inner = F.silu(linear(y, w, "layers.0.mlp.gate_proj")) * linear(y, w, "layers.0.mlp.up_proj")
        x = x + linear(inner, w, "layers.0.mlp.down_proj")
        normed = x if self.method == "eagle" else rms(x, w["norm.weight"])
        logits = torch.full((len(x), VOCAB), -torch.inf)
        logits[:, self.target_ids] = normed @ w.get("lm_head.weight", self.target.head).T
        return (normed if self.options.get("norm_output") else x), logits

    @torch.inference_mode()
    def logits(self, tokens: list[int], drafts: list[int]) -> list[Tensor]:
        """[V] before each of `drafts`, which follow `tokens`; the target has computed all but the last of `tokens`."""
        features = self.fuse(self.target.states(tokens[:-1]))
        read, found = tokens[1:], []
        for draft in drafts:
            output, logits = self.layer(read, features)
            found.append(logits[-1])
            read, features = [*read, draft], torch.cat((features, output[-1:]))
        return found

    def check_greedy(self, tokens: list[int], drafts: list[int]) -> None:
        """Each draft is the most likely token, up to rounding."""
        for logits, draft in zip(self.logits(tokens, drafts), drafts, strict=True):
            assert logits[draft] >= logits.max() - 1e-4


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Target:
    return Target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def decoder(target):
    """The target as our decoder, in float32."""
    from outrider.models.checkpoint.loader import load_model

    return load_model(target.path, dtype="float32")


@pytest.fixture(scope="session")
def make_head(target):
    """make_head(method, **options) -> Head"""
    return lambda method, **options: Head(target, method, **options)


@pytest.fixture
def load_head(decoder, tmp_path):
    """load_head(path or Head, method, **fields) -> the drafter, through the factory; the plain one unless adaptive."""
    from outrider.platform.core.speculative_config import parse_speculative
    from outrider.spec_decode.drafters.factory import DrafterContext, make_drafter

    def load(head, method=None, *, load_format="auto", budget=2048, max_model_len=256, **fields):
        path = head.save(tmp_path / "head") if isinstance(head, Head) else head
        config = {"method": method or head.method, "model": str(path), "adaptive": False, **fields}
        context = DrafterContext(
            target=decoder,
            device="cpu",
            dtype="float32",
            load_format=load_format,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
        )
        return make_drafter(parse_speculative(config), context)

    return load
