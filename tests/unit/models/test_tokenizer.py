"""The tokenizer comes from the model's directory; end tokens from all files that name one."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.models.tokenizer import eos_token_ids, load_tokenizer
from outrider.platform.core.errors import InvalidRequestError, NotFoundError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="?").save_pretrained(tmp_path)
    return tmp_path


def test_load_tokenizer(directory: Path) -> None:
    assert load_tokenizer(directory)("b a x")["input_ids"] == [2, 1, 3]


def test_missing_tokenizers_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as missing:
        load_tokenizer(tmp_path / "nosuch")
    with pytest.raises(InvalidRequestError) as empty:
        load_tokenizer(tmp_path)
    assert missing.value.param == empty.value.param == "tokenizer"


def test_eos_token_ids_are_collected(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    assert eos_token_ids(directory, tokenizer) == {0}
    assert eos_token_ids(directory) == frozenset()
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    assert eos_token_ids(directory, tokenizer) == {0, 1, 2, 3}
    (directory / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert eos_token_ids(directory) == {1, 3}
