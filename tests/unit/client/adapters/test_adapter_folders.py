"""Local folders: confinement to roots, special files, sizes, exchanges; folders of adapters."""

import asyncio
import os
import shutil
import socket
from pathlib import Path

import pytest

from outrider.platform.client.adapters.sources import AdapterSources, SourceOptions
from outrider.platform.client.adapters.sources.folders import AdapterDirectory, FolderRules
from outrider.platform.client.adapters.sources.resolver import valid_folder_name
from outrider.platform.core.adapter_files import ADAPTER_FILES, TEXT_FILES, AdapterFolder, real_roots
from outrider.platform.core.errors import AdapterError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def make_adapter(folder: Path, size: int = 10) -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS).write_bytes(b"x" * size)
    return folder


@pytest.fixture
def root(tmp_path) -> Path:
    return (tmp_path / "root").resolve()


@pytest.fixture
def good(root) -> Path:
    return make_adapter(root / "good")


@pytest.fixture
def secret(tmp_path) -> Path:
    return make_adapter(tmp_path / "secret")


@pytest.fixture
def rules(root, good) -> FolderRules:
    return FolderRules(real_roots([str(root)]), 1000)


def test_a_folder_inside(rules, good, root):
    checked = rules.check(str(good))
    assert checked.path == str(good)
    assert {Path(state.path).name for state in checked.state} == {"good", CONFIG, WEIGHTS}
    rules.check_again(checked)
    assert rules.check(str(root / "missing")).state == ()
    assert rules.check(str(good / CONFIG)).state == (), "a file: the engine says what is wrong"


@pytest.mark.parametrize(
    "path",
    ["/", "/etc", "..", "{root}/..", "{root}/../secret", "{root}/good/../../secret", "{root}x", "{root}x/y", "secret",
     "{root}/../root/../secret", "/proc/self/fd", "/dev/fd/0", "//etc", "{root}/a/../../../../../../../../etc"],
)  # fmt: skip
def test_paths_that_leave(rules, root, secret, path):
    with pytest.raises(AdapterError, match="outside") as caught:
        rules.check(path.format(root=root), "draft_path")
    assert caught.value.param == "draft_path"


def test_errors_do_not_reveal_whether_outside_files_exist(rules, secret):
    messages = set()
    for path in (secret, secret.parent / "nothing"):
        with pytest.raises(AdapterError) as caught:
            rules.check(str(path))
        messages.add(caught.value.message.replace(str(path), "PATH"))
    assert len(messages) == 1


@pytest.mark.parametrize("path", ["/a\0b", "x" * 5000, "/" + "a/" * 3000])
def test_paths_that_are_none(rules, path):
    with pytest.raises(AdapterError) as caught:
        rules.check(path)
    assert caught.value.param == "lora_path"
    assert len(caught.value.message) < 400


def link_folder(root, good, secret):
    (root / "link").symlink_to(secret)
    return root / "link"


def link_parent(root, good, secret):
    (root / "link").symlink_to(secret.parent)
    return root / "link" / "secret"


def link_config(root, good, secret):
    (good / CONFIG).unlink()
    (good / CONFIG).symlink_to(secret / CONFIG)
    return good


def link_weights_by_way_of_links(root, good, secret):
    (good / WEIGHTS).unlink()
    (root / "hop").symlink_to(secret)
    (good / WEIGHTS).symlink_to("../hop/" + WEIGHTS)
    return good


def link_draft(root, good, secret):
    (good / "draft").symlink_to(secret)
    return good


def link_method(root, good, secret):
    (good / "draft").mkdir()
    (good / "draft" / "eagle3").symlink_to(secret)
    return good


def link_draft_file(root, good, secret):
    (good / "draft" / "eagle3").mkdir(parents=True)
    (good / "draft" / "eagle3" / WEIGHTS).symlink_to(secret / WEIGHTS)
    return good


@pytest.mark.parametrize(
    "make",
    [link_folder, link_parent, link_config, link_weights_by_way_of_links, link_draft, link_method, link_draft_file],
)
def test_links_that_leave(rules, root, good, secret, make):
    with pytest.raises(AdapterError, match="outside"):
        rules.check(str(make(root, good, secret)))


def test_links_inside(rules, root, good):
    blobs = root / "blobs"
    blobs.mkdir()
    shutil.move(good / WEIGHTS, blobs / "123")
    (good / WEIGHTS).symlink_to(blobs / "123")
    (root / "alias").symlink_to(good)
    assert rules.check(str(root / "alias")).path == str(good)


def test_links_into_another_root(root, good, secret):
    link = link_folder(root, good, secret)
    assert FolderRules(real_roots([str(root), str(secret)]), 1000).check(str(link)).path == str(secret.resolve())


@pytest.mark.parametrize(
    "name", [*ADAPTER_FILES, *TEXT_FILES, "draft", "draft/eagle3", f"draft/{WEIGHTS}", f"draft/medusa/{CONFIG}"]
)
@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
def test_special_files(rules, good, name, kind, monkeypatch):
    path = good / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(path.parent)  # a socket's path must be short
        socket.socket(socket.AF_UNIX).bind(path.name)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(
        AdapterError, match=rf"^lora_path: {name} of the adapter is a .*(no regular file|no folder|outside)"
    ):
        rules.check(str(good))


def test_sizes(rules, good):
    with open(good / "adapter_model.bin", "wb") as file:
        file.truncate(1 << 42)  # sparse: it takes no room on the disk
    with pytest.raises(AdapterError, match=r"adapter_model.bin .*more than 1000 bytes.* --max-lora-bytes"):
        rules.check(str(good))
    (good / "adapter_model.bin").unlink()
    (good / "optimizer.pt").write_bytes(b"x" * 5000)
    rules.check(str(good))
    (good / "draft").mkdir()
    for name in (*TEXT_FILES, f"draft/{WEIGHTS}"):
        (good / name).write_bytes(b"x" * 989)
        with pytest.raises(AdapterError, match=rf"{name} .*--max-lora-bytes"):
            rules.check(str(good))
        (good / name).unlink()


def test_loops_of_links(rules, good):
    (good / "draft").mkdir()
    (good / "draft" / "again").symlink_to(good / "draft")
    rules.check(str(good))
    (good / WEIGHTS).unlink()
    (good / WEIGHTS).symlink_to(WEIGHTS)
    with pytest.raises(AdapterError, match="is a link"):
        rules.check(str(good))


def test_a_broken_link_hides_no_other_file(rules, good):
    """A folder is refused when not all of it can be looked at."""
    (good / "adapter_a").symlink_to(good / "nothing")
    os.mkfifo(good / "adapter_model.bin")
    with pytest.raises(AdapterError):
        rules.check(str(good))


def swap_for_a_link(good, secret):
    good.rename(good.with_name("aside"))
    good.symlink_to(secret)


def swap_there_and_back(good, secret):
    swap_for_a_link(good, secret)
    good.unlink()
    good.with_name("aside").rename(good)


def swap_a_file(good, secret):
    (good / WEIGHTS).unlink()
    (good / WEIGHTS).symlink_to(secret / WEIGHTS)


def swap_a_file_there_and_back(good, secret):
    times = os.stat(good / WEIGHTS)
    (good / WEIGHTS).rename(good / "aside")
    (good / WEIGHTS).symlink_to(secret / WEIGHTS)
    (good / WEIGHTS).unlink()
    (good / "aside").rename(good / WEIGHTS)
    os.utime(good / WEIGHTS, ns=(times.st_atime_ns, times.st_mtime_ns))


def rewrite_with_the_old_time(good, secret):
    times = os.stat(good / WEIGHTS)
    (good / WEIGHTS).write_bytes(b"y" * 10)
    os.utime(good / WEIGHTS, ns=(times.st_atime_ns, times.st_mtime_ns))


def add_draft(good, secret):
    (good / "draft").mkdir()


def remove(good, secret):
    shutil.rmtree(good)


@pytest.mark.parametrize(
    "change",
    [swap_for_a_link, swap_there_and_back, swap_a_file, swap_a_file_there_and_back, rewrite_with_the_old_time,
     add_draft, remove],
)  # fmt: skip
def test_exchanges_while_it_is_read(rules, good, secret, change):
    checked = rules.check(str(good))
    change(good, secret)
    with pytest.raises(AdapterError):
        rules.check_again(checked)


# --- the hub's cache --------------------------------------------------------------------------------------------------


def test_a_snapshot_reads_blobs_of_its_repository_alone(tmp_path):
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = make_adapter(repository / "snapshots" / "abc")
    blob, foreign = repository / "blobs" / "1", tmp_path / "hub" / "models--org--other" / "blobs" / "1"
    for file in (blob, foreign):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"content")
    folder = AdapterFolder(str(snapshot), real_roots([str(snapshot)]))
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    assert folder.read("tokenizer.json", 100) == b"content"
    (snapshot / "chat_template.jinja").symlink_to("../../../models--org--other/blobs/1")
    with pytest.raises(AdapterError, match=r"^chat_template\.jinja .* is a link that leads outside"):
        folder.read("chat_template.jinja", 100)


# --- folders of adapters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "valid"),
    [("sql", True), ("a+b:0.5", True), ("имя", True), ("", False), (".", False), ("..", False), (".hidden", False),
     ("a/b", False), ("/etc", False), ("a\0", False), ("a\n", False), ("x" * 256, False), ("a\u202eb", False)],
)  # fmt: skip
def test_names_of_folders(name, valid):
    assert valid_folder_name(name) is valid


def test_a_directory(root, good, secret):
    directory = AdapterDirectory(str(root), (), 1000)
    (root / "no adapter").mkdir()
    (root / "file").touch()
    make_adapter(root / ".hidden")
    assert directory.adapters() == {"good": str(good)}
    assert directory.resolve("good", None) == str(good)
    assert directory.resolve("good", "s3://x") is None, "what has a source is not meant"
    for name in ("no adapter", "file", "missing", ".hidden", "../secret", "good/../good", ""):
        assert directory.resolve(name, None) is None
    link_folder(root, good, secret)
    with pytest.raises(AdapterError, match="outside") as caught:
        directory.resolve("link", None)
    assert caught.value.param == "model"
    assert AdapterDirectory(str(root), (str(secret),), 1000).resolve("link", None) == str(secret.resolve())
    assert AdapterDirectory(str(root / "gone"), (), 1000).adapters() == {}


def test_new_and_removed_adapters_are_seen(root, good):
    now = 0.0
    sources = AdapterSources(SourceOptions(directories=(str(root), str(root.parent))), clock=lambda: now)

    async def names() -> list[str]:
        return sorted(await sources.in_directories())

    async def run() -> None:
        nonlocal now
        assert await names() == ["good"]
        assert await sources.find("new") is None
        make_adapter(root / "new")
        make_adapter(root.parent / "good")
        assert await sources.find("new") is None, "for a moment what is known holds"
        now = 2.0
        assert (await sources.find("new")).path == str(root / "new")
        assert (await sources.find("good")).path == str(good), "the first directory wins"
        assert await names() == ["good", "new"]
        assert (await sources.in_directories())["good"] == str(good)
        shutil.rmtree(root / "new")
        now = 4.0
        assert await sources.find("new") is None
        assert await names() == ["good"]

    asyncio.run(run())
