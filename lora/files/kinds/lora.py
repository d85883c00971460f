"""LoRA (Hu et al. 2021, arXiv:2106.09685): the served and refused values of each field of PEFT's `LoraConfig`."""

from __future__ import annotations

from typing import Any

from ....models.families.multimodal import is_of_tower
from .base import ANY, TRAINING, AdapterKind, FieldRule

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


_KEYS = "any value; the names of the file's tensors say which modules are adapted"

FIELDS: dict[str, FieldRule] = {
    "task_type": FieldRule(ANY),
    "auto_mapping": FieldRule(ANY),
    "peft_version": FieldRule(ANY),
    "base_model_name_or_path": FieldRule("any value; shapes say whether the adapter fits"),
    "revision": FieldRule(ANY),
    "inference_mode": FieldRule(ANY),
    "r": FieldRule("up to `--max-lora-rank`"),
    "lora_alpha": FieldRule("any positive number"),
    "rank_pattern": FieldRule("names and regular expressions"),
    "alpha_pattern": FieldRule("names and regular expressions"),
    "use_rslora": FieldRule(ANY),
    "use_dora": FieldRule(ANY, refused_on="experts"),
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
    "lora_bias": FieldRule(ANY, refused_on="experts"),
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
    "lora_dropout": FieldRule(TRAINING),
    "loftq_config": FieldRule(TRAINING),
    "eva_config": FieldRule(TRAINING),
    "corda_config": FieldRule(TRAINING),
    "lora_ga_config": FieldRule(TRAINING),
    "velora_config": FieldRule(TRAINING),
    "monteclora_config": FieldRule(TRAINING),
    "megatron_config": FieldRule(TRAINING),
    "megatron_core": FieldRule(TRAINING),
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
"""All fields but `peft_type`."""

LORA = AdapterKind(
    peft_type="LORA",
    own_fields={},
    shared_fields=FIELDS,
    as_lora=lambda config: {},
    tensors=lambda file, known: file,
)
