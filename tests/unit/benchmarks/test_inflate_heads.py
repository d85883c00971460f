"""Draft heads that were grown with their target make the drafts that they made before."""

import importlib
import json

import pytest
import torch
from safetensors.torch import save_file

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine.engine_core import EngineCore

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 48, 96, 6, 2, 8, 120
LARGER = "--hidden-size 96 --layers 7 --intermediate-size 144 --heads 12 --kv-heads 3 --dtype float32"
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
}


@pytest.fixture
def inflate(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(repo_root / "benchmarks")
    return importlib.import_module("inflate")


def weight(*shape):
    return torch.randn(*shape) * 1.3 * shape[-1] ** -0.5


def layer_tensors(prefix, read):
    """A layer's projections; attention reads `read` numbers."""
    return {
        f"{prefix}.self_attn.q_proj.weight": weight(HEADS * DIM, read),
        f"{prefix}.self_attn.k_proj.weight": weight(KV_HEADS * DIM, read),
        f"{prefix}.self_attn.v_proj.weight": weight(KV_HEADS * DIM, read),
        f"{prefix}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * DIM),
        f"{prefix}.mlp.gate_proj.weight": weight(INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": weight(INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": weight(HIDDEN, INNER),
        f"{prefix}.post_attention_layernorm.weight": torch.rand(HIDDEN) + 0.5,
    }


def norms(*names):
    return {f"{name}.weight": torch.rand(HIDDEN) + 0.5 for name in names}


def write(folder, config, tensors, file="model.safetensors"):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".pt"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    return folder


def make_eagle3(folder):
    """Its own head over 60 of the tokens, the target's embedding."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 60}
    tensors = layer_tensors("midlayer", 2 * HIDDEN) | norms("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    tensors |= {"fc.weight": weight(HIDDEN, 3 * HIDDEN), "lm_head.weight": weight(60, HIDDEN)}
    tensors["d2t"] = torch.arange(60)  # draft id i is token 2 i
    return write(folder, SIZES | config | {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, tensors)


def make_eagle3_by_default(folder):
    """The target's embedding and head, the default layers, norms over the fused states."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "norm_before_fc": True}
    tensors = layer_tensors("layers.0", 2 * HIDDEN) | norms("layers.0.input_layernorm", "layers.0.hidden_norm", "norm")
    tensors |= {"fc.weight": weight(HIDDEN, 3 * HIDDEN), "input_norm.weight": torch.rand(3 * HIDDEN) + 0.5}
    return write(folder, SIZES | config, tensors)


def make_eagle(folder):
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    tensors = layer_tensors("layers.0", HIDDEN) | {"fc.weight": weight(HIDDEN, 2 * HIDDEN)}
    tensors |= {"fc.bias": torch.randn(HIDDEN), "embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    return write(folder, SIZES | config, tensors)


def make_medusa(folder):
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    tensors = {}
    for head in range(3):
        tensors[f"{head}.0.linear.weight"] = weight(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = torch.randn(HIDDEN)
        tensors[f"{head}.1.weight"] = weight(VOCAB, HIDDEN)
    return write(folder, config, tensors, "medusa_lm_head.pt")


HEADS_BY_NAME = {
    "eagle3": ("eagle3", make_eagle3),
    "eagle3 sharing": ("eagle3", make_eagle3_by_default),
    "eagle": ("eagle", make_eagle),
    "medusa": ("medusa", make_medusa),
}


def make_target(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(**SIZES, num_hidden_layers=3, tie_word_embeddings=True, eos_token_id=1, initializer_range=0.2)
    )
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.float().save_pretrained(folder)
    return folder


def make_adapter(folder, eagle3):
    """An adapter of the target, with draft weights for an EAGLE-3 head."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder.parent / "target", dtype=torch.float32)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(folder)
    if eagle3:
        draft = folder / "draft" / "eagle3"
        draft.mkdir(parents=True)
        (draft / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
        sizes = {"fc": (3 * HIDDEN, HIDDEN), "layers.0.self_attn.o_proj": (HEADS * DIM, HIDDEN)}
        sizes["layers.0.self_attn.q_proj"] = (2 * HIDDEN, HEADS * DIM)
        tensors = {}
        for module, (read, written) in sizes.items():
            tensors[f"base_model.model.{module}.lora_A.weight"] = weight(4, read)
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(written, 4)
        save_file(tensors, draft / "adapter_model.safetensors")
    return folder


def list_drafts(base, method, head, adapter=None):
    """Every step's tokens by request: all drafts, which are accepted whatever they are, and one of the target's."""
    speculative = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.0, 1.0, 1.0]}
    args = EngineArgs(
        model=str(base), dtype="float32", speculative_config=speculative, max_model_len=128, enable_lora=bool(adapter)
    )
    engine = EngineCore(args)
    lora = LoRARequest("tenant", path=str(adapter)) if adapter else None
    if lora and method == "eagle3":
        assert engine.adapters.load(lora).draft == "loaded"
    for index, prompt in enumerate(([5, 6, 7, 8, 9], list(range(20, 50)))):
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        engine.add_request(EngineRequest(str(index), prompt, params, lora=lora))
    steps = []
    while engine.has_work():
        steps += [(delta.request_id, tuple(delta.token_ids), delta.num_accepted) for delta in engine.step()]
    engine.shutdown()
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", HEADS_BY_NAME)
def test_drafts_are_the_small_heads(name, adapted, inflate, tmp_path):
    method, make = HEADS_BY_NAME[name]
    target, head = make_target(tmp_path / "target"), make(tmp_path / "head")
    adapter = make_adapter(tmp_path / "tenant", method == "eagle3") if adapted else None
    more = f" --adapters {adapter}" if adapted else ""
    inflate.main(f"{target} {tmp_path / 'large'} {LARGER} --{method} {head}{more}".split())
    large = tmp_path / "large"
    steps = list_drafts(target, method, head, adapter)
    assert list_drafts(large / "base", method, large / method, adapter and large / "adapters" / "tenant") == steps
    drafts = [ids[:num_accepted] for _, ids, num_accepted in steps if num_accepted]
    assert len(drafts) > 20
    assert len(set(drafts)) > 5


def test_a_head_of_another_kind_is_refused(inflate, tmp_path):
    target = make_target(tmp_path / "target")
    made = {name: HEADS_BY_NAME[name][1](tmp_path / name) for name in ("eagle3", "eagle", "medusa")}
    made["draft"] = target
    for option in made:
        for name, folder in made.items():
            if name == option:
                continue
            with pytest.raises(SystemExit, match=f"--{option} .* are those of kind"):
                inflate.main(f"{target} {tmp_path / 'large'} {LARGER} --{option} {folder}".split())
            assert not (tmp_path / "large").exists()


@pytest.mark.parametrize(
    ("method", "grown", "found"),
    [
        ("eagle", "eagle eagle3", "eagle"),
        ("eagle3", "eagle eagle3", "eagle3"),
        ("eagle", "eagle3", "no drafter"),
        ("eagle3", "eagle", "no drafter"),
    ],
)
def test_plain_draft_weights_go_to_their_head(method, grown, found, inflate, tmp_path, capsys):
    target = make_target(tmp_path / "target")
    adapter = make_adapter(tmp_path / "tenant", eagle3=False)
    (adapter / "draft").mkdir()
    (adapter / "draft" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    read = 2 * HIDDEN if method == "eagle3" else HIDDEN
    prefix = "base_model.model.layers.0.self_attn.q_proj"
    tensors = {f"{prefix}.lora_A.weight": weight(4, read), f"{prefix}.lora_B.weight": weight(HEADS * DIM, 4)}
    save_file(tensors, adapter / "draft" / "adapter_model.safetensors")
    heads = " ".join(f"--{name} {HEADS_BY_NAME[name][1](tmp_path / name)}" for name in grown.split())
    inflate.main(f"{target} {tmp_path / 'large'} {LARGER} {heads} --adapters {adapter}".split())
    assert f"adapter tenant: draft weights for {found}\n" in capsys.readouterr().out
    assert (tmp_path / "large" / "adapters" / "tenant" / "draft").exists() == (found != "no drafter")


def test_draft_weights_that_fit_two_heads_are_refused(inflate, tmp_path):
    target = make_target(tmp_path / "target")
    adapter = make_adapter(tmp_path / "tenant", eagle3=False)
    (adapter / "draft").mkdir()
    (adapter / "draft" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    prefix = "base_model.model.layers.0.mlp.down_proj"
    tensors = {f"{prefix}.lora_A.weight": weight(4, INNER), f"{prefix}.lora_B.weight": weight(HIDDEN, 4)}
    save_file(tensors, adapter / "draft" / "adapter_model.safetensors")
    heads = " ".join(f"--{name} {HEADS_BY_NAME[name][1](tmp_path / name)}" for name in ("eagle", "eagle3"))
    with pytest.raises(SystemExit, match="could be for each of eagle, eagle3"):
        inflate.main(f"{target} {tmp_path / 'large'} {LARGER} {heads} --adapters {adapter}".split())
    assert not (tmp_path / "large").exists()


def test_a_head_of_another_width_is_refused(inflate, tmp_path):
    target, head = make_target(tmp_path / "target"), make_eagle3(tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"target_hidden_size": 64}))
    with pytest.raises(SystemExit, match="hidden size"):
        inflate.main(f"{target} {tmp_path / 'large'} {LARGER} --eagle3 {head}".split())
