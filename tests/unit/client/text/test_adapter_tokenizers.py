"""Tokenizers of adapters: bounds on bytes and words, and the cache."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.client.adapters.sources.sources import AdapterSources
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


def test_other_settings_of_a_known_tokenizer_are_read(tokenizers, write):
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


def test_a_slow_tokenizer_delays_no_other(tokenizers, write, tmp_path, monkeypatch):
    slow, begun, goes_on, read = write(1), threading.Event(), threading.Event(), AdapterFolder.read
    other = AdapterFolder(str(shutil.copytree(tmp_path, tmp_path / "other")))

    def read_slowly(folder, name, most):
        if folder == slow:
            begun.set()
            assert goes_on.wait(60)
        return read(folder, name, most)

    monkeypatch.setattr(AdapterFolder, "read", read_slowly)
    sources = AdapterSources()
    with ThreadPoolExecutor(4) as pool:
        try:
            waiting = pool.submit(sources.study("tokenizer", slow.path, lambda: tokenizers.read(slow)).result)
            assert begun.wait(30)
            pool.submit(sources.study("tokenizer", "second", lambda: goes_on.wait(60)).result)
            assert pool.submit(tokenizers.read, other).result(30) is not None
            assert pool.submit(sources.sampling_defaults(other).result).result(30) == {}
        finally:
            goes_on.set()
        assert waiting.result(30) is not None
