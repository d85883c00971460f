"""The arithmetic of mixes: rows one after another, deltas equal to PEFT's weighted sum."""

import dataclasses
import itertools

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from outrider.lora.adapter import DRAFT_LOADED, Adapter
from outrider.lora.device.layout import LoraWeights
from outrider.lora.files.tensor_keys import ModuleShape
from outrider.lora.registry.mixes import check_mixable, mix_adapters
from outrider.platform.core.errors import AdapterError

from ..parsing import make_model, parse

ADAPTERS = {
    # PEFT gives a mix the first part's use_rslora, which is right without alone.
    "linear": {"r": 6, "lora_alpha": 16, "target_modules": "all-linear"},
    "some": {
        "use_rslora": True,
        "r": 3,
        "lora_alpha": 4,
        "target_modules": ["v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 5},
    },
    "vocabulary": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
}
WEIGHTS = [(0.7, 0.3, -1.5), (1.0, 1.0, 1.0), (-0.25, 4.0, 0.5)]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """(PEFT's model with all adapters, ours parsed by name)."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model, folder = transformers.LlamaForCausalLM(config), tmp_path_factory.mktemp("adapters")
    known = {
        name: ModuleShape(module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    known["model.embed_tokens"] = ModuleShape(61, 32, embedding=True, is_base=lambda tensor: True)
    known["lm_head"] = known["lm_head"]._replace(is_base=lambda tensor: True)
    peft, parsed = None, {}
    for name, options in ADAPTERS.items():
        config = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **options)
        if peft is None:
            peft = get_peft_model(model, config, adapter_name=name)
        else:
            peft.add_adapter(name, config)
        for parameter_name, parameter in peft.named_parameters():
            if f".{name}" in parameter_name and "lora_" in parameter_name:
                torch.nn.init.normal_(parameter)
        peft.save_pretrained(str(folder), selected_adapters=[name])
        parsed[name] = parse(folder / name, known, max_rank=8, dtype=torch.float32).adapter
    return peft, parsed


def delta(weights):
    """[out, in]."""
    return weights.b.t() @ weights.a


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_as_pefts_weighted_sum(case, weights):
    peft, parsed = case
    name = f"mix {weights}".replace(".", "_")
    peft.add_weighted_adapter([*ADAPTERS], list(weights), name, combination_type="cat")
    mixed = mix_adapters([(parsed[n], w) for n, w in zip(ADAPTERS, weights, strict=True)])
    layers = {n.removeprefix("base_model.model."): m for n, m in peft.named_modules() if isinstance(m, LoraLayer)}
    layers = {n: m for n, m in layers.items() if name in {*m.lora_A, *m.lora_embedding_A}}
    modules = mixed.target.modules()
    assert set(modules) == set(layers)
    for module, layer in layers.items():
        expected = layer.get_delta_weight(name)
        if "embed" in module:
            expected = expected.t()
        torch.testing.assert_close(delta(modules[module]), expected, atol=1e-4, rtol=1e-4)


def adapter_tensors(adapter):
    return [tensor for weights in adapter.target.modules().values() for tensor in (weights.a, weights.b)]


def test_rows_are_those_of_the_parts(case):
    """A module has the rows of the parts that adapt it, not of all, and shares no memory with them."""
    _, parsed = case
    mixed = mix_adapters([(parsed[name], 0.5) for name in ADAPTERS])
    ranks = {name: len(weights.a) for name, weights in mixed.target.modules().items()}
    first = "model.layers.0."
    assert {name.removeprefix(first): rank for name, rank in ranks.items() if name.startswith(first)} == {
        "self_attn.q_proj": 6, "self_attn.k_proj": 6, "self_attn.v_proj": 6 + 5 + 4, "self_attn.o_proj": 6,
        "mlp.gate_proj": 6, "mlp.up_proj": 6, "mlp.down_proj": 6 + 3,
    }  # fmt: skip
    assert (ranks["lm_head"], ranks["model.embed_tokens"]) == (4, 4)
    assert (mixed.rows, mixed.target.rank) == (15, 15)
    theirs = {tensor.data_ptr() for part in parsed.values() for tensor in adapter_tensors(part)}
    assert not any(tensor.data_ptr() in theirs for tensor in adapter_tensors(mixed))


def test_order_changes_no_bit_and_weights_change_the_digest(case):
    _, parsed = case
    parts = [(parsed[name], weight) for name, weight in zip(ADAPTERS, (0.7, 0.3, -1.5), strict=True)]
    mixes = [mix_adapters(order) for order in itertools.permutations(parts)]
    assert len({mix.digest for mix in mixes}) == 1
    assert all(
        torch.equal(*both)
        for mix in mixes
        for both in zip(adapter_tensors(mixes[0]), adapter_tensors(mix), strict=True)
    )
    first, second, third = (adapter for adapter, _ in parts)
    others = [
        parts[:2],
        [(first, 0.3), (second, 0.7), (third, -1.5)],
        [(first, 0.7000000000000001), (second, 0.3), (third, -1.5)],
        [(first, 0.7)],
        [(first, 1.0)],
    ]
    digests = {mix_adapters(order).digest for order in others} | {adapter.digest for adapter, _ in parts}
    assert len(digests | {mixes[0].digest}) == len(others) + len(parts) + 1


SHAPES = {name: ModuleShape(2, 3) for name in "qde"}
LAYOUT = make_model(SHAPES).layout
DRAFT_LAYOUT = make_model(SHAPES).layout


def adapter(digest, modules, draft_modules=(), draft=""):
    """Rank 1, or more for a name given more often."""

    def weights(names):
        return {n: LoraWeights(torch.ones(names.count(n), 2), torch.ones(names.count(n), 3)) for n in set(names)}

    return Adapter(digest, LAYOUT.pack(weights(modules)), DRAFT_LAYOUT.pack(weights(list(draft_modules))), draft)


def test_draft_weights_are_mixed_likewise():
    both = adapter(b"1", ["q"], ["d", "d", "e"], DRAFT_LOADED)
    other = adapter(b"2", ["q"], ["d"], DRAFT_LOADED)
    bare = adapter(b"3", ["q"], draft="unreadable")
    mixed = mix_adapters([(both, 0.5), (other, -2), (bare, 1)])
    assert mixed.draft == DRAFT_LOADED
    draft_modules = mixed.drafter.modules()
    assert {name: len(weights.a) for name, weights in draft_modules.items()} == {"d": 3, "e": 1}
    assert draft_modules["d"].b[:, 0].tolist() == [0.5, 0.5, -2]
    assert (mixed.target.rank, mixed.rows) == (3, 3)
    more = mix_adapters([(both, 1), (adapter(b"4", ["q"], ["d", "d"], DRAFT_LOADED), 1)])
    assert (more.target.rank, more.rows) == (2, 4), "the drafter's modules have the larger rank"
    for parts in ([(bare, 0.5)], [(bare, 1), (adapter(b"5", ["q"]), 1)]):
        mixed = mix_adapters(parts)
        assert (mixed.drafter.modules(), mixed.draft) == ({}, "unreadable")


@pytest.mark.parametrize("where", ["target", "drafter"])
def test_dora_is_refused_by_name(where):
    plain = adapter(b"1", ["q"], ["d"], DRAFT_LOADED)
    check_mixable("a", plain)
    scaling = dataclasses.replace(plain, **{where: getattr(plain, where)._replace(gains={"q": torch.ones(3)})})
    with pytest.raises(AdapterError, match="adapter 'x' uses DoRA"):
        check_mixable("x", scaling)
