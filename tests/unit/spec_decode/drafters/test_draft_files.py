"""Models by hub id: the fetched files. Pickles are of heads, and of targets that have nothing else."""

import huggingface_hub
import pytest

from outrider.models.checkpoint.paths import resolve_model_path


@pytest.mark.parametrize(
    ("draft", "stored", "pickles"),
    [
        (True, None, {"*.bin", "*.pt"}),
        (False, "model.safetensors", set()),
        (False, "pytorch_model.bin", {"pytorch_model*.bin"}),
    ],
)
def test_files_fetched_from_the_hub(monkeypatch, tmp_path, draft, stored, pickles):
    asked = set()

    def snapshot_download(name, allow_patterns, **options):
        assert name == "someone/model"
        asked.update(allow_patterns)
        return str(tmp_path)

    if stored is not None:
        (tmp_path / stored).touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model_path("someone/model", draft=draft) == tmp_path
    assert {"*.json", "*.safetensors"} <= asked
    assert {pattern for pattern in asked if pattern.endswith((".bin", ".pt"))} == pickles
