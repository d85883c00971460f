"""GGUF files: each family and type of block gives the model that the same numbers in a folder give."""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from outrider.kernels.quantized_linear import QuantizedWeight
from outrider.models.checkpoint.gguf_file import read_gguf
from outrider.models.checkpoint.json_files import read_model_config
from outrider.models.checkpoint.loader import load_model, read_facts
from outrider.models.checkpoint.paths import resolve_model_path
from outrider.models.checkpoint.tokenizer import eos_token_ids, load_tokenizer
from outrider.models.checkpoint.vocabulary import agreement
from outrider.models.demo import demo_model_path
from outrider.platform.core.errors import InvalidRequestError, NotFoundError, UnsupportedModelError

from ...gguf_files import write_gguf
from ...gguf_layouts import LAYOUTS
from ...tiny_families import FAMILIES

SIZES = {"hidden_size": 64, "intermediate_size": 96}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
QUANTISED = [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]
BLOCKS = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS]
DEQUANTISED = [Type.IQ4_XS]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


@pytest.fixture
def logits(driver: Callable) -> Callable:
    def compute(path: Path) -> torch.Tensor:
        return driver(load_model(path, "float32"), prompt_lens={0: len(TOKENS)}).forward_once({0: TOKENS})[0]

    return compute


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_file_is_the_folder_it_was_made_of(family: str, save_tiny: Callable, tmp_path: Path, logits) -> None:
    folder, _ = save_tiny(family, **SIZES, head_dim=20, tie_word_embeddings=family == "Qwen3")
    file = tmp_path / "m.gguf"
    write_gguf(folder, file)
    config = read_model_config(file)
    assert (config["dtype"], config["head_dim"]) == ("float32", 20)
    assert config["tie_word_embeddings"] == (family == "Qwen3")
    assert logits(file).equal(logits(folder))


PHI4_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
             "short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [1.0 + i for i in range(6)]}  # fmt: skip
DEEPSEEK_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
                 "mscale": 0.9, "mscale_all_dim": 0.9}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OTHERS = {
    "phi3": ("Phi3", {"sliding_window": 6}),
    "phi4-mini": ("Phi3", {"rope_parameters": PHI4_ROPE, "original_max_position_embeddings": 128}),
    "phi4-mini-long": ("Phi3", {"rope_parameters": PHI4_ROPE, "original_max_position_embeddings": 8}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.6,
                            "attention_multiplier": 0.2}),
    "olmo2": ("Olmo2", {}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm-2-12b": ("StableLm", {"use_parallel_residual": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 6}),
    "gpt2": ("GPT2", {"num_key_value_heads": 4}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 20, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {**EXPERTS, "intermediate_size": 32}),
    "gptneox": ("GPTNeoX", {"num_key_value_heads": 4}),
    "gptneox-in-turn": ("GPTNeoX", {"num_key_value_heads": 4, "use_parallel_residual": False}),
    "falcon-40b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96}),
    "falcon-11b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
                              "ffn_hidden_size": 96}),
    "falcon-7b": ("Falcon", {"multi_query": True, "ffn_hidden_size": 96}),
    "phi2": ("Phi", {"num_key_value_heads": 4}),
    "gpt-oss": ("GptOss", FAMILIES["gpt-oss"].config),
    "deepseek2": ("DeepseekV2", {**FAMILIES["deepseek2"].config, "rope_parameters": DEEPSEEK_ROPE}),
    "deepseek3": ("DeepseekV3", FAMILIES["deepseek3"].config),
    "glm4moe": ("Glm4Moe", FAMILIES["glm4-moe"].config),
    "lfm2": ("Lfm2", FAMILIES["lfm2"].config),
    "lfm2moe": ("Lfm2Moe", FAMILIES["lfm2-moe"].config),
    "ernie4_5": ("Ernie4_5", FAMILIES["ernie4.5"].config),
    "ernie4_5-moe": ("Ernie4_5_Moe", FAMILIES["ernie4.5-moe"].config | {"moe_layer_end_index": -1}),
    "exaone4": ("Exaone4", FAMILIES["exaone4"].config),
    "seed_oss": ("SeedOss", FAMILIES["seed-oss"].config),
    "minimax-m2": ("MiniMaxM2", {**FAMILIES["minimax-m2"].config, "intermediate_size": 32}),
    "cohere2": ("Cohere2", FAMILIES["cohere2"].config),
    "mistral3": ("Ministral3", FAMILIES["ministral3"].config),
    "olmo3": ("Olmo3", FAMILIES["olmo3"].config),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str, save_tiny: Callable, tmp_path: Path, logits) -> None:
    family, options = OTHERS[name]
    folder, theirs = save_tiny(family, **{**SIZES, **options})
    write_gguf(folder, tmp_path / "m.gguf")
    found = logits(tmp_path / "m.gguf")
    assert found.equal(logits(folder))
    with torch.inference_mode():
        torch.testing.assert_close(found, theirs(torch.tensor([TOKENS])).logits[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3Text"])
def test_gemma(family: str, save_tiny: Callable, tmp_path: Path, logits) -> None:
    more = {"num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5}
    folder, _ = save_tiny(family, **SIZES, **more)
    raw = json.loads((folder / "config.json").read_text())
    raw["architectures"] = [raw["architectures"][0].replace("Text", "")]
    (folder / "config.json").write_text(json.dumps(raw))
    write_gguf(folder, tmp_path / "m.gguf")
    torch.testing.assert_close(logits(tmp_path / "m.gguf"), logits(folder), rtol=1e-4, atol=1e-4)  # w + 1 - 1


def test_biases_of_queries_are_reordered_too(save_tiny: Callable, tmp_path: Path, logits) -> None:
    folder, _ = save_tiny("Llama", **SIZES, attention_bias=True, mlp_bias=True)
    write_gguf(folder, tmp_path / "m.gguf")
    assert logits(tmp_path / "m.gguf").equal(logits(folder))


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_quantised_matrices(kind: Type, save_tiny: Callable, tmp_path: Path, logits) -> None:
    folder, _ = save_tiny("Llama", **SIZES)
    rounded = tmp_path / "rounded"
    shutil.copytree(folder, rounded)
    save_file(write_gguf(folder, tmp_path / "m.gguf", lambda name: kind), rounded / "model.safetensors")
    assert read_facts(tmp_path / "m.gguf").dtype == {"F16": "float16"}.get(kind.name, "bfloat16")
    torch.testing.assert_close(logits(tmp_path / "m.gguf"), logits(rounded), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["Llama", "StableLm", "Starcoder2"])
def test_a_file_reads_as_in_transformers(family: str, save_tiny: Callable, tmp_path: Path, logits) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    folder, _ = save_tiny(family, **SIZES)
    write_gguf(folder, tmp_path / "m.gguf", lambda name: Type.Q8_0, llama__vocab_size=131)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    theirs.save_pretrained(tmp_path / "converted")
    torch.testing.assert_close(logits(tmp_path / "m.gguf"), logits(tmp_path / "converted"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [*QUANTISED[2:], *BLOCKS], ids=lambda kind: kind.name)
def test_blocks_of_any_bytes(kind: Type, tmp_path: Path) -> None:
    file, name = tmp_path / "m.gguf", "model.layers.0.mlp.down_proj.weight"
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng, count = np.random.default_rng(0), 512 // block
    data = rng.integers(0, 256, (3 * count, size), dtype=np.uint8)
    while (bad := ~np.isfinite(gguf.dequantize(data, kind)).all(1)).any():  # float16 numbers that are none
        data[bad] = rng.integers(0, 256, (bad.sum(), size), dtype=np.uint8)
    data = data.reshape(3, count * size)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("blk.0.ffn_down.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = read_gguf(
        file,
        [name],
        SimpleNamespace(num_layers=1, num_extra_layers=0, num_heads=1, num_kv_heads=1, norm_offset=0.0, block=None),
    )[name]
    assert stored.shape == (3, 512)
    expected = torch.from_numpy(gguf.dequantize(data, kind)).view(-1, block)
    weight = stored.read()
    assert isinstance(weight, QuantizedWeight) == (kind not in DEQUANTISED)
    values = weight.dequantized() if isinstance(weight, QuantizedWeight) else weight
    errors = (values.view(-1, block) - expected).abs() / expected.abs().amax(1, keepdim=True)
    assert float(errors.max()) < 1e-6


def test_llama_3s_rotation_is_in_a_tensor(save_tiny: Callable, tmp_path: Path, driver: Callable) -> None:
    folder, model = save_tiny("Llama", **SIZES, rope_parameters=LLAMA3)
    plain = {"rope_type": "default", "rope_theta": 5e5}
    base = 1 / 5e5 ** (torch.arange(0, 16, 2) / 16)
    divisors = (base / model.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() > 1
    add = gguf.GGUFWriter.write_header_to_file

    def with_divisors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", divisors)
        add(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_divisors)
        write_gguf(folder, tmp_path / "m.gguf")
    assert read_model_config(tmp_path / "m.gguf")["rope_parameters"] | plain != plain
    got, wanted = (
        driver(load_model(path, "float32")).forward_once({0: TOKENS})[0] for path in (tmp_path / "m.gguf", folder)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_yarn(save_tiny: Callable, tmp_path: Path, logits) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    folder, _ = save_tiny("Qwen2", **SIZES, rope_parameters=yarn)
    write_gguf(folder, tmp_path / "m.gguf")
    assert logits(tmp_path / "m.gguf").equal(logits(folder))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    write_gguf(demo_model_path(), file, tokenizer__ggml__eot_token_id=7)
    return file


def test_tokenizer_template_and_ends(demo: Path) -> None:
    theirs, ours = load_tokenizer(demo_model_path()), load_tokenizer(demo)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in ("SELECT name FROM users\n\tWHERE id = 12345;", "Ünïcödé 漢字 🎉🏽\u200d", "<|end|> a  b <|pad|>", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text, add_special_tokens=False)) == text
    assert ours.chat_template == theirs.chat_template
    assert eos_token_ids(demo, ours) == {2, 7}
    assert agreement(demo, demo_model_path()) == 1.0


def test_a_tokenizer_next_to_a_gguf_file_is_not_used(demo: Path, tmp_path: Path) -> None:
    shutil.copy(demo, tmp_path / "demo.gguf")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(tmp_path / "demo.gguf").get_vocab() == load_tokenizer(demo).get_vocab()


def test_without_its_package_the_error_names_the_extra(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InvalidRequestError, match=r"outrider\[gguf\]"):
        read_facts(demo)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        resolve_model_path(tmp_path / "m.gguf")
    with pytest.raises(NotFoundError, match="no such file"):
        load_tokenizer(tmp_path / "m.gguf")


def test_a_folder_with_the_name_of_a_file(save_tiny: Callable, tmp_path: Path) -> None:
    folder, _ = save_tiny("Llama", **SIZES)
    other = shutil.copytree(folder, tmp_path / "m.gguf")
    assert read_facts(resolve_model_path(other)).vocab_size == read_facts(folder).vocab_size


def test_files_that_are_not_served(save_tiny: Callable, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"mamba; supported are cohere2"):
        read_facts(tmp_path / "mamba.gguf")
    folder, _ = save_tiny("Qwen2", **SIZES)
    write_gguf(folder, tmp_path / "partial.gguf", qwen2__rope__dimension_count=4)
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        read_facts(tmp_path / "partial.gguf")


def test_queries_keys_and_values_in_one_tensor(save_tiny: Callable, tmp_path: Path, logits) -> None:
    """As in old files of Phi-2."""
    folder, _ = save_tiny("Phi", **SIZES, num_key_value_heads=4)
    add, parts = gguf.GGUFWriter.add_tensor, {}

    def merged(writer: gguf.GGUFWriter, name: str, values: np.ndarray, raw_dtype: Type) -> None:
        if (found := re.search(r"attn_([qkv])", name)) is None:
            return add(writer, name, values, raw_dtype=raw_dtype)
        whole = name.replace(found[0], "attn_qkv")
        parts.setdefault(whole, {})[found[1]] = values
        if len(parts[whole]) == 3:
            add(writer, whole, np.concatenate([parts[whole][part] for part in "qkv"]), raw_dtype=raw_dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", merged)
        write_gguf(folder, tmp_path / "m.gguf", lambda name: Type.Q8_0 if "_proj" in name else Type.F32)
    assert len(parts) == 4
    held = write_gguf(folder, tmp_path / "again.gguf", lambda name: Type.Q8_0 if "_proj" in name else Type.F32)
    rounded = shutil.copytree(folder, tmp_path / "rounded")
    save_file(held, rounded / "model.safetensors")
    torch.testing.assert_close(logits(tmp_path / "m.gguf"), logits(rounded), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_deepseeks_older_files_have_whole_heads(save_tiny: Callable, tmp_path: Path, logits) -> None:
    """Their sizes are those of heads, and groups of experts are not stated."""
    config = FAMILIES["deepseek2"].config
    folder, _ = save_tiny("DeepseekV2", **{**SIZES, **config, "rope_parameters": DEEPSEEK_ROPE})
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(LAYOUTS, ("deepseek2", ".kv_b_proj."))
        for name in ("key", "value"):
            patch.setattr(gguf.GGUFWriter, f"add_{name}_length", lambda *_: None)
            patch.setattr(gguf.GGUFWriter, f"add_{name}_length_mla", lambda *_: None)
        sizes = {"deepseek2__attention__key_length": 20, "deepseek2__attention__value_length": 10}
        write_gguf(folder, tmp_path / "m.gguf", **sizes)
    assert logits(tmp_path / "m.gguf").equal(logits(folder))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [("gpt-oss", Type.MXFP4), ("deepseek2", Type.Q8_0), ("falcon", Type.Q8_0)])
def test_quantised_parts(family: str, kind: Type, save_tiny: Callable, tmp_path: Path, logits) -> None:
    made, more = FAMILIES[family], {"hidden_size": 128} if family == "falcon" else {}
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "rope_parameters": DEEPSEEK_ROPE} if "deep" in family else more
    folder, _ = save_tiny(made.prefix, **{**SIZES, **made.config, **sizes})
    rounded = shutil.copytree(folder, tmp_path / "rounded")
    chosen = ("experts", "query_key_value") if family != "deepseek2" else ("kv_b",)
    held = write_gguf(
        folder, tmp_path / "m.gguf", lambda name: kind if any(part in name for part in chosen) else Type.F32
    )
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, rounded / "model.safetensors")
    assert not logits(rounded).equal(logits(folder))
    torch.testing.assert_close(logits(tmp_path / "m.gguf"), logits(rounded), rtol=0, atol=1e-5)


def test_quantised_experts(save_tiny: Callable, tmp_path: Path, logits) -> None:
    folder, _ = save_tiny("Qwen3Moe", **SIZES, **EXPERTS, norm_topk_prob=True)
    rounded = shutil.copytree(folder, tmp_path / "rounded")
    save_file(write_gguf(folder, tmp_path / "m.gguf", lambda name: Type.Q8_0), rounded / "model.safetensors")
    torch.testing.assert_close(logits(tmp_path / "m.gguf"), logits(rounded), rtol=0, atol=1e-5)


def test_layers_that_predict_further_tokens_are_counted_with_the_others(
    save_tiny: Callable, tmp_path: Path, logits
) -> None:
    folder, _ = save_tiny("Glm4Moe", **{**SIZES, **FAMILIES["glm4-moe"].config, "num_hidden_layers": 4})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 3, "num_nextn_predict_layers": 1}))
    three = logits(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    write_gguf(folder, tmp_path / "m.gguf", glm4moe__nextn_predict_layers=1)
    assert logits(tmp_path / "m.gguf").equal(three)


def test_parts_of_a_model(save_tiny: Callable, tmp_path: Path, logits) -> None:
    folder, _ = save_tiny("Llama", **SIZES)
    write_gguf(folder, tmp_path / "m.gguf", split=8)
    parts = sorted(tmp_path.glob("m-*-of-00003.gguf"))
    assert len(parts) == 3
    assert logits(parts[0]).equal(logits(folder))
    with pytest.raises(InvalidRequestError, match=r"part 2 of 3.*give the first part.*-00001-of-00003"):
        read_facts(parts[1])
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(InvalidRequestError, match=r"-00001-of-00003"):
        read_facts(tmp_path / "renamed.gguf")
    (tmp_path / "renamed.gguf").rename(parts[0])
    parts[2].unlink()
    with pytest.raises(NotFoundError, match=parts[2].name):
        load_model(parts[0])


def test_a_shape_with_a_zero_takes_no_memory(tmp_path: Path) -> None:
    """Whatever number of rows the file states."""
    file = tmp_path / "m.gguf"
    write_gguf(demo_model_path(), file)
    content = bytearray(file.read_bytes())
    name = b"blk.0.attn_q.weight"
    struct.pack_into("<QQ", content, content.find(name) + len(name) + 4, 0, 1 << 40)
    file.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=r"wrong shape: model\.layers\.0\.self_attn\.q_proj\.weight"):
        load_model(file, "float32")
