"""Every field of PEFT's LoraConfig, compared with PEFT: equal logits, or a refusal that names the field."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import peft
import pytest
import torch

from outrider.lora.files.kinds import KINDS, field_rules, fields_table
from outrider.lora.files.kinds.lora import LORA
from outrider.platform.core.errors import AdapterError

from .kinds import OF_LORA, WRITTEN_OF_LORA
from .reference import ALL, VOCAB, Engine, peft_logits, save_base, train

pytestmark = pytest.mark.slow

FIELDS = field_rules(LORA)

PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}

# Options of PEFT in addition to `PLAIN`, by name of the case: the field, and a letter if it has several.
TRAINED = {
    **OF_LORA,
    "r": {"r": 7},
    "lora_alpha": {"lora_alpha": 3},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {r"layers\.1\..*v_proj": 20}},
    "use_rslora": {"use_rslora": True},
    "use_dora": {"use_dora": True},
    "ensure_weight_tying": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "bias a": {"bias": "all"},
    "bias b": {"bias": "lora_only", "target_modules": ALL},
    "bias c": {"bias": "all", "use_dora": True},
    "lora_bias": {"lora_bias": True},
    "lora_bias a": {"lora_bias": True, "bias": "all", "target_modules": ["lm_head", *ALL], "use_rslora": True},
    "modules_to_save a": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "modules_to_save b": {"modules_to_save": ["mlp"]},
    "modules_to_save c": {"modules_to_save": ["lm_head"], "lora_bias": True},
    "modules_to_save d": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "trainable_token_indices a": {"trainable_token_indices": [9, 5, 20, 7]},
    "trainable_token_indices b": {"trainable_token_indices": {"embed_tokens": [1, 7], "lm_head": [2]}},
    "init_lora_weights a": {"init_lora_weights": "gaussian"},
    "init_lora_weights b": {"init_lora_weights": "orthogonal"},
    "init_lora_weights c": {"init_lora_weights": "mica"},
    "init_lora_weights d": {"init_lora_weights": "pissa"},
    "init_lora_weights e": {"init_lora_weights": "pissa_niter_4"},
    "init_lora_weights f": {"init_lora_weights": "olora"},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "target_parameters a": {"target_modules": [], "target_parameters": ["mlp.up_proj.weight"]},
    "target_parameters b": {  # patterns match the parameter's name
        "target_modules": ["q_proj"],
        "target_parameters": ["up_proj.weight", "v_proj.weight"],
        "alpha_pattern": {"up_proj.weight": 30, "v_proj": 50, "q_proj": 2},
        "rank_pattern": {r".*\.1\.mlp\.up_proj\.weight": 2},
    },
    "alora_invocation_tokens a": {"alora_invocation_tokens": [3, 4], "task_type": "CAUSAL_LM"},
    "use_bdlora": {
        "use_bdlora": {"target_modules_bd_a": ["q_proj", "v_proj"], "target_modules_bd_b": ["down_proj"], "nblocks": 2}
    },
    "kasa_config": {"kasa_config": peft.KasaConfig()},
}
# Values written into a plain adapter's file, as PEFT needs data or another model to train with them.
WRITTEN = {
    "peft_type": "IA3",
    "init_lora_weights g": "eva",
    "init_lora_weights h": "corda",
    "init_lora_weights i": "loftq",
    "init_lora_weights j": "lora_ga",
    "init_lora_weights k": "PiSSA",
    "init_lora_weights l": "novelty",
    "bias d": "some",
    "trainable_token_indices c": [1, 1],
    "alora_invocation_tokens b": ["invoke"],
    "target_parameters c": "mlp.up_proj.weight",
    **WRITTEN_OF_LORA,
    "use_qalora": True,
    "arrow_config": {"top_k": 3},
}
WITHOUT_PEFT = {"eva_config", "corda_config", "lora_ga_config", "megatron_config", "init_lora_weights g"}
"""Cases of `WRITTEN` with values that PEFT does not load without data: it loads the file without them."""


def disturb(model):
    """Change all parameters without an effect yet, so that their absence would show."""
    for name, parameter in model.named_parameters():
        if "lm_head.modules_to_save" in name or (".lora_A" in name and not parameter.any()):
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def saved_value(path, field):
    return json.loads((Path(path) / "adapter_config.json").read_text()).get(field)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """(base, folder of each case)."""
    folder = tmp_path_factory.mktemp("fields")
    base = save_base(folder / "base", "Qwen2", True)
    paths = {}
    for seed, (name, options) in enumerate(TRAINED.items()):
        paths[name] = folder / name.replace(" ", "-")
        disturb(train(base, seed, **PLAIN | options)).save_pretrained(paths[name])
    for name, value in WRITTEN.items():
        paths[name] = folder / name.replace(" ", "-")
        train(base, 0, **PLAIN).save_pretrained(paths[name])
        file = paths[name] / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name.split()[0]: value}))
    return base, {name: str(path) for name, path in paths.items()}


def test_the_table_has_every_field_of_peft_and_every_field_is_driven():
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert set(FIELDS) == fields
    assert {name.split()[0] for name in (*TRAINED, *WRITTEN)} == fields


def test_served_values_give_the_logits_of_peft(adapters):
    base, paths = adapters
    served = [name for name, path in paths.items() if not FIELDS[(f := name.split()[0])].refuses(saved_value(path, f))]
    prompts = {name.replace(" ", "_"): torch.randint(3, VOCAB, (9,)).tolist() for name in ("base", *served)}
    prompts["alora_invocation_tokens_a"] = [3, 4, 9, 3, 3, 4, 8, 4, 50]
    folders = {name.replace(" ", "_"): paths[name] for name in served}
    engine = Engine(base, folders, prompts, max_loras=len(prompts))
    engine.admit(prompts)
    got = engine.run(prompts, (5, 2))
    engine.close()
    for name in served:
        prompt = prompts[name.replace(" ", "_")]
        if name in WITHOUT_PEFT:
            config = json.loads((Path(paths[name]) / "adapter_config.json").read_text())
            del config[name.split()[0]]
            (Path(paths[name]) / "adapter_config.json").write_text(json.dumps(config))
        expected = peft_logits(base, paths[name], prompt)
        found = got[name.replace(" ", "_")]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
        assert (found - peft_logits(base, None, prompt)).abs().max() > 0.05, name


def test_refused_values_are_refused_by_the_name_of_the_field(adapters):
    base, paths = adapters
    refused = [name for name, path in paths.items() if FIELDS[(f := name.split()[0])].refuses(saved_value(path, f))]
    assert {name.split()[0] for name in refused} == {name for name, rule in FIELDS.items() if rule.refused}
    for name in refused:
        engine = Engine(base, {"x": paths[name]}, {"x": [3, 4]})
        with pytest.raises(AdapterError, match=rf"adapter_config\.json: {name.split()[0]}=.* is not served"):
            engine.admit(["x"])
        engine.close()


@pytest.mark.parametrize(
    ("value", "served"), [(True, False), ({"x": 1}, False), (None, True), (False, True), ({}, True)]
)
def test_an_unknown_peft_field_is_named_if_it_is_switched_on(adapters, tmp_path, value, served):
    base, paths = adapters
    shutil.copytree(paths["r"], tmp_path / "newer")
    file = tmp_path / "newer" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_novelty": value, "novelty_size": 16}))
    engine = Engine(base, {"x": str(tmp_path / "newer")}, {"x": [3, 4]})
    with (
        contextlib.nullcontext()
        if served
        else pytest.raises(AdapterError, match=r"json: 'use_novelty': .* is not known")
    ):
        engine.admit(["x"])
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_documentation_has_the_table(kind):
    docs = Path(__file__).parents[4] / "docs" / "guides" / "adapters.md"
    assert fields_table(KINDS[kind]) in docs.read_text(encoding="utf-8")
