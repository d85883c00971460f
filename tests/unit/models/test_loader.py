"""Model directories: sharded, tied, incomplete, wrong, or without weights."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from outrider.models.batch import KVLayerSpec
from outrider.models.checkpoint.loader import ModelOptions, load_model, read_facts
from outrider.models.checkpoint.paths import resolve_model_path
from outrider.platform.core.errors import InvalidRequestError, NotFoundError, UnsupportedModelError

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def tiny(save_tiny: Callable) -> Path:
    return save_tiny("Llama")[0]


@pytest.fixture
def changed(tiny: Path, tmp_path: Path) -> Callable[[Callable[[dict], None]], Path]:
    """changed(edit) -> a copy of the tiny model whose tensors `edit` has changed."""

    def change(edit: Callable[[dict], None]) -> Path:
        path = tmp_path / "model"
        shutil.copytree(tiny, path)
        tensors = load_file(path / "model.safetensors")
        edit(tensors)
        save_file(tensors, path / "model.safetensors")
        return path

    return change


def test_sharded_equals_single(save_tiny: Callable, driver: Callable) -> None:
    single, _ = save_tiny("Qwen3")
    sharded, _ = save_tiny("Qwen3", max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    a, b = (driver(load_model(path)).forward_once({0: TOKENS})[0] for path in (single, sharded))
    assert a.equal(b)


def test_missing_unexpected_and_misshapen_tensors_are_named_together(changed: Callable) -> None:
    def edit(tensors: dict) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.7.extra"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(5)

    with pytest.raises(InvalidRequestError) as caught:
        load_model(changed(edit))
    said = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in said
    assert "unexpected: model.layers.7.extra" in said
    assert "model.norm.weight [5] instead of [48]" in said


def test_rotary_buffers_are_ignored(changed: Callable, driver: Callable, tiny: Path) -> None:
    path = changed(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}))
    a, b = (driver(load_model(p)).forward_once({0: TOKENS})[0] for p in (path, tiny))
    assert a.equal(b)


@pytest.mark.parametrize(("family", "impl"), [("Llama", "auto"), ("Llama", "transformers"), ("GPT2", "auto")])
def test_a_tied_model_with_a_head_of_its_own_uses_it(
    family: str, impl: str, save_tiny: Callable, driver: Callable, tmp_path: Path
) -> None:
    """As in transformers, if the stored head is no copy of the embeddings; a copy changes nothing."""
    sizes = {} if family == "Llama" else {"num_key_value_heads": 4}
    tied, reference = save_tiny(family, tie_word_embeddings=True, **sizes)
    tensors = load_file(tied / "model.safetensors")
    assert "lm_head.weight" not in tensors
    table = reference.get_input_embeddings().weight
    heads = {"copy": table.clone(), "own": table + 0.1 * torch.randn_like(table)}
    for name, head in heads.items():
        shutil.copytree(tied, tmp_path / name)
        save_file({**tensors, "lm_head.weight": head}, tmp_path / name / "model.safetensors")
        theirs = type(reference).from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            expected = theirs(torch.tensor([TOKENS])).logits[0]
        ours = driver(load_model(tmp_path / name, options=ModelOptions(impl=impl))).forward_once({0: TOKENS})[0]
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
        with torch.no_grad():
            assert ((expected - reference(torch.tensor([TOKENS])).logits[0]).abs().max() > 0.1) == (name == "own")


@pytest.mark.parametrize(("family", "impl"), [("Llama", "auto"), ("Llama", "transformers"), ("GPT2", "auto")])
def test_a_tied_models_file_may_have_the_head_alone(
    family: str, impl: str, save_tiny: Callable, driver: Callable, tmp_path: Path
) -> None:
    """As `save_model` of safetensors writes it, which keeps one name of each tensor."""
    tied, reference = save_tiny(
        family, tie_word_embeddings=True, **({"num_key_value_heads": 4} if family == "GPT2" else {})
    )
    shutil.copytree(tied, tmp_path / "head")
    save_model(reference, str(tmp_path / "head" / "model.safetensors"))
    names = set(load_file(tmp_path / "head" / "model.safetensors"))
    assert "lm_head.weight" in names
    assert not any("embed" in name or "wte" in name for name in names)
    one, other = (
        driver(load_model(path, options=ModelOptions(impl=impl))).forward_once({0: TOKENS})[0]
        for path in (tied, tmp_path / "head")
    )
    assert one.equal(other)


def test_an_untied_model_needs_its_lm_head(changed: Callable) -> None:
    with pytest.raises(InvalidRequestError, match=r"missing: lm_head\.weight"):
        load_model(changed(lambda tensors: tensors.pop("lm_head.weight")))


def test_missing_and_broken_files(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidRequestError, match="JSON"):
        load_model(tmp_path)
    shutil.copy(tiny / "config.json", tmp_path)
    with pytest.raises(NotFoundError, match=r"model\.safetensors"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(NotFoundError, match="model-00001-of-00002"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(InvalidRequestError, match="safetensors"):
        load_model(tmp_path)


def test_quantized_weights_are_refused(changed: Callable) -> None:
    def edit(tensors: dict) -> None:
        tensors["model.norm.weight"] = torch.ones(48, dtype=torch.int8)

    with pytest.raises(InvalidRequestError, match=r"model\.norm\.weight is int8"):
        load_model(changed(edit))


def test_json_nested_too_deep_and_names_too_long(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(InvalidRequestError, match="JSON"):
        load_model(tmp_path)
    for name in ("x" * 5000, "~nobody-of-that-name/model"):
        with pytest.raises(NotFoundError) as caught:
            resolve_model_path(name)
        assert caught.value.param == "model"
        assert len(caught.value.message) < 400


def test_dummy_weights_need_only_the_config(tiny: Path, driver: Callable, tmp_path: Path) -> None:
    shutil.copy(tiny / "config.json", tmp_path)

    def logits(seed: int) -> torch.Tensor:
        return driver(load_model(tmp_path, load_format="dummy", seed=seed)).forward_once({0: TOKENS})[0]

    first = logits(0)
    assert first.isfinite().all()
    assert 0.1 < first.std() < 10
    assert first.equal(logits(0))
    assert not first.equal(logits(1))


def test_linears_describe_the_checkpoints_modules(tiny: Path) -> None:
    model = load_model(tiny, load_format="dummy")
    linears = {linear.name: linear for linear in model.linears()}
    assert list(linears)[:4] == ["layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down"]
    assert len(linears) == 8
    qkv = linears["layers.1.qkv"]
    attention = "model.layers.1.self_attn"
    assert qkv.slices == [(f"{attention}.q_proj", 48), (f"{attention}.k_proj", 24), (f"{attention}.v_proj", 24)]
    assert (qkv.in_features, qkv.out_features) == (48, 96)


def test_num_parameters_and_kv_layers(save_tiny: Callable) -> None:
    for tied in (False, True):
        path, reference = save_tiny("Qwen2", tie_word_embeddings=tied)
        model = load_model(path, load_format="dummy")
        assert model.num_parameters == sum(p.numel() for p in reference.parameters())
        assert model.kv_layers == [KVLayerSpec(2, 12)] * 2


def test_an_adapter_site_adds_before_the_residual(tiny: Path) -> None:
    linear = load_model(tiny).linears()[1]

    class Site:
        def start(self, x: torch.Tensor, adapters: float) -> None:
            return None

        def add(self, y: torch.Tensor, x: torch.Tensor, adapters: float, started: None) -> None:
            y += adapters * x.sum(-1, keepdim=True)

    class Batch:
        adapters: float | None = None

    x, residual, batch = torch.randn(3, linear.in_features), torch.randn(3, linear.out_features), Batch()
    plain = linear.forward(x, batch, residual)
    linear.lora = Site()
    assert linear.forward(x, batch, residual).equal(plain)
    batch.adapters = 2.0
    expected = plain + 2.0 * x.sum(-1, keepdim=True)
    torch.testing.assert_close(linear.forward(x, batch, residual), expected)


def test_facts_are_read_without_weights(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    facts = read_facts(tmp_path)
    assert (facts.architecture, facts.dtype, facts.vocab_size) == ("LlamaForCausalLM", "float32", 131)
    assert facts.max_position_embeddings == 256
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 12 * 4
    assert read_facts(tmp_path, "bfloat16").kv_bytes_per_token == 2 * 2 * 2 * 12 * 2
    assert read_facts(tmp_path, "auto") == facts
    assert read_facts(tmp_path, kv_cache_dtype="fp8").kv_bytes_per_token == 2 * 2 * 2 * 12
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        read_facts(tmp_path)


def test_model_paths(tiny: Path) -> None:
    assert resolve_model_path(str(tiny)) == tiny
    assert resolve_model_path(tiny) == tiny
    for name in (str(tiny / "nosuch"), "./nosuch", "nobody/no-such-model", str(tiny / "config.json")):
        with pytest.raises(NotFoundError) as caught:
            resolve_model_path(name)
        assert name in str(caught.value)
        assert caught.value.param == "model"


def test_a_hub_id_is_found_in_the_hubs_cache(tiny: Path, driver: Callable, tmp_path: Path, monkeypatch) -> None:
    """The layout that huggingface_hub itself downloads into; the network stays off."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--someone--tiny"
    shutil.copytree(tiny, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    with pytest.raises(NotFoundError):
        resolve_model_path("someone/tiny")
    assert resolve_model_path("someone/tiny", cache_dir=str(tmp_path)) == repo / "snapshots" / commit
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    path = resolve_model_path("someone/tiny")
    assert path == repo / "snapshots" / commit
    ours, theirs = (driver(load_model(where)).forward_once({0: TOKENS})[0] for where in (path, tiny))
    assert torch.equal(ours, theirs)


def test_wrong_dtype_is_refused(tiny: Path) -> None:
    with pytest.raises(InvalidRequestError, match="float8") as caught:
        load_model(tiny, dtype="float8")
    assert caught.value.param == "dtype"


@pytest.mark.parametrize("name", ["consolidated.00.pth", "consolidated.safetensors"])
def test_consolidated_files_are_refused_by_name(tiny: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(InvalidRequestError, match=rf"{name} is in the form of Meta's or Mistral's"):
        load_model(tmp_path)


def test_float8_weights_are_refused_by_name(changed: Callable) -> None:
    def edit(tensors: dict) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    with pytest.raises(InvalidRequestError, match=r"layers\.1\.mlp\.up_proj\.weight is float8_e4m3fn"):
        load_model(changed(edit))


def test_sharded_pickles_equal_the_single_file(save_tiny: Callable, tmp_path: Path, driver: Callable) -> None:
    single, _ = save_tiny("Qwen3")
    shutil.copy(single / "config.json", tmp_path)
    tensors = list(load_file(single / "model.safetensors").items())
    parts = {f"pytorch_model-{part + 1:05}-of-00002.bin": dict(tensors[part::2]) for part in range(2)}
    for name, part in parts.items():
        torch.save(part, tmp_path / name)
    weight_map = {tensor: name for name, part in parts.items() for tensor in part}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    a, b = (driver(load_model(path)).forward_once({0: TOKENS})[0] for path in (single, tmp_path))
    assert a.equal(b)


def test_configs_of_transformers_4_and_5(tiny: Path, tmp_path: Path) -> None:
    raw = json.loads((tiny / "config.json").read_text())
    old = {key: value for key, value in raw.items() if key not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": raw["rope_parameters"]["rope_theta"], "rope_scaling": None, "torch_dtype": raw["dtype"]}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_facts(tmp_path) == dataclasses.replace(read_facts(tiny), path=str(tmp_path))
