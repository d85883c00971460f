"""Adapters like one before are read by its plan: the same rows to the last bit, and the same errors."""

from pathlib import Path

import pytest
import torch

from outrider.kernels.native import library
from outrider.lora.adapter import AdapterSource
from outrider.lora.files import peft_weights, read_plan, tensor_file
from outrider.platform.core.adapter_files import WEIGHT_FILES
from outrider.platform.core.errors import AdapterError

from ..conftest import KIND_STATES, tensors, write_adapter
from ..reader.test_reader import KINDS, draft_weights, magnitudes
from ..reading import Both, assert_same

UNPLANNED = ("bin", "half", "double", "vocabulary", "only the vocabulary", *KIND_STATES)
PLANNED = {kind: options for kind, options in KINDS.items() if kind not in UNPLANNED} | {
    "bfloat16": {"state": lambda: {key: value.bfloat16() for key, value in tensors().items()}}
}


@pytest.fixture
def both():
    if library() is None:
        pytest.skip("no compiler")
    with Both() as made:
        yield made


def quick(both, path, draft_path=None):
    return both.files.read(AdapterSource(str(path), draft_path))


@pytest.fixture
def understood(monkeypatch):
    """The number of files whose keys were parsed."""
    real, seen = peft_weights.group_keys, []
    monkeypatch.setattr(peft_weights, "group_keys", lambda *arguments: seen.append(1) or real(*arguments))
    return seen


def made(kind):
    options = dict(PLANNED[kind])
    return options.pop("state", lambda: tensors(options.get("rank", 4)))(), options


def changed(state):
    return {key: value.flip(0) * 3 for key, value in state.items()}


@pytest.mark.parametrize("kind", PLANNED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_rows_and_digests(tmp_path, understood, kind, dtype):
    if library() is None:
        pytest.skip("no compiler")
    both = Both(getattr(torch, dtype))
    state, options = made(kind)
    first = write_adapter(tmp_path / "a", state, **options)
    variants = ({"lora_alpha": 5}, {"use_rslora": not options.get("use_rslora")})
    others = [write_adapter(tmp_path / "b", changed(state), **options)] + [
        write_adapter(tmp_path / f"c{index}", state, **(options | variant)) for index, variant in enumerate(variants)
    ]
    quick(both, first)
    understood.clear()
    got = [quick(both, path) for path in (first, *others)]
    assert not understood, "the plan is enough"
    for entry, path in zip(got, (first, *others), strict=True):
        assert_same(entry, both.by_thread(path))
    assert got[0].digest != got[1].digest != got[2].digest


def test_the_first_of_a_form_is_read_by_its_plan(both, tmp_path, monkeypatch):
    real, read = read_plan.ReadPlan.read, []
    monkeypatch.setattr(read_plan.ReadPlan, "read", lambda self, *given: read.append(1) or real(self, *given))
    for count, name in enumerate("ab", 1):
        path = write_adapter(tmp_path / name, changed(tensors()))
        got = quick(both, path)
        assert len(read) == count
        assert_same(got, both.by_thread(path))


@pytest.mark.parametrize("kind", [*UNPLANNED, "magnitudes"])
def test_adapters_without_a_simple_plan_are_read_in_full(both, tmp_path, understood, kind):
    options = dict(KINDS.get(kind, {"state": magnitudes, "use_dora": True}))
    state = options.pop("state", lambda: None)()
    for name in ("a", "b"):
        path = write_adapter(tmp_path / name, state, **options)
        got, expected = quick(both, path), both.by_thread(path)
        assert got.digest == expected.digest
        for rows, wanted in zip(got.packed[0][:2], expected.packed[0][:2], strict=True):
            assert torch.equal(rows.data, wanted.data)
    assert len(understood) == 4


def test_neighbours_that_lie_far_apart_go_the_long_way(both, tmp_path, monkeypatch, understood):
    """A group's bytes may lie anywhere in the file, as its dtypes come one after the other."""
    monkeypatch.setattr("outrider.lora.files.row_conversion._ELEMENTS", 300)
    state = {key: value if "lora_A" in key else value.bfloat16() for key, value in tensors().items()}
    for name in ("a", "b"):
        path = write_adapter(tmp_path / name, state)
        assert_same(quick(both, path), both.by_thread(path))
    assert len(understood) == 4


def test_another_form_has_no_plan(both, tmp_path):
    quick(both, write_adapter(tmp_path / "a"))
    other = write_adapter(tmp_path / "b", r=3)
    with pytest.raises(AdapterError, match="expected"):
        quick(both, other)
    dora = write_adapter(tmp_path / "c", use_dora=True)
    with pytest.raises(AdapterError, match="is missing"):
        quick(both, dora)
    saved = write_adapter(tmp_path / "d", modules_to_save=["lm_head"])
    with pytest.raises(AdapterError, match="modules_to_save"):
        quick(both, saved)


def test_broken_files_of_a_known_form(both, tmp_path):
    quick(both, write_adapter(tmp_path / "a"))
    state = tensors()
    list(state.values())[5][0, 0] = float("inf")
    with pytest.raises(AdapterError, match=r"not finite"):
        quick(both, write_adapter(tmp_path / "b", state))
    with pytest.raises(AdapterError, match=r"not finite"):  # by its scale
        quick(both, write_adapter(tmp_path / "c", {k: v * 1e36 for k, v in tensors().items()}, lora_alpha=1e9))
    file = Path(write_adapter(tmp_path / "d"), WEIGHT_FILES[0])
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(AdapterError, match="not a valid safetensors file"):
        quick(both, tmp_path / "d")


def test_a_file_that_becomes_shorter_meanwhile(both, tmp_path, monkeypatch):
    quick(both, write_adapter(tmp_path / "a"))
    path = write_adapter(tmp_path / "b")
    real = read_plan.ReadPlan.read

    def read(self, file, scales):
        Path(path, WEIGHT_FILES[0]).write_bytes(Path(path, WEIGHT_FILES[0]).read_bytes()[:-800])
        return real(self, file, scales)

    monkeypatch.setattr(read_plan.ReadPlan, "read", read)
    with pytest.raises(AdapterError, match="shorter"):
        quick(both, path)


def test_draft_weights_with_a_plan(both, tmp_path):
    for name in ("a", "b"):
        path = write_adapter(tmp_path / name)
        draft_weights(tmp_path / name / "draft")
        got = quick(both, path)
        assert got.drafter.rank
        assert_same(got, both.by_thread(path))


def test_few_forms_are_remembered(both, tmp_path, monkeypatch, understood):
    monkeypatch.setattr(read_plan, "_MAX_PLANS", 2)
    paths = [write_adapter(tmp_path / str(rank), rank=rank) for rank in (1, 2, 3)]
    for path in (*paths, paths[2], paths[1]):
        quick(both, path)
    assert len(understood) == 3
    quick(both, paths[0])
    assert len(understood) == 4


def test_a_header_is_checked_once(both, tmp_path, monkeypatch):
    """By the library; its findings are found again."""
    tensor_file._known.cache_clear()
    real, checked = tensor_file.safe_open, []
    monkeypatch.setattr(tensor_file, "safe_open", lambda *a, **k: checked.append(1) or real(*a, **k))
    for name in ("a", "b"):
        quick(both, write_adapter(tmp_path / name))
    assert len(checked) == 1
    monkeypatch.setattr(tensor_file, "_CACHED_BYTES", 100)
    quick(both, tmp_path / "a")
    assert len(checked) == 2, "long ones are not kept"
    file = Path(write_adapter(tmp_path / "c"), WEIGHT_FILES[0])
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F99"', 1))
    for _ in range(2):
        with pytest.raises(AdapterError, match="safetensors"):
            quick(both, tmp_path / "c")
