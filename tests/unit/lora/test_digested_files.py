"""Adapters that another server has registered by the digest of their files."""

from pathlib import Path

from outrider.lora.files.peft_weights import WeightsReader
from outrider.platform.core.adapter_files import CONFIG_FILE, WEIGHT_FILES, AdapterFolder, files_digest
from outrider.platform.core.lora_request import LoRARequest

from .conftest import admitted


def test_files_of_a_digest_are_read_once(make_manager, folder, monkeypatch):
    """Files replaced after they were digested are not read: content and digest are those of the same bytes."""
    path, other = Path(folder("a")), Path(folder("b"))
    manager = make_manager()
    manager.forget(admitted(manager, "plain", str(path)))
    expected = manager.catalog.find("plain").digest
    opened = []
    open_file = AdapterFolder.open

    def noted(self, name, most=None):
        if not self.files:
            opened.append(name)
        return open_file(self, name, most)

    def replaced(folder, *arguments):
        for file in other.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        (path / WEIGHT_FILES[0]).rename(path / WEIGHT_FILES[1])
        return read(folder, *arguments)

    read = WeightsReader.read
    monkeypatch.setattr(AdapterFolder, "open", noted)
    monkeypatch.setattr(WeightsReader, "read", lambda self, folder: replaced(self, folder))
    manager.catalog.register([LoRARequest("a", path=str(path), digest=files_digest(str(path)))])
    opened.clear()
    manager.forget(admitted(manager, "a", str(path)))
    assert opened == [CONFIG_FILE, WEIGHT_FILES[0]]
    assert manager.catalog.find("a").digest == expected
