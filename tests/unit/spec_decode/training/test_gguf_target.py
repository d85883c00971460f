"""A GGUF file trains as the folder it was made of, as the target and as the draft model."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from outrider.platform.core.errors import UnsupportedModelError
from outrider.spec_decode.training.run import train_draft

from ....gguf_files import write_gguf

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("role", ["model", "draft"])
def test_a_gguf_file_trains_as_its_folder(role, folders, samples, options, tmp_path):
    folder = folders.target if role == "model" else folders.draft
    file = tmp_path / "files" / "m.gguf"
    file.parent.mkdir()
    write_gguf(Path(folder), file)
    method, more = ("eagle3", {}) if role == "model" else ("draft-lora", {"rank": 2, "unroll": None})
    trained = []
    for name, path in (("one", str(file)), ("two", folder)):
        chosen = options(method, output=str(tmp_path / name), steps=2, warmup=1, **more | {role: path})
        train_draft(chosen, samples[:8], samples[8:12])
        (tensors,) = (tmp_path / name).glob("*model.safetensors")
        trained.append(load_file(tensors))
    assert trained[0].keys() == trained[1].keys()
    assert all(tensor.equal(trained[1][name]) for name, tensor in trained[0].items())
    assert any(tensor.any() for tensor in trained[0].values())


def test_a_file_in_parts_is_refused(folders, samples, options, tmp_path):
    write_gguf(Path(folders.target), tmp_path / "m.gguf", split=20)
    chosen = options(model=str(tmp_path / "m-00001-of-00002.gguf"), output=str(tmp_path / "out"))
    with pytest.raises(UnsupportedModelError, match="gguf-split --merge"):
        train_draft(chosen, samples, samples[:4])
