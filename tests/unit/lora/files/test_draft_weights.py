"""Draft weights of an adapter: their folders, and that both parts are one object."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from outrider.lora.device.sites import AdapterHooks
from outrider.lora.files.tensor_keys import ModuleShape
from outrider.lora.manager import AdapterManager
from outrider.platform.core.config import LoRAConfig
from outrider.platform.core.errors import AdapterError, InvalidRequestError
from outrider.platform.core.lora_request import LoRARequest

from ..conftest import SIZES, admitted, make_linears, make_request, module, tensors, write_adapter
from ..parsing import DraftTarget, parse

KNOWN = {module(layer, name): ModuleShape(*sizes) for layer in (0, 1) for name, sizes in SIZES.items()}
DRAFTER = DraftTarget("draft_model", {name: shape for name, shape in KNOWN.items() if "layers.0" in name})


def read(path, draft=DRAFTER, **options):
    return parse(str(path), KNOWN, max_rank=8, dtype=torch.float32, draft=draft, **options)


def write_both(folder, rank=4, draft_rank=4, where="draft", seed=0, draft_seed=1):
    write_adapter(folder, rank=rank, seed=seed)
    write_adapter(folder / where, tensors(draft_rank, seed=draft_seed, layers=(0,)), rank=draft_rank)
    return str(folder)


@pytest.fixture
def make_drafted():
    """Managers with a drafter of one layer, which keep the digests that they said are gone in `gone`."""
    made = []

    def make(**limits):
        gone = []
        config = LoRAConfig(**{"max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 8} | limits)
        hooks = AdapterHooks(draft_method="draft_model", draft_linears=make_linears(1), on_gone=gone.append)
        manager = AdapterManager(make_linears(), config, torch.float32, "cpu", hooks)
        manager.gone, manager.draft_linears = gone, hooks.draft_linears
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.check_integrity()
        manager.close()


def test_biases_of_the_draft_weights_alone_make_an_adapter_more_than_rank_rows(tmp_path, make_drafted):
    """Captured graphs have rank rows alone, the target's and the drafter's."""
    folder = write_both(tmp_path / "plain")
    state = tensors(4, layers=(0,))
    biases = {f"{key.removesuffix('weight')}bias": torch.ones(len(b)) for key, b in state.items() if "lora_B" in key}
    biased = write_adapter(tmp_path / "biased")
    write_adapter(tmp_path / "biased" / "draft", state | biases, lora_bias=True)
    manager = make_drafted()
    assert admitted(manager, "plain", folder, "1").adapter.is_plain
    assert not admitted(manager, "biased", biased, "2").adapter.is_plain


def test_both_parts_are_one_adapter(tmp_path):
    adapter = read(write_both(tmp_path, rank=4, draft_rank=6))
    assert set(adapter.modules) == set(KNOWN)
    assert set(adapter.draft_modules) == set(DRAFTER.modules)
    assert (adapter.rows, adapter.draft) == (6, "loaded")
    state = tensors(6, seed=1, layers=(0,))
    weights = adapter.draft_modules[module(0, "v_proj")]
    expected = state[f"base_model.model.{module(0, 'v_proj')}.lora_B.weight"].T * 8 / 6
    torch.testing.assert_close(weights.b, expected)


def test_the_digest_covers_draft_weights_only_if_they_are_used(tmp_path):
    one, other = write_both(tmp_path / "1"), write_both(tmp_path / "2", draft_seed=2)
    plain = write_adapter(tmp_path / "3")
    assert len({read(path).digest for path in (one, other, plain)}) == 3
    assert len({read(path, draft=None).digest for path in (one, other, plain)}) == 1
    assert read(one, draft=None).draft_modules == {}


def test_a_broken_part_of_the_drafter_is_no_part_of_the_content(tmp_path):
    path = write_both(tmp_path / "1")
    (tmp_path / "1" / "draft" / "adapter_model.safetensors").write_bytes(b"x")
    adapter = read(path)
    assert adapter.digest == read(write_adapter(tmp_path / "2")).digest
    assert "safetensors" in adapter.draft


@pytest.mark.parametrize(
    ("where", "draft"), [("draft/draft_model", "loaded"), ("draft", "loaded"), ("draft/eagle3", ""), ("drafts", "")]
)
def test_draft_weights_are_found_in_the_folder_draft(tmp_path, where, draft):
    assert read(write_both(tmp_path, where=where)).draft == draft


def test_the_folder_of_the_method_comes_first(tmp_path):
    path = write_both(tmp_path, draft_rank=2)
    write_adapter(tmp_path / "draft" / "draft_model", tensors(3, layers=(0,)), rank=3)
    assert len(read(path).draft_modules[module(0, "q_proj")].a) == 3


def test_named_draft_weights(tmp_path):
    path, draft = write_adapter(tmp_path / "x"), tmp_path / "y"
    write_adapter(draft, tensors(2, layers=(0,)), rank=2)
    assert read(path, draft_path=str(draft)).draft == "loaded"
    for bad in (tmp_path / "none", tmp_path / "x"):  # no folder; modules that the drafter does not have
        with pytest.raises(AdapterError, match=r"^draft_path: ") as error:
            read(path, draft_path=str(bad))
        assert error.value.param == "draft_path"
    assert read(path, draft=None, draft_path="/nowhere").draft == ""


def deep_folder(root, length):
    """A folder whose path has `length` characters, with the configuration if there is room for its name."""
    path = str(root)
    while length - len(path) > 250:
        path += "/" + "d" * 100
    path += "/" + "d" * (length - len(path) - 1)
    os.makedirs(path)
    if length + len("/adapter_config.json") < 4096:
        shutil.copy(root / "x" / "adapter_config.json", path)
    return path


@pytest.mark.parametrize(
    ("length", "exists"), [(300, False), (4070, True), (4085, True), (5000, False), (10**6, False)]
)
def test_paths_that_no_file_system_takes(tmp_path, length, exists):
    """Linux takes 4095 bytes: a folder's path may be short enough, and its files' not."""
    path = write_adapter(tmp_path / "x")
    long = deep_folder(tmp_path, length) if exists else "/" + "a" * length
    for options in ({"draft_path": long}, {"path": long}):
        with pytest.raises(AdapterError) as error:
            read(**{"path": path} | options)
        assert len(error.value.message) < 600
        assert error.value.param == ("draft_path" if "draft_path" in options else "lora_path")


def test_a_mismatch_names_the_model_that_it_is_about(tmp_path):
    adapter = write_adapter(tmp_path / "x", tensors(2, modules=("q_proj",)), rank=2)
    write_adapter(tmp_path / "x" / "draft", tensors(2, layers=(1,)), rank=2)
    assert "the drafter has no linear module 'model.layers.1" in read(adapter).draft
    with pytest.raises(AdapterError, match="the drafter has no linear module") as error:
        read(adapter, draft_path=str(tmp_path / "x" / "draft"))
    assert "served model" not in error.value.message
    state = {key: value[:, 1:] if "lora_A" in key else value for key, value in tensors(2, layers=(0,)).items()}
    write_adapter(tmp_path / "x" / "draft", {key: value.contiguous() for key, value in state.items()}, rank=2)
    assert "in the drafter)" in read(adapter).draft


def link_loop(path):
    path.symlink_to(path)


def unreadable_weights(path):
    (path / "adapter_config.json").mkdir(parents=True)


@pytest.mark.parametrize(
    ("where", "make", "reason"),
    [
        ("draft", os.mkdir, "holds no draft weights"),
        ("draft", link_loop, "cannot be read"),
        ("draft", lambda path: path.write_text("x"), "is a file, and no folder"),
        ("draft", lambda path: (path / "checkpoint-5").mkdir(parents=True), "holds no draft weights"),
        ("draft", unreadable_weights, "adapter_config.json of the adapter is a folder"),
        ("draft/draft_model", os.mkdir, "no adapter_config.json"),
        ("draft/draft_model", link_loop, "cannot be read"),
        ("draft/draft_model", lambda path: path.write_text("x"), "is a file, and no folder"),
    ],
)
def test_unusable_draft_weights_give_the_reason(tmp_path, where, make, reason):
    path = write_adapter(tmp_path)
    (tmp_path / where).parent.mkdir(exist_ok=True)
    make(tmp_path / where)
    assert reason in read(path).draft
    assert read(path).digest == read(path, draft=None).digest


def test_draft_path_of_a_lora_request():
    request = LoRARequest("x", 1, "/a", draft_path="/d")
    assert (request.lora_path, request.draft_path) == ("/a", "/d")
    assert LoRARequest("x", path="/a").draft_path is None
    request = LoRARequest("x", path=Path("/a"), draft_path=Path("/d"))
    assert (request.lora_path, request.draft_path) == ("/a", "/d")


def test_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    request = LoRARequest("x", path="~/a", draft_path=Path("~/d"))
    assert (request.lora_path, request.draft_path) == ("/home/me/a", "/home/me/d")
    assert LoRARequest("x", path="./~").path == "./~"


class BytesPath:
    def __fspath__(self):
        return b"/x"


@pytest.mark.parametrize("wrong", ["", 5, True, ["a"], {}, b"/x", BytesPath()])
@pytest.mark.parametrize("field", ["lora_path", "draft_path"])
def test_paths_are_strings_or_path_objects(field, wrong):
    with pytest.raises(InvalidRequestError) as error:
        LoRARequest("x", **{"lora_path": "/a", field: wrong})
    assert error.value.param == field


def test_names_cannot_forge_lines_of_the_log(make_drafted, tmp_path, caplog):
    path = write_both(tmp_path)
    state = {f"a\nb.{key}": value for key, value in tensors(2, layers=(0,)).items()}
    write_adapter(tmp_path / "draft", state, rank=2)
    make_drafted().catalog.load(LoRARequest("x\nERROR forged", path=path))
    (record,) = caplog.records
    assert "without its draft weights" in record.getMessage()
    assert "\n" not in record.getMessage()


def drafted_output(manager, request, features=24):
    """Delta of one token of ones from the drafter's adapter on down_proj."""
    batch = manager.prepare_draft([(request.adapter, 1)])
    y = torch.zeros(1, SIZES["down_proj"][1])
    if batch is not None:
        manager.draft_linears[1].lora.add(y, torch.ones(1, features), batch)
    return y


def test_rows_of_the_drafter_go_with_the_adapters(make_drafted, tmp_path):
    """One fits at a time: rows are written for both parts, and cleared before."""
    manager = make_drafted(max_loras=1, max_cpu_loras=1)
    paths = {
        "large": write_both(tmp_path / "large", rank=2, draft_rank=8),
        "small": write_both(tmp_path / "small", rank=8, draft_rank=1, draft_seed=5),
        "none": write_adapter(tmp_path / "none"),
    }
    expected = {}
    for name, path in paths.items():
        weights = read(path).draft_modules.get(module(0, "down_proj"))
        expected[name] = torch.ones(1, 24) @ weights.a.T @ weights.b if weights else torch.zeros(1, 16)
    for name in ("large", "none", "small", "large", "small", "none"):
        request = admitted(manager, name, paths[name])
        torch.testing.assert_close(drafted_output(manager, request), expected[name], atol=1e-4, rtol=1e-5)
        manager.forget(request)
    assert {info.name: (info.rank, info.rows, info.draft) for info in manager.catalog.list()} == {
        "large": (2, 8, "loaded"),
        "small": (8, 8, "loaded"),
        "none": (4, 4, ""),
    }


def test_requests_for_other_draft_weights_get_another_version(make_drafted, tmp_path):
    manager = make_drafted()
    path = write_both(tmp_path / "x")
    others = write_adapter(tmp_path / "y", tensors(2, layers=(0,)), rank=2)
    first = make_request("x", path)
    manager.resolve(first)
    second = make_request("x", path)
    second.lora = LoRARequest("x", path=path, draft_path=others)
    manager.resolve(second)
    assert first.adapter is not second.adapter
    while manager.admit(second) is not None:
        manager.wait(10)
    third = make_request("x", path)
    manager.resolve(third)
    assert second.adapter is third.adapter  # names no draft weights: those registered
    for request in (first, second, third):
        manager.forget(request)


@pytest.mark.parametrize("bad", ["/nowhere", "/" + "a" * 5000, "/a\0", "/\ud800"])
def test_a_request_with_a_wrong_draft_path_changes_nothing(make_drafted, tmp_path, bad):
    manager = make_drafted()
    before = manager.catalog.load(LoRARequest("x", path=write_both(tmp_path)), pinned=True)
    request = make_request("x", str(tmp_path))
    request.lora = LoRARequest("x", path=str(tmp_path), draft_path=bad)
    with pytest.raises(AdapterError, match=r"^draft_path: the folder .* does not exist$") as error:
        manager.resolve(request)
    assert (error.value.param, len(error.value.message) < 300) == ("draft_path", True)
    assert manager.catalog.list() == [before]


def test_changed_draft_weights_are_refused_once_out_of_memory(make_drafted, tmp_path):
    manager = make_drafted(max_loras=1, max_cpu_loras=1)
    path, other = write_both(tmp_path / "x"), write_both(tmp_path / "y", seed=3)
    request = admitted(manager, "x", path)
    before = request.adapter.digest
    manager.forget(request)
    manager.forget(admitted(manager, "y", other))
    write_adapter(tmp_path / "x" / "draft", tensors(5, layers=(0,)), rank=5)
    with pytest.raises(AdapterError, match="load_inplace"):
        admitted(manager, "x", path)
    manager.catalog.load(LoRARequest("x", path=path), load_inplace=True)
    request = admitted(manager, "x", path)
    assert request.adapter.digest not in (None, before)
    assert request.adapter.rows == 5
    manager.forget(request)
    assert before in manager.gone


def test_gone_is_reported_once_when_the_content_is_unused(make_drafted, tmp_path):
    manager = make_drafted()
    path = write_both(tmp_path / "x")
    twin = str(tmp_path / "twin")
    shutil.copytree(path, twin)
    request = admitted(manager, "x", path)
    digest = request.adapter.digest
    manager.catalog.load(LoRARequest("twin", path=twin))
    manager.catalog.unload("x")
    manager.forget(request)
    assert manager.gone == []  # the twin has it
    manager.catalog.unload("twin")
    assert manager.gone == [digest]
    request = admitted(manager, "x", path)
    manager.catalog.unload("x")
    manager.release(request)  # preempted: it will continue
    assert manager.gone == [digest]
    manager.forget(request)
    assert manager.gone == [digest, digest]
