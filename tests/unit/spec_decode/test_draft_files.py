"""Heads by hub id: their files are fetched, pickles too, which a target's are not."""

import huggingface_hub
import pytest

from outrider.models.loader import resolve_model_path


@pytest.mark.parametrize(("draft", "pickles"), [(True, True), (False, False)])
def test_what_is_fetched_from_the_hub(monkeypatch, tmp_path, draft, pickles):
    asked = {}

    def snapshot_download(name, allow_patterns, **options):
        asked[name] = set(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model_path("someone/head", draft=draft) == tmp_path
    assert {"*.json", "*.safetensors"} <= asked["someone/head"]
    assert ({"*.bin", "*.pt"} <= asked["someone/head"]) == pickles
