"""Language models inside multimodal checkpoints: logits are those of transformers for text, and towers are not read."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.models.checkpoint import loader, weight_files
from outrider.models.checkpoint.json_files import read_model_config
from outrider.models.checkpoint.loader import load_model, read_facts
from outrider.models.checkpoint.tokenizer import eos_token_ids
from outrider.models.checkpoint.weight_files import StoredTensor
from outrider.models.config import config_from_hf
from outrider.models.families.multimodal import TEXT_MODELS, WRAPPERS, is_of_tower, language_config, language_name
from outrider.platform.core.errors import InvalidRequestError, UnsupportedModelError

from ... import gguf_files
from ...quantized_files import CASES, write_quantized
from ...tiny_families import FAMILIES, build
from ...tiny_multimodal import MULTIMODAL

TOKENS = torch.randint(3, 131, (30,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.nn.Module]]:
    """saved("gemma3") -> (folder, the model), each made once."""
    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def save(name: str) -> tuple[Path, torch.nn.Module]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = build(MULTIMODAL[name])
            model.save_pretrained(folder)
            made[name] = folder, model
        return made[name]

    return save


def compute_logits(folder: Path, driver: Callable) -> torch.Tensor:
    return driver(load_model(folder)).forward_once({0: TOKENS})[0]


def changed(folder: Path, to: Path, change: Callable[[dict], dict]) -> Path:
    """A copy of a folder with another config.json."""
    shutil.copytree(folder, to)
    file = to / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    return to


def test_each_architecture_is_tested() -> None:
    built = {f"{family.prefix}ForConditionalGeneration" for family in MULTIMODAL.values()}
    assert built | {"Gemma3nForConditionalGeneration"} == set(WRAPPERS)


def test_gemma3n_as_published(driver: Callable, tmp_path: Path) -> None:
    """transformers builds its tower with timm, so the names of a whole checkpoint are written by hand. Older files have
    keys of layers that read those of others."""
    build(FAMILIES["gemma3n"]).save_pretrained(tmp_path / "text")
    shutil.copytree(tmp_path / "text", tmp_path / "whole")
    stored = load_file(tmp_path / "text" / "model.safetensors")
    whole = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    attention = "model.language_model.layers.{}.self_attn.{}.weight"
    for part in ("k_proj", "v_proj", "k_norm"):
        whole[attention.format(4, part)] = whole[attention.format(2, part)].clone()
    towers = "vision_tower.timm_model.conv.weight", "audio_tower.a.weight", "embed_vision.b.weight", "embed_audio.c"
    whole |= {f"model.{name}": torch.ones(2) for name in towers}
    save_file(whole, tmp_path / "whole" / "model.safetensors")
    file = tmp_path / "whole" / "config.json"
    text = json.loads(file.read_text())
    file.write_text(json.dumps({"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}))
    expected = compute_logits(tmp_path / "text", driver)
    torch.testing.assert_close(compute_logits(tmp_path / "whole", driver), expected, atol=0, rtol=0)
    whole[attention.format(0, "extra")] = torch.ones(2)
    save_file(whole, tmp_path / "whole" / "model.safetensors")
    with pytest.raises(InvalidRequestError, match=r"unexpected: model.layers.0.*extra"):
        load_model(tmp_path / "whole")


@pytest.mark.parametrize("name", MULTIMODAL)
def test_logits_are_those_of_transformers_and_no_tower_is_read(
    name: str, saved: Callable, driver: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = saved(name)
    read: list[str] = []

    def noted(file: Path, param: str) -> dict[str, StoredTensor]:
        found = weight_files.read_safetensors(file, param)
        return {key: StoredTensor(stored.shape, partial(note, key, stored)) for key, stored in found.items()}

    def note(key: str, stored: StoredTensor) -> object:
        read.append(key)
        return stored.read()

    monkeypatch.setattr(loader, "read_weights", lambda path, param, **_: noted(path / "model.safetensors", param))
    ours = compute_logits(folder, driver)
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    stored = load_file(folder / "model.safetensors")
    assert set(read) == {key for key in stored if language_name(key)}
    towers = set(stored) - set(read)
    assert towers
    assert all(is_of_tower(key) for key in towers)
    assert not any(is_of_tower(key) for key in read)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_names_as_modules_have_them(name: str, saved: Callable, driver: Callable, tmp_path: Path) -> None:
    """transformers writes the names of older versions for most models; others write those of its present modules."""
    folder, reference = saved(name)
    shutil.copytree(folder, tmp_path / "new")
    stored = load_file(folder / "model.safetensors")
    state = {key: tensor.contiguous().clone() for key, tensor in reference.state_dict().items()}
    if reference.get_output_embeddings().weight is reference.get_input_embeddings().weight:
        state.pop("lm_head.weight", None)
    save_file(state, tmp_path / "new" / "model.safetensors")
    assert state.keys() == stored.keys() or name in {
        *(
            "gemma3",
            "mistral3",
            "ministral3",
            "glm4v-moe",
            "llava",
            "llava-next",
            "llava-onevision",
            "internvl",
            "qwen2-vl",
            "qwen2.5-vl",
            "qwen3.5-vl-moe",
        )
    }
    torch.testing.assert_close(compute_logits(tmp_path / "new", driver), compute_logits(folder, driver), atol=0, rtol=0)


def test_experts_as_the_published_files_have_them(saved: Callable, driver: Callable, tmp_path: Path) -> None:
    folder, _ = saved("qwen3-vl-moe")
    shutil.copytree(folder, tmp_path / "published")
    stored = load_file(folder / "model.safetensors")
    turned = {key: tensor.mT.contiguous() if ".experts." in key else tensor for key, tensor in stored.items()}
    assert [tensor.shape for tensor in turned.values()] != [tensor.shape for tensor in stored.values()]
    save_file(turned, tmp_path / "published" / "model.safetensors")
    torch.testing.assert_close(
        compute_logits(tmp_path / "published", driver), compute_logits(folder, driver), atol=0, rtol=0
    )


@pytest.mark.parametrize("kind", ["mrope", "default"])
def test_config_before_text_config(kind: str, saved: Callable, driver: Callable, tmp_path: Path) -> None:
    """Qwen2.5-VL as it was published: keys of the text model among those of the whole, and the old form of M-RoPE."""

    def flat(raw: dict) -> dict:
        text = raw.pop("text_config")
        rope = text.pop("rope_parameters")
        scaling = {"type": kind, "mrope_section": rope["mrope_section"]}
        return {**text, **raw, "rope_theta": rope["rope_theta"], "rope_scaling": scaling, "torch_dtype": "float32"}

    folder, _ = saved("qwen2.5-vl")
    old = changed(folder, tmp_path / "old", flat)
    torch.testing.assert_close(compute_logits(old, driver), compute_logits(folder, driver), atol=0, rtol=0)
    assert eos_token_ids(old) == {1}


def test_keys_of_the_outer_config_count(saved: Callable, tmp_path: Path) -> None:
    folder, _ = saved("gemma3")
    outer = {"eos_token_id": [5, 6], "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    path = changed(folder, tmp_path / "outer", lambda raw: raw | outer)
    (path / "generation_config.json").unlink()
    assert eos_token_ids(path) == {5, 6}
    facts = read_facts(path)
    assert (facts.dtype, facts.architecture) == ("bfloat16", "Gemma3ForCausalLM")
    path = changed(folder, tmp_path / "inner", lambda raw: raw)
    (path / "generation_config.json").unlink()
    assert eos_token_ids(path) == {1}


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True), (None, False), (False, None)])
def test_a_head_of_its_own_decides_about_tying(
    outer: bool | None, inner: bool | None, saved: Callable, driver: Callable, tmp_path: Path
) -> None:
    def ties(raw: dict) -> dict:
        text = {key: value for key, value in raw["text_config"].items() if key != "tie_word_embeddings"}
        raw = {key: value for key, value in raw.items() if key != "tie_word_embeddings"}
        inside = {} if inner is None else {"tie_word_embeddings": inner}
        return {**raw, "text_config": text | inside} | ({} if outer is None else {"tie_word_embeddings": outer})

    folder, _ = saved("mistral3")
    path = changed(folder, tmp_path / "ties", ties)
    torch.testing.assert_close(compute_logits(path, driver), compute_logits(folder, driver), atol=0, rtol=0)


def test_published_configs_that_leave_out_most_keys() -> None:
    gemma = language_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {
                **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"},
                **{"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
                "sliding_window": 1024,
            },
        }
    )
    config = config_from_hf(gemma, torch.bfloat16)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.max_position_embeddings == 131072  # which is already scaled
    assert (config.rope.factor, config.layer_ropes[0].factor, config.windows[0]) == (8.0, 1.0, 1024)
    assert config.tie_word_embeddings
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    llava = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    config = config_from_hf(language_config(llava), torch.float16)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (4096, 32, 32064)


def test_text_models_that_are_not_served_are_named(saved: Callable, tmp_path: Path) -> None:
    folder, _ = saved("mistral3")
    path = changed(folder, tmp_path / "other", lambda raw: raw | {"text_config": {"model_type": "mistral4"}})
    with pytest.raises(
        UnsupportedModelError, match=r"Mistral3ForConditionalGeneration with a text model of type 'mistral4"
    ):
        read_facts(path)
    with pytest.raises(UnsupportedModelError, match="text_config must be an object"):
        language_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": []})
    with pytest.raises(UnsupportedModelError, match="MllamaForConditionalGeneration"):
        config_from_hf(language_config({"architectures": ["MllamaForConditionalGeneration"]}), torch.float32)


def test_missing_tensors_are_named(saved: Callable, tmp_path: Path) -> None:
    folder, _ = saved("llava")
    shutil.copytree(folder, tmp_path / "less")
    stored = load_file(folder / "model.safetensors")
    del stored["language_model.model.norm.weight"]
    stored["language_model.model.layers.0.self_attn.extra.weight"] = torch.ones(1)
    save_file(stored, tmp_path / "less" / "model.safetensors")
    with pytest.raises(InvalidRequestError, match=r"missing: model.norm.weight; unexpected: model.layers.0.*extra"):
        load_model(tmp_path / "less")


def test_other_configs_stay_as_they_are() -> None:
    for raw in ({"architectures": ["Gemma3ForCausalLM"]}, {"architectures": 3}, {}, {"text_config": {}}):
        assert language_config(raw) == raw


@pytest.mark.parametrize("kind", ["awq", "gptq", "ct-w4", "ct-by-name", "fp8-blocks", "nf4"])
def test_quantised_weights(kind: str, driver: Callable, tmp_path: Path) -> None:
    """Logits are those of the dequantised weights. Names in the config's schemes are those of the whole model."""
    case = CASES[kind.replace("ct-by-name", "ct-w4")]
    family = MULTIMODAL["llava"]
    text = {**family.config["text_config"], **case.sizes, "head_dim": 16}
    vision = {**family.config["vision_config"], "hidden_size": 64}
    build(replace(family, config={**family.config, "text_config": text, "vision_config": vision})).save_pretrained(
        tmp_path / "plain"
    )
    write_quantized(tmp_path / "plain", tmp_path / "packed", case)
    if kind == "ct-by-name":
        file = tmp_path / "packed" / "config.json"
        raw = json.loads(file.read_text())
        (scheme,) = raw["quantization_config"]["config_groups"].values()
        wide = {**scheme, "weights": {**scheme["weights"], "num_bits": 8}, "targets": ["re:vision_tower.*"]}
        groups = {"a": {**scheme, "targets": ["re:language_model.*"]}, "b": wide}
        file.write_text(json.dumps({**raw, "quantization_config": {**case.config, "config_groups": groups}}))
    ours, dense = (
        driver(load_model(folder, "float32")).forward_once({0: TOKENS})[0]
        for folder in (tmp_path / "packed", tmp_path / "packed" / "dense")
    )
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-5 * float(dense.abs().max()))


@pytest.mark.parametrize(("name", "family"), [("qwen2vl", "Qwen2"), ("qwen3vl", "Qwen3"), ("qwen3vlmoe", "Qwen3Moe")])
def test_gguf_files(
    name: str, family: str, save_tiny: Callable, driver: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's converter gives the language model names of its own, and its tower a file of its own."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    folder, _ = save_tiny(family, hidden_size=64, intermediate_size=96, **(experts if "Moe" in family else {}))
    monkeypatch.setitem(gguf_files.NAMES, f"{family}ForCausalLM", name)
    gguf_files.write_gguf(folder, tmp_path / "m.gguf")
    torch.testing.assert_close(
        compute_logits(tmp_path / "m.gguf", driver), compute_logits(folder, driver), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("name", ["mistral3", "qwen2.5-vl"])
def test_transformers_code_serves_them_too(name: str, saved: Callable, driver: Callable) -> None:
    folder, _ = saved(name)
    model = load_model(folder, options=loader.ModelOptions(impl="transformers"))
    ours = driver(model).forward_once({0: TOKENS})[0]
    torch.testing.assert_close(ours, compute_logits(folder, driver), atol=1e-4, rtol=0)


def test_all_text_models_are_families() -> None:
    raw = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 64}
    raw |= {"num_key_value_heads": 4, "num_kv_shared_layers": 0}
    for kind in TEXT_MODELS:
        outer = "LlavaForConditionalGeneration"
        config = config_from_hf(
            language_config({"architectures": [outer], "text_config": {**raw, "model_type": kind}}), torch.float32
        )
        assert config.architecture == TEXT_MODELS[kind].architecture
    assert set(WRAPPERS.values()) <= set(TEXT_MODELS)


def test_read_model_config_is_that_of_the_text_model(saved: Callable) -> None:
    folder, _ = saved("gemma3")
    raw = read_model_config(folder)
    assert raw["architectures"] == ["Gemma3ForCausalLM"]
    assert raw["multimodal_architecture"] == "Gemma3ForConditionalGeneration"
