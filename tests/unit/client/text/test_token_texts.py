"""Texts and bytes of single tokens: joined they are the text, for each kind of vocabulary."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from outrider.platform.client.output_processor import OutputProcessor, RequestState
from outrider.platform.client.prepared import ParsedPrompt, Prepared
from outrider.platform.core.messages import PromptTable, TokenDelta, TokenLogprobs
from outrider.platform.core.outputs import CompletionOutput, Logprob
from outrider.platform.core.sampling_params import SamplingParams

EURO = "€"


def metaspace(*, strips: bool) -> Any:
    """A vocabulary as SentencePiece writes it: with `strips` as Llama 2's, without as Gemma's."""
    pieces = ["<s>", "</s>", "▁", "▁the", "▁cat", "s", *(f"<0x{b:02X}>" for b in range(256))]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def word_pieces() -> Any:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "##c": 2, "[SEP]": 3}, unk_token="a"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, sep_token="[SEP]", clean_up_tokenization_spaces=False)


def added(processor: OutputProcessor, tokenizer: Any, prompt: list[int], params: SamplingParams) -> RequestState:
    inputs: Any = SimpleNamespace(tokenizer=tokenizer, eos_token_ids=[], num_shared_tokens=lambda token_ids: 0)
    prepared = Prepared("r", inputs, ParsedPrompt(prompt), params, None)
    return processor.add(prepared, prepared.sequences())


def answer(
    tokenizer: Any, ids: list[int], prompt: list[int], sizes: list[int], end: str = "length", **params: Any
) -> CompletionOutput:
    """The output when the engine brings `ids` in steps of these sizes; the alternative at each place is its token."""
    processor = OutputProcessor()
    state = added(processor, tokenizer, prompt, SamplingParams(logprobs=1, max_tokens=99, **params))
    start, step = 0, 0
    while start < len(ids):
        part = ids[start : start + sizes[step % len(sizes)]]
        start, step = start + len(part), step + 1
        positions = [TokenLogprobs([i, i], [-1.0, -1.0], 1) for i in part]
        processor.process([TokenDelta("r", part, positions, finish_reason=end if start >= len(ids) else None)])
        if state.finished:
            break
    [output] = state.take().outputs
    return output


def chosen(output: CompletionOutput) -> list[Logprob]:
    return [entries[i] for i, entries in zip(output.token_ids, output.logprobs or [], strict=True)]


@pytest.fixture(scope="module", params=["byte-level", "Llama 2", "Gemma", "word pieces"])
def vocabulary(request: pytest.FixtureRequest) -> Any:
    if request.param == "byte-level":
        return request.getfixturevalue("tokenizer")
    return word_pieces() if request.param == "word pieces" else metaspace(strips=request.param == "Llama 2")


@given(
    text=st.lists(st.sampled_from([" the", " cat", "s", EURO, "😀", " "]), min_size=1, max_size=12),
    prompt=st.lists(st.sampled_from(["<s>", " the", "s"]), max_size=2),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_joined_they_are_the_text(vocabulary: Any, text: list[str], prompt: list[str], sizes: list[int]) -> None:
    ids = [i for part in text for i in vocabulary.encode(part, add_special_tokens=False)]
    before = [i for part in prompt for i in vocabulary.encode(part, add_special_tokens=False)]
    output = answer(vocabulary, ids, before, sizes)
    assert "".join(entry.decoded_token or "" for entry in chosen(output)) == output.text
    assert b"".join(entry.token_bytes or b"" for entry in chosen(output)) == output.text.encode()


def test_a_character_belongs_to_the_token_that_completes_it(tokenizer: Any) -> None:
    ids = tokenizer.encode("a😀", add_special_tokens=False)
    whole, cut = answer(tokenizer, ids, [], [2]), answer(tokenizer, ids[:-1], [], [2])
    assert [entry.decoded_token for entry in chosen(whole)] == ["a", "", "", "", "😀"]
    assert [entry.token_bytes for entry in chosen(whole)] == [bytes([b]) for b in "a😀".encode()]
    assert [entry.decoded_token for entry in chosen(cut)] == ["a", "", "", "\ufffd"]
    assert cut.text == "a\ufffd"


def test_an_alternative_may_be_a_part_of_a_character(tokenizer: Any) -> None:
    letter, part = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("a", "😀"))
    processor = OutputProcessor()
    state = added(processor, tokenizer, [letter], SamplingParams(logprobs=2))
    position = TokenLogprobs([letter, part, letter], [-2.0, -1.0, -2.0], 2)
    processor.process([TokenDelta("r", [letter], [position], finish_reason="length")])
    [entries] = state.take().outputs[0].logprobs or []
    assert entries[part] == (-1.0, 1, "bytes:\\xf0", b"\xf0")


def test_tokens_that_the_text_leaves_out_have_no_bytes(tokenizer: Any) -> None:
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    user, end = tokenizer.convert_tokens_to_ids(["<|user|>", "</s>"])
    for ids, params, data in (
        ([a, user, b, end], {}, [b"a", b"", b"b", b""]),
        ([a, user, b, end], {"skip_special_tokens": False}, [b"a", b"<|user|>", b"b", b""]),
        ([a, b], {}, [b"a", b""]),  # a stop token that is a letter
        ([a, b], {"include_stop_str_in_output": True}, [b"a", b"b"]),
    ):
        output = answer(tokenizer, ids, [a], [9], end="stop", **params)
        assert [entry.token_bytes for entry in chosen(output)] == data
        assert b"".join(data).decode() == output.text
        assert chosen(output)[-1].decoded_token == tokenizer.decode(ids[-1:])


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 0, 2], [-1, 3]])
def test_a_prompts_positions_may_be_read_in_any_order(tokenizer: Any, order: list[int]) -> None:
    prompt = tokenizer.encode("a😀", add_special_tokens=False)
    positions = PromptTable()
    positions.extend([TokenLogprobs([i, prompt[0]], [-1.0, -2.0], 1) for i in prompt[1:]])
    processor = OutputProcessor()
    state = added(processor, tokenizer, prompt, SamplingParams(prompt_logprobs=1))
    processor.process([TokenDelta("r", prompt[:1], prompt_logprobs=positions)])
    read = state.take(delta=True).prompt_logprobs
    assert read is not None
    assert len(read) == 5
    texts = ["", "", "", "", "😀"]
    for index in order:
        entries = read[index]
        if index == 0:
            assert entries is None
        else:
            assert entries[prompt[index]] == (-1.0, 1, texts[index], bytes(["a😀".encode()[index]]))
            assert entries[prompt[0]] == (-2.0, 1, "a", b"a")
