"""Tokenizer of a GGUF file: text is split, and begun, as for the tokenizer that the file's fields name."""

from __future__ import annotations

import logging
from pathlib import Path

import gguf
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.platform.core.errors import InvalidRequestError

BYTES = sorted(bytes_to_unicode().values())
WORDS = ["he", "ll", "hell", "hello", "12", "123", "45", "Ġ1", "Ġ12", "Ġ123"]
"""Words that merges make, but for "hello": no merge has it."""
MERGES = ["h e", "l l", "he ll", "1 2", "12 3", "4 5", "Ġ 1", "Ġ1 2", "Ġ12 3"]
TOKENS = [*BYTES, *WORDS, "<s>", "</s>"]
TEXT = "hello 12345 hello12345"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def write(file: Path, pre: str, architecture: str = "llama", **flags: bool) -> Path:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 2) + [3, 3])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(len(TOKENS) - 2)
    writer.add_eos_token_id(len(TOKENS) - 1)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def expected(pattern: str, *, whole_words: bool = False) -> list[str]:
    """Tokens of TEXT when it is split by `pattern`."""
    vocab = {token: index for index, token in enumerate(TOKENS)}
    merges = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return tokenizer.encode(TEXT).tokens


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "lfm2"])
def test_llama_3_keeps_known_words_whole_and_begins_with_a_token(pre: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", pre))
    words = expected(LLAMA3, whole_words=True)
    assert tokenizer.tokenize(TEXT) == words
    assert words[0] == "hello"
    assert tokenizer.encode(TEXT)[0] == TOKENS.index("<s>")
    assert tokenizer.decode(tokenizer.encode(TEXT), skip_special_tokens=True) == TEXT


def test_a_file_without_a_bos_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", "llama-bpe", add_bos_token=False))
    assert tokenizer.encode(TEXT)[0] == TOKENS.index("hello")


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [("glm4", LLAMA3), ("chatglm-bpe", LLAMA3), ("stablelm2", QWEN2), ("qwen2", QWEN2), ("qwen35", QWEN2)],
)
def test_splits_of_other_families(pre: str, pattern: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", pre))
    assert tokenizer.tokenize(TEXT) == expected(pattern)
    assert tokenizer.encode(TEXT)[0] != TOKENS.index("<s>")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("architecture", "pre", "text", "words"),
    [
        ("falcon", "falcon", "Don't 12345 a!word", ["Don", "'", "t", "Ġ", "123", "45", "Ġa", "!", "word"]),
        ("deepseek2", "deepseek-v3", "Don't 12345 漢字!word", ["Don", "'t", "Ġ", "123", "45", "Ġ", "漢字", "!word"]),
        ("gpt-oss", "gpt-4o", "Don't 12345 漢字!word", ["Don't", "Ġ", "123", "45", "Ġ漢字", "!word"]),
    ],
)
def test_splits_of_several_steps(
    architecture: str, pre: str, text: str, words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", pre, architecture))
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    found = [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert [bytes(map(byte_of.__getitem__, word)).decode().replace(" ", "Ġ") for word in found] == words
    assert caplog.records == []


def test_each_digit_alone(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", "smollm"))
    assert [token for token in tokenizer.tokenize(TEXT) if "1" in token] == ["1", "1"]


def test_an_unknown_split_is_gpt_2s_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = load_tokenizer(write(tmp_path / "new.gguf", "novel")).tokenize(TEXT)
    assert "novel" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(write(tmp_path / "m.gguf", "gpt-2")).tokenize(TEXT) == found
    assert caplog.records == []


def test_marks_belong_to_words_of_qwen_3_5(tmp_path: Path) -> None:
    """Qwen2 splits them off: a word of Devanagari is one piece in Qwen3.5 alone."""
    word = "\u0915\u0940\u0915"
    for pre, count in (("qwen35", 1), ("qwen2", 2)):
        splitter = load_tokenizer(write(tmp_path / "m.gguf", pre, "qwen35")).backend_tokenizer.pre_tokenizer
        assert len(splitter.pre_tokenize_str(word)) == count


def test_the_tokenizer_of_gemma_4_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(TOKENS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InvalidRequestError, match=r"its tokenizer, gemma4, is not read.*--tokenizer") as caught:
        load_tokenizer(tmp_path / "m.gguf")
    assert caught.value.param == "tokenizer"
