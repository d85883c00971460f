"""Adapters of PEFT of every kind but LoRA: one entry of `KIND_CASES` a kind. Cases of the fields that kinds share."""

from collections.abc import Callable
from dataclasses import dataclass, field

import peft
import torch
from peft import AdaLoraConfig, VeraConfig, get_peft_model

from .reference import ALL, load_base

# Options of PEFT for a field that all kinds have.
OF_ALL = {
    "task_type": {"task_type": "CAUSAL_LM"},
    "auto_mapping": {"auto_mapping": {"base_model_class": "Qwen2ForCausalLM"}},
    "peft_version": {"peft_version": "0.1"},
    "base_model_name_or_path": {"base_model_name_or_path": "somebody/something"},
    "revision": {"revision": "main"},
    "inference_mode": {"inference_mode": False},
    "target_modules": {"target_modules": "all-linear"},
    "layers_to_transform": {"layers_to_transform": [1]},
    "layers_pattern": {"layers_to_transform": 0, "layers_pattern": "layers"},
    "fan_in_fan_out": {"fan_in_fan_out": True},
}
# The same for fields of LoRA that AdaLoRA has too.
OF_LORA = {
    **OF_ALL,
    "exclude_modules": {"exclude_modules": ["v_proj"]},
    "lora_dropout": {"lora_dropout": 0.1},
    "velora_config": {"velora_config": peft.VeloraConfig(num_groups=4)},
    "monteclora_config": {"monteclora_config": peft.MontecloraConfig()},
    "megatron_core": {"megatron_core": "other.core"},
    "runtime_config": {"runtime_config": peft.LoraRuntimeConfig(ephemeral_gpu_offload=False)},
    "qalora_group_size": {"qalora_group_size": 8},
}
# Values of LoRA's fields that concern training, written into a file: PEFT needs data or another model to train so.
WRITTEN_OF_LORA = {
    "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "ipm"},
    "lora_ga_config": {"direction": "ArB2r"},
    "megatron_config": {"hidden_size": 48},
}


def train_vera(base, seed, **options):
    """A PEFT model with a VeRA adapter that is random in all its parts."""
    torch.manual_seed(seed)
    model = get_peft_model(load_base(base), VeraConfig(projection_prng_key=seed, **options))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data += (0.5 if "vera_lambda" in name else 0.3) * torch.randn_like(parameter)
    return model


def train_adalora(base, seed, *, kept=None, **options):
    """A PEFT model with an AdaLoRA adapter that is random in all its parts.

    `kept`: the rows that training kept, by the end of a module's name; all of the others.
    """
    torch.manual_seed(seed)
    model = get_peft_model(load_base(base), AdaLoraConfig(total_step=10, **options))
    pattern = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data += (0.1 if "lora_" in name else 0.3) * torch.randn_like(parameter)
        if ".lora_E." in name:
            parameter.data += 1
            masks = (mask for end, mask in (kept or {}).items() if f"{end}.lora_E" in name)
            pattern[name.removeprefix("base_model.model.")] = next(masks, [True] * len(parameter))
    if kept is not None:
        model.peft_config["default"].rank_pattern = pattern
    return model


@dataclass(frozen=True, kw_only=True)
class KindCases:
    """Cases of one kind."""

    config: type
    """PEFT's."""
    train: Callable
    """Returns PEFT's model of (base, seed, **options)."""
    plain: dict
    """Options of every adapter."""
    mixed: dict
    """Options of the adapter that shares batches with other kinds."""
    served: dict
    """More options, by name of the case: the field, and a letter if it has several."""
    refused: dict
    """Values written into a plain adapter's file, by name of the field."""
    written: dict = field(default_factory=dict)
    """Values that are served, written into a plain adapter's file, by name of the field."""


VERA = KindCases(
    config=VeraConfig,
    train=train_vera,
    plain={"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    mixed={"r": 6, "target_modules": ["lm_head", *ALL]},
    served={
        **OF_ALL,
        "r": {"r": 7},
        "target_modules b": {"target_modules": ["lm_head", *ALL]},
        "target_modules c": {"target_modules": r".*\.1\.mlp\.up_proj"},
        "modules_to_save": {"modules_to_save": ["lm_head"]},
        "bias a": {"bias": "all"},
        "bias b": {"bias": "vera_only"},
        "projection_prng_key": {},
        "vera_dropout": {"vera_dropout": 0.1},
        "d_initial": {"d_initial": 0.5},
        "init_weights": {"init_weights": False},
    },
    refused={"save_projection": False, "bias": "some", "peft_type": "IA3", "modules_to_save": ["mlp"]},
)

_KEPT = {"0.self_attn.q_proj": [True, False, True, False], "v_proj": [False, False, True, False]}
ADALORA = KindCases(
    config=AdaLoraConfig,
    train=train_adalora,
    plain={"init_r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    mixed={"init_r": 4, "lora_alpha": 5, "target_modules": ["lm_head", *ALL], "kept": _KEPT},
    served={
        **OF_LORA,
        "init_r": {"init_r": 7},
        "rank_pattern a": {"kept": _KEPT},
        "rank_pattern b": {"kept": _KEPT | {"1.mlp.down_proj": [False] * 4}},
        "rank_pattern c": {"kept": _KEPT, "bias": "all", "modules_to_save": ["embed_tokens"]},
        "rank_pattern d": {"kept": {}},
        "lora_alpha": {"lora_alpha": 11},
        "r": {"r": 7},
        "alpha_pattern": {"alpha_pattern": {"q_proj": 3}},
        "use_rslora": {"use_rslora": True},
        "lora_bias": {"lora_bias": True},
        "init_lora_weights a": {"init_lora_weights": False},
        "init_lora_weights b": {"init_lora_weights": "pissa"},
        "target_modules b": {"target_modules": ["lm_head", *ALL]},
        "ensure_weight_tying": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        "bias": {"bias": "lora_only"},
        "modules_to_save": {"modules_to_save": ["lm_head"]},
        "trainable_token_indices": {"trainable_token_indices": [3, 9]},
        "target_r": {"target_r": 2},
        "tinit": {"tinit": 2},
        "tfinal": {"tfinal": 2},
        "deltaT": {"deltaT": 3},
        "beta1": {"beta1": 0.5},
        "beta2": {"beta2": 0.5},
        "orth_reg_weight": {"orth_reg_weight": 0.1},
        "total_step": {},
    },
    refused={
        "peft_type": "IA3",
        "rank_pattern": {"q_proj": 3},
        "use_dora": True,
        "target_parameters": ["q_proj.weight"],
        "alora_invocation_tokens": [3],
        "bias": "some",
        "modules_to_save": ["mlp"],
        "layer_replication": [[0, 1]],
        "use_qalora": True,
        "use_bdlora": {"target_modules_bd_a": []},
        "arrow_config": {"router_temperature": 1.0},
        "kasa_config": {"beta": 1.0},
        "trainable_token_indices": [3, 3],
    },
    written=WRITTEN_OF_LORA,
)

KIND_CASES = {"VERA": VERA, "ADALORA": ADALORA}
