"""Fields of PEFT's `LoraConfig` and `VeraConfig`: the served and refused values of each.

`tests/unit/lora` tests every field against PEFT; the tables in docs/guides/adapters.md are generated from these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...models.families.multimodal import is_of_tower
from ...platform.core.adapter_files import CONFIG_FILE
from ...platform.core.errors import AdapterError
from ...platform.core.sampling_params import quote_for_error

# Initializations that leave the base model alone. Others change its weights too, and without those changes the adapter
# is wrong. `save_pretrained(..., path_initial_model_for_weight_conversion=...)` converts them to plain LoRA, and
# records it.
_PLAIN_INITS = ("true", "false", "none", "gaussian", "orthogonal", "eva", "mica")


def _changes_base(value: Any) -> bool:
    return str(value).lower() not in _PLAIN_INITS


_VOCABULARY = ("embed_tokens", "wte", "embed_in", "word_embeddings", "lm_head", "embed_out")
"""Names of embeddings and heads in the models that are served."""
CLASSIFIERS = ("score", "classifier")
"""Names that PEFT gives for the task SEQ_CLS, of which a model has one."""


def _trains_modules(value: Any) -> bool:
    """Return whether modules other than embeddings, heads and vision towers are trained in full."""
    return _is_no_names(value) or any(
        name.rpartition(".")[2] not in _VOCABULARY + CLASSIFIERS and not is_of_tower(name) for name in value or []
    )


def _is_no_names(value: Any) -> bool:
    names = value or []
    return not isinstance(names, list) or not all(isinstance(name, str) for name in names)


def _is_no_tokens(value: Any) -> bool:
    tokens = value or []
    return not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens)


def _is_no_token_set(value: Any) -> bool:
    lists = list(value.values()) if isinstance(value, dict) else [value]
    return any(_is_no_tokens(tokens) or len(set(tokens or [])) < len(tokens or []) for tokens in lists)


class FieldRule(NamedTuple):
    """One field."""

    served: str
    """Values that are served, for the documentation."""
    refused: str = ""
    """Values that are refused, for the documentation and the error; "" when there are none."""
    is_refused: Callable[[Any], bool] = bool
    """Returns True for a value that is refused. An absent field and a neutral value are accepted."""
    refused_on: str = ""
    """Modules on which the field is refused when they are read, for the documentation."""

    @property
    def refusals(self) -> str:
        """All that is refused, for the documentation."""
        return "; ".join(part for part in (self.refused, self.refused_on and f"on {self.refused_on}") if part)

    def refuses(self, value: Any) -> bool:
        """Return whether a value of adapter_config.json is refused."""
        return bool(self.refused) and self.is_refused(value)


_VERA = "VERA"
_ANY = "any value"
_KEYS = "any value; the names of the file's tensors say which modules are adapted"
_TRAINING = "any value; it concerns training"

FIELDS: dict[str, FieldRule] = {
    "peft_type": FieldRule(
        "`LORA`; `VERA`, with fields of its own", "only LORA and VERA are", lambda value: value not in ("LORA", _VERA)
    ),
    "task_type": FieldRule(_ANY),
    "auto_mapping": FieldRule(_ANY),
    "peft_version": FieldRule(_ANY),
    "base_model_name_or_path": FieldRule("any value; shapes say whether the adapter fits"),
    "revision": FieldRule(_ANY),
    "inference_mode": FieldRule(_ANY),
    "r": FieldRule("up to `--max-lora-rank`"),
    "lora_alpha": FieldRule("any positive number"),
    "rank_pattern": FieldRule("names and regular expressions"),
    "alpha_pattern": FieldRule("names and regular expressions"),
    "use_rslora": FieldRule(_ANY),
    "use_dora": FieldRule(_ANY, refused_on="experts"),
    "target_modules": FieldRule(_KEYS),
    "exclude_modules": FieldRule(_KEYS),
    "layers_to_transform": FieldRule(_KEYS),
    "layers_pattern": FieldRule(_KEYS),
    "ensure_weight_tying": FieldRule(_KEYS),
    "bias": FieldRule(
        "`none`, `all`, `lora_only`: biases of linear projections",
        "other values",
        lambda value: value not in (None, "none", "all", "lora_only"),
        refused_on="experts",
    ),
    "lora_bias": FieldRule(_ANY, refused_on="experts"),
    "modules_to_save": FieldRule(
        "embeddings and heads (`embed_tokens`, `lm_head` and their other names), of a resized vocabulary too; `score` "
        "of a classifier; modules of vision towers, which are left out",
        "other fully trained modules",
        _trains_modules,
    ),
    "trainable_token_indices": FieldRule(
        "tokens of `embed_tokens` and `lm_head`, added ones too",
        "anything but lists of different tokens",
        _is_no_token_set,
    ),
    "init_lora_weights": FieldRule(
        "all that leave the base model alone: booleans, `gaussian`, `orthogonal`, `eva`, `mica`",
        "others, such as `loftq`; and `pissa`, `olora`, `corda` and `lora_ga`, which change the base weights, unless "
        "`path_initial_model_for_weight_conversion` made plain LoRA of them",
        _changes_base,
    ),
    "fan_in_fan_out": FieldRule("any value; it concerns how the base model stores its weights"),
    "lora_dropout": FieldRule(_TRAINING),
    "loftq_config": FieldRule(_TRAINING),
    "eva_config": FieldRule(_TRAINING),
    "corda_config": FieldRule(_TRAINING),
    "lora_ga_config": FieldRule(_TRAINING),
    "velora_config": FieldRule(_TRAINING),
    "monteclora_config": FieldRule(_TRAINING),
    "megatron_config": FieldRule(_TRAINING),
    "megatron_core": FieldRule(_TRAINING),
    "runtime_config": FieldRule("never saved"),
    "qalora_group_size": FieldRule("any value; only `use_qalora` reads it"),
    "layer_replication": FieldRule("", "a model with repeated layers"),
    "target_parameters": FieldRule(
        "weights of linear modules and routers, `gate_up_proj` and `down_proj` of experts",
        "anything but lists of names",
        _is_no_names,
    ),
    "alora_invocation_tokens": FieldRule(
        "lists of tokens; the base model computes the prompt before their last occurrence, and shares its cached "
        "prefixes",
        "anything but lists of tokens",
        _is_no_tokens,
        refused_on="`kv_b_proj`, with trained biases or whole weights",
    ),
    "use_qalora": FieldRule("", "QA-LoRA"),
    "use_bdlora": FieldRule("", "block-diagonal LoRA"),
    "arrow_config": FieldRule("", "Arrow routing"),
    "kasa_config": FieldRule("", "KaSA"),
}


VERA_FIELDS: dict[str, FieldRule] = {
    "r": FIELDS["r"],
    "save_projection": FieldRule(
        "`true`: the file has `vera_A` and `vera_B`",
        "`false`: save the adapter with save_projection=True",
        lambda value: value is not None and value is not True,
    ),
    "projection_prng_key": FieldRule("any value; only needed without `save_projection`"),
    "bias": FieldRule(
        "`none`, `all`, `vera_only`: biases of linear projections",
        "other values",
        lambda value: value not in (None, "none", "all", "vera_only"),
        refused_on="experts",
    ),
    "vera_dropout": FieldRule(_TRAINING),
    "d_initial": FieldRule(_TRAINING),
    "init_weights": FieldRule(_TRAINING),
}
"""Fields of a VeRA adapter in addition to `SHARED_FIELDS`."""
SHARED_FIELDS = (
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "fan_in_fan_out",
)
"""Fields of a VeRA adapter that mean the same as LoRA's."""


def is_vera(config: dict[str, Any]) -> bool:
    """Return whether adapter_config.json is that of a VeRA adapter."""
    return bool(config.get("peft_type") == _VERA)


def lora_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a checked VeRA configuration as those of a LoRA one, whose scale is 1."""
    bias = "lora_only" if config.get("bias") == "vera_only" else config.get("bias")
    fields = {name: config[name] for name in SHARED_FIELDS if name in config}
    return fields | {"peft_type": "LORA", "r": config.get("r"), "lora_alpha": config.get("r"), "bias": bias}


def check_fields(config: dict[str, Any]) -> None:
    """Refuse (AdapterError) a configuration with a value that is not served; the message names the field.

    Of unknown fields, as newer versions of PEFT write them, those that switch something on are refused: the value true,
    and objects.
    """
    fields = VERA_FIELDS | {name: FIELDS[name] for name in SHARED_FIELDS} if is_vera(config) else FIELDS
    for name, rule in fields.items():
        if rule.refuses(config.get(name)):
            raise AdapterError(
                f"{CONFIG_FILE}: {name}={quote_for_error(config.get(name))} is not served ({rule.refused})",
                param="lora_path",
            )
    for name, value in config.items():
        if name not in fields and (value is True or (isinstance(value, dict) and value)):
            raise AdapterError(
                f"{CONFIG_FILE}: {quote_for_error(name)}: {quote_for_error(value)} is not known, and may "
                "change what the adapter computes; if it concerns training alone, remove it",
                param="lora_path",
            )


def fields_table(fields: dict[str, FieldRule] = FIELDS) -> str:
    """Return a table of the documentation."""
    lines = ["| field | served | refused by name |", "|---|---|---|"]
    lines += [f"| `{name}` | {rule.served or '-'} | {rule.refusals or '-'} |" for name, rule in fields.items()]
    return "\n".join(lines) + "\n"
