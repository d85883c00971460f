"""The frozen target: the states that heads read, and the distributions that they learn."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models.checkpoint.gguf_file import is_gguf
from ...models.checkpoint.gguf_reader import open_gguf
from ...models.checkpoint.json_files import read_json, read_model_config
from ...models.checkpoint.paths import resolve_model_path
from ...models.config import DecoderConfig, config_from_hf
from ...models.families.multimodal import OUTER
from ...platform.core.errors import AdapterError, OutriderError, UnsupportedModelError
from .data import Batch
from .options import reason, wrong
from .products import compute_in_float32

_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_CHUNK = 256  # states whose logits are held at a time
MISSING_EXTRA = "training with adapters needs peft: pip install 'outrider[train]'"


class Labels(NamedTuple):
    """N positions whose next token is learned, row by row and ascending within a row."""

    rows: Tensor
    """[N] row of the batch."""
    positions: Tensor
    """[N] position p; token p + 1 is to be guessed."""
    states: Tensor
    """[N, H] the target's state at position p, as its head reads it."""


class TargetHead:
    """The target's lm_head, with its adapter if it has one."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._rows: tuple[Tensor, Tensor] | None = None
        self.dtype = _plain_weight(module).dtype
        """Dtype of the product."""

    def logits(self, states: Tensor, tokens: Tensor | None = None) -> Tensor:
        """[..., H] to float32 logits [..., V] of all tokens, or of `tokens` [V]."""
        states = states.to(self.dtype)
        if tokens is None:
            return self._module(states).float()
        if type(self._module) is not nn.Linear:
            return self._module(states)[..., tokens].float()
        if self._rows is None or self._rows[0] is not tokens:
            self._rows = tokens, self._module.weight[tokens].to(self.dtype)
        bias = None if self._module.bias is None else self._module.bias[tokens].to(self.dtype)
        return nn.functional.linear(states, self._rows[1], bias).float()

    def greedy(self, states: Tensor) -> Tensor:
        """[N, H] to the most likely tokens [N], a chunk at a time."""
        return torch.cat([self.logits(rows).argmax(-1) for rows in states.split(_CHUNK)])


class Features(NamedTuple):
    """A batch as heads see it."""

    ids: Tensor
    """[B, T]."""
    hidden: Tensor
    """[B, T, H] after the final norm."""
    aux: tuple[Tensor, ...]
    """[B, T, H] each: what enters the chosen layers."""
    labels: Labels
    head: TargetHead

    @property
    def next_tokens(self) -> Tensor:
        """[N] the text's token after each label."""
        return self.ids[self.labels.rows, self.labels.positions + 1]


def import_peft() -> Any:
    """The module peft, from the extra `train`.

    Raises:
        OutriderError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise OutriderError(MISSING_EXTRA) from error
    # Caused by the libraries' versions; a user cannot change it.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing. is deprecated", category=FutureWarning)
    return peft


def load_causal_lm(path: str, dtype: torch.dtype, device: torch.device, option: str = "model") -> Any:
    """A transformers model, frozen and in evaluation mode.

    Args:
        option: the one that named it, for errors.

    Raises:
        NotFoundError, UnsupportedModelError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    found = resolve_model_path(path)
    try:
        folder, options = (found.parent, _gguf_options(found)) if is_gguf(found) else (found, {})
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    except Exception as error:  # broken files raise whatever the libraries run into
        message = f"--{option} {path}: transformers cannot load it: {reason(error)}"
        raise UnsupportedModelError(message, param=option) from error
    return model.to(device).eval().requires_grad_(False)


def _gguf_options(file: Path) -> dict[str, Any]:
    from transformers import GgufConfig

    if open_gguf(file, tensors=False).is_split:  # transformers would read the first part, and draw the other weights
        raise UnsupportedModelError("it is one of several parts; llama.cpp's gguf-split --merge joins them")
    return {"gguf_file": file.name, "quantization_config": GgufConfig(dequantize=True)}


class Target:
    """A causal LM, with an adapter or without, that is never changed."""

    def __init__(self, causal: Any, config: DecoderConfig, aux_layers: Sequence[int] = ()) -> None:
        self._causal = causal
        self.config = config
        self.aux_layers = tuple(aux_layers)
        self.head = TargetHead(causal.get_output_embeddings())
        self._dtype = self.head.dtype
        self._before_norm: Tensor | None = None
        if config.num_layers in self.aux_layers:  # transformers gives the last one only after the final norm
            causal.base_model.norm.register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._before_norm = inputs[0]

    def compute_in_float32(self) -> None:
        """See `products.compute_in_float32`; states keep their dtype when they are stored."""
        compute_in_float32(self._causal)
        self.head.dtype = torch.float32

    @property
    def eos_tokens(self) -> list[int]:
        """Tokens that end a text."""
        given = getattr(self._causal.generation_config, "eos_token_id", None)
        ids = [given] if isinstance(given, int) else list(given or ())
        return [token for token in ids if 0 <= token < self.config.vocab_size]

    @property
    def embeddings(self) -> Tensor:
        """[V, H], without any adapter."""
        return _plain_weight(self._causal.get_input_embeddings())

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids to [..., H], without any adapter."""
        return nn.functional.embedding(ids, self.embeddings)

    @property
    def lm_head(self) -> Tensor:
        """[V, H], without any adapter."""
        return _plain_weight(self._causal.get_output_embeddings())

    @property
    def decoder(self) -> Any:
        """The transformers model below the head, which is not to be changed."""
        return self._causal.base_model

    @property
    def last_layer(self) -> dict[str, Tensor]:
        """The last decoder layer's weights by module, without any adapter.

        In addition "norm.weight" of the final norm and "first_norm.weight" of the first layer's input norm.
        """
        decoder = self._causal.base_model
        weights = {
            name.replace(".base_layer", "").removeprefix("layers."): p.detach()
            for name, p in decoder.layers[-1].named_parameters()
            if "lora_" not in name
        }
        first = getattr(decoder.layers[0], "input_layernorm", None)  # some models have none
        if first is not None:
            weights["first_norm.weight"] = first.weight.detach()
        return weights | {"norm.weight": decoder.norm.weight.detach()}

    @torch.no_grad()
    def features(self, batch: Batch) -> Features:
        """Run the target over a batch."""
        output = self._causal.base_model(
            input_ids=batch.ids, use_cache=False, output_hidden_states=bool(self.aux_layers)
        )
        hidden = output.last_hidden_state
        entering: list[Tensor] = list(output.hidden_states or ())
        if self._before_norm is not None:
            entering[-1], self._before_norm = self._before_norm, None
        # What is kept, and what is computed again, has the model's dtype.
        hidden, *aux = (state.to(self._dtype) for state in (hidden, *(entering[layer] for layer in self.aux_layers)))
        rows, positions = batch.learned[:, 1:].nonzero(as_tuple=True)
        labels = Labels(rows, positions, hidden[rows, positions])
        return Features(batch.ids, hidden, tuple(aux), labels, self.head)


def _plain_weight(module: nn.Module) -> Tensor:
    plain: Any = getattr(module, "base_layer", module)
    weight: Tensor = plain.weight
    return weight.detach()


def read_config(model: str) -> DecoderConfig:
    """Sizes of the target, as the engine reads them.

    Raises:
        NotFoundError, UnsupportedModelError: it is not a model that is served, or is a multimodal checkpoint.
    """
    raw = read_model_config(resolve_model_path(model))
    if OUTER in raw:
        raise UnsupportedModelError(f"--model {model}: no drafts are trained on a {raw[OUTER]}", param="model")
    return config_from_hf(raw, torch.float32)


def load_target(
    model: str,
    adapter: str | None,
    dtype: torch.dtype,
    device: torch.device,
    aux_layers: tuple[int, ...] | None = (),
) -> Target:
    """Load a target.

    Args:
        aux_layers: layers whose inputs are read; None chooses them as EAGLE-3 does (`choose_aux_layers`).

    Raises:
        NotFoundError, UnsupportedModelError, AdapterError: it cannot be loaded.
        InvalidRequestError: the target has no such layers.
    """
    if adapter is not None:
        _check_adapter(adapter)
    config, causal = read_config(model), load_causal_lm(model, dtype, device)
    num_layers = config.num_layers
    layers = choose_aux_layers(num_layers) if aux_layers is None else aux_layers
    if any(not 0 <= layer <= num_layers for layer in layers):
        given = ", ".join(map(str, layers))
        raise wrong("aux_layers", f"names layers that must be in [0, {num_layers}], the target's; got {given}")
    if adapter is not None:
        peft = import_peft()
        try:
            causal = peft.PeftModel.from_pretrained(causal, adapter).eval().requires_grad_(False).get_base_model()
        except Exception as error:  # broken files raise whatever the libraries run into
            raise AdapterError(f"--adapter {adapter}: PEFT cannot load it: {reason(error)}", param="adapter") from error
    return Target(causal, config, layers)


def _check_adapter(adapter: str) -> None:
    """Check a folder before PEFT, which asks a hub for missing files and accepts invalid configurations."""
    folder = Path(adapter)
    if not os.path.isdir(folder):
        raise AdapterError(f"--adapter: there is no folder {adapter}", param="adapter")
    if not any((folder / name).is_file() for name in _ADAPTER_WEIGHTS):
        raise AdapterError(f"--adapter: {adapter} has no {' or '.join(_ADAPTER_WEIGHTS)}", param="adapter")
    try:
        config = read_json(folder / "adapter_config.json")
    except OutriderError as error:
        raise AdapterError(f"--adapter: {error.message}", param="adapter") from error
    for name, is_good in (("peft_type", config.get("peft_type") == "LORA"), ("r", type(config.get("r")) is int)):
        if not is_good:
            problem = f"has {name} {config.get(name)!r:.50}; training takes adapters of peft_type LORA with a rank r"
            raise AdapterError(f"--adapter: {adapter}/adapter_config.json {problem}", param="adapter")


def choose_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers 2, L//2 and L-3 (Li et al. 2025, EAGLE-3), or three adjacent ones near the end if these are not distinct.

    Raises:
        InvalidRequestError: the target has no three.
    """
    usual = (2, num_layers // 2, num_layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    last = max(num_layers - 1, 2)
    if last > num_layers:
        raise wrong("aux_layers", f"must be given: three layers cannot be chosen in a target of {num_layers}")
    return (last - 2, last - 1, last)
