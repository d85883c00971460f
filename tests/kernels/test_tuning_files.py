"""Files of kernel configs: written ones are read again, broken ones refused by name, and each device finds its own."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.tuning import KINDS, VARIABLE, Configs, KernelConfigError, bucket, check_source, tuned, using
from outrider.kernels.tuning import store as store_module
from outrider.kernels.tuning.configs import ActAndMulConfig, KernelConfig, RMSNormConfig
from outrider.kernels.tuning.files import ConfigEntry, ConfigFile, DeviceName, Times, parse_configs, read_configs
from outrider.kernels.tuning.store import SHIPPED, find_configs

H200, H100 = DeviceName("NVIDIA H200", (9, 0)), DeviceName("NVIDIA H100 80GB HBM3", (9, 0))
A100 = DeviceName("NVIDIA A100-SXM4-80GB", (8, 0))
NORM, OTHER = RMSNormConfig(4, 16), RMSNormConfig(1, 8)


def config_values(kind: type[KernelConfig]) -> st.SearchStrategy[KernelConfig]:
    fields = {}
    for field in dataclasses.fields(kind):
        values = range(field.metadata["least"], field.metadata["most"] + 1)
        if field.metadata["power"]:
            values = [1 << n for n in range(20) if 1 << n in values]
        fields[field.name] = st.sampled_from(values)
    return st.builds(kind, **fields)


def config_entries(kernel: str) -> st.SearchStrategy[dict]:
    kind = KINDS[kernel]
    shapes = st.tuples(*(st.integers(0, 1 << 20) for _ in kind.shape)).map(lambda shape: (kernel, shape))
    micros = st.floats(0, 1e9, allow_nan=False)
    times = st.dictionaries(st.text(max_size=20), st.builds(Times, micros, micros), max_size=3)
    return st.dictionaries(shapes, st.builds(ConfigEntry, config_values(kind), times), max_size=4)


FILES = st.builds(
    ConfigFile,
    st.builds(DeviceName, st.text(max_size=40), st.tuples(st.integers(0, 20), st.integers(0, 9))),
    st.text(max_size=10),
    st.dates().map(str),
    st.sampled_from(sorted(KINDS)).flatmap(config_entries),
)


@given(FILES)
def test_written_files_are_parsed_back(file: ConfigFile) -> None:
    assert parse_configs(file.to_json(), "x") == file


def a_file(device: DeviceName = H200, config: KernelConfig = NORM) -> ConfigFile:
    return ConfigFile(device, "3.6.0", "2026-01-31", {("rms_norm", (4096, 2)): ConfigEntry(config, {"w": Times(2, 1)})})


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / H200.file_name
    a_file().write(path)
    a_file(config=OTHER).write(path)
    assert read_configs(path) == a_file(config=OTHER)
    assert [found.name for found in path.parent.iterdir()] == ["nvidia-h200.json"]


def changed(change: Callable[[dict], object]) -> str:
    data = json.loads(a_file().to_json())
    change(data)
    return json.dumps(data)


def norm_entry(data: dict) -> dict:
    return data["kernels"]["rms_norm"][0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "the file: must be an object, got list"),
        (changed(lambda data: data.update(version=2)), "version: must be 1, got 2"),
        (changed(lambda data: data.pop("triton")), "triton: is missing"),
        (changed(lambda data: data.update(cuda="13")), "cuda: unknown field"),
        (changed(lambda data: data.update(date="soon")), "date: must be a date such as 2026-01-31, got 'soon'"),
        (changed(lambda data: data["device"].update(name=3)), "device.name: must be a string, got 3"),
        (changed(lambda data: data["device"].update(capability=[9])), "device.capability: must be two integers"),
        (changed(lambda data: data["kernels"].update(conv=[])), "kernels.conv: no such kernel; there are attention"),
        (changed(lambda data: data["kernels"].update(act_and_mul={})), "kernels.act_and_mul: must be a list, got dict"),
        (
            changed(lambda data: norm_entry(data)["shape"].update(width="8")),
            "kernels.rms_norm[0].shape.width: must be an integer of at least 0, got '8'",
        ),
        (changed(lambda data: norm_entry(data)["shape"].update(x=1)), "kernels.rms_norm[0].shape.x: unknown field"),
        (
            changed(lambda data: norm_entry(data)["config"].update(num_warps=3)),
            "kernels.rms_norm[0].config.num_warps: must be a power of two from 1 to 32, got 3",
        ),
        (
            changed(lambda data: norm_entry(data)["config"].update(rows=True)),
            "kernels.rms_norm[0].config.rows: must be a power of two from 1 to 128, got True",
        ),
        (changed(lambda data: norm_entry(data)["config"].pop("rows")), "kernels.rms_norm[0].config.rows: is missing"),
        (
            changed(lambda data: data["kernels"]["rms_norm"].append(norm_entry(data))),
            "kernels.rms_norm[1].shape: is a duplicate",
        ),
        (
            changed(lambda data: norm_entry(data)["microseconds"]["w"].update(tuned=-1)),
            "kernels.rms_norm[0].microseconds.w.tuned: must be a number of at least 0, got -1",
        ),
    ],
)
def test_invalid_files_are_refused_by_file_and_field(text: str, message: str) -> None:
    with pytest.raises(KernelConfigError) as raised:
        parse_configs(text, "h.json")
    assert str(raised.value).startswith(f"h.json: {message}")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for name in ("missing.json", "binary.json"):
        with pytest.raises(KernelConfigError, match=f"{name}: cannot be read"):
            read_configs(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(KernelConfigError, match="no file of kernel configs in this folder"):
        check_source(str(tmp_path / "empty"))
    with pytest.raises(KernelConfigError, match="binary"):
        check_source(str(tmp_path))


def norm_for(device: DeviceName, named: Path | None, shipped: Path) -> RMSNormConfig:
    return find_configs(device, None if named is None else str(named), shipped).get(RMSNormConfig(1, 1), 4096, 2)


def test_a_device_finds_its_own_file_then_its_capabilitys_then_none(tmp_path: Path) -> None:
    default = RMSNormConfig(1, 1)
    assert norm_for(H200, None, tmp_path) == default
    a_file(H100, OTHER).write(tmp_path / H100.file_name)
    assert norm_for(H200, None, tmp_path) == OTHER
    a_file(H200, NORM).write(tmp_path / H200.file_name)
    assert norm_for(H200, None, tmp_path) == NORM
    assert norm_for(H100, None, tmp_path) == OTHER
    assert norm_for(A100, None, tmp_path) == default
    assert find_configs(H200, None, tmp_path).source == tmp_path / "nvidia-h200.json"


def test_a_named_file_replaces_the_shipped_one(tmp_path: Path) -> None:
    shipped, mine = tmp_path / "shipped", tmp_path / "mine"
    a_file(H200, NORM).write(shipped / H200.file_name)
    a_file(H100, OTHER).write(mine / "any-name.json")
    assert norm_for(H200, mine, shipped) == OTHER
    assert norm_for(H200, mine / "any-name.json", shipped) == OTHER
    with pytest.raises(KernelConfigError, match=r"any-name.json: device.capability: is 9.0, this device .* has 8.0"):
        find_configs(A100, str(mine / "any-name.json"), shipped)


def test_files_of_other_device_kinds_are_ignored(tmp_path: Path) -> None:
    a_file(A100).write(tmp_path / H200.file_name)
    assert norm_for(H200, None, tmp_path) == RMSNormConfig(1, 1)


def test_shapes_and_kernels_are_kept_apart() -> None:
    configs = Configs({("rms_norm", (4096, 2)): NORM})
    assert configs.get(OTHER, 4096, 4) == OTHER
    assert configs.get(ActAndMulConfig(1024, 4), 4096, 2) == ActAndMulConfig(1024, 4)


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setattr(store_module, "device_name", lambda device: H200)
    store_module._configs_of.cache_clear()
    yield torch.device("cuda", 0)
    store_module._configs_of.cache_clear()


def test_kernels_of_a_device_read_what_the_variable_names(
    on_an_h200: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_file().write(tmp_path / "x.json")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "x.json"))
    assert tuned(on_an_h200, OTHER, 4096, 2) == NORM
    assert tuned(torch.device("cpu"), OTHER, 4096, 2) == OTHER


def test_a_broken_file_stops_the_kernels(
    on_an_h200: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    with pytest.raises(KernelConfigError, match="nothing: cannot be read"):
        tuned(on_an_h200, OTHER, 4096, 2)


def test_configs_in_use_end_with_their_block(on_an_h200: torch.device) -> None:
    with using(Configs({("rms_norm", (64, 2)): NORM})):
        assert tuned(torch.device("cpu"), OTHER, 64, 2) == tuned(on_an_h200, OTHER, 64, 2) == NORM
    assert tuned(torch.device("cpu"), OTHER, 64, 2) == OTHER


def test_every_shipped_file_is_of_its_device() -> None:
    for path in SHIPPED.glob("*.json"):
        assert read_configs(path).device.file_name == path.name


def test_sizes_are_tuned_at_the_next_power_of_two() -> None:
    assert [bucket(n) for n in (0, 1, 2, 3, 64, 65, 128256)] == [1, 1, 2, 4, 64, 128, 131072]
