"""Files of other tools, and malicious files."""

import json
import struct
import zipfile

import pytest
import torch
from safetensors.torch import save, save_file

from outrider.lora.device.dora import BaseWeight
from outrider.lora.device.sites import AdapterSites
from outrider.lora.files.row_conversion import StoredModule, convert_modules
from outrider.lora.files.tensor_header import InvalidFileError, read_header
from outrider.lora.files.tensor_keys import MAGNITUDE, A, B, ModuleShape
from outrider.platform.core.adapter_files import WEIGHT_FILES
from outrider.platform.core.errors import AdapterError

from ..conftest import SIZES, make_linears, module, tensors, write_adapter
from ..parsing import make_model, parse

Q = module(0, "q_proj")
PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def known():
    linears = make_linears()
    generator = torch.Generator().manual_seed(3)
    for linear in linears:
        for slot in linear.weight_slots().values():
            slot.load(torch.randn(slot.shape, generator=generator))
    return AdapterSites(linears, None, torch.float32, torch.device("cpu")).model.shapes


@pytest.fixture
def read(known):
    return lambda path: parse(str(path), known, max_rank=8, dtype=torch.float32)


def dora(rank=4, ending="", middle=""):
    """`tensors` with magnitudes."""
    state = tensors(rank, middle=middle)
    generator = torch.Generator().manual_seed(9)
    for layer in (0, 1):
        for name in SIZES:
            key = f"{PREFIX}{module(layer, name)}.lora_magnitude_vector{ending}"
            state[key] = torch.rand(SIZES[name][1], generator=generator) + 0.5
    return state


def renamed(state, rename):
    return {rename(key): tensor for key, tensor in state.items()}


# --- keys ---


@pytest.mark.parametrize(
    ("ending", "middle"),
    [("", ""), (".weight", ""), (".default", ".default"), (".default.weight", ".default"), (".a1.weight", ".a1")],
)
def test_keys_of_magnitudes(tmp_path, read, ending, middle):
    plain = read(write_adapter(tmp_path / "plain", dora(), use_dora=True))
    other = read(write_adapter(tmp_path / "other", dora(ending=ending, middle=middle), use_dora=True))
    assert other.digest == plain.digest
    assert all(weights.gain is not None for weights in other.modules.values())
    assert plain.digest != read(write_adapter(tmp_path / "without", tensors())).digest


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: f"_orig_mod.{key}",
        lambda key: f"module.{key}",
        lambda key: f"module._orig_mod.{key}",
        lambda key: key.replace(PREFIX, f"{PREFIX}_orig_mod."),
        lambda key: key.replace(".self_attn.", "._fsdp_wrapped_module.self_attn.").replace(
            ".mlp.", "._checkpoint_wrapped_module.mlp."
        ),
        lambda key: key.replace(f"{PREFIX}model.", f"{PREFIX}language_model.model."),
        lambda key: key.replace(f"{PREFIX}model.", f"{PREFIX}model.language_model."),
        lambda key: key.replace(f"{PREFIX}model.", PREFIX),
        lambda key: key.removeprefix(PREFIX),
        lambda key: key.replace(".weight", ".default.weight"),
    ],
    ids=["compiled", "ddp", "both", "compiled inside", "fsdp", "llava", "vlm", "inner", "bare", "named"],
)
def test_wrappers_around_the_model_mean_nothing(tmp_path, read, rename):
    plain = read(write_adapter(tmp_path / "plain"))
    assert read(write_adapter(tmp_path / "other", renamed(tensors(), rename))).digest == plain.digest


def test_patterns_are_about_the_names_that_peft_saw(tmp_path, read):
    """Names of an inner model have no "model." prefix, as an anchored pattern shows."""
    patterns = {"alpha_pattern": {r"^layers\.0\.self_attn\.q_proj": 80}}
    inner = read(
        write_adapter(tmp_path / "a", renamed(tensors(), lambda key: key.replace("model.layers", "layers")), **patterns)
    )
    outer = read(write_adapter(tmp_path / "b", **patterns))
    torch.testing.assert_close(inner.modules[Q].b, 10 * outer.modules[Q].b)


def test_the_same_module_under_two_names(tmp_path, read):
    state = tensors() | renamed(tensors(seed=1), lambda key: key.replace(PREFIX, "module."))
    with pytest.raises(AdapterError, match="two tensors for the same weight"):
        read(write_adapter(tmp_path, state))


# --- merged projections ---


def merged(rank=4):
    generator = torch.Generator().manual_seed(4)
    key = f"{PREFIX}model.layers.0.self_attn.qkv_proj"
    return {
        f"{key}.lora_A.weight": torch.randn(rank, 16, generator=generator),
        f"{key}.lora_B.weight": torch.randn(32, rank, generator=generator),
    }


def test_merged_projections_are_divided(tmp_path, read):
    adapter = read(write_adapter(tmp_path, merged(), alpha_pattern={"qkv_proj": 4, "q_proj": 100}))
    a, b = merged().values()
    assert list(adapter.modules) == [module(0, name) for name in ("q_proj", "k_proj", "v_proj")]
    for weights, rows in zip(adapter.modules.values(), b.split([16, 8, 8]), strict=True):
        torch.testing.assert_close(weights.a, a)
        torch.testing.assert_close(weights.b, rows.T)


def test_merged_projections_of_another_width(tmp_path, read):
    state = merged()
    key = next(key for key in state if "lora_B" in key)
    with pytest.raises(AdapterError, match=r"qkv_proj: base mismatch.*lora_B is \[31, 4\], expected \[32, 4\]"):
        read(write_adapter(tmp_path, state | {key: torch.zeros(31, 4)}))


def test_merged_and_unmerged_in_one_file(tmp_path, read):
    with pytest.raises(AdapterError, match=r"two adapters for .*k_proj"):
        read(write_adapter(tmp_path, merged() | tensors(modules=("k_proj",))))


# --- magnitudes ---


def test_gains_are_magnitudes_over_row_norms(tmp_path, read):
    linears = make_linears()
    generator = torch.Generator().manual_seed(3)
    base = {}
    for linear in linears:
        for name, slot in linear.weight_slots().items():
            base[name] = torch.randn(slot.shape, generator=generator)
    state = dora()
    adapter = read(write_adapter(tmp_path, state, use_dora=True, lora_alpha=6))
    for name, weights in adapter.modules.items():
        a, b, m = (
            state[f"{PREFIX}{name}.{part}"] for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
        )
        gain = m / (base[f"{name}.weight"] + 1.5 * b @ a).norm(dim=1)
        torch.testing.assert_close(weights.gain, gain, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights.b, 1.5 * (gain[:, None] * b).T)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda key, t: None if "0.self_attn.q_proj.lora_mag" in key else t, {}, "lora_magnitude_vector is missing"),
        (lambda key, t: t, {"use_dora": False}, "no use without use_dora"),
        (lambda key, t: t[:-1] if "magnitude" in key else t, {}, r"lora_magnitude_vector is \[15\], expected \[16\]"),
        (lambda key, t: t[None] if "magnitude" in key else t, {}, r"lora_magnitude_vector is \[1, 16\]"),
        (lambda key, t: t * float("nan") if "magnitude" in key else t, {}, "lora_magnitude_vector is not finite"),
        (lambda key, t: t.to(torch.int32) if "magnitude" in key else t, {}, "dtype torch.int32"),
    ],
    ids=["one is missing", "not configured", "short", "matrix", "nan", "integers"],
)
def test_magnitudes_that_are_refused(tmp_path, read, change, config, message):
    state = {key: changed for key, tensor in dora().items() if (changed := change(key, tensor)) is not None}
    with pytest.raises(AdapterError, match=message):
        read(write_adapter(tmp_path, state, **{"use_dora": True} | config))


def test_a_row_without_any_weight_has_no_gain(tmp_path, known):
    """A magnitude over a norm of zero: PEFT computes NaN."""
    linears = make_linears()
    for linear in linears:
        for slot in linear.weight_slots().values():
            slot.load(torch.zeros(slot.shape))
    modules = AdapterSites(linears, None, torch.float32, torch.device("cpu")).model.shapes
    state = {key: tensor * ("lora_B" not in key) for key, tensor in dora().items()}
    with pytest.raises(AdapterError, match="lora_magnitude_vector is not finite"):
        parse(write_adapter(tmp_path, state, use_dora=True), modules, max_rank=8, dtype=torch.float32)


# --- dtypes ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("binary", [False, True])
def test_floats_are_read_as_they_are(tmp_path, read, dtype, binary):
    state = {key: tensor.to(dtype) for key, tensor in tensors().items()}
    adapter = read(write_adapter(tmp_path, state, binary=binary))
    torch.testing.assert_close(adapter.modules[Q].a, state[f"{PREFIX}{Q}.lora_A.weight"].float(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64, torch.bool])
@pytest.mark.parametrize("binary", [False, True])
def test_other_dtypes_are_refused_by_name(tmp_path, read, dtype, binary):
    state = {key: tensor.to(dtype) for key, tensor in tensors().items()}
    with pytest.raises(AdapterError, match=f"lora_A has dtype {dtype}"):
        read(write_adapter(tmp_path, state, binary=binary))


# --- .bin ---


def test_the_old_format_of_torch_save(tmp_path, read):
    path = write_adapter(tmp_path / "a", binary=True)
    old = write_adapter(tmp_path / "b", binary=True)
    torch.save(tensors(), tmp_path / "b" / WEIGHT_FILES[1], _use_new_zipfile_serialization=False)
    assert read(old).digest == read(path).digest


def test_parameters_that_still_want_gradients(tmp_path, read):
    state = {key: torch.nn.Parameter(tensor) for key, tensor in tensors().items()}
    assert read(write_adapter(tmp_path / "a", state, binary=True)).digest == read(write_adapter(tmp_path / "b")).digest


def test_compressed_pickles_are_not_unpacked(tmp_path, read):
    path = write_adapter(tmp_path, binary=True)
    file = tmp_path / WEIGHT_FILES[1]
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(AdapterError, match="is compressed"):
        read(path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(4, 16, device="meta"),
        torch.eye(4, 16).to_sparse(),
        torch.quantize_per_tensor(torch.rand(4, 16), 0.1, 0, torch.qint8),
    ],
    ids=["meta", "sparse", "quantized"],
)
@pytest.mark.filterwarnings("ignore:.*quantiz.*", "ignore:TypedStorage")
def test_tensors_that_are_none(tmp_path, read, tensor):
    with pytest.raises(AdapterError, match=r"adapter_model\.bin"):
        read(write_adapter(tmp_path, tensors() | {f"{PREFIX}{Q}.lora_A.weight": tensor}, binary=True))


@pytest.mark.parametrize("cut", [0, 1, 10, 500, 3000])
def test_a_cut_pickle(tmp_path, read, cut):
    path = write_adapter(tmp_path, binary=True)
    file = tmp_path / WEIGHT_FILES[1]
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(AdapterError, match=r"adapter_model\.bin of the adapter cannot be read"):
        read(path)


# --- safetensors ---


def safetensors(header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


HALF_A_CHARACTER = {"\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
SLOW_PRODUCT = {"x": {"dtype": "F32", "shape": [2**62] * 20_000, "data_offsets": [0, 4]}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        safetensors(b"{}", size=2**63),
        safetensors(b"{}", size=10**9),
        safetensors(b"{}", size=3),
        safetensors(b"[" * 10_000),
        safetensors(
            {f"{PREFIX}{Q}.lora_A.weight": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, b"1234"
        ),
        safetensors(
            {f"{PREFIX}{Q}.lora_A.weight": {"dtype": "F32", "shape": [4, 16], "data_offsets": [0, 256]}}, b"1234"
        ),
        safetensors(
            {f"{PREFIX}{Q}.lora_A.weight": {"dtype": "F32", "shape": [4, 16], "data_offsets": [-1, 255]}}, b"1" * 256
        ),
        safetensors({f"{PREFIX}{Q}.lora_A.weight": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        safetensors(b"\xff\xfe"),
        safetensors([]),
        safetensors({"x": 1}),
        safetensors({"x": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        safetensors({"x": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, b"1234"),
        safetensors({"x": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"1234"),
        safetensors({"x": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"1234"),
        safetensors({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, b"1234"),
        safetensors({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"),
        safetensors({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "xy"}, b"12345678"),
        safetensors({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345678"),
        safetensors(HALF_A_CHARACTER, b"1234"),
        safetensors(SLOW_PRODUCT, b"1234"),
    ],
    ids=lambda content: content[8:].decode("latin-1")[:60] or "empty",
)
def test_headers_that_lie(tmp_path, read, content):
    path = write_adapter(tmp_path)
    (tmp_path / WEIGHT_FILES[0]).write_bytes(content)
    with pytest.raises(AdapterError, match="not a valid safetensors file"):
        read(path)


@pytest.mark.parametrize("header", [HALF_A_CHARACTER, SLOW_PRODUCT], ids=["half a character", "slow product"])
def test_headers_that_safetensors_refuses_are_refused(header):
    """The file may change after it was checked."""
    with pytest.raises(InvalidFileError, match=r"no Unicode text|more elements"):
        read_header(json.dumps(header).encode(), 4)


def test_a_header_that_would_take_long_to_parse_is_not_parsed(tmp_path, read):
    path = write_adapter(tmp_path)
    (tmp_path / WEIGHT_FILES[0]).write_bytes(safetensors(b" " * (20 << 20)))
    with pytest.raises(AdapterError, match="claims 20971520 bytes; the limit is"):
        read(path)


def test_a_key_twice_in_the_header(tmp_path, read):
    path = write_adapter(tmp_path)
    content = save({"x.lora_A.weight": torch.ones(4), "y.lora_A.weight": torch.ones(4)})
    (tmp_path / WEIGHT_FILES[0]).write_bytes(content.replace(b'"y.', b'"x.'))
    with pytest.raises(AdapterError):
        read(path)


def test_several_files_are_refused_by_name(tmp_path, read):
    path = write_adapter(tmp_path)
    (tmp_path / WEIGHT_FILES[0]).rename(tmp_path / "adapter_model-00001-of-00002.safetensors")
    (tmp_path / f"{WEIGHT_FILES[0]}.index.json").write_text("{}")
    with pytest.raises(
        AdapterError, match=r"in several files \(adapter_model\.safetensors\.index\.json\) is not served"
    ):
        read(path)


@pytest.mark.parametrize("rank", [0, -1, 2**31, 9])
def test_ranks_outside_the_limits(tmp_path, read, rank):
    path = write_adapter(tmp_path / "a", tensors(4), r=rank)
    with pytest.raises(AdapterError, match=r"r must be a positive|exceeds the limit max_lora_rank=8"):
        read(path)
    with pytest.raises(AdapterError, match=r"rank_pattern|exceeds the limit"):
        read(write_adapter(tmp_path / "b", tensors(4), rank_pattern={"v_proj": rank}))


def test_matrices_without_rows(tmp_path, read):
    state = tensors() | {
        f"{PREFIX}{Q}.lora_A.weight": torch.zeros(0, 16),
        f"{PREFIX}{Q}.lora_B.weight": torch.zeros(16, 0),
    }
    write_adapter(tmp_path)
    save_file(state, tmp_path / WEIGHT_FILES[0])
    with pytest.raises(AdapterError, match=r"lora_[AB] is \[(0, 16|16, 0)\]"):
        read(tmp_path)


# --- digests ---


def test_the_digest_of_dora_is_of_b_before_it_is_rounded():
    """The gain and the served adapter are, too."""
    base = torch.randn(64, 16)
    a, b, magnitude = torch.randn(4, 16), torch.randn(64, 4), torch.rand(64) + 1.0
    other = b * (1.0 + 1e-3 * torch.randn(64, 4))
    other = torch.where((2.0 * other).bfloat16() == (2.0 * b).bfloat16(), other, b)
    weight = BaseWeight(lambda x: (base.square().sum(1), x.float() @ base.t()))
    model = make_model({"m": ModuleShape(16, 64, base=weight)}, torch.bfloat16)

    def served(b):
        stored, tensors = StoredModule("m", 4, 16, 64, 2.0, None, 0), {A: a, B: b, MAGNITUDE: magnitude}
        packed, digest = convert_modules([stored], lambda _: tensors, model)
        return packed.modules()["m"].b, digest

    (one, digest), (two, other_digest) = served(b), served(other)
    assert not torch.equal(one, two)
    assert digest != other_digest
    assert served(b)[1] == digest
