"""Adapters read in another process are those that a thread reads, to the last bit, and so are the errors."""

import json
import os
from pathlib import Path

import pytest
import torch

from outrider.lora.device.layout import LM_HEAD
from outrider.models.layers.embedding import EMBEDDING
from outrider.platform.core.adapter_files import WEIGHT_FILES
from outrider.platform.core.errors import AdapterError

from ..conftest import HIDDEN, KIND_STATES, SIZES, module, tensors, write_adapter
from ..reading import VOCAB, Both, assert_same, vocabulary_weight

pytestmark = pytest.mark.slow

PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def both():
    with Both() as made:
        yield made


@pytest.fixture
def running(both):
    """The same, with the process ready."""
    assert both.reader.wait_ready(60)
    return both


# --- parity ---


def vocabulary_state(rank=4):
    generator = torch.Generator().manual_seed(5)
    shapes = {
        f"{EMBEDDING}.lora_embedding_A": (rank, VOCAB),
        f"{EMBEDDING}.lora_embedding_B": (HIDDEN, rank),
        f"{LM_HEAD}.lora_A.weight": (rank, HIDDEN),
        f"{LM_HEAD}.lora_B.weight": (VOCAB, rank),
    }
    return {f"{PREFIX}{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def ranks_by_pattern():
    state = tensors(2)
    return state | tensors(5, modules=("q_proj",))


def merged_state(rank=4):
    generator = torch.Generator().manual_seed(6)
    key = f"{PREFIX}model.layers.0.self_attn.qkv_proj"
    return {
        f"{key}.lora_A.weight": torch.randn(rank, HIDDEN, generator=generator),
        f"{key}.lora_B.weight": torch.randn(32, rank, generator=generator),
    }


KINDS = {
    "all": {},
    "rank 1": {"rank": 1},
    "rslora": {"use_rslora": True},
    "patterns": {"state": ranks_by_pattern, "rank": 2, "rank_pattern": {"q_proj": 5}, "alpha_pattern": {"k_proj": 3}},
    "some modules": {"state": lambda: tensors(modules=("q_proj", "down_proj"), layers=(1,))},
    "bin": {"binary": True},
    "half": {"state": lambda: {key: value.half() for key, value in tensors().items()}},
    "double": {"state": lambda: {key: value.double() for key, value in tensors().items()}},
    "merged": {"state": merged_state},
    "wrapped": {"state": lambda: tensors(prefix="_orig_mod.base_model.model.", middle=".default")},
    "vocabulary": {"state": lambda: tensors() | vocabulary_state()},
    "only the vocabulary": {"state": vocabulary_state},
    **{kind: {"state": state, "peft_type": kind, **fields} for kind, (state, fields) in KIND_STATES.items()},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_rows_to_the_last_bit(running, request, tmp_path, kind, dtype):
    if dtype == "bfloat16":
        running = request.getfixturevalue("narrow")
    options = dict(KINDS[kind])
    state = options.pop("state", lambda: None)()
    path = write_adapter(tmp_path / "ädapter \n", state, **options)
    got = running.by_process(path)
    assert got is not None
    assert_same(got, running.by_thread(path))


@pytest.fixture(scope="module")
def narrow():
    with Both(torch.bfloat16) as made:
        assert made.reader.wait_ready(60)
        yield made


def draft_weights(folder, **options):
    return write_adapter(folder, tensors(layers=(0,), seed=9), **options)


@pytest.mark.parametrize("where", ["draft", "draft/draft_model", "named", "broken", "empty"])
def test_draft_weights_too(running, tmp_path, where):
    path, draft_path = write_adapter(tmp_path / "a"), None
    if where == "named":
        draft_path = draft_weights(tmp_path / "d")
    elif where == "broken":
        draft_weights(tmp_path / "a" / "draft", rank=3)
    elif where == "empty":
        (tmp_path / "a" / "draft").mkdir()
    else:
        draft_weights(tmp_path / "a" / where)
    got = running.by_process(path, draft_path)
    assert got is not None
    assert_same(got, running.by_thread(path, draft_path))
    assert bool(got.drafter.rank) == (where not in ("broken", "empty"))


def magnitudes():
    state = tensors()
    for layer in (0, 1):
        for name in SIZES:
            state[f"{PREFIX}{module(layer, name)}.lora_magnitude_vector"] = torch.ones(SIZES[name][1])
    return state


def test_adapters_beyond_rank_rows_are_left_to_the_thread(running, tmp_path):
    dora = write_adapter(tmp_path / "dora", magnitudes(), use_dora=True)
    assert running.by_process(dora) is None
    assert running.by_thread(dora).packed[0].gains
    copied = tensors() | {f"{PREFIX}lm_head.base_layer.weight": vocabulary_weight()}
    copy = write_adapter(tmp_path / "copy", copied)
    assert running.by_process(copy) is None
    assert running.by_thread(copy).rows == 4
    biases = {f"{PREFIX}{module(i, name)}.lora_B.bias": torch.ones(SIZES[name][1]) for i in (0, 1) for name in SIZES}
    biased = write_adapter(tmp_path / "biased", tensors() | biases, lora_bias=True)
    assert running.by_process(biased) is None
    assert len(running.by_thread(biased).target.biases) == len(biases)
    assert running.reader.pid is not None, "that is no failure of the process"


# --- errors ---


def config(folder, **values):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def with_weights(content):
    return lambda folder: (folder / WEIGHT_FILES[0]).write_bytes(content)


def broken_state(change):
    def make(folder):
        state = tensors()
        change(state)
        write_adapter(folder, state)

    return make


def poison(state):
    state[next(iter(state))][0, 0] = float("nan")


def cut(folder):
    (folder / WEIGHT_FILES[0]).write_bytes((folder / WEIGHT_FILES[0]).read_bytes()[:-8])


def pickled(folder):
    (folder / WEIGHT_FILES[0]).unlink()
    torch.save({"x": os.system}, folder / WEIGHT_FILES[1])


BROKEN = {
    "no folder": lambda folder: folder.rename(folder.with_name("gone")),
    "no weights": lambda folder: (folder / WEIGHT_FILES[0]).unlink(),
    "no configuration": lambda folder: (folder / "adapter_config.json").unlink(),
    "configuration": lambda folder: (folder / "adapter_config.json").write_text("{"),
    "other kind": lambda folder: config(folder, peft_type="IA3"),
    "rank": lambda folder: config(folder, r=9),
    "bias": lambda folder: config(folder, bias="some"),
    "modules_to_save": lambda folder: config(folder, modules_to_save=["lm_head"]),
    "pattern": lambda folder: config(folder, rank_pattern={"(": 3}),
    "empty file": with_weights(b""),
    "not safetensors": with_weights(b"\x00" * 100),
    "cut": cut,
    "code": pickled,
    "unknown module": broken_state(lambda state: state.update({f"{PREFIX}other.lora_A.weight": torch.ones(4, 4)})),
    "half a module": broken_state(lambda state: state.pop(next(iter(state)))),
    "shape": broken_state(lambda state: state.update({next(iter(state)): torch.ones(4, 5)})),
    "nan": broken_state(poison),
    "integers": broken_state(lambda state: state.update({next(iter(state)): torch.ones(4, 16, dtype=torch.int8)})),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_the_same_errors(running, tmp_path, kind):
    folder = Path(write_adapter(tmp_path / "a"))
    BROKEN[kind](folder)
    with pytest.raises(AdapterError) as expected:
        running.by_thread(folder)
    with pytest.raises(AdapterError) as got:
        running.by_process(folder)
    assert got.value.info() == expected.value.info()
    assert running.reader.pid is not None


def test_an_error_of_named_draft_weights_names_their_field(running, tmp_path):
    path, draft = write_adapter(tmp_path / "a"), draft_weights(tmp_path / "d", rank=3)
    with pytest.raises(AdapterError, match="rank 3") as got:
        running.by_process(path, draft)
    assert got.value.param == "draft_path"
