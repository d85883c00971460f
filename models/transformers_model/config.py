"""Facts about a model of transformers, found by a dry pass on the meta device: it computes shapes only."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.paged_attention import AttentionOptions
from ..quantization import Format, read_format
from .experts import find_experts
from .layers import outer_model
from .paged_attention import AttentionCall
from .rotation import replace_rotation
from .skeleton import (
    build_on_meta,
    find_architecture,
    find_linears,
    linear_sizes,
    module_name,
    refused,
    replace_linears,
)

TOKENS = 3
"""Tokens of the dry pass."""
_NUM_INPUTS = 3
"""Hidden states, experts and weights: inputs of a module of experts."""
_HARMLESS = frozenset(
    "dropout scaling softcap sliding_window is_causal use_cache cache past_key_values position_ids cache_position "
    "position_embeddings output_attentions output_hidden_states return_dict s_aux".split()
)
"""Options of attention that are served, or without effect here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """Model that runs through transformers' code."""

    raw: str
    """config.json."""
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    calls: tuple[AttentionCall, ...]
    """Attention of each layer, in order."""
    attention: AttentionOptions
    """Its scale and cap, the same in all layers."""
    notes_rotation: bool
    """True when the backend can rotate queries and keys: see `rotation`."""
    sites: tuple[tuple[str, ...], ...]
    """Linear modules that compute each token of a pass once, so that adapters can target them; those of one input side
    by side."""
    experts: tuple[str, ...]
    """Modules of experts that compute each token of a pass once, and have a form that we compute."""
    dtype: torch.dtype
    quantization: Format | None
    """Format of the weights; None: they are not quantised."""
    batch_invariant: bool = False
    """Always refused when True: transformers' code does not promise it."""

    @property
    def embedding_size(self) -> int:
        """Elements of a token's embedding."""
        return self.hidden_size


def transformers_config(raw: Mapping[str, Any], dtype: torch.dtype) -> TransformersConfig | None:
    """Config of a model that runs in `dtype`, from its config.json; None when transformers has no such causal model.

    Raises:
        UnsupportedModelError: this way does not serve it; the message has the reason.
    """
    architecture = find_architecture(raw)
    return None if architecture is None else _describe(json.dumps(raw), architecture, dtype)


@functools.lru_cache(8)
def _describe(raw: str, architecture: str, dtype: torch.dtype) -> TransformersConfig:
    model = build_on_meta(json.loads(raw), architecture, dtype)
    config = model.config
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        raise refused(architecture, f"its embedding is a {type(embedding).__name__}, its head a {type(head).__name__}")
    if module_name(model, head) != "lm_head":
        raise refused(architecture, f"its head is called {module_name(model, head)}")
    if embedding.weight.shape != head.weight.shape or embedding.embedding_dim != config.hidden_size:
        raise refused(architecture, "its embedding, its head and its hidden states have different sizes")
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise refused(architecture, "it has convolutions over tokens, whose state is not kept in blocks")
    quantization = read_format(json.loads(raw))
    if quantization is not None and not all(type(module) is nn.Linear for module in find_linears(model)):
        raise refused(architecture, "its linear layers are stored transposed, and its weights are quantised")
    dry = _DryPass(architecture, model)
    dry.run()
    _check_windows(architecture, config, dry.calls)
    heads, kv_heads, head_dim, options = dry.uniform()
    return TransformersConfig(
        raw=raw,
        architecture=architecture,
        vocab_size=head.out_features,
        hidden_size=config.hidden_size,
        num_layers=len(dry.calls),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context_length(architecture, config),
        tie_word_embeddings=head.weight is embedding.weight,
        calls=tuple(dry.calls),
        attention=options,
        notes_rotation=dry.all_noted,
        sites=tuple(dry.sites()),
        experts=tuple(name for name, counts in dry.experts.items() if counts == [TOKENS]),
        dtype=dtype,
        quantization=quantization,
    )


class _DryPass:
    """One pass over a skeleton, which records what its layers ask of attention and of linear layers."""

    def __init__(self, architecture: str, model: Any) -> None:
        self.calls: list[AttentionCall] = []
        self.all_noted = True
        """True when all queries and keys came as the rotation gave them."""
        self._noted: tuple[Tensor, ...] = ()
        self.linears: dict[str, list[Tensor]] = {}
        """Input of each call of a linear module."""
        self.experts: dict[str, list[int]] = {}
        """Number of tokens in each call of a module of experts."""
        self._kinds: set[tuple[int, int, int, AttentionOptions]] = set()
        self._kinds_of_linears: dict[str, tuple[bool, bool]] = {}
        self._architecture = architecture
        self._model = model
        for name, module in model.named_modules():
            replace_rotation(module, self._note)
            module.paged = functools.partial(self._record, name, module)
            if name.endswith(".experts") and find_experts(module) is not None:
                module.register_forward_pre_hook(functools.partial(self._note_experts, name), with_kwargs=True)
        replace_linears(model, self._linear)

    def uniform(self) -> tuple[int, int, int, AttentionOptions]:
        """Heads, KV heads, head size and options, the same in all layers."""
        if len(self._kinds) != 1:
            raise refused(self._architecture, "its layers have different heads, scales or caps of attention")
        return next(iter(self._kinds))

    def sites(self) -> list[tuple[str, ...]]:
        """See `TransformersConfig.sites`."""
        found: dict[tuple[object, ...], list[str]] = {}
        for name, inputs in self.linears.items():
            if len(inputs) == 1 and inputs[0].shape[:-1].numel() == TOKENS:
                parent = name.rpartition(".")[0]
                found.setdefault((id(inputs[0]), parent, self._kinds_of_linears[name]), []).append(name)
        return [tuple(names) for names in found.values()]

    def run(self) -> None:
        """Compute the pass.

        Raises:
            UnsupportedModelError: it fails, or does not call the attention interface once for each layer.
        """
        config = self._model.config
        config._experts_implementation = "batched_mm"  # others depend on values, of which there are none
        try:
            with torch.device("meta"), torch.no_grad():
                ids = torch.zeros(1, TOKENS, dtype=torch.int64)
                positions = torch.arange(TOKENS)[None]
                states = self._model.base_model(input_ids=ids, position_ids=positions, use_cache=False)[0]
                outer_model(self._model)(states[0, :1])  # fewer rows than TOKENS: the head is no site
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise refused(self._architecture, f"a pass over shapes fails: {reason}") from error
        layers = config.num_hidden_layers
        if len(self.calls) != layers or len({call.module for call in self.calls}) != layers:
            raise refused(
                self._architecture,
                f"{len(self.calls)} of its {layers} layers attend through transformers' attention interface, once each",
            )

    def _note(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # Some families have angles in float32 with queries in bfloat16; the backend's are in the queries' dtype.
        if cos.shape == sin.shape == (1, TOKENS, q.shape[3]) and cos.dtype == sin.dtype == q.dtype:
            self._noted = q, k
        return q, k

    def _note_experts(self, name: str, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        is_known = len(args) == _NUM_INPUTS and not options
        self.experts.setdefault(name, []).append(args[0].shape[:-1].numel() if is_known else 0)

    def _linear(self, name: str, module: nn.Module) -> nn.Module:
        self._kinds_of_linears[name] = isinstance(module, nn.Linear), module.bias is not None
        return _ShapeLinear(linear_sizes(module)[1], self.linears.setdefault(name, []))

    def _record(
        self, name: str, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        for option, value in options.items():
            if option not in _HARMLESS and value is not None and value is not False:
                raise refused(self._architecture, f"its attention has {option}")
        if mask is not None or not options.get("is_causal", getattr(module, "is_causal", False)):
            raise refused(self._architecture, "its attention has a mask of its own")
        heads, head_dim = q.shape[1], q.shape[3]
        if k.shape != v.shape or k.shape[3] != head_dim or q.shape[:3:2] != (1, TOKENS) or k.shape[2] != TOKENS:
            raise refused(self._architecture, "its keys and values have different sizes")
        if head_dim % 2:
            raise refused(self._architecture, f"its heads have an odd size, {head_dim}")
        sinks = options.get("s_aux")
        if sinks is not None and sinks.shape != (heads,):
            raise refused(self._architecture, f"its attention has sinks of shape {list(sinks.shape)}")
        kind = AttentionOptions(options.get("scaling"), options.get("softcap") or None)
        self.all_noted &= [*map(id, self._noted)] == [id(q), id(k)]
        self._noted = ()
        self._kinds.add((heads, k.shape[1], head_dim, kind))
        self.calls.append(AttentionCall(name, options.get("sliding_window") or None))
        return q.transpose(1, 2)


class _ShapeLinear(nn.Module):
    """Linear layer without weights, in the dry pass. It keeps its inputs."""

    def __init__(self, out_features: int, calls: list[Tensor]) -> None:
        super().__init__()
        self._out_features = out_features
        self._calls = calls

    def forward(self, x: Tensor) -> Tensor:
        """Return an output's shape."""
        self._calls.append(x)
        return x.new_empty(*x.shape[:-1], 2 * self._out_features)[..., : self._out_features]  # as of a merged product


def _check_windows(architecture: str, config: Any, calls: list[AttentionCall]) -> None:
    """Refuse a model whose windows are in its masks only, which are not made here."""
    types = getattr(config, "layer_types", None)
    if types is None:
        has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        wanted = [bool(has_window)] * len(calls)
    else:
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise refused(architecture, f"it has layers of type {', '.join(sorted(map(str, unknown)))}")
        wanted = [name == "sliding_attention" for name in types]
    if wanted != [call.window is not None for call in calls]:
        raise refused(architecture, "the windows of its config do not reach the attention interface")


def context_length(architecture: str, config: Any) -> int:
    """Context length in tokens. LongRoPE turns all rows of a pass alike, so it ends with the short context, even if
    layers of one type alone have it."""
    found = getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        raise refused(architecture, "its config has no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    shorts = [part.get("original_max_position_embeddings") for part in ropes if part.get("rope_type") == "longrope"]
    return min([found, *(int(short) for short in shorts if short)])
