"""Files that would take more time or memory than any adapter of the model: refused before the work is done."""

import json
import pickle
import resource
import struct
import time

import pytest
import torch

from outrider.lora.device.sites import AdapterSites
from outrider.lora.files import tensor_file
from outrider.lora.files.tensor_keys import ModuleShape
from outrider.platform.core.adapter_files import WEIGHT_FILES
from outrider.platform.core.errors import AdapterError

from ....mutations import MUTATIONS, mutated
from ..conftest import SIZES, make_linears, module, tensors, write_adapter
from ..parsing import DraftTarget, parse

Q = module(0, "q_proj")
A = f"base_model.model.{Q}.lora_A.weight"
LIMIT = 128 << 20
"""Bytes that this process may grow by; the files ask for gigabytes."""


def never(tensor):
    raise AssertionError("it was read")


@pytest.fixture(scope="module")
def known():
    modules = AdapterSites(make_linears(), None, torch.float32, torch.device("cpu")).model.shapes
    return {**modules, "lm_head": ModuleShape(16, 40, is_base=never)}


@pytest.fixture(params=["target", "draft"])
def read(request, known, tmp_path):
    """Reads a folder as an adapter, or as the draft weights of another one."""

    def read(path):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            if request.param == "target":
                return parse(str(path), known, max_rank=8, dtype=torch.float32)
            plain = write_adapter(tmp_path / "plain")
            return parse(
                plain, known, max_rank=8, dtype=torch.float32, draft=DraftTarget("eagle", known), draft_path=str(path)
            )
        finally:
            assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < LIMIT

    return read


TARGET = pytest.mark.parametrize("read", ["target"], indirect=True)  # making the files takes time
SLOW = "(?:[a-z0-9_.]|[a-z0-9_.]{2}){1,12}"
PATTERNS = {
    "so many": ({f"m{i}": 1 for i in range(20_000)}, "has 20000 patterns; at most 16384"),
    "expressions": ({f"(a|a)*b{i}": 1 for i in range(2_000)}, "more than 256 regular expressions"),
    "long": ({"a" * 5_000: 1}, "has 5000 characters; at most 1000"),
    "exponential": ({"(?:[a-z0-9_.]|[a-z0-9_.]{2})+_projx?[0-9]": 1}, "takes too long"),
    "slow together": (
        {f"(?:[a-z0-9_.]|[a-z0-9_.]{{2}}){{1,15}}.*_projx?[0-9]{{{i + 1}}}": 1 for i in range(200)},
        "takes too long",
    ),
    "unbalanced": ({"q_proj)|(": 1}, "no regular expression"),
}


@pytest.mark.slow
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("case", PATTERNS)
def test_patterns_that_take_long(tmp_path, known, field, case):
    patterns, message = PATTERNS[case]
    path, began = write_adapter(tmp_path, **{field: patterns}), time.thread_time()
    with pytest.raises(AdapterError, match=f"{field}.*{message}") as caught:
        parse(path, known, max_rank=8, dtype=torch.float32)
    assert time.thread_time() - began < 1.2  # 0.4 s, and the imports of the first one; it was 5.7 s
    assert len(caught.value.message) < 400


def test_thousands_of_names_are_no_expressions(tmp_path, known):
    """As PEFT writes them: one a module, with and without escapes and anchors; the first that matches counts."""
    names = {f"model.layers.{i}.mlp.experts.{j}.up_proj": 3 for i in range(50) for j in range(100)}
    names |= {rf"layers\.0\.{'self_attn'}\.q_proj": 80, "q_proj": 40, "^model.layers.0.self_attn.k_proj$": 16}
    names |= {"^layers.1.self_attn.k_proj": 5, "(k|v)_proj": 24}
    adapter = parse(write_adapter(tmp_path, alpha_pattern=names), known, max_rank=8, dtype=torch.float32)
    state = tensors()
    expected = {(0, "q_proj"): 20, (1, "q_proj"): 10, (0, "k_proj"): 4, (1, "k_proj"): 6, (0, "v_proj"): 6}
    for (layer, name), scale in expected.items():
        b = state[f"base_model.model.{module(layer, name)}.lora_B.weight"]
        torch.testing.assert_close(adapter.modules[module(layer, name)].b, scale * b.T)
    other = adapter.modules[module(0, next(name for name in SIZES if name not in ("q_proj", "k_proj", "v_proj")))]
    assert other is not None


@pytest.mark.parametrize("field", ["modules_to_save", "bias", "peft_type", "trainable_token_indices"])
def test_long_values_are_not_repeated_in_errors(tmp_path, known, field):
    value = ["x" * 100] * 9_000
    with pytest.raises(AdapterError) as caught:
        parse(write_adapter(tmp_path, **{field: value}), known, max_rank=8, dtype=torch.float32)
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("text", ["[" * 500_000, '{"r": ' * 100_000, " " * 1_100_000])
def test_configurations_of_any_shape(tmp_path, read, text):
    path = write_adapter(tmp_path / "x")
    (tmp_path / "x" / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError):
        read(path)


def test_a_tensor_without_strides_is_not_written_out(tmp_path, read):
    state = tensors() | {A: torch.zeros(1).expand(4, 1 << 28)}
    with pytest.raises(AdapterError, match=r"lora_A is \[4, 268435456\]"):
        read(write_adapter(tmp_path / "x", state, binary=True))


@TARGET
def test_ten_thousands_of_tensors_are_not_unpickled(tmp_path, read, monkeypatch):
    one = torch.zeros(1)
    path = write_adapter(tmp_path / "x", {"x" * 300 + f"{i}": one[:] for i in range(4_000)}, binary=True)
    monkeypatch.setattr(torch, "load", never)
    with pytest.raises(AdapterError, match="its pickle is larger"):
        read(path)


@TARGET
def test_ten_thousands_of_entries_are_not_listed(tmp_path, read, monkeypatch):
    path = write_adapter(tmp_path / "x", {f"x{i}": torch.zeros(1) for i in range(7_000)}, binary=True)
    monkeypatch.setattr(torch, "load", never)
    with pytest.raises(AdapterError, match="has more entries"):
        read(path)


@TARGET
def test_the_old_format_is_counted_too(tmp_path, read, monkeypatch):
    path, one = write_adapter(tmp_path / "x", binary=True), torch.zeros(1)
    state = {f"x{i}.lora_A.weight": one[:] for i in range(9_000)}
    torch.save(state, tmp_path / "x" / WEIGHT_FILES[1], _use_new_zipfile_serialization=False)
    monkeypatch.setattr(torch, "load", never)
    with pytest.raises(AdapterError, match="its pickle is larger"):
        read(path)


def test_a_file_larger_than_the_model_allows(tmp_path, read, monkeypatch):
    path = write_adapter(tmp_path / "x", binary=True)
    with (tmp_path / "x" / WEIGHT_FILES[1]).open("ab") as file:
        file.truncate(4 << 30)
    monkeypatch.setattr(torch, "load", never)
    with pytest.raises(AdapterError, match=r"has 4294967296 bytes; at most .* max_lora_rank"):
        read(path)


class Bytes:
    def __reduce__(self):
        return bytearray, (1 << 31,)


def test_memory_for_the_asking(tmp_path, read):
    path = write_adapter(tmp_path / "x", binary=True)
    (tmp_path / "x" / WEIGHT_FILES[1]).write_bytes(b"".join(pickle.dumps(Bytes(), protocol=2) for _ in range(5)))
    with pytest.raises(AdapterError, match="something else than tensors"):
        read(path)


@pytest.mark.parametrize("key", [A, "base_model.model.lm_head.weight", "base_model.model.model.norm.lora_A.weight"])
def test_a_sparse_file_is_not_read(tmp_path, read, key):
    path = write_adapter(tmp_path / "x")
    size = 39 << 24
    other = {"dtype": "F32", "shape": [16, 4], "data_offsets": [size, size + 256]}
    header = {key: {"dtype": "F32", "shape": [size // 64, 16], "data_offsets": [0, size]}, A.replace("A", "B"): other}
    text = json.dumps(header).encode()
    with (tmp_path / "x" / WEIGHT_FILES[0]).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size + 256)
    with pytest.raises(AdapterError):
        read(path)


@TARGET
def test_a_file_that_becomes_shorter_while_it_is_checked(tmp_path, read, monkeypatch):
    """A missing page of a mapped file would crash the process."""
    path, check = write_adapter(tmp_path / "x"), tensor_file.safe_open

    def shortened(*args, **options):
        with (tmp_path / "x" / WEIGHT_FILES[0]).open("r+b") as file:
            file.truncate(4)
        return check(*args, **options)

    monkeypatch.setattr(tensor_file, "safe_open", shortened)
    tensor_file._known.cache_clear()
    with pytest.raises(AdapterError, match="has become shorter"):
        read(path)


def test_long_keys(tmp_path, read):
    with pytest.raises(AdapterError, match="key has 5014 characters; at most 1000") as caught:
        read(write_adapter(tmp_path / "x", tensors() | {"x" * 5000 + ".lora_A.weight": torch.zeros(1)}))
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (torch.full((16,), float("nan")), "is not finite"),
        (torch.full((16,), 6e4), "is not finite in float16"),  # with the scale
        (torch.ones(16, dtype=torch.int32), "has dtype torch.int32"),
        (torch.ones(15), "wrong shape"),
        (torch.ones(16, 1), "wrong shape"),
    ],
    ids=["nan", "overflow", "dtype", "size", "matrix"],
)
def test_hostile_biases(tmp_path, bias, message):
    state = tensors(modules=("q_proj",), layers=(0,))
    path = write_adapter(tmp_path, state | {f"base_model.model.{Q}.lora_B.bias": bias}, lora_bias=True)
    shapes = AdapterSites(make_linears(), None, torch.float32, torch.device("cpu")).model.shapes
    with pytest.raises(AdapterError, match=message):
        parse(path, shapes, max_rank=8, dtype=torch.float16)


@TARGET
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"])
def test_mutations(tmp_path, read, name):
    path = write_adapter(tmp_path / "damaged", binary=name.endswith("bin"))
    file = tmp_path / "damaged" / name
    whole, refused = file.read_bytes(), 0
    assert read(path).modules
    for seed in range(MUTATIONS):
        file.write_bytes(mutated(whole, name, seed))
        try:
            adapter = read(path)
        except AdapterError:
            refused += 1
        else:
            assert all(torch.isfinite(part).all() for weights in adapter.modules.values() for part in weights[:2])
    assert refused >= MUTATIONS // 4
