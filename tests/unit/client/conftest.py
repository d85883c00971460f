"""A small byte-level tokenizer with a chat template, and `fake_engine` on the path, here and in engine processes."""

import asyncio
import contextlib
import gc
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if messages[0].role == 'bad' %}{{ raise_exception('bad role') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{{ suffix or '' }}"
)
WORDS = "the quick brown fox jumps over the lazy dog and then says hello world to everybody stop STOP end "


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS] * 10, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_path(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder with a tokenizer and no weights."""
    path = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1, "vocab_size": 400}')
    return str(path)


@pytest.fixture(params=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Runs a coroutine under both event loops."""
    if request.param == "asyncio":
        return asyncio.run
    return pytest.importorskip("uvloop").run


def _children(but_of: Collection[psutil.Process] = ()) -> set[psutil.Process]:
    """Processes that this one has started, and theirs, but none that `but_of` have started."""
    found: set[psutil.Process] = set()
    for child in psutil.Process().children():
        found.add(child)
        if child not in but_of:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.update(child.children(recursive=True))
    return found


@pytest.fixture
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No child process and no folder of a link outlives the test."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    before = _children()  # those of servers that other tests share start and end children of their own
    yield
    gc.collect()
    assert _children(but_of=before) <= before
    assert list(folder.glob("outrider-*")) == []
    shutil.rmtree(folder)  # torch may have put something there
