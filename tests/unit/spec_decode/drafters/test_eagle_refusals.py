"""Heads that do not fit are refused at load, with both figures; and sizes read from config.json alone."""

import dataclasses
import json

import pytest
import torch

from outrider.models.batch import allocate_kv
from outrider.platform.core.errors import InvalidRequestError, NotFoundError, OutriderError, UnsupportedModelError
from outrider.platform.core.speculative_config import parse_speculative
from outrider.spec_decode.drafters.base import no_adapters
from outrider.spec_decode.drafters.eagle.config import eagle_kv_bytes_per_token, read_eagle_config
from outrider.spec_decode.drafters.eagle.drafter import EagleDrafter
from outrider.spec_decode.drafters.factory import draft_kv_bytes_per_token


@pytest.fixture
def refused(load_head, tmp_path):
    """refused(head, config changes, tensor changes, method) -> the error of loading it."""

    def refused(head, config=None, tensors=None, method=None) -> OutriderError:
        path = tmp_path / "changed"
        head.weights |= {n: t for n, t in (tensors or {}).items() if t is not None}
        for name in [n for n, t in (tensors or {}).items() if t is None]:
            del head.weights[name]
        head.save(path)
        if config:
            raw = json.loads((path / "config.json").read_text()) | config
            (path / "config.json").write_text(json.dumps({n: v for n, v in raw.items() if v is not None}))
        with pytest.raises((InvalidRequestError, UnsupportedModelError)) as caught:
            load_head(path, method or head.method)
        assert caught.value.param == "speculative_config"
        assert caught.value.message.startswith("speculative_config: ")
        assert str(path) in caught.value.message
        return caught.value

    return refused


@pytest.mark.parametrize(
    ("method", "config", "figures"),
    [
        ("eagle", {"hidden_size": 64}, ("64", "32")),
        ("eagle3", {"hidden_size": 24}, ("24", "32")),
        ("eagle3", {"target_hidden_size": 48}, ("48", "32")),
        ("eagle", {"vocab_size": 100}, ("100", "97")),
        ("eagle3", {"vocab_size": 100}, ("100", "97")),
        ("eagle3", {"draft_vocab_size": 200}, ("200", "97")),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, ("6", "5 layers")),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [-1, 2, 3]}, ("-1", "5 layers")),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2]}, ("[32, 96]", "[32, 64]")),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": []}, ("[]",)),
        ("eagle", {"num_hidden_layers": 2}, ("2",)),
        ("eagle3", {"num_hidden_layers": 2}, ("missing: layers.1.self_attn.q_proj.weight",)),
        ("eagle3", {"parallel_drafting": True}, ("mask_token_id", "pard_token", "ptd_token_id")),
        ("eagle3", {"speculators_model_type": "peagle"}, ("mask_token_id",)),
        ("eagle3", {"ptd_token_id": 97}, ("ptd_token_id", "97")),
        ("eagle3", {"pard_token": "x"}, ("pard_token", "'x'")),
        ("eagle3", {"pard_token": 4}, ("missing: mask_hidden",)),
        ("eagle", {"speculators_model_type": "peagle"}, ("'peagle'", "'eagle'")),
        ("eagle", {"architectures": ["OPTForCausalLM"]}, ("OPTForCausalLM", "LlamaForCausalLM")),
        ("eagle", {"architectures": ["LlamaForCausalLMEagle3"]}, ("use method 'eagle3'",)),
        ("eagle3", {"architectures": ["LlamaForCausalLMEagle"]}, ("use method 'eagle'",)),
        ("eagle", {"speculators_model_type": "eagle3"}, ("'eagle3'", "'eagle'")),
        ("eagle3", {"draft_vocab_size": 40}, ("[97]", "[40]")),
        ("eagle3", {"draft_vocab_size": "many"}, ("'many'",)),
        # Errors of the model reader, reported for the head.
        ("eagle", {"hidden_size": "x"}, ("hidden_size", "'x'")),
        ("eagle3", {"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
        ("eagle", {"architectures": -1}, ("architectures", "-1")),
        ("eagle3", {"architectures": [[1]]}, ("architectures", "[[1]]")),
        ("eagle3", {"eagle_config": "x"}, ("eagle_config",)),
        ("eagle3", {"eagle_config": [1, 2]}, ("eagle_config",)),
        ("eagle3", {"transformer_layer_config": 5}, ("transformer_layer_config",)),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1] * 100_000}, ("1 to 6", "100000 of them")),
    ],
)
def test_configs_that_do_not_fit(make_head, refused, method, config, figures):
    error = refused(make_head(method, own_head=True, d2t=method == "eagle3"), config)
    for figure in figures:
        assert figure in error.message


def test_hidden_states_beyond_the_last_layer_are_none(make_head, refused, load_head, tmp_path):
    """The number of layers means the output of the last one."""
    path = make_head("eagle3", aux=(1, 2, 5)).save(tmp_path / "last")
    assert load_head(path, "eagle3").needs.aux_layers == (1, 2, 5)


@pytest.mark.parametrize(
    ("method", "tensors", "words"),
    [
        ("eagle", {"fc.weight": None}, ("missing: fc.weight",)),
        ("eagle", {"fc.weight": torch.zeros(32, 96)}, ("fc.weight [32, 96] instead of [32, 64]",)),
        ("eagle3", {"fc.weight": torch.zeros(32, 64)}, ("fc.weight [32, 64] instead of [32, 96]",)),
        ("eagle", {"layers.0.input_layernorm.weight": torch.ones(32)}, ("unexpected: layers.0.input_layernorm",)),
        ("eagle3", {"norm.weight": None}, ("missing: norm.weight",)),
        ("eagle3", {"layers.1.mlp.up_proj.weight": torch.ones(3)}, ("unexpected: layers.1.mlp.up_proj.weight",)),
        ("eagle3", {"layers.0.self_attn.q_proj.bias": torch.ones(32)}, ("missing", "k_proj.bias", "v_proj.bias")),
        ("eagle3", {"mask_hidden": torch.zeros(1, 96)}, ("unexpected: mask_hidden",)),
        ("eagle3", {"d2t": torch.full((97,), 60)}, ("156", "97")),
        ("eagle3", {"d2t": torch.full((97,), -1)}, ("-1", "97")),
        ("eagle3", {"d2t": torch.arange(97) * -1}, ("97 tokens to 1",)),
        ("eagle3", {"d2t": torch.zeros(97)}, ("float32",)),
        ("eagle3", {"lm_head.weight": torch.zeros(50, 32)}, ("[50, 32]", "[97, 32]")),
        ("eagle3", {"embed_tokens.weight": torch.zeros(50, 32)}, ("[50, 32]", "[97, 32]")),
    ],
)
def test_tensors_that_do_not_fit(make_head, refused, method, tensors, words):
    error = refused(make_head(method), tensors=tensors)
    for word in words:
        assert word in error.message


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.to(torch.int8), "int8"),
        (lambda t: t > 0, "bool"),
        (lambda t: t.to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (lambda t: t.to(torch.complex64), "complex64"),
        (lambda t: t.to_sparse(), "sparse"),
        (lambda t: t.to("meta"), "no values"),
    ],
)
def test_tensors_that_are_no_plain_weights(make_head, refused, change, word):
    head = make_head("eagle3", bin=True)
    message = refused(head, tensors={"fc.weight": change(head.weights["fc.weight"])}).message
    assert "fc.weight" in message
    assert word in message


def test_offsets_that_are_no_integers(make_head, refused):
    offsets = torch.zeros(97, dtype=torch.complex64)
    assert "d2t is complex64" in refused(make_head("eagle3", bin=True), tensors={"d2t": offsets}).message


def test_before_anything_is_loaded_errors_name_the_draft_too(make_head, tmp_path):
    path = make_head("eagle").save(tmp_path / "head")
    for text, word in (('{"hidden_size": 1.5}', "hidden_size"), ("[" * 100_000, "JSON")):
        (path / "config.json").write_text(text)
        for method in ("eagle", "draft_model"):
            config = parse_speculative({"method": method, "model": str(path)})
            with pytest.raises((InvalidRequestError, UnsupportedModelError)) as caught:
                draft_kv_bytes_per_token(config, "float32")
            assert caught.value.param == "speculative_config"
            assert str(path) in caught.value.message
            if method == "eagle" or word == "JSON":
                assert word in caught.value.message
    with pytest.raises(NotFoundError, match="too long") as caught:
        draft_kv_bytes_per_token(parse_speculative({"method": "eagle", "model": "x" * 5000}), "float32")
    assert caught.value.param == "speculative_config"
    assert len(caught.value.message) < 1000


def test_a_position_limit_below_the_longest_sequence_is_reported(make_head, load_head, target, tmp_path, caplog):
    path = make_head("eagle").save(tmp_path / "short")
    for folder, method, positions in ((path, "eagle", 256), (target.path, "draft_model", 512)):
        caplog.clear()
        load_head(folder, method, max_model_len=positions)
        assert not caplog.records
        load_head(folder, method, max_model_len=positions + 100)
        (message,) = caplog.messages
        assert all(figure in message for figure in (str(folder), str(positions), str(positions + 100)))


def test_weights_of_the_other_generation(make_head, refused, load_head, tmp_path):
    """Both may name LlamaForCausalLM: the tensors decide."""
    error = refused(make_head("eagle3", architecture="LlamaForCausalLM"), method="eagle")
    assert "EAGLE-3 weights" in error.message
    assert "use method 'eagle3'" in error.message
    path = make_head("eagle").save(tmp_path / "one")
    with pytest.raises(InvalidRequestError, match="use method 'eagle'"):
        load_head(path, "eagle3")


def test_default_layers_of_a_target_too_small(make_head, decoder):
    config = dataclasses.replace(decoder.config, num_layers=2)
    with pytest.raises(InvalidRequestError, match=r"\[2, 1, -1\] \(the default.* 2 layers"):
        read_eagle_config(make_head("eagle3").config(), "eagle3", config)


def test_a_smaller_head_cannot_share_the_targets_embedding(make_head, refused):
    error = refused(make_head("eagle3", hidden=24, draft_vocab=50))
    assert "embed_tokens" in error.message
    assert "24" in error.message
    assert "32" in error.message
    assert "lm_head" in refused(make_head("eagle3", hidden=24, own_embedding=True)).message


def test_missing_files(load_head, tmp_path):
    with pytest.raises(NotFoundError):
        load_head(tmp_path / "nothing", "eagle")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match=r"config\.json"):
        load_head(tmp_path / "empty", "eagle")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle", {}),
        ("eagle3", {}),
        ("eagle3", {"draft_vocab": 40, "hidden": 24}),
        ("eagle3", {"speculators": True, "norm_before_fc": True, "fc_norm": True, "attention_bias": True}),
    ],
)
def test_random_weights_need_no_file(make_head, load_head, tmp_path, method, options):
    head = make_head(method, **options)
    (tmp_path / "config.json").write_text(json.dumps(head.config()))
    drafter = load_head(tmp_path, method, load_format="dummy")
    assert isinstance(drafter, EagleDrafter)
    kv = allocate_kv(drafter.needs.kv_layers, 4, 4, torch.float32)
    drafter.bind(kv, no_adapters)
    from outrider.platform.core.request import Request
    from outrider.platform.core.sampling_params import SamplingParams
    from outrider.spec_decode.drafters.base import DraftRow, TargetOutput

    request = Request("r", [1, 2, 3], 3, SamplingParams(), seed_key=1)
    states = torch.randn(3, 32)
    rows = [DraftRow(request, [1, 2, 3, 4], 3, 0, 3, [0, 1], True)]
    output = TargetOutput(states, (states,) * len(drafter.needs.aux_layers))
    (proposal,) = drafter.propose(rows, output)
    assert len(proposal.drafts.token_ids) == 3
    assert proposal.drafts.probs.shape == (3, 97)
    torch.testing.assert_close(proposal.drafts.probs.sum(-1), torch.ones(3))


@pytest.mark.parametrize(
    ("method", "options"), [("eagle", {}), ("eagle3", {"hidden": 24}), ("eagle3", {"speculators": True, "kv_heads": 1})]
)
def test_bytes_a_token_are_those_of_the_layers(make_head, load_head, tmp_path, method, options):
    head = make_head(method, own_embedding=True, own_head=True, **options)
    path = head.save(tmp_path / "head")
    specs = load_head(path, method).needs.kv_layers
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        assert eagle_kv_bytes_per_token(path, dtype) == size * sum(spec.num_elements for spec in specs)
    config = parse_speculative({"method": method, "model": str(path)})
    assert draft_kv_bytes_per_token(config, "float32") == eagle_kv_bytes_per_token(path, "float32")


def test_a_mask_of_another_size(make_head, refused):
    head = make_head("eagle3", mask_token=3)
    assert "mask_hidden [32] instead of [96]" in refused(head, tensors={"mask_hidden": torch.zeros(1, 32)}).message


def test_sizes_of_several_layers(make_head, load_head, tmp_path):
    path = make_head("eagle3", layers=3).save(tmp_path / "three")
    specs = load_head(path, "eagle3").needs.kv_layers
    assert len(specs) == 4
    assert eagle_kv_bytes_per_token(path, "bfloat16") == 2 * sum(spec.num_elements for spec in specs)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_projections_have_the_names_that_adapters_use(make_head, load_head, method):
    names = [name for linear in load_head(make_head(method)).needs.linears for name, _ in linear.slices]
    layer = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    assert names == ["fc", *(f"layers.0.{name}" for name in layer)]
