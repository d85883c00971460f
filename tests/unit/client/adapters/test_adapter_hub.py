"""Adapters of the hub: from its cache, and from a small server that answers as the hub does."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from outrider.platform.client.adapters.sources import resolver
from outrider.platform.client.adapters.sources.hub import HubResolver
from outrider.platform.core.errors import AdapterError, AdapterSourceError

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"weights",
    "draft/adapter_config.json": b'{"draft": 1}',
    "README.md": b"hello",
    "training_args.bin": b"no",
}


class Hub(BaseHTTPRequestHandler):
    """The few answers of the hub that a download needs; knows one repository."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path, _, _ = self.path.partition("?")
        parts = path.strip("/").split("/")
        if parts[:4] == ["api", "models", "org", "adapter"] and parts[4:5] in ([], ["revision"]):
            siblings = [{"rfilename": name, "size": len(content), "blobId": SHA} for name, content in FILES.items()]
            self._send(200, json.dumps({"id": "org/adapter", "sha": SHA, "siblings": siblings}).encode(), body)
        elif parts[:5] == ["api", "models", "org", "adapter", "tree"]:
            tree = [{"type": "file", "path": n, "size": len(c), "oid": SHA} for n, c in FILES.items()]
            self._send(200, json.dumps(tree).encode(), body)
        elif parts[:3] == ["org", "adapter", "resolve"] and "/".join(parts[4:]) in FILES:
            self._send(200, FILES["/".join(parts[4:])], body)
        else:
            self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        all_headers = {"Content-Length": str(len(content)), "Content-Type": "application/json", **(headers or {})}
        if status == 200:
            all_headers |= {"ETag": f'"{hash(content)}"', "X-Repo-Commit": SHA}
        for name, value in all_headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def names_in(folder: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors", "draft/adapter_config.json"]


def test_only_the_adapters_files_are_downloaded(hub, tmp_path, capfd):
    hub_resolver = HubResolver(1000, endpoint=hub, cache_dir=str(tmp_path))
    folder = hub_resolver.resolve("x", "org/adapter")
    assert names_in(folder) == ADAPTER_FILES
    assert hub_resolver.resolve("x", "hf://org/adapter@main") == folder
    assert capfd.readouterr().err == "", "no progress bars in a server's terminal"


def test_too_large_is_found_before_anything_is_downloaded(hub, tmp_path):
    with pytest.raises(AdapterError, match="21 bytes; at most 20"):
        HubResolver(20, endpoint=hub, cache_dir=str(tmp_path)).resolve("x", "org/adapter")
    assert not names_in(str(tmp_path))


def test_repositories_that_do_not_exist(hub, tmp_path):
    with pytest.raises(AdapterError, match="'org/nothing' cannot be had from the hub"):
        HubResolver(1000, endpoint=hub, cache_dir=str(tmp_path)).resolve("x", "org/nothing")


def test_no_adapter(hub, tmp_path, monkeypatch):
    monkeypatch.delitem(FILES, "adapter_config.json")
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        HubResolver(1000, endpoint=hub, cache_dir=str(tmp_path)).resolve("x", "org/adapter")


def test_offline_the_cache_is_enough(hub, tmp_path, monkeypatch):
    folder = HubResolver(1000, endpoint=hub, cache_dir=str(tmp_path)).resolve("x", "org/adapter")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    offline = HubResolver(1000, cache_dir=str(tmp_path))
    assert offline.resolve("x", "org/adapter") == folder
    assert offline.resolve("x", f"org/adapter@{SHA}") == folder
    with pytest.raises(AdapterSourceError, match="cannot be reached"):
        offline.resolve("x", "org/other")


def test_a_hub_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(AdapterSourceError, match="cannot be reached"):
        HubResolver(1000, endpoint="http://127.0.0.1:9", cache_dir=str(tmp_path)).resolve("x", "org/adapter")


@pytest.mark.parametrize("source", ["hf://adapter", "hf://a/b/c", "hf://a/b@../../x", "hf://../b", "hf://a/b@"])
def test_bad_ids(source):
    with pytest.raises(AdapterError, match="no id of the hub"):
        HubResolver(1000).resolve("x", source)


@pytest.mark.parametrize("source", [None, "s3://a/b", "/a/b", "a/b/c"])
def test_sources_that_are_no_hub_ids(source):
    assert HubResolver(1000).resolve("x", source) is None


@pytest.mark.parametrize(
    ("source", "scheme"),
    [
        ("/adapters/sql", None), ("./a/b", None), ("adapters", None), ("a/b/c", None), ("~/a", None), ("C:/x", None),
        ("org/name", "hf"), ("org/name@v1", "hf"), ("org/name@refs/pr/1", "hf"), ("hf://org/name", "hf"),
        ("org/name@../../etc", None), ("../name", None), ("S3://bucket/x", "s3"), ("file:///x", "file"),
    ],
)  # fmt: skip
def test_schemes(source, scheme):
    assert resolver.source_scheme(source) == scheme


def test_a_local_folder_of_that_name_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolver.source_scheme("org/name") is None
