"""adapter_config.json of PEFT: checked, with the rank and scale of every module."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from ...models.families.multimodal import is_of_tower
from ...platform.core.adapter_files import CONFIG_FILE, AdapterFolder
from ...platform.core.sampling_params import quote_for_error
from .errors import adapter_error, quote_path
from .foreign_adapters import is_mlx, peft_fields, tool_hint
from .kinds import check_fields, lora_fields
from .kinds.base import AdapterKind, positive
from .kinds.lora import LORA
from .patterns import Patterns

_MAX_CONFIG_BYTES = 1 << 20
_VERSION = re.compile("[0-9]+")
_MAX_VERSION = 40
"""Characters of `peft_version` that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """Fields of a PEFT configuration that decide what an adapter computes."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Patterns
    alpha_pattern: Patterns
    target_parameters: tuple[str, ...]
    """Ends of the names of parameters that were targeted; a module is configured as its `weight` if that is one."""
    use_dora: bool
    bias: str
    """The model's biases that the file may have: "none", "all" or "lora_only"."""
    lora_bias: bool
    """True when every lora_B has a bias."""
    modules_to_save: tuple[str, ...]
    """Only embeddings and heads."""
    invocation: tuple[int, ...]
    """Invocation tokens from which on the adapter applies; (): it applies to all tokens."""
    ties_weights: bool
    """True when trained parts of a tied embedding apply to the head too."""
    trainable_tokens: tuple[tuple[str, tuple[int, ...]], ...]
    """Tokens of trained rows, by name of the embedding or head; the name "" stands for the embedding."""
    version: tuple[int, ...] = ()
    """Version of PEFT that wrote the folder; (): none is named, as before 0.18."""
    mlx: bool = False
    """True when mlx-lm wrote the folder."""
    kind: AdapterKind = LORA
    """Kind of the file's tensors. The other fields are those of LoRA."""

    @property
    def form(self) -> tuple[Any, ...]:
        """All fields but those of the scales."""
        more = (self.use_dora, self.lora_bias, self.modules_to_save, self.trainable_tokens, self.target_parameters)
        return self.rank, self.rank_pattern.items, *more

    @property
    def has_token_indices(self) -> bool:
        """True when rows of some tokens are trained."""
        return bool(self.trainable_tokens)

    def token_indices(self, module: str) -> tuple[int, ...]:
        """Return the tokens of an embedding's or head's trained rows; AdapterError when none are named."""
        for name, tokens in self.trainable_tokens:
            if name in ("", module) or module.endswith(f".{name}") or name.endswith(f".{module}"):
                return tokens
        raise adapter_error(f"{CONFIG_FILE}: trainable_token_indices names no tokens of {module}")

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the model that PEFT was given."""
        return int(self.rank_pattern.find(self._pattern_name(module), self.rank))

    def scale_of(self, module: str) -> float:
        """Return alpha / r, or alpha / sqrt(r) for rank-stabilized LoRA (Kalajdzievski 2023, arXiv:2312.03732)."""
        rank = self.rank_of(module)
        alpha = float(self.alpha_pattern.find(self._pattern_name(module), self.alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _pattern_name(self, module: str) -> str:
        """Return the name of a module, or of its targeted parameter, that PEFT matches with patterns."""
        parameter = f"{module}.weight"
        return parameter if any(f".{parameter}".endswith(f".{end}") for end in self.target_parameters) else module


def _pattern(config: dict[str, Any], name: str, *, integer: bool, zero: bool = False) -> Patterns:
    """Return the patterns of a field with positive values; with `zero`, 0 is served too."""
    values = config.get(name) or {}
    if not isinstance(values, dict):
        raise adapter_error(f"{CONFIG_FILE}: {name} must be an object, got {quote_for_error(values)}")
    patterns = Patterns(name, values)
    for pattern, value in values.items():
        if value != 0 or not zero:
            positive(f"{name}[{quote_for_error(pattern)}]", value, integer=integer)
    return patterns


def _trainable_tokens(values: list[int] | dict[str, list[int]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    named = values if isinstance(values, dict) else {"": values}
    return tuple((name, tuple(tokens)) for name, tokens in named.items())


def read_config(folder: AdapterFolder) -> PeftConfig:
    """Read and check `folder`/adapter_config.json.

    Raises:
        AdapterError: the file is missing or broken, or needs something that is not served (named in the message).
    """
    content = folder.read(CONFIG_FILE, _MAX_CONFIG_BYTES)
    if content is None:
        raise adapter_error(f"no {CONFIG_FILE} in {quote_path(folder.label)}{tool_hint(folder)}")
    try:
        config = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise folder.error(CONFIG_FILE, f"cannot be read: {str(error)[:200]}") from None
    if not isinstance(config, dict):
        raise folder.error(CONFIG_FILE, "is not a JSON object")
    if mlx := is_mlx(config):
        config = peft_fields(config)
    kind = check_fields(config)
    config = lora_fields(kind, config)
    return PeftConfig(
        rank=positive("r", config.get("r"), integer=True),
        alpha=positive("lora_alpha", config.get("lora_alpha"), integer=False),
        use_rslora=bool(config.get("use_rslora")),
        rank_pattern=_pattern(config, "rank_pattern", integer=True, zero=kind.prunes_ranks),
        alpha_pattern=_pattern(config, "alpha_pattern", integer=False),
        target_parameters=tuple(config.get("target_parameters") or ()),
        use_dora=bool(config.get("use_dora")),
        bias=str(config.get("bias") or "none"),
        lora_bias=bool(config.get("lora_bias")),
        modules_to_save=tuple(name for name in config.get("modules_to_save") or () if not is_of_tower(name)),
        invocation=tuple(config.get("alora_invocation_tokens") or ()),
        ties_weights=bool(config.get("ensure_weight_tying")),
        trainable_tokens=_trainable_tokens(config.get("trainable_token_indices") or {}),
        version=tuple(map(int, _VERSION.findall(str(config.get("peft_version"))[:_MAX_VERSION])))[:2],
        mlx=mlx,
        kind=kind,
    )
