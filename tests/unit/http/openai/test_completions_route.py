"""`/v1/completions` over an engine that answers from a script."""

import json

import pytest

from outrider.platform.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from outrider.platform.http.openai.completions import Completions


def events(response) -> list:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def complete(http, **body):
    response = http.post("/v1/completions", {"model": "base", "prompt": "ab", **body})
    assert response.status_code == 200, response.text
    return response


def test_answer_has_the_openai_shape(http):
    answer = complete(http).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "base"
    assert answer["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert "metrics" not in answer


def test_max_tokens_defaults_to_sixteen_and_cuts(http, llm):
    llm.reply = "x" * 40
    choice = complete(http).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("x" * 16, "length")
    assert complete(http, max_tokens=3).json()["choices"][0]["text"] == "xxx"


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
def test_the_default_of_max_tokens_ends_with_the_context(http, llm, given):
    llm.reply = "x" * 40
    answer = complete(http, prompt=[[5] * 60, [5], [5] * 63], **given).json()
    assert [len(choice["text"]) for choice in answer["choices"]] == [4, 16, 1]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert http.post("/v1/completions", {"prompt": [5] * 60, "max_tokens": 5}).status_code == 400


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ("hi", [{"prompt_token_ids": [1, 104, 105]}]),
        (["hi", "yo"], [{"prompt_token_ids": [1, 104, 105]}, {"prompt_token_ids": [1, 121, 111]}]),
        ([5, 6], [{"prompt_token_ids": [5, 6]}]),
        ([[5, 6], [7]], [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}]),
    ],
)
def test_prompt_has_four_forms(http, llm, prompt, seen):
    choices = complete(http, prompt=prompt).json()["choices"]
    assert [call["prompt"] for call in llm.calls] == seen
    assert [choice["index"] for choice in choices] == list(range(len(seen)))


def test_prompts_times_n_make_the_index(http):
    answer = complete(http, prompt=["a", "bc"], n=2, stream=False).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2 + 3  # once a prompt, not once a choice
    assert answer["usage"]["completion_tokens"] == 20


def test_stream_brings_the_same_text(http):
    chunks = events(complete(http, prompt=["a", "bc"], n=2, stream=True))
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        assert "usage" not in chunk
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert set(texts.values()) == {"Hello"}
    ends = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert ends == ["stop"] * 4


def test_stream_usage_comes_last_and_is_null_before(http):
    assert "usage" not in events(complete(http, stream=True, stream_options={"include_usage": None}))[-1]
    chunks = events(complete(http, stream=True, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 5
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 8


def test_continuous_usage_counts_up(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(complete(http, stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 5]


def test_tokens_without_text_are_counted_too(http, monkeypatch):
    """Halves of characters and special tokens have none: such a chunk has no choice."""
    encode = Completions.choices
    monkeypatch.setattr(Completions, "choices", lambda self, e: encode(self, e) if e.output.finished else [])
    options = {"continuous_usage_stats": True}
    chunks = events(complete(http, stream=True, stream_options=options | {"include_usage": True}))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 5]
    assert [len(chunk["choices"]) for chunk in chunks] == [0, 0, 0, 0, 1, 0]
    assert len(events(complete(http, stream=True))) == 1


def test_logprobs(http):
    logprobs = complete(http, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("Hello")
    assert logprobs["token_logprobs"] == [-2.5] * 5
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["top_logprobs"][0] == {"È": -1.0, "É": -2.0, "H": -2.5}


def test_tokens_of_equal_text_stay_apart(http, llm, monkeypatch):
    entries = {72: Logprob(-3.0, 4, "\ufffd"), 9: Logprob(-1.0, 1, "\ufffd"), 8: Logprob(-2.0, 2, "b")}
    monkeypatch.setattr(llm, "_logprobs", lambda count, char: [entries])
    llm.reply = "H"
    logprobs = complete(http, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"\ufffd": -1.0, "b": -2.0, "token_id:72": -3.0}]
    assert (logprobs["tokens"], logprobs["token_logprobs"]) == (["\ufffd"], [-3.0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("skip", "offsets"), [(True, [0, 1, 1]), (False, [0, 1, 4])])
def test_special_tokens_that_are_not_shown_take_no_room(http, llm, monkeypatch, skip, offsets, stream):
    llm.reply = "a\x02b"
    text, data = ("EOS", b"" if skip else b"EOS")
    monkeypatch.setattr(
        llm, "_logprobs", lambda _, c: [{ord(c): Logprob(-1.0, 1, *((text, data) if c < "a" else (c, c.encode())))}]
    )
    response = complete(http, logprobs=0, skip_special_tokens=skip, stream=stream)
    answers = events(response) if stream else [response.json()]
    assert [o for a in answers for o in a["choices"][0]["logprobs"]["text_offset"]] == offsets


def test_stream_logprobs_have_continuous_offsets(http):
    chunks = events(complete(http, stream=True, logprobs=0))
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1], [2], [3], [4]]


def test_echo_repeats_the_prompt_with_its_logprobs(http):
    choice = complete(http, echo=True, logprobs=1).json()["choices"][0]
    assert choice["text"] == "abHello"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["", "a", "b", *"Hello"]
    assert logprobs["token_logprobs"][:4] == [None, -9999.0, -9999.0, -2.5]  # JSON has no minus infinity
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("options", "shown"), [({}, 0), ({"add_special_tokens": False, "prompt": [1, 97, 98]}, 3)])
def test_the_bos_token_is_not_echoed(http, llm, monkeypatch, options, shown):
    monkeypatch.setattr(llm.tokenizer, "decode", lambda ids: "".join("BOS" if i == 1 else chr(i) for i in ids))
    choice = complete(http, echo=True, logprobs=1, **options).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:3] == ["BOS", "a", "b"]
    assert logprobs["text_offset"][:4] == [0, shown, shown + 1, shown + 2]
    for token, offset in zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_echo_alone_generates_nothing(http):
    answer = complete(http, echo=True, logprobs=1, max_tokens=0).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["", "a", "b"]
    assert answer["usage"]["completion_tokens"] == 0


def test_an_aborted_scoring_has_scored_nothing(http, llm, monkeypatch):
    async def run(prepared, *, delta):
        aborted = CompletionOutput(0, "", [], logprobs=[], finish_reason="abort")
        yield RequestOutput("", None, prepared.prompt.token_ids, [aborted], True, RequestMetrics())

    monkeypatch.setattr(llm, "run", run)
    [choice] = complete(http, echo=True, logprobs=1, max_tokens=0).json()["choices"]
    assert choice["finish_reason"] == "abort"


@pytest.mark.parametrize(
    "scoring", [{"echo": True, "logprobs": 1}, {"echo": True}, {"prompt_logprobs": 0}, {"echo": True, "n": 2}]
)
def test_a_prompt_that_fills_the_context_can_be_scored(http, scoring):
    answer = complete(http, prompt=[97] * 64, max_tokens=0, **scoring).json()
    assert answer["usage"]["completion_tokens"] == 0
    for choice in answer["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("a" * 64 if "echo" in scoring else "", "length")
        assert len(choice["logprobs"]["tokens"] if "logprobs" in scoring else [0] * 64) == 64
        assert len(choice.get("prompt_logprobs", [0] * 64)) == 64
    for length, max_tokens in ((65, 0), (64, 2)):
        body = {"prompt": [97] * length, "max_tokens": max_tokens, **scoring}
        error = http.post("/v1/completions", body).json()["error"]
        assert error["code"] == "context_length_exceeded"


def test_echo_in_a_stream_comes_first(http):
    chunks = events(complete(http, prompt=[97, 98], echo=True, stream=True))
    assert chunks[0]["choices"][0]["text"] == "abH"


def test_prompt_logprobs(http):
    choice = complete(http, prompt_logprobs=0).json()["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {"97": {"logprob": -9999.0, "rank": 3, "decoded_token": "a"}}


def test_token_ids_when_asked_for(http):
    choice = complete(http, return_token_ids=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == [1, 97, 98]
    assert choice["token_ids"] == [ord(c) for c in "Hello"]
    chunks = events(complete(http, return_token_ids=True, stream=True))
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [1, 97, 98]
    assert "prompt_token_ids" not in chunks[1]["choices"][0]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[ord(c)] for c in "Hello"]


def test_metrics_when_asked_for(http):
    expected = {
        "num_drafts": 2,
        "num_draft_tokens": 6,
        "num_accepted_tokens": 3,
        "acceptance_rate": 0.5,
        "acceptance_length": 2.5,
        "accepted_per_position": [1.0, 0.5, 0.0],
        "steps_by_k": [1, 0, 0, 2],
    }
    assert complete(http, return_metrics=True).json()["metrics"] == {"speculative_decoding": expected}
    chunks = events(complete(http, return_metrics=True, stream=True))
    assert chunks[-1]["metrics"] == {"speculative_decoding": expected}
    assert chunks[-1]["choices"] == []


def test_metrics_of_several_sequences_add_up(http):
    counts = complete(http, prompt=["ab", "cd"], return_metrics=True).json()["metrics"]["speculative_decoding"]
    assert (counts["num_drafts"], counts["num_accepted_tokens"], counts["steps_by_k"]) == (4, 6, [2, 0, 0, 4])


STATUS = ["sampled", "drafted", "sampled", "drafted", "sampled"]


def test_draft_status_when_asked_for(http):
    answer = complete(http, return_draft_status=True, return_token_ids=True, n=2).json()
    for choice in answer["choices"]:
        assert choice["draft_status"] == STATUS
        assert len(choice["draft_status"]) == len(choice["rejected_drafts"]) == len(choice["token_ids"])
    assert not {"draft_status", "rejected_drafts"} & complete(http).json()["choices"][0].keys()
    scored = complete(http, echo=True, max_tokens=0, return_draft_status=True).json()["choices"][0]
    assert scored["draft_status"] == scored["rejected_drafts"] == []


def test_draft_status_in_a_stream(http):
    chunks = events(complete(http, return_draft_status=True, stream=True, n=2, logprobs=1))
    for index in (0, 1):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [status for choice in choices for status in choice["draft_status"]] == STATUS
        assert all(len(c["draft_status"]) == len(c["logprobs"]["tokens"]) for c in choices)
    assert all("draft_status" not in c["choices"][0] for c in events(complete(http, stream=True)))


def test_sampling_parameters_arrive(http, llm):
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1.0,
        "repetition_penalty": 1.2, "seed": 11, "stop": ["x", "y"], "stop_token_ids": [9], "bad_words": ["no"],
        "include_stop_str_in_output": True, "ignore_eos": True, "max_tokens": 8, "min_tokens": 2,
        "allowed_token_ids": [1, 2], "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "speculative": 2, "n": 2, "logprobs": 3,
    }  # fmt: skip
    complete(http, **given, logit_bias={"5": 1.5}, priority=-3, cache_salt="s", user="u", best_of=2)
    call = llm.calls[0]
    assert {name: getattr(call["params"], name) for name in given} == given
    assert call["params"].logit_bias == {5: 1.5}
    assert (call["priority"], call["cache_salt"]) == (-3, "s")


@pytest.mark.parametrize(("value", "cap"), [(False, 0), (0, 0), (True, None), (None, None), (3, 3), (2**40, 2**40)])
def test_speculation_of_one_request(http, llm, value, cap):
    complete(http, speculative=value)
    assert llm.calls[0]["params"].max_drafts == cap


def test_the_models_sampling_defaults_stand_behind_the_request(http, llm, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 4, "max_new_tokens": 30}')
    llm.sampling_defaults.read_model(str(tmp_path))
    for path, content in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        assert http.post(path, {**content, "temperature": 0.9, "top_k": None}).status_code == 200
        params = llm.calls[-1]["params"]
        assert (params.temperature, params.top_k, params.max_tokens) == (0.9, 4, 30)
        long = {"prompt": "x" * 50} if "prompt" in content else {"messages": [{"role": "user", "content": "x" * 50}]}
        assert http.post(path, long).status_code == 200, "the default ends with the context"
        assert http.post(path, {**content, "max_tokens": 5}).status_code == 200
        assert llm.calls[-1]["params"].max_tokens == 5


def test_an_adapters_sampling_defaults_come_before_the_models(http, llm, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3}')
    http.load_adapter("sql", str(tmp_path))
    assert http.post("/v1/completions", {"model": "sql", "prompt": "x"}).status_code == 200
    assert llm.calls[-1]["params"].temperature == 0.3
    assert http.post("/v1/completions", {"model": "base", "prompt": "x"}).status_code == 200
    assert llm.calls[-1]["params"].temperature == 1.0
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    llm.sources.restrict("sql", [str(tmp_path)])
    answer = http.post("/v1/completions", {"model": "sql", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


def test_min_tokens_are_compared_with_the_max_tokens_that_hold(http, llm):
    """Without max_tokens a chat answer may take the rest of the context, a completion 16 tokens."""
    chat = {"messages": [{"role": "user", "content": "x"}], "min_tokens": 20}
    assert http.post("/v1/chat/completions", chat).status_code == 200
    for stream in (False, True):
        answer = http.post("/v1/completions", {"prompt": "x", "min_tokens": 20, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")


def test_null_means_not_given(http, llm):
    complete(http, temperature=None, max_tokens=None, stop=None, stream=None, logprobs=None, suffix=None)
    assert llm.calls[0]["params"].temperature == 1.0
    assert llm.calls[0]["params"].max_tokens == 16


def test_special_tokens_can_be_left_out(http, llm):
    complete(http, add_special_tokens=False)
    assert llm.calls[0]["prompt"] == {"prompt_token_ids": [97, 98]}


def test_engine_ids_are_ours_and_unique(http, llm):
    for _ in range(2):
        complete(http, prompt=["a", "b"])
    ids = [call["request_id"] for call in llm.calls]
    assert len(set(ids)) == 4
