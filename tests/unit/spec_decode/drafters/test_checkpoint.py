"""Weight files of draft heads: those found, those refused, and that no pickle runs code."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from outrider.platform.core.errors import InvalidRequestError, NotFoundError
from outrider.spec_decode.drafters.checkpoint import read_tensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}


def same(path, **options) -> bool:
    found = read_tensors(path, **options)
    assert {name: tensor.shape for name, tensor in found.items()} == {"a": (2, 3), "b": (4,)}
    return all(torch.equal(found[name].read(), tensor) for name, tensor in TENSORS.items())


def test_one_safetensors_file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert same(tmp_path)


def test_a_sharded_one(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "x.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "y.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(tmp_path)
    (tmp_path / "y.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"y\.safetensors"):
        read_tensors(tmp_path)


def test_pickles_whole_and_sharded(tmp_path):
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    assert same(tmp_path)
    for name, tensor in TENSORS.items():
        torch.save({name: tensor}, tmp_path / f"{name}.bin")
    index = {"weight_map": {"a": "a.bin", "b": "b.bin"}}
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert same(tmp_path)


def test_an_old_pickle_without_zip(tmp_path):
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same(tmp_path)


def test_safetensors_come_first_and_other_names_last(tmp_path):
    torch.save({"c": torch.ones(1)}, tmp_path / "medusa_lm_head.pt")
    assert list(read_tensors(tmp_path, extra=["medusa_lm_head.pt"])) == ["c"]
    torch.save({"d": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert list(read_tensors(tmp_path, extra=["medusa_lm_head.pt"])) == ["d"]
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert same(tmp_path, extra=["medusa_lm_head.pt"])


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('ran')",))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path):
    torch.save({"a": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidRequestError, match="more than tensors"):
        read_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Evil()}))
    with pytest.raises(InvalidRequestError):
        read_tensors(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off", b"\x80\x02."])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=name) as caught:
        read_tensors(tmp_path)
    assert caught.value.param == "speculative_config"


@pytest.mark.parametrize("value", [[torch.ones(1)], {"a": 3}, torch.ones(2)])
def test_something_else_than_named_tensors(tmp_path, value):
    torch.save(value, tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidRequestError, match="names to tensors"):
        read_tensors(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(NotFoundError, match=r"looked for .*pytorch_model\.bin, x\.pt"):
        read_tensors(tmp_path, extra=["x.pt"])


@pytest.mark.parametrize("index", ["{}", '{"weight_map": 3}', "[]"])
def test_a_broken_index(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InvalidRequestError):
        read_tensors(tmp_path)
