"""Samples from JSONL: every form, every refusal with its line; batches and the target's features."""

import json
from random import Random

import pytest
import torch
from transformers import AutoTokenizer

from outrider.models.demo import demo_model_path
from outrider.platform.core.errors import InvalidRequestError, NotFoundError
from outrider.spec_decode.training.data import (
    Reader,
    Sample,
    choose_vocab_size,
    collate,
    frequent_tokens,
    hold_out,
    plan_batches,
    plan_epoch,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reader():
    return Reader(AutoTokenizer.from_pretrained(demo_model_path()), 2048)


def write(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_every_form(reader, tmp_path):
    chat = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello you"}]
    path = write(
        tmp_path,
        {"prompt": "One two", "completion": " three four"},
        "",
        {"messages": chat},
        {"text": "Some text here"},
        {"token_ids": [5, 6, 7]},
        {"prompt_token_ids": [9, 8], "completion_token_ids": [7, 6, 2]},
    )
    found = reader.samples(path, 100)
    decode = reader._tokenizer.decode
    assert decode(found[0].token_ids) == "<|bos|>One two three four<|end|>"
    assert decode(found[0].token_ids[: found[0].num_prompt_tokens]) == "<|bos|>One two"
    prompt = "<|bos|><|user|>\nHi there<|end|>\n<|assistant|>\n"
    assert decode(found[1].token_ids) == prompt + "Hello you<|end|>"
    assert decode(found[1].token_ids[: found[1].num_prompt_tokens]) == prompt
    assert decode(found[2].token_ids) == "<|bos|>Some text here"
    assert found[2].num_prompt_tokens == 0
    assert found[3:] == [Sample([5, 6, 7], 0), Sample([9, 8, 7, 6, 2], 2)]
    assert reader.samples(path, 4)[-1] == Sample([9, 8, 7, 6], 2)  # cut; the first two have nothing left to learn
    assert len(reader.samples(path, 4)) == 3


def test_prompts_leave_given_answers_out(reader, tmp_path):
    ask = {"role": "user", "content": "Hi"}
    path = write(
        tmp_path, {"messages": [ask, {"role": "assistant", "content": "x"}]}, {"messages": [ask]}, {"prompt": "a"}
    )
    first, second, third = reader.prompts(path)
    assert first == second
    assert reader._tokenizer.decode(third) == "<|bos|>a"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ({"question": "x"}, "'question'"),
        ({"prompt": ""}, "prompt must be a non-empty string"),
        ({"prompt": "x"}, "there is no completion"),
        ({"token_ids": [1, "2"]}, "token_ids must be a list of integers"),
        ({"token_ids": [1, 2048]}, r"\[0, 2048\)"),
        ({"messages": []}, "messages must be"),
        ({"messages": [{"role": "user"}]}, "messages must be"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no turn before"),
        ('{"text": "a\\ud800b"}', "half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "\\udc00"}]}', "half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(reader, tmp_path, line, words):
    path = write(tmp_path, {"text": "this one is right"}, "", line)
    with pytest.raises(InvalidRequestError, match=rf"data.jsonl, line 3: .*{words}") as caught:
        reader.samples(path, 100)
    assert caught.value.param == "data"


def test_files_that_give_nothing(reader, tmp_path):
    with pytest.raises(NotFoundError, match="cannot read"):
        reader.samples(tmp_path / "none", 100)
    with pytest.raises(InvalidRequestError, match="no lines"):
        reader.samples(write(tmp_path, "", ""), 100)
    with pytest.raises(InvalidRequestError, match="--max-length 2"):
        reader.samples(write(tmp_path, {"token_ids": [4, 5, 6]}), 2)
    with pytest.raises(InvalidRequestError, match="line 1: --generate needs a prompt"):
        reader.prompts(write(tmp_path, {"text": "x"}))


def test_batches_hold_every_sample_once_and_fit():
    rng = Random(3)
    samples = [Sample([1] * rng.choice((3, 9, 40, 200)), 1) for _ in range(300)]
    batches = plan_batches(samples, 128, seed=1)
    assert batches == plan_batches(samples, 128, seed=1) != plan_batches(samples, 128, seed=2)
    plans = [plan_epoch(len(batches), seed=1, epoch=epoch) for epoch in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]
    assert sorted(plans[2]) == list(range(len(batches)))
    for batch in batches:
        lengths = [len(samples[i].token_ids) for i in batch]
        assert max(lengths) * len(lengths) <= 128 or len(batch) == 1
    assert sorted(i for batch in batches for i in batch) == list(range(300))


def test_tokens_to_learn():
    batch = collate([Sample([5, 6, 7, 8], 2), Sample([9, 9], 0)], torch.device("cpu"))
    assert batch.ids.tolist() == [[5, 6, 7, 8], [9, 9, 0, 0]]
    assert batch.learned.tolist() == [[False, False, True, True], [False, True, False, False]]


def test_hold_out_and_vocabulary():
    samples = [Sample([i, i + 1, 7], 1) for i in range(10)]
    train, held = hold_out(samples, 3, seed=0)
    assert len(held) == 3
    assert sorted(train + held) == samples
    with pytest.raises(InvalidRequestError, match="--held-out 10 leaves nothing of 10"):
        hold_out(samples, 10, seed=0)
    assert frequent_tokens([Sample([1, 9, 9, 4, 9, 4, 3], 1)], 2) == [4, 9]
    assert frequent_tokens([Sample([1, 9], 1)], 4) == [0, 1, 2, 9]
    assert frequent_tokens([Sample([1, 9], 1)], 2, always=[5]) == [5, 9]


def test_large_vocabularies_are_reduced():
    """The smallest of three sizes that covers samples which did not count; a small vocabulary stays whole."""
    few, many = [Sample(list(range(8000)), 0)] * 16, [Sample(list(range(20000)), 0)] * 16
    rare = [Sample([30000 + i] * 100, 0) for i in range(16)]  # each has tokens that no other has
    assert choose_vocab_size(few, 16384) == 16384
    assert choose_vocab_size(few, 49152) == choose_vocab_size([], 49152) == 8192
    assert choose_vocab_size(many, 49152) == 32768
    assert choose_vocab_size(many, 20000) == 20000
    assert choose_vocab_size(rare, 49152) == 32768


def test_features_are_inputs_of_the_layers(samples, read_batch, folders):
    target, features = read_batch(samples[:3], aux_layers=(0, 3, 4))
    entering = {}
    decoder = target._causal.base_model
    for index, layer in enumerate(decoder.layers):
        layer.register_forward_pre_hook(lambda m, args, index=index: entering.__setitem__(index, args[0]))
    decoder.norm.register_forward_pre_hook(lambda m, args: entering.__setitem__(4, args[0]))
    with torch.no_grad():
        wanted = target._causal(input_ids=features.ids)
    for layer, tensor in zip((0, 3, 4), features.aux, strict=True):
        assert torch.equal(tensor, entering[layer])
    labels = features.labels
    assert torch.allclose(features.head.logits(labels.states), wanted.logits[labels.rows, labels.positions], atol=1e-5)
    learned = [
        (row, p - 1) for row, s in enumerate(samples[:3]) for p in range(max(1, s.num_prompt_tokens), len(s.token_ids))
    ]
    assert list(zip(labels.rows.tolist(), labels.positions.tolist(), strict=True)) == learned
    # the samples are the target's own greedy texts
    assert (features.head.greedy(labels.states) == features.ids[labels.rows, labels.positions + 1]).all()


def test_the_adapter_changes_features_and_not_the_shared_weights(samples, read_batch, folders):
    plain, a = read_batch(samples[:2])
    adapted, b = read_batch(samples[:2], adapter=folders.adapter)
    assert not torch.allclose(a.hidden, b.hidden)
    assert torch.equal(plain.lm_head, adapted.lm_head)
    assert plain.last_layer.keys() == adapted.last_layer.keys()
    assert all(torch.equal(plain.last_layer[name], adapted.last_layer[name]) for name in plain.last_layer)
