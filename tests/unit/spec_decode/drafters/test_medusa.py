"""Medusa heads in every public format against a plain forward pass of the same tensors."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from outrider.kernels.noise import ROUND, Stream, row_keys
from outrider.kernels.noise.torch import gumbel
from outrider.kernels.sampling import filter_logits
from outrider.platform.core.errors import InvalidRequestError, NotFoundError, UnsupportedModelError
from outrider.platform.core.request import Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.drafters.base import DraftRow, TargetOutput, no_adapters

from ....pairwise import pairwise

VOCAB, HIDDEN = 97, 32
GREEDY = SamplingParams(temperature=0.0)
ORIGINAL = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}


def tensors(num_heads=3, num_layers=1, biases=(), head_biases=()):
    generator = torch.Generator().manual_seed(3)
    made = {}
    for i in range(num_heads):
        for j in range(num_layers):
            made[f"{i}.{j}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.3
            if i in biases:
                made[f"{i}.{j}.linear.bias"] = torch.randn(HIDDEN, generator=generator)
        made[f"{i}.{num_layers}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
        if i in head_biases:
            made[f"{i}.{num_layers}.bias"] = 3 * torch.randn(VOCAB, generator=generator)
    return made


def logits(w, head, num_layers, hidden):
    """The plain forward pass of one head for [H]."""
    x = hidden
    for j in range(num_layers):
        x = x + F.silu(F.linear(x, w[f"{head}.{j}.linear.weight"], w.get(f"{head}.{j}.linear.bias")))
    return F.linear(x, w[f"{head}.{num_layers}.weight"], w.get(f"{head}.{num_layers}.bias"))


def vllm_names(w, num_layers):
    return {
        f"lm_heads.{i}.{kind}" if j == str(num_layers) else f"blocks.{i}.layers.{j}.{kind}": w[name]
        for name, (i, j, *_, kind) in ((name, name.split(".")) for name in w)
    }


@pytest.fixture
def load(load_head, tmp_path):
    def load(w, config=ORIGINAL, file="medusa_lm_head.pt", **fields):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if file.endswith(".safetensors"):
            save_file({name: tensor.contiguous() for name, tensor in w.items()}, tmp_path / file)
        else:
            torch.save(w, tmp_path / file)
        drafter = load_head(tmp_path, "medusa", num_speculative_tokens=3, **fields)
        drafter.bind([], no_adapters)
        return drafter

    return load


def row(tokens, params=GREEDY, k=3, *, seed=1, first_index=0, start=0, rejected=0, sampled=True):
    request = Request("r", tokens[:-1], len(tokens) - 1, params, seed_key=seed)
    return DraftRow(
        request, tokens, len(tokens) - 1, 0, k, [], sampled, start, first_index, num_drafts=rejected, num_accepted=0
    )


def check(w, num_layers, proposal, hidden, count=3):
    assert proposal.drafts.token_ids == [int(logits(w, i, num_layers, hidden).argmax()) for i in range(count)]


CASES = {
    "plain": ({}, ORIGINAL),
    "biases": ({"biases": (0, 1, 2)}, ORIGINAL),
    "a bias of one block and of one head": ({"biases": (1,), "head_biases": (2,)}, ORIGINAL),
    "two layers": ({"num_layers": 2, "biases": (0, 1, 2)}, ORIGINAL | {"medusa_num_layers": 2}),
    "more heads than the config counts": ({"num_heads": 5}, ORIGINAL | {"medusa_num_heads": 2}),
    "sizes": ({}, {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 3, "hidden_size": 32}),
}


FILES = ["medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin"]
PREFIXES = ["", "medusa_head.", "medusa_heads.", "heads.", "model.medusa_head.", "vllm"]


@pytest.mark.parametrize(("case", "prefix", "file"), pairwise(CASES, PREFIXES, FILES))
def test_drafts_are_those_of_a_plain_forward_pass(load, case, prefix, file):
    options, config = CASES[case]
    w, num_layers = tensors(**options), options.get("num_layers", 1)
    stored = vllm_names(w, num_layers) if prefix == "vllm" else {prefix + name: t for name, t in w.items()}
    hidden = torch.randn(4, HIDDEN)
    (proposal,) = load(stored, config, file).propose([row([3, 4, 5, 6, 7])], TargetOutput(hidden))
    check(w, num_layers, proposal, hidden[3])
    assert proposal.num_draft_computed == 5
    assert proposal.drafts.probs is None


def test_ragged_rows_read_the_last_position_that_counts(load):
    w = tensors()
    hidden = torch.randn(14, HIDDEN)
    rows = [
        row([1, 2, 3, 4], k=1, first_index=0),  # positions 0..2
        row([1, 2, 3, 4], k=0, first_index=3),
        row([1] * 9, k=3, first_index=6, start=7, rejected=3),  # position 7 counts, 8..10 held rejected drafts
        row([1] * 30, k=3, first_index=10, start=2, sampled=False),  # a chunk of a prompt
        row([1] * 8, k=2, first_index=11, start=4),  # positions 4..6
    ]
    proposals = load(w).propose(rows, TargetOutput(hidden))
    for proposal, index, count in zip(proposals, (2, 5, 6, 0, 13), (1, 0, 3, 0, 2), strict=True):
        check(w, 1, proposal, hidden[index], count)


@pytest.mark.parametrize("rule", ["independent", "seeded", "invariant"])
def test_sampled_drafts_and_their_distribution(load, rule):
    w = tensors(head_biases=(0, 1, 2))
    hidden = torch.randn(8, HIDDEN)
    params = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, seed=5 if rule == "seeded" else None)
    fields = {"rejection_sample_method": "invariant"} if rule == "invariant" else {}
    rows = [row([1, 2, 3, 4, 5], GREEDY), row([1, 2, 3, 4, 5], params, seed=77, first_index=4)]
    greedy, sampled = load(w, **fields).propose(rows, TargetOutput(hidden))
    check(w, 1, greedy, hidden[3])
    for i, token in enumerate(sampled.drafts.token_ids):
        filtered = filter_logits(logits(w, i, 1, hidden[7])[None], [0.8], [30], [0.9], [0.01])
        stream, step = (Stream.DRAFT, ROUND) if rule == "independent" else (Stream.TARGET, 1)
        noise = gumbel(row_keys([77], [5 * step + i], stream), VOCAB)
        scores = (filtered.log_softmax(-1) + noise)[0]
        assert scores[token] >= scores.max() - 1e-4
        if rule == "independent":
            assert torch.allclose(sampled.drafts.probs[i], filtered.softmax(-1)[0], atol=1e-4)
    assert (sampled.drafts.probs is not None) == (rule == "independent")


@pytest.mark.parametrize(
    ("options", "config", "words"),
    [
        ({"num_heads": 2}, ORIGINAL, ("num_speculative_tokens is 3", "2 Medusa heads")),
        ({}, ORIGINAL | {"hidden_size": 64}, ("64", "32")),
        ({}, ORIGINAL | {"vocab_size": 100}, ("100", "97")),
        ({}, {"architectures": ["LlamaForCausalLM"]}, ("LlamaForCausalLM", "medusa_num_heads")),
        ({}, ORIGINAL | {"medusa_num_heads": 0}, ("medusa_num_heads", "0")),
        ({}, ORIGINAL | {"architectures": 1.5}, ("architectures", "1.5")),
    ],
)
def test_configs_that_do_not_fit(load, options, config, words):
    with pytest.raises((InvalidRequestError, UnsupportedModelError)) as caught:
        load(tensors(**options), config)
    assert caught.value.param == "speculative_config"
    assert all(word in caught.value.message for word in words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"0.0.linear.weight": None}, ("missing: 0.0.linear.weight",)),
        ({"1.1.weight": torch.zeros(50, HIDDEN)}, ("1.1.weight [50, 32] instead of [97, 32]",)),
        ({"2.0.linear.weight": torch.zeros(HIDDEN, 64)}, ("[32, 64] instead of [32, 32]",)),
        ({"100000000.0.linear.weight": torch.zeros(HIDDEN, HIDDEN)}, ("100000001", "64")),
        ({"token_map": torch.zeros(3)}, ("unexpected: token_map",)),
        ({"4.1.weight": torch.zeros(VOCAB, HIDDEN)}, ("missing: 3.0.linear.weight, 4.0.linear.weight, 3.1.weight",)),
    ],
)
def test_tensors_that_do_not_fit(load, change, words):
    w = {name: tensor for name, tensor in (tensors() | change).items() if tensor is not None}
    with pytest.raises(InvalidRequestError) as caught:
        load(w)
    assert all(word in caught.value.message for word in words)


@pytest.mark.parametrize("adaptive", [True, False])
def test_without_a_number_there_are_as_many_drafts_as_heads(load_head, tmp_path, adaptive):
    (tmp_path / "config.json").write_text(json.dumps(ORIGINAL))
    torch.save(tensors(num_heads=2), tmp_path / "medusa_lm_head.pt")
    drafter = load_head(tmp_path, "medusa", adaptive=None if adaptive else False)  # None: as if it were not there
    drafter.bind([], no_adapters)
    (proposal,) = drafter.propose([row([1, 2, 3], k=4)], TargetOutput(torch.randn(2, HIDDEN)))
    assert len(proposal.drafts.token_ids) == 2
    for said in (3, 4):
        with pytest.raises(InvalidRequestError, match=f"num_speculative_tokens is {said}.*2 Medusa heads"):
            load_head(tmp_path, "medusa", num_speculative_tokens=said, adaptive=True)


def test_random_weights_need_no_file(load_head, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ORIGINAL))
    drafter = load_head(tmp_path, "medusa", load_format="dummy", num_speculative_tokens=3)
    (proposal,) = drafter.propose([row([1, 2, 3])], TargetOutput(torch.randn(2, HIDDEN)))
    assert len(proposal.drafts.token_ids) == 3


def test_missing_files(load_head, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ORIGINAL))
    with pytest.raises(NotFoundError, match=r"medusa_lm_head\.pt"):
        load_head(tmp_path, "medusa", num_speculative_tokens=3)
