"""The oracle: recorded answers as drafts."""

import json

import pytest

from outrider import LLM, SamplingParams
from outrider.models.demo import demo_model_path
from outrider.platform.core.errors import InvalidRequestError, NotFoundError

MODEL = str(demo_model_path())
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": prompt} for prompt in ([5, 6, 7], [5, 6, 8], [9] * 20)]


def engine(file, k=3):
    config = {"method": "oracle", "model": str(file), "num_speculative_tokens": k}
    return LLM(MODEL, dtype="float32", speculative_config=config)


@pytest.fixture(scope="module")
def answers():
    with LLM(MODEL, dtype="float32") as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def write(file, answers):
    lines = [
        {"prompt_token_ids": prompt["prompt_token_ids"], "completion_token_ids": answer}
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_recorded_answers_are_always_right(answers, tmp_path):
    with engine(write(tmp_path / "a.jsonl", answers)) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        [entry] = llm.stats().speculation
        assert llm.stats().drafters == ["oracle"]
    assert [list(output.outputs[0].token_ids) for output in outputs] == answers
    for output in outputs:  # the first token is the prompt's, then rounds of four; the last holds what is left
        assert output.metrics.steps_by_k == [1, 0, 1, 5]
    assert entry.counts.num_accepted_tokens == entry.counts.num_draft_tokens == 3 * (5 * 3 + 2)


def test_an_answer_that_differs_is_left(answers, tmp_path):
    """Its drafts are right up to the difference, are rejected there, and stop."""
    other = [[*answer[:9], (answer[9] + 1) % 2048, *answer[10:]] for answer in answers]
    with engine(write(tmp_path / "a.jsonl", other)) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == answers
    for output in outputs:
        assert output.metrics.num_accepted_tokens == 6
        assert output.metrics.steps_by_k == [1 + 14, 0, 0, 3]


def test_other_prompts_get_no_drafts(answers, tmp_path):
    with engine(write(tmp_path / "a.jsonl", answers)) as llm:
        output = llm.generate({"prompt_token_ids": [5, 6]}, PARAMS, use_tqdm=False)[0]
    assert output.metrics.num_draft_tokens == 0


@pytest.mark.parametrize(
    "line", ["[]", "{", '{"prompt_token_ids": [1]}', '{"prompt_token_ids": [1], "completion_token_ids": ["a"]}']
)
def test_a_line_that_is_no_answer_is_named(line, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt_token_ids": [1], "completion_token_ids": [2]}\n\n' + line)
    with pytest.raises(InvalidRequestError, match=r"speculative_config: .*line 3 is not an object with prompt"):
        engine(file)


@pytest.mark.parametrize("token", [-1, 99999999])
def test_token_ids_beyond_the_vocabulary_are_refused(token, tmp_path):
    """The target could not verify them."""
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": [1], "completion_token_ids": [2, token]}))
    with pytest.raises(InvalidRequestError, match=r"speculative_config: .*line 1 has token ids that are not below"):
        engine(file)


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(NotFoundError, match=r"none\.jsonl"):
        engine(tmp_path / "none.jsonl")
    with pytest.raises(InvalidRequestError, match="oracle needs a model"):
        LLM(MODEL, speculative_config={"method": "oracle"})
