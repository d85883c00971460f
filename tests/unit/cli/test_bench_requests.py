"""What `outrider bench throughput | serve` ask, and which adapters."""

import json
from collections import Counter

import numpy as np
import pytest

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.cli.bench.serving.datasets import Sample, assign_adapters, make_samples
from outrider.platform.cli.main import build_parser
from outrider.platform.core.errors import InvalidRequestError


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo_model_path())


def _options(*arguments):
    return build_parser().parse_args(["bench", "serve", *map(str, arguments)])


def test_random_prompts_have_their_lengths_and_no_special_token(tokenizer):
    options = _options("--num-prompts", 200, "--input-len", 40, "--output-len", 20, "--random-range-ratio", 0.5)
    samples = make_samples(options, tokenizer, 0)
    lengths = [len(sample.prompt) for sample in samples]
    assert (min(lengths), max(lengths)) == (20, 60)
    assert np.mean(lengths) == pytest.approx(40, abs=4 * 12 / 200**0.5)
    assert {min(s.max_tokens for s in samples), max(s.max_tokens for s in samples)} == {10, 30}
    assert not {token for sample in samples for token in sample.prompt} & set(tokenizer.all_special_ids)
    assert [s.prompt for s in make_samples(options, tokenizer, 0)] == [s.prompt for s in samples]
    assert [s.prompt for s in make_samples(options, tokenizer, 1)] != [s.prompt for s in samples]


def test_prefix_prompts_share_their_beginnings_in_turn(tokenizer):
    options = _options("--dataset", "prefix", "--prefix-len", 30, "--num-prefixes", 2, "--input-len", 10)
    prompts = [sample.prompt for sample in make_samples(options, tokenizer, 0)][:6]
    assert all(len(prompt) == 40 for prompt in prompts)
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 2
    assert prompts[0][:30] == prompts[2][:30] == prompts[4][:30]
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 6


def test_sharegpt_takes_first_questions_and_the_length_of_their_answers(tokenizer, tmp_path):
    def talk(*texts):
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    question, answer = "What is the capital of Portugal, please?", "The capital of Portugal is Lisbon."
    file = tmp_path / "sharegpt.json"
    data = [talk(question, answer, "more"), talk("alone"), talk("Hi", "Hi"), talk("word " * 3000, answer), {"id": 1}]
    file.write_text(json.dumps(data))
    samples = make_samples(_options("--dataset", "sharegpt", "--dataset-path", file, "--num-prompts", 3), tokenizer, 0)
    assert [sample.prompt for sample in samples] == [question] * 3  # too short and too long ones are left out
    assert samples[0].num_prompt_tokens == len(tokenizer.encode(question))
    assert samples[0].max_tokens == len(tokenizer.encode(answer, add_special_tokens=False))
    fixed = _options("--dataset", "sharegpt", "--dataset-path", file, "--num-prompts", 1, "--output-len", 9)
    assert make_samples(fixed, tokenizer, 0)[0].max_tokens == 9


def test_jsonl_lines_are_texts_messages_or_ids_and_may_name_an_adapter(tmp_path):
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "Hi"}]
    lines = [{"prompt": "Hello"}, {"messages": messages, "adapter": "sql"}, {"prompt_token_ids": [5, 6]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    options = _options("--dataset", "jsonl", "--dataset-path", file, "--num-prompts", 4, "--output-len", 3)
    samples = make_samples(options, None, 0)
    assert samples == [
        Sample("Hello", None, 3),
        Sample(messages, None, 3, "sql"),
        Sample([5, 6], 2, 3),
        Sample("Hello", None, 3),
    ]
    assert [(s.is_ids, s.is_messages) for s in samples[:3]] == [(False, False), (False, True), (True, False)]
    assign_adapters(samples, ["json"], "random", 0)
    assert [sample.adapter for sample in samples] == ["json", "sql", "json", "json"]


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '[{"conversations": 3}]', '[{"conversations": [{"value": "a"}, {"value": 2}]}]']
)
def test_files_that_are_no_dataset_are_refused_by_the_option(content, tokenizer, tmp_path):
    file = tmp_path / "data.json"
    if content is not None:
        file.write_text(content)
    for name in ("sharegpt", "jsonl"):
        with pytest.raises(InvalidRequestError if content is not None or name == "sharegpt" else LookupError) as error:
            make_samples(_options("--dataset", name, "--dataset-path", file), tokenizer, 0)
        assert error.value.param == "dataset_path"
        assert str(file) in error.value.message


def test_made_up_prompts_need_a_tokenizer():
    with pytest.raises(InvalidRequestError, match="random") as error:
        make_samples(_options(), None, 0)
    assert error.value.param == "tokenizer"


def test_adapters_are_assigned_in_turn_at_random_or_skewed():
    names, count = ["a", "b", "c"], 6000

    def assigned(how, seed=0):
        samples = [Sample("x", None, 1) for _ in range(count)]
        assign_adapters(samples, names, how, seed)
        return [sample.adapter for sample in samples]

    assert assigned("round-robin") == names * (count // 3)
    assert assigned("random") == assigned("random") != assigned("random", 1)
    assert all(abs(number - count / 3) < 150 for number in Counter(assigned("random")).values())  # 4 deviations
    skewed = Counter(assigned("skewed"))
    assert skewed["a"] > 2 * skewed["b"] > 2 * skewed["c"]
    base = [Sample("x", None, 1)]
    assign_adapters(base, [], "random", 0)
    assert base[0].adapter is None
