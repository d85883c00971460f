"""Rights to load adapters over HTTP, and their allowed sources."""

import os
from pathlib import Path

import pytest

from outrider.platform.client.adapters.sources import AdapterSources, SourceOptions
from outrider.platform.core.errors import AdapterSourceError, EngineDeadError

from ....error_answers import error_in

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADMIN_CALLS = [
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/adapters/x"}),
    ("/v1/unload_lora_adapter", {"lora_name": "x"}),
    ("/v1/pin_lora_adapter", {"lora_name": "x"}),
    ("/v1/unpin_lora_adapter", {"lora_name": "x"}),
]


def make_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS).write_bytes(b"x" * 10)
    return folder


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@pytest.fixture
def confined(make_http, tmp_path):
    """A server with one root, `tmp_path / "root"`."""
    root = tmp_path / "root"
    make_adapter(root / "good")
    make_adapter(tmp_path / "outside")
    return make_http(lora_roots=(str(root),), lora_sources=SourceOptions(max_adapter_bytes=1000))


# --- rights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), ADMIN_CALLS)
@pytest.mark.parametrize(
    ("api_keys", "key", "status"),
    [
        ((), None, 403),
        ((), "client", 403),
        (("client",), None, 401),
        (("client",), "wrong", 401),
        (("client",), "client", 403),
        (("client",), "Admin", 401),
    ],
)
def test_only_an_admin_may(make_http, llm, path, body, api_keys, key, status):
    http = make_http(api_keys=api_keys, admin_api_keys=("admin", "other-admin"))
    error = error_in(http.post(path, body, headers=bearer(key)), status)
    assert error["type"] == ("PermissionDeniedError" if status == 403 else "AuthenticationError")
    assert not llm.in_engine
    assert not llm.calls


def test_an_admin_may(make_http, llm):
    http = make_http(api_keys=("client",), admin_api_keys=("admin", "other-admin"))
    for path, body in ADMIN_CALLS:
        if "unload" not in path:
            assert http.post(path, body, headers=bearer("other-admin")).status_code == 200
    assert http.get("/v1/models", headers=bearer("admin")).status_code == 200, "an admin is a client, too"
    assert http.post("/v1/unload_lora_adapter", {"lora_name": "x"}, headers=bearer("admin")).status_code == 200
    assert not llm.in_engine


def test_without_admin_keys_every_client_may(make_http):
    path, body = ADMIN_CALLS[0]
    assert make_http().post(path, body).status_code == 200
    http = make_http(api_keys=("client",))
    error_in(http.post(path, body), 401)
    assert http.post(path, body | {"lora_name": "y"}, headers=bearer("client")).status_code == 200


def test_the_right_is_checked_before_the_body_is_read(make_http):
    http = make_http(admin_api_keys=("admin",))
    for content in (b"{", b"[" * 100_000, b"\xff"):
        response = http.post("/v1/load_lora_adapter", content=content, headers={"Content-Type": "application/json"})
        error_in(response, 403)


def test_a_client_can_use_an_admins_adapter(make_http):
    http = make_http(admin_api_keys=("admin",))
    path, body = ADMIN_CALLS[0]
    http.post(path, body, headers=bearer("admin"))
    assert http.post("/v1/completions", {"model": "x", "prompt": "a"}).status_code == 200


# --- sources ----------------------------------------------------------------------------------------------------------


def test_without_roots_no_folder_is_loaded(make_http, llm):
    error = error_in(make_http(lora_roots=()).load_adapter("x", "/adapters/x"))
    assert (error["type"], error["param"]) == ("InvalidAdapter", "lora_path")
    assert "--lora-root" in error["message"]
    assert not llm.in_engine


def test_a_folder_in_a_root(confined, llm, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    good = tmp_path / "root" / "good"
    (tmp_path / "root" / "alias").symlink_to(good)
    for name, path in (("a", good), ("b", good / ".." / "alias"), ("d", "~/root/good"), ("c", f"file://{good}")):
        assert confined.load_adapter(name, str(path)).status_code == 200
        assert llm.adapters.requests[name].path == str(good.resolve()), "the real path: no link in it can be exchanged"
    assert confined.get("/v1/models/c").json()["root"] == f"file://{good}", "as it was written"
    error_in(confined.load_adapter("e", "~/outside"))


def test_roots_that_are_implied(make_http, llm, tmp_path):
    modules, drafts, directory = (make_adapter(tmp_path / name / "a") for name in ("modules", "drafts", "directory"))
    http = make_http(
        lora_roots=(), lora_modules={"m": str(modules), "s": "s3://bucket/x"}, lora_draft_paths={"m": str(drafts)},
        lora_sources=SourceOptions(directories=(str(directory.parent),)),
    )  # fmt: skip
    for path in (modules, drafts, directory, modules.parent / "new"):
        assert http.load_adapter("x", str(path), load_inplace=True).status_code == 200
    error_in(http.load_adapter("x", str(tmp_path), load_inplace=True))


def test_the_whole_disk_is_never_implied(make_http):
    http = make_http(lora_roots=(), lora_modules={"m": "/adapter"})
    assert http.load_adapter("x", "/adapter").status_code == 200
    error_in(http.load_adapter("y", "/etc"))


@pytest.mark.parametrize("field", ["lora_path", "draft_path"])
@pytest.mark.parametrize(
    "path",
    ["/etc", "/", "..", "{root}/../outside", "{root}/good/../../outside", "{root}/link", "{root}/link/deeper",
     "{root}x", "file://{root}/../outside", "file:///etc", "FILE:///etc", "local:///etc", "~root", "~",
     "/proc/self/root{root}/../outside", "org/name", "{root}/config-link", "{root}/draft-link"],
)  # fmt: skip
def test_paths_that_leave(confined, llm, tmp_path, field, path):
    root = tmp_path / "root"
    (root / "link").symlink_to(tmp_path / "outside")
    make_adapter(root / "config-link")
    (root / "config-link" / CONFIG).unlink()
    (root / "config-link" / CONFIG).symlink_to("/etc/passwd")
    make_adapter(root / "draft-link")
    (root / "draft-link" / "draft").symlink_to(tmp_path / "outside")
    body = {"path": str(root / "good")} | ({"path": path.format(root=root)} if field == "lora_path" else {})
    extra = {"draft_path": path.format(root=root)} if field == "draft_path" else {}
    error = error_in(confined.load_adapter("x", **body, **extra))
    assert (error["type"], error["param"]) == ("InvalidAdapter", field)
    assert not llm.in_engine


def test_files_that_would_never_end(confined, llm, tmp_path):
    root = tmp_path / "root"
    pipe, sparse, device = (make_adapter(root / name) for name in ("pipe", "sparse", "device"))
    (pipe / WEIGHTS).unlink()
    os.mkfifo(pipe / WEIGHTS)
    (device / WEIGHTS).unlink()
    (device / WEIGHTS).symlink_to("/dev/zero")
    with open(sparse / WEIGHTS, "r+b") as file:
        file.truncate(1 << 40)
    for folder, words in ((pipe, "is a named pipe"), (device, "outside"), (sparse, "--max-lora-bytes")):
        error = error_in(confined.load_adapter("x", str(folder)))
        assert error["param"] == "lora_path"
        assert words in error["message"]
    assert not llm.in_engine


@pytest.mark.parametrize("inplace", [False, True])
def test_files_swapped_during_a_read_are_unloaded(confined, llm, tmp_path, monkeypatch, inplace):
    good = tmp_path / "root" / "good"
    if inplace:
        assert confined.load_adapter("x", str(good)).status_code == 200
    load = llm.adapters.load

    async def load_while_it_changes(request, **options):
        good.rename(good.with_name("aside"))
        good.symlink_to(tmp_path / "outside")
        return await load(request, **options)

    monkeypatch.setattr(llm.adapters, "load", load_while_it_changes)
    error = error_in(confined.load_adapter("x", str(good), load_inplace=inplace))
    assert error["param"] == "lora_path"
    assert not llm.in_engine
    assert llm.calls[-1] == {"unload": "x", "mode": "abort"}
    assert confined.get("/v1/models/x").status_code == 404


def test_other_sources_need_their_scheme(make_http, llm):
    http = make_http(lora_remote=("s3", "hf"))
    for name, source in (("a", "s3://bucket/x"), ("b", "S3://bucket/x"), ("c", "org/name"), ("d", "hf://org/name")):
        assert http.load_adapter(name, source).status_code == 200
        assert llm.adapters.requests[name].path == source
        assert http.get(f"/v1/models/{name}").json()["root"] == source
    for source in ("gs://bucket/x", "http://169.254.169.254/x", "memory://x", "s3a://bucket/x"):
        error = error_in(http.load_adapter("x", source))
        assert error["param"] == "lora_path"
        assert f"--lora-remote {source.partition(':')[0]}" in error["message"]
    error_in(make_http().load_adapter("x", "s3://bucket/x"))
    error_in(http.load_adapter("x", "/adapters/x", draft_path="gs://bucket/x"))


def test_chained_schemes_do_not_bypass_the_policy(make_http, tmp_path, llm):
    """A URL with an allowed scheme that leads elsewhere is refused by the resolver, before the engine sees it."""
    llm.sources = AdapterSources(SourceOptions(cache_dir=str(tmp_path)))

    async def load(request, **options):
        await llm.sources.localize(request)
        raise AssertionError

    llm.adapters.load = load
    error = error_in(make_http(lora_remote=("s3", "zip")).load_adapter("x", "zip://a::file:///etc"))
    assert "chained" in error["message"]


def test_a_password_in_a_source_is_not_shown(make_http):
    http = make_http(lora_remote=("https",))
    assert http.load_adapter("x", "https://me:secret@host/x?token=abc").status_code == 200
    shown = http.get("/v1/models").text
    assert "secret" not in shown
    assert "abc" not in shown


def test_a_store_that_does_not_answer_is_a_503(make_http, llm):
    llm.error = AdapterSourceError("no network", param="lora_path")

    async def load(request, **options):
        raise llm.error

    llm.adapters.load = load
    response = make_http(lora_remote=("s3",)).load_adapter("x", "s3://bucket/x")
    assert (error_in(response, 503)["type"], response.headers["retry-after"]) == ("AdapterSourceError", "5")


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for path, _ in ADMIN_CALLS])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[1]", b'"x"', b"[" * 100_000, b'{"lora_name":' * 5000])
def test_broken_bodies(http, path, content):
    response = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert error_in(response)["type"] == "BadRequestError"


DEEP: dict = {}
for _ in range(150):
    DEEP = {"x": DEEP}


@pytest.mark.parametrize("path", [path for path, _ in ADMIN_CALLS])
@pytest.mark.parametrize("value", [None, 5, True, ["x"], {"x": 1}, DEEP])
def test_wrong_types(http, path, value):
    error = error_in(
        http.post(path, {"lora_path": "/a", "lora_name": value} if "/load" in path else {"lora_name": value})
    )
    assert error["param"] == "lora_name"


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("/v1/load_lora_adapter", {"lora_path": ["/a"]}, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_path": "/a\0b"}, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_path": "/" + "a" * 1_000_000}, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_path": "/a", "draft_path": 5}, "draft_path"),
        ("/v1/load_lora_adapter", {"lora_path": "/a", "draft_path": ""}, "draft_path"),
        ("/v1/load_lora_adapter", {"lora_path": "/a", "pinned": 1}, "pinned"),
        ("/v1/load_lora_adapter", {"lora_path": "/a", "load_inplace": "no"}, "load_inplace"),
        ("/v1/unload_lora_adapter", {"mode": "kill"}, "mode"),
        ("/v1/unload_lora_adapter", {"mode": None}, "mode"),
        ("/v1/pin_lora_adapter", {"mode": "drain"}, "mode"),
        ("/v1/unpin_lora_adapter", {"lora_path": "/a"}, "lora_path"),
    ],
)
def test_wrong_fields(http, path, extra, param):
    error = error_in(http.post(path, {"lora_name": "x", **extra}))
    assert error["param"] == param
    assert len(error["message"]) < 500


@pytest.mark.parametrize("name", ["", " ", "x ", " x", "a\nb", "a\0b", "\u202ex", "a\tb", "x" * 257, "\ud800"])
def test_names_that_are_refused(http, name):
    body = f'{{"lora_path": "/a", "lora_name": "{name.encode("unicode_escape").decode()}"}}'.replace("\\x", "\\u00")
    response = http.post("/v1/load_lora_adapter", content=body, headers={"Content-Type": "application/json"})
    assert error_in(response)["param"] in ("lora_name", None)


def test_a_name_that_looks_like_a_sum_is_that_adapter(http, llm):
    for name in ("a", "b", "a:0.7+b:0.3", "a:0.5"):
        assert http.load_adapter(name, f"/{name}").status_code == 200
    for name in ("a:0.7+b:0.3", "a:0.5", "base:a:0.5"):
        assert http.post("/v1/completions", {"model": name, "prompt": "x"}).status_code == 200
        assert llm.calls[-1]["lora_request"].name == name.removeprefix("base:")


# --- unloading, pinning -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("extra", "mode"), [({}, "drain"), ({"mode": "drain"}, "drain"), ({"mode": "abort"}, "abort")])
def test_modes_of_unloading(http, llm, extra, mode):
    http.load_adapter("x")
    assert http.post("/v1/unload_lora_adapter", {"lora_name": "x", **extra}).status_code == 200
    assert llm.calls[-1] == {"unload": "x", "mode": mode}


def test_pinning(http, llm):
    http.load_adapter("x")
    response = http.post("/v1/pin_lora_adapter", {"lora_name": "x"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'x' pinned successfully.")
    assert http.get("/v1/models/x").json()["pinned"] is True
    response = http.post("/v1/unpin_lora_adapter", {"lora_name": "x"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'x' unpinned successfully.")
    assert http.get("/v1/models/x").json()["pinned"] is False
    for path in ("/v1/pin_lora_adapter", "/v1/unpin_lora_adapter"):
        error = error_in(http.post(path, {"lora_name": "nobody"}), 404)
        assert (error["type"], error["param"]) == ("NotFoundError", "lora_name")


def test_a_dead_engine(http, llm):
    async def dead(*arguments, **options):
        raise EngineDeadError("the engine process died")

    for verb in ("load", "unload", "pin", "unpin"):
        setattr(llm.adapters, verb, dead)
    for path, body in ADMIN_CALLS:
        response = http.post(path, body)
        assert error_in(response, 503)["type"] == "EngineDeadError"
        assert "retry-after" in response.headers
    llm.state = "restarting"
    for path, body in ADMIN_CALLS:
        assert error_in(http.post(path, body), 503)["type"] == "ServiceUnavailableError"
