"""Incremental detokenization: equal to decoding at once, never half a character, stops independent of the chunks."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from outrider.platform.client.text.detokenizer import IncrementalDetokenizer, TokenDecoder, make_decoder
from outrider.platform.core.sampling_params import SamplingParams

TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from("abc 😀🇩🇪👩‍🚀é€漢\n\ufffd"), st.characters(exclude_categories=["Cs"])),
    max_size=30,
)
IDS = st.lists(st.integers(0, 339), max_size=40)


class Slow:
    """A tokenizer without a Rust backend."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

        self.added_tokens_decoder = tokenizer.added_tokens_decoder

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return self._tokenizer.decode(token_ids, **options)


def run(tokenizer: Any, ids: list[int], prompt: list[int] = [], **params: Any) -> list[str]:  # noqa: B006
    """The texts given out after every token, and at the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**params), prompt)
    parts, done = [], 0
    for token_id in ids:
        detokenizer.update([token_id])
        safe = detokenizer.num_safe_chars()
        parts.append(detokenizer.text[done:safe])
        done = safe
    detokenizer.finish()
    return [*parts, detokenizer.text[done:]]


@pytest.mark.slow
@pytest.mark.parametrize("slow", [False, True])
@given(ids=IDS, prompt=IDS, skip=st.booleans())
@settings(max_examples=75)
def test_deltas_add_up_to_decoding_at_once(
    tokenizer: Any, slow: bool, ids: list[int], prompt: list[int], skip: bool
) -> None:
    parts = run(Slow(tokenizer) if slow else tokenizer, ids, prompt, skip_special_tokens=skip)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("slow", [False, True])
@given(text=TEXTS)
@settings(max_examples=75)
def test_valid_text_never_shows_half_a_character(tokenizer: Any, slow: bool, text: str) -> None:
    byte_ids = [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]
    parts = run(Slow(tokenizer) if slow else tokenizer, byte_ids)
    assert "".join(parts) == text
    assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")


def test_incomplete_character_is_held_and_shown_at_the_end(tokenizer: Any) -> None:
    ids = tokenizer.encode("a😀", add_special_tokens=False)
    assert len(ids) == 5
    assert run(tokenizer, ids[:-1]) == ["a", "", "", "", "\ufffd"]
    assert run(tokenizer, ids) == ["a", "", "", "", "😀", ""]


def test_prompt_that_ends_inside_a_character_is_no_context(tokenizer: Any) -> None:
    ids = tokenizer.encode("😀b", add_special_tokens=False)
    for decoder_of in (tokenizer, Slow(tokenizer)):
        assert "".join(run(decoder_of, ids[2:], ids[:2])) == tokenizer.decode(ids[2:])


def sentencepiece() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["▁", "▁Hello", "▁world", "a", *(f"<0x{b:02X}>" for b in range(256))])}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def test_first_token_keeps_its_space_after_a_prompt() -> None:
    decode = sentencepiece().decode
    decoder = TokenDecoder(decode, [1])
    assert [decoder.step(2), decoder.step(3), decoder.flush()] == [" world", "a", ""]
    assert TokenDecoder(decode, []).step(2) == "world"


def test_invalid_bytes_after_returned_text_do_not_stop_the_stream() -> None:
    euro = [4 + b for b in "€".encode()]
    decoder = TokenDecoder(sentencepiece().decode, [])
    texts = [decoder.step(token) for token in [*euro, 4 + 0xFF, 3, 2]]
    assert texts == ["", "", "€", "", "\ufffda", " world"]


class Counting:
    """A tokenizer that counts how often its decoder decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.num_decoded = tokenizer, 0
        self.backend_tokenizer = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += 1
        return str(self._tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


def test_a_token_alone_is_decoded_once_for_all_sequences(tokenizer: Any) -> None:
    counting, ids = Counting(tokenizer), tokenizer.encode("abcabcabc", add_special_tokens=False)
    for _ in range(3):
        before = counting.num_decoded
        decoder = make_decoder(counting, SamplingParams(), [])
        assert "".join(map(decoder.step, ids)) + decoder.flush() == "abcabcabc"
    assert counting.num_decoded - before == len(ids)


class WithSpecialTokens:
    """A tokenizer with two special tokens."""

    def __init__(self) -> None:
        self.backend_tokenizer = Tokenizer(models.WordLevel({"a": 0, "<x>": 1, "<y>": 2}, unk_token="a"))
        self.backend_tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
        self.added_tokens_decoder = {1: AddedToken("<x>"), 2: AddedToken("<y>")}


@pytest.mark.parametrize("spaces", [True, False])
def test_spaces_between_special_tokens(spaces: bool) -> None:
    params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces)
    decoder = make_decoder(WithSpecialTokens(), params, [])
    assert [decoder.step(token) for token in [0, 1, 2, 0]] == ["a", " <x>", " <y>" if spaces else "<y>", " a"]


def chunked(tokenizer: Any, ids: list[int], sizes: list[int], params: SamplingParams) -> tuple[str, int, str | None]:
    """(text, tokens kept, stop string) when the tokens come in chunks of these sizes."""
    detokenizer = IncrementalDetokenizer(tokenizer, params, [])
    start, index = 0, 0
    while start < len(ids):
        size = sizes[index % len(sizes)]
        match = detokenizer.update(ids[start : start + size])
        if match is not None:
            return detokenizer.text, start + match.num_tokens, match.stop
        start, index = start + size, index + 1
    detokenizer.finish()
    return detokenizer.text, len(ids), None


@pytest.mark.slow
@given(
    text=st.text("abc é😀", max_size=25),
    stops=st.lists(st.text("abc é😀", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
@settings(max_examples=120)
def test_stop_does_not_depend_on_the_chunks(
    tokenizer: Any, text: str, stops: list[str], sizes: list[int], min_tokens: int, include: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=99, include_stop_str_in_output=include)
    got, kept, stop = one = chunked(tokenizer, ids, [1], params)
    assert chunked(tokenizer, ids, sizes, params) == one
    if stop is None and min_tokens == 0:
        assert got == text
        assert not any(s in text for s in stops)
    if stop is not None:
        assert kept > min_tokens
        assert text.startswith(got)
        assert got.endswith(stop) if include else text[len(got) :].startswith(stop)
        if min_tokens == 0:
            first_end = min(text.find(s) + len(s) for s in stops if s in text)
            assert len(got) + (0 if include else len(stop)) == first_end


@pytest.mark.slow
@given(text=st.text("abx", max_size=20), stops=st.lists(st.text("abx", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=120)
def test_streamed_text_is_never_taken_back_and_held_no_longer_than_needed(
    tokenizer: Any, text: str, stops: list[str]
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=stops, max_tokens=99), [])
    shown = ""
    for token in tokenizer.encode(text, add_special_tokens=False):
        match = detokenizer.update([token])
        assert detokenizer.text.startswith(shown)
        shown = detokenizer.text[: detokenizer.num_safe_chars()]
        if match is not None:
            break
        held = detokenizer.text[len(shown) :]
        ends = [detokenizer.text[-n:] for n in range(1, 4)]
        assert len(held) == max((len(end) for end in ends for s in stops if s.startswith(end) and s != end), default=0)
    detokenizer.finish()
    ended = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    assert detokenizer.text == text[: min(ended)[1] if ended else None]


@pytest.mark.slow
@given(
    parts=st.lists(st.sampled_from(["a", "b", "é", "<|user|>", "<|assistant|>"]), max_size=12),
    stops=st.lists(
        st.sampled_from(["<|user|>", "a<|user|>", "<|user|>b", "|><|", "ab", "é<|assistant|>a"]), min_size=1, max_size=3
    ),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    include=st.booleans(),
)
@settings(max_examples=100)
def test_stops_see_the_special_tokens_that_the_text_leaves_out(
    tokenizer: Any, parts: list[str], stops: list[str], sizes: list[int], include: bool
) -> None:
    def shown(text: str) -> str:
        return text.replace("<|user|>", "").replace("<|assistant|>", "")

    ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]
    params = SamplingParams(stop=stops, max_tokens=99, include_stop_str_in_output=include)
    got, kept, stop = one = chunked(tokenizer, ids, [1], params)
    assert chunked(tokenizer, ids, sizes, params) == one
    assert not any(s in got for s in stops) or include
    whole, left_out = "".join(parts), shown("".join(parts))
    seen = tokenizer.decode(ids[:kept])
    if stop is None:
        assert got == left_out
        assert not any(s in whole or s in left_out for s in stops)
    else:
        assert stop in seen or stop in shown(seen)
        assert left_out.startswith(got)
        assert not any(s in tokenizer.decode(ids[: kept - 1]) for s in stops)


@pytest.mark.parametrize("slow", [False, True])
def test_text_before_a_stop_with_a_special_token_is_held_back(tokenizer: Any, slow: bool) -> None:
    ids = tokenizer.encode("ab<|user|>c<|user|>ab<|assistant|>", add_special_tokens=False)
    if slow:
        tokenizer = Slow(tokenizer)
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop="b<|user|>d", max_tokens=99), [])
    held = []
    for token in ids:
        assert detokenizer.update([token]) is None
        held.append(detokenizer.text[detokenizer.num_safe_chars() :])
    assert held == ["", "b", "b", "", "", "", "b", "b"]


def test_stop_token_is_not_in_the_text_unless_asked_for(tokenizer: Any) -> None:
    ids = tokenizer.encode("ab", add_special_tokens=False)
    for include, expected in ((False, "a"), (True, "ab")):
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(include_stop_str_in_output=include), [])
        detokenizer.update(ids, ends_with_stop_token=True)
        detokenizer.finish()
        assert detokenizer.text == expected
