"""Model that computes with transformers' code, our linear layers, and attention over the paged cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...platform.core.errors import InvalidRequestError
from ..attention import AttentionSpec, make_attention
from ..batch import ForwardBatch, KVLayerSpec
from ..checkpoint.weight_files import StoredTensor
from ..layers.embedding import LM_HEAD, Embedding, VocabularyNames
from ..layers.experts import ExpertLayers
from ..layers.linear import Linear
from ..layers.score_head import ScoreHead
from ..layers.weights import WeightSlot
from ..model import DecoderOutput
from ..states.memory import StateSpec
from .config import TransformersConfig
from .direct import call_directly, with_hooks
from .experts import ServedExperts, find_experts
from .gated_mlp import use_mlp_kernel
from .layers import (
    AdaptedLinear,
    BareLinear,
    Head,
    MergedLinear,
    SharedInput,
    TokenEmbedding,
    outer_model,
    parameter_slot,
)
from .names import CheckpointNames
from .paged_attention import NoRotation, PagedLayer, PassState
from .rotation import replace_rotation
from .skeleton import build_on_meta, fill_buffers, linear_sizes, module_name, replace, replace_linears


class TransformersModel:
    """Causal language model. It is built without weights: fill every slot of `weight_slots`, then run it. Implements
    LanguageModel."""

    score: ScoreHead | None = None
    """Classifiers run natively alone."""

    def __init__(self, config: TransformersConfig, device: torch.device | str = "cpu") -> None:
        """Build the model.

        Raises:
            InvalidRequestError: `batch_invariant` is requested.
        """
        if config.batch_invariant:
            raise InvalidRequestError(
                f"batch_invariant is not promised for {config.architecture}, which runs through transformers' code: "
                "torch's activations round an element by its position in a tensor",
                param="batch_invariant",
            )
        self.config = config
        self.device = torch.device(device)
        windows = frozenset(call.window for call in config.calls)
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        self.attention = make_attention(AttentionSpec(*heads, windows, config.dtype, self.device, config.attention))
        self.rope = NoRotation(config.head_dim, dtype=config.dtype, device=self.device)
        self._state = PassState()
        self._linears: list[Linear] = []
        self._slots: dict[str, WeightSlot] = {}
        self._outer = build_on_meta(json.loads(config.raw), config.architecture, config.dtype)
        self._names = CheckpointNames(self._outer)
        self._put_layers()
        fill_buffers(self._outer, self.device)
        self._add_parameters()
        self._inner = self._outer.base_model
        self._blocks = next(
            module
            for module in self._inner.modules()
            if isinstance(module, nn.ModuleList) and len(module) == config.num_layers
        )
        use_mlp_kernel(self._outer, self._state)
        call_directly(self._outer)
        self._logits_of = outer_model(self._outer)
        self._entering: dict[int, Tensor] = {}
        self._hooked: set[int] = set()

    def _put_layers(self) -> None:
        config, model = self.config, self._outer
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        table_name = module_name(model, embedding)
        self.embedding = Embedding(
            config.vocab_size,
            config.hidden_size,
            tied=config.tie_word_embeddings,
            names=VocabularyNames(table_name, head_bias=head.bias is not None),
            dtype=config.dtype,
            device=self.device,
        )
        self._slots |= self.embedding.weight_slots()
        self._put_linears(keep=head)
        for name in config.experts:
            self._put_experts(name)
        replace(model, table_name, TokenEmbedding(self.embedding, self._state))
        replace(model, "lm_head", Head(self.embedding, self._state))
        for index, call in enumerate(config.calls):
            module = model.get_submodule(call.module)
            module.paged = PagedLayer(call, index, self.attention, self._state)
            if config.notes_rotation:
                replace_rotation(module, self._state.noted)

    def _put_linears(self, keep: nn.Module) -> None:
        """Replace the model's linear layers, except `keep`, by ours; those of one input are merged."""
        plain: dict[str, Any] = {}

        def bare(name: str, module: nn.Module) -> nn.Module:
            plain[name] = module
            return nn.Identity()

        replace_linears(self._outer, bare, keep=keep)
        for names in self.config.sites:
            modules = [plain.pop(name) for name in names]
            # Only plain Linear modules are merged: a Conv1D stores the transposed matrix.
            groups = [names] if isinstance(modules[0], nn.Linear) else [(name,) for name in names]
            for group in groups:
                self._put_sites(group, dict(zip(names, modules, strict=True)))
        for name, module in plain.items():
            replace(self._outer, name, BareLinear(self._linear((name,), {name: module})))

    def _put_experts(self, name: str) -> None:
        module = self._outer.get_submodule(name)
        form = find_experts(module)
        assert form is not None, "the dry pass has found it"
        common: dict[str, Any] = {"dtype": self.config.dtype, "device": self.device, "batch_invariant": False}
        merged = ["gate_up_proj"] if form.bias else ["gate_proj", "up_proj"]
        layers = ExpertLayers(name, name, form, [*merged, "down_proj"], **common)
        self._linears += layers.linears()
        slots = layers.merged_slots(name, transposed=module.is_transposed)
        self._slots |= {key: renamed.slot for key, renamed in slots.items()}
        replace(self._outer, name, ServedExperts(layers, self._state))

    def _put_sites(self, names: tuple[str, ...], modules: Mapping[str, Any]) -> None:
        linear = self._linear(names, modules)
        self._linears.append(linear)
        if len(names) == 1:
            replace(self._outer, names[0], AdaptedLinear(linear, self._state))
            return
        shared = SharedInput(linear, self._state)
        for index, name in enumerate(names):
            replace(self._outer, name, MergedLinear(shared, index))

    def _linear(self, names: tuple[str, ...], modules: Mapping[str, Any]) -> Linear:
        first = modules[names[0]]
        linear = Linear(
            names[0],
            [(name, linear_sizes(modules[name])[1]) for name in names],
            linear_sizes(first)[0],
            bias=first.bias is not None,
            dtype=self.config.dtype,
            device=self.device,
        )
        slots = linear.weight_slots()
        if not isinstance(first, nn.Linear):
            slots[f"{names[0]}.weight"] = _transposed(slots[f"{names[0]}.weight"])
        self._slots |= slots
        return linear

    def _add_parameters(self) -> None:
        """Slots of the tensors that stay in modules of transformers."""
        for name in self._outer.state_dict():
            parent, _, leaf = name.rpartition(".")
            self._slots[name] = parameter_slot(self._outer.get_submodule(parent), leaf, self.device)

    @property
    def kv_layers(self) -> list[KVLayerSpec]:
        """See LanguageModel."""
        return [KVLayerSpec(self.config.num_kv_heads, self.config.head_dim)] * self.config.num_layers

    @property
    def state_layers(self) -> list[StateSpec]:
        """None: such models are refused."""
        return []

    @property
    def num_parameters(self) -> int:
        """See LanguageModel."""
        return sum(torch.Size(slot.shape).numel() for slot in self._slots.values())

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, aux_layers: Sequence[int] = ()) -> DecoderOutput:
        """See LanguageModel."""
        self._state.batch = batch
        for index in aux_layers:
            self._hook(index)
        found = self._inner(input_ids=batch.input_ids[None], position_ids=batch.positions[None], use_cache=False)
        return DecoderOutput(found.last_hidden_state[0], tuple(self._entering[index] for index in aux_layers))

    def _hook(self, index: int) -> None:
        """Keep the hidden states that enter a layer, from now on."""
        if index in self._hooked:
            return
        self._hooked.add(index)

        def entering(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            self._entering[index] = (args[0] if args else options["hidden_states"])[0]

        def leaving(_: nn.Module, __: Any, output: Any) -> None:
            self._entering[index] = (output if isinstance(output, Tensor) else output[0])[0]

        if index < len(self._blocks):
            with_hooks(self._blocks[index]).register_forward_pre_hook(entering, with_kwargs=True)
        else:
            with_hooks(self._blocks[-1]).register_forward_hook(leaving)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, adapters: Any = None, out: Tensor | None = None) -> Tensor:
        """See LanguageModel."""
        self._state.head_adapters = adapters
        logits = self._logits_of(hidden)
        out = logits.float() if out is None else out.copy_(logits)
        self.embedding.mask(out, adapters)
        return out

    def linears(self) -> list[Linear]:
        """See LanguageModel."""
        return self._linears

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See LanguageModel."""
        return dict(self._slots)

    def by_slot(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Stored tensors by the names of slots, without those that follow from others or from the config."""
        tied = {LM_HEAD} if self.config.tie_word_embeddings else set()
        return self._names.by_slot(tensors, self._slots, tied)


def _transposed(slot: WeightSlot) -> WeightSlot:
    rows, columns = slot.shape
    return WeightSlot((columns, rows), lambda tensor: slot.load(tensor.t()), slot.scale)
