"""Every file that is ever opened in an adapter's folder, replaced by what must not be read.

The names are recorded while an adapter with everything is used: a file that is opened without `AdapterFolder`, or is
new, shows here.
"""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_model_path
from outrider.platform.core.adapter_files import ADAPTER_FILES, TEXT_FILES, WEIGHT_FILES, files_digest
from outrider.platform.core.errors import AdapterError

MESSAGES = [{"role": "user", "content": "list the names of all customers"}]
_WATCHED: dict[str, set[str]] = {}


def _record(event: str, arguments: tuple) -> None:
    """Record what is opened below a watched folder: an audit hook, which cannot be removed."""
    if event in ("open", "os.open") and _WATCHED and isinstance(arguments[0], str | os.PathLike):
        path = os.fspath(arguments[0])
        for folder, names in _WATCHED.items():
            if isinstance(path, str) and path.startswith(f"{folder}/"):
                names.add(path.removeprefix(f"{folder}/"))


def make_everything(folder: Path) -> Path:
    """An adapter of the demo with draft weights, a tokenizer of its own, a template and sampling parameters."""
    shutil.copytree(demo_adapters()["sql"], folder)
    tokenizer = (demo_model_path() / "tokenizer.json").read_text()
    assert tokenizer.count('"added_tokens": [') == 1
    token = '{"id": 2048, "content": "<own>", "single_word": false, "lstrip": false, "rstrip": false, '
    token += '"normalized": false, "special": false},'
    (folder / "tokenizer.json").write_text(tokenizer.replace('"added_tokens": [', f'"added_tokens": [{token}'))
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo_model_path() / name, folder)
    shutil.copy(demo_model_path() / "chat_template.jinja", folder)
    return folder


@pytest.fixture(scope="module")
def llm():
    with LLM(max_loras=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("root").resolve()


def chat(llm: LLM, folder: Path, root: Path | None, **options) -> str:
    roots = () if root is None else (str(root),)
    lora = LoRARequest(folder.name, path=folder, roots=roots, **options)
    params = llm.llm_engine.requests.chat_prompt(MESSAGES, lora, {}).result()
    llm.generate([params], None, lora, use_tqdm=False)
    return llm.chat(MESSAGES, SamplingParams(max_tokens=4), lora, use_tqdm=False)[0].outputs[0].text


@pytest.fixture(scope="module")
def good(llm, root) -> tuple[Path, set[str]]:
    """The adapter, and all that was opened in its folder."""
    folder = make_everything(root / "good")
    sys.addaudithook(_record)
    _WATCHED[str(folder)] = names = set()
    chat(llm, folder, root, digest=files_digest(str(folder)))
    _WATCHED.clear()
    return folder, names


def test_only_listed_adapter_files_are_opened(good):
    folders = ("draft", "draft/eagle3")  # the sizes of files in both are looked up before one is read
    expected = {*ADAPTER_FILES, *TEXT_FILES, *folders}
    assert good[1] <= expected | {f"{folder}/{name}" for folder in folders for name in ADAPTER_FILES}
    assert {"adapter_config.json", "adapter_model.safetensors", *TEXT_FILES} <= good[1]
    assert "draft/eagle3/adapter_model.safetensors" in good[1]


def link_out(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def pipe(path: Path, secret: Path) -> None:
    os.mkfifo(path)


def device(path: Path, secret: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path, secret: Path) -> None:
    path.mkdir()


def huge(path: Path, secret: Path) -> None:
    shutil.copy(secret, path)
    os.truncate(path, 1 << 40)  # sparse


NAMES = [
    "adapter_config.json",
    *WEIGHT_FILES,
    *TEXT_FILES,
    "draft/eagle3/adapter_config.json",
    "draft/eagle3/adapter_model.safetensors",
]


@pytest.mark.parametrize("make", [link_out, pipe, device, folder, huge])
@pytest.mark.parametrize("name", NAMES)
def test_unsafe_adapter_files_are_refused(llm, root, good, name, make):
    copy, path = root / f"{make.__name__}-{name.replace('/', '-')}", good[0] / name
    shutil.copytree(good[0], copy)
    if name in WEIGHT_FILES:
        (copy / "adapter_model.safetensors").unlink()
        path = good[0] / "adapter_model.safetensors"
    (copy / name).unlink(missing_ok=True)
    secret = root.with_name("secret")
    shutil.copy(path, secret)
    make(copy / name, secret)
    started = time.monotonic()
    try:
        chat(llm, copy, None if make is device else root)
    except AdapterError as error:
        message = error.message
    else:  # draft weights change no text: the adapter is served without them, and its card says why
        message = next(info.draft for info in llm.list_lora_adapters() if info.name == copy.name)
        assert name.startswith("draft/")
    assert name in message
    assert str(root) not in message
    assert time.monotonic() - started < 10
    assert chat(llm, good[0], root), "others go on"


def test_a_link_inside_the_root(llm, root, good):
    copy = root / "linked"
    copy.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", *TEXT_FILES):
        (copy / name).symlink_to(good[0] / name)
    assert chat(llm, copy, root) == chat(llm, good[0], root)
