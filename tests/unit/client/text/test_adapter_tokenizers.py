"""Tokenizers of adapters: bounds on bytes and words, and what is kept."""

from __future__ import annotations

import json

import pytest

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.client.text.adapter_tokenizers import MAX_ADDED_WORDS, AdapterTokenizers
from outrider.platform.core.adapter_files import AdapterFolder
from outrider.platform.core.errors import AdapterError


@pytest.fixture(scope="module")
def base():
    return load_tokenizer(demo_model_path())


@pytest.fixture
def made() -> list:
    return []


@pytest.fixture
def tokenizers(base, made) -> AdapterTokenizers:
    def make(own):
        made.append(own)
        return own

    return AdapterTokenizers(base, make)


@pytest.fixture
def write(tmp_path):
    def write(num_words: int, **settings) -> AdapterFolder:
        content = json.loads((demo_model_path() / "tokenizer.json").read_text())
        vocab = content["model"]["vocab"]
        vocab |= {f"added{i}": len(vocab) + i for i in range(num_words)}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        return AdapterFolder(str(tmp_path))

    return write


def test_a_copy_of_the_models_changes_nothing(tokenizers, write, made):
    assert tokenizers.read(write(0)) is None
    assert made == []


def test_added_words(tokenizers, write, made):
    folder = write(MAX_ADDED_WORDS, eos_token_id=[3, 2050])
    own = tokenizers.read(folder)
    assert own.eos_token_ids >= {3, 2050}
    assert tokenizers.read(folder) is own
    assert made == [own], "read once"


def test_the_settings_count_for_what_is_known(tokenizers, write):
    assert 77 not in tokenizers.read(write(1)).eos_token_ids
    assert 77 in tokenizers.read(write(1, eos_token_id=77)).eos_token_ids


def test_too_many_words(tokenizers, write):
    with pytest.raises(AdapterError, match=r"^tokenizer\.json of the adapter has \d+ words; at most \d+ are read"):
        tokenizers.read(write(2 * MAX_ADDED_WORDS))


def test_too_many_bytes(tokenizers, tmp_path):
    """27 MiB, of a sparse file: it is refused before it is read."""
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    with (tmp_path / "tokenizer.json").open("r+b") as file:
        file.truncate(27 << 20)
    message = rf"^tokenizer\.json of the adapter has {27 << 20} bytes; at most {tokenizers.max_bytes} are read"
    with pytest.raises(AdapterError, match=message):
        tokenizers.read(AdapterFolder(str(tmp_path)))
    assert tokenizers.max_bytes < 10 << 20


@pytest.mark.parametrize("value", [-5, "a", [1, "a"], True, {}])
def test_end_tokens_of_a_wrong_type(tokenizers, write, value):
    with pytest.raises(AdapterError, match=r"generation_config\.json: eos_token_id must be a token id"):
        tokenizers.read(write(1, eos_token_id=value))
