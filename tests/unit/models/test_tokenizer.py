"""The tokenizer comes from the model's directory; end tokens from all files that name one."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.models.checkpoint.tokenizer import eos_token_ids, load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.core.errors import InvalidRequestError, NotFoundError

from ...tokenizer_files import PATTERN, RANKS, write_sentencepiece, write_tekken, write_tiktoken


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="?").save_pretrained(tmp_path)
    return tmp_path


def test_load_tokenizer(directory: Path) -> None:
    assert load_tokenizer(directory)("b a x")["input_ids"] == [2, 1, 3]


@pytest.mark.slow
def test_the_demos_tokenizer_matches_transformers_without_torch() -> None:
    code = (
        "import sys; from outrider.models.demo import demo_model_path; "
        "from outrider.models.checkpoint.tokenizer import *; "
        "tokenizer = load_tokenizer(demo_model_path()); eos_token_ids(demo_model_path(), tokenizer); "
        "print(type(tokenizer).__name__, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = AutoTokenizer.from_pretrained(demo_model_path(), local_files_only=True)
    assert done.stdout.split() == [type(expected).__name__, "False"]
    ours = load_tokenizer(demo_model_path())
    assert (ours.get_vocab(), ours.special_tokens_map) == (expected.get_vocab(), expected.special_tokens_map)
    assert ours.chat_template == expected.chat_template


@pytest.mark.parametrize(
    ("file", "change"),
    [("config.json", {"model_type": "phi3"}), ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"})],
)
def test_special_tokenizers_are_left_to_transformers(tmp_path: Path, monkeypatch, file, change) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo_model_path() / name).read_bytes())
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | change))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda directory, **options: "chosen by transformers")
    assert load_tokenizer(demo_model_path()) != "chosen by transformers"
    assert load_tokenizer(tmp_path) == "chosen by transformers"


def test_template_of_a_processor(tmp_path: Path) -> None:
    """chat_template.json of older multimodal models counts if the tokenizer has no template of its own."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo_model_path() / name).read_bytes())
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "a processor's"}))
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": "its own"}))
    assert load_tokenizer(tmp_path).chat_template == "its own"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": None}))
    assert load_tokenizer(tmp_path).chat_template == "a processor's"


@pytest.fixture
def sentencepiece_directory(tmp_path: Path) -> Path:
    """A folder with nothing but SentencePiece's own file."""
    write_sentencepiece(tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return tmp_path


@pytest.mark.parametrize("settings", [None, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}])
def test_sentencepiece_file_alone_is_a_tokenizer(sentencepiece_directory: Path, settings: dict | None) -> None:
    import sentencepiece

    if settings is not None:
        (sentencepiece_directory / "tokenizer_config.json").write_text(json.dumps(settings))
    reference = sentencepiece.SentencePieceProcessor(str(sentencepiece_directory / "tokenizer.model"))
    tokenizer = load_tokenizer(sentencepiece_directory)
    for text in ("the cat sat", "dog ö", "on"):
        ids = tokenizer.encode(text)
        assert ids == [1] * (settings is not None) + reference.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert eos_token_ids(sentencepiece_directory, tokenizer) == {2}


@pytest.mark.parametrize(
    ("content", "package"),
    [(b"\n\x0e\n\x05<unk>", "sentencepiece"), (b"\n\x0e\n", "google.protobuf"), (b"IQ== 0\nIg== 1\n", "tiktoken")],
)
def test_package_that_is_missing_is_named(tmp_path: Path, monkeypatch, content: bytes, package: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    for name in ("sentencepiece", "google.protobuf", "tiktoken"):
        monkeypatch.setitem(sys.modules, name, None if name == package else types.ModuleType(name))
    with pytest.raises(InvalidRequestError, match=rf"{package}.*pip install 'outrider\[sentencepiece\]'"):
        load_tokenizer(tmp_path)


TEXT = "hello wo ö 🎉"


def tiktoken_ids() -> list[int]:
    """Tokens of TEXT by tiktoken."""
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding("tiny", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens={})
    return encoding.encode(TEXT)


def test_lone_tiktoken_file(tmp_path: Path) -> None:
    write_tiktoken(tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert ids == tiktoken_ids()
    assert tokenizer.decode(ids) == TEXT
    file = tmp_path / "tokenizer.model"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    assert load_tokenizer(tmp_path).encode(TEXT, add_special_tokens=False) != ids, "the file has changed"


def test_a_tokenizer_with_code_of_its_own_is_warned_of(tmp_path: Path, caplog) -> None:
    """Kimi's checkpoints: the code is not run."""
    write_tiktoken(tmp_path / "tiktoken.model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_linear"}))
    code = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": code}))
    (tmp_path / "tokenization_kimi.py").write_text("raise SystemExit")
    assert load_tokenizer(tmp_path).encode("hello", add_special_tokens=False) == [259]
    assert "brings code for its tokenizer" in caplog.text


@pytest.fixture
def tekken(tmp_path: Path) -> Path:
    """A folder with Mistral's own file alone."""
    write_tekken(tmp_path / "tekken.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    return tmp_path


def test_lone_tekken_file(tekken: Path) -> None:
    (tekken / "chat_template.jinja").write_text("<s>{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}")
    tokenizer = load_tokenizer(tekken)
    ids = [6 + index for index in tiktoken_ids()]  # special tokens come first
    assert tokenizer.encode(TEXT) == [1, *ids]
    assert tokenizer.decode([1, *ids, 2], skip_special_tokens=True) == TEXT
    text = tokenizer.apply_chat_template([{"role": "user", "content": TEXT}], tokenize=False)
    assert tokenizer.encode(text, add_special_tokens=False) == [1, 3, *ids, 4]
    assert eos_token_ids(tekken, tokenizer) == {2}


def test_tekken_without_its_package(tekken: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("outrider.models.checkpoint.tokenizer.find_spec", lambda name: None)
    load_tokenizer(tekken)
    assert "outrider[mistral]" in caplog.text
    monkeypatch.setitem(sys.modules, "transformers.integrations.mistral", None)  # as if it cannot be imported
    with pytest.raises(InvalidRequestError, match=r"mistral-common.*outrider\[mistral\]"):
        load_tokenizer(tekken)


@pytest.mark.parametrize("form", ["jinja", "text", "list"])
def test_chat_templates_in_all_forms(directory: Path, form: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    if form == "jinja":
        (directory / "chat_template.jinja").write_text(template)
    else:
        file = directory / "tokenizer_config.json"
        named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "tools"}]
        settings = json.loads(file.read_text()) | {"chat_template": template if form == "text" else named}
        file.write_text(json.dumps(settings))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False) == "a b"


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
