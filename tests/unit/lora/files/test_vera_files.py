"""Files of VeRA adapters that are broken, or do not fit: refused before a tensor is read."""

import pytest
import torch

from outrider.lora.files.kinds import KINDS
from outrider.lora.files.tensor_file import TensorFile
from outrider.lora.files.tensor_keys import ModuleShape
from outrider.platform.core.errors import AdapterError

from ..conftest import SIZES, admitted, module, vera_state, write_adapter
from ..reading import Both

A, B = "base_model.vera_A", "base_model.vera_B"
Q = f"base_model.model.{module(0, 'q_proj')}"


def write_vera(folder, state=None, **config):
    return write_adapter(folder, vera_state() if state is None else state, **{"peft_type": "VERA", **config})


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("middle", ["", ".default"])
def test_rank_rows_are_the_products(tmp_path, binary, middle):
    state = vera_state(middle=middle)
    path = write_vera(tmp_path / "x", state, binary=binary, lora_alpha=100)
    with Both() as both:
        adapter = both.by_thread(path)
    assert adapter.rows == 4
    assert len(adapter.target.modules()) == 2 * len(SIZES)
    for name, weights in adapter.target.modules().items():
        key = f"base_model.model.{name}"
        in_features, out_features = SIZES[name.rpartition(".")[2]]
        a = state[f"{key}.vera_lambda_d{middle}"][:, None] * state[f"{A}{middle}"][:, :in_features]
        b = state[f"{key}.vera_lambda_b{middle}"][:, None] * state[f"{B}{middle}"][:out_features]
        assert torch.equal(weights.a, a)
        assert torch.equal(weights.b, b.t())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_of_other_dtypes_give_the_rows_of_their_values(make_manager, tmp_path, dtype):
    state = {key: tensor.to(dtype) for key, tensor in vera_state().items()}
    exact = {key: tensor.float() for key, tensor in state.items()}
    manager = make_manager()
    one = admitted(manager, "one", write_vera(tmp_path / "one", state), "1")
    other = admitted(manager, "other", write_vera(tmp_path / "other", exact), "2")
    assert one.adapter.digest == other.adapter.digest
    for request in (one, other):
        manager.forget(request)


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({A: None}, {}, "vera_A is missing: a VeRA adapter is served only with save_projection=True"),
        ({B: None}, {}, "vera_B is missing"),
        ({A: None, B: None}, {"save_projection": False}, "adapter_config.json: save_projection=False is not served"),
        ({A: None, B: None}, {"save_projection": None}, "vera_A is missing: .* save_projection=True"),
        ({f"{A}.default": torch.ones(4, 24)}, {}, "two tensors for the same weight"),
        ({f"{Q}.vera_lambda_d.default": torch.ones(4)}, {}, "two tensors for the same weight"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 16)}, {}, "is a tensor of LoRA"),
        ({A: torch.ones(24)}, {}, r"must be \[r, in\] and \[out, r\], got \[24\]"),
        ({A: torch.ones(5, 24)}, {}, r"must be \[r, in\] and \[out, r\], got \[5, 24\] and \[16, 4\]"),
        ({A: torch.ones(4, 20)}, {}, r"down_proj.vera_lambda_d \[4\] for 24 inputs does not fit vera_A \[4, 20\]"),
        ({B: torch.ones(15, 4)}, {}, r"vera_lambda_b \[16\] does not fit vera_B \[15, 4\]"),
        ({f"{Q}.vera_lambda_d": torch.ones(3)}, {}, r"q_proj.vera_lambda_d \[3\] .* does not fit vera_A \[4, 24\]"),
        ({f"{Q}.vera_lambda_b": torch.ones(2, 2)}, {}, r"q_proj.vera_lambda_b \[2, 2\] does not fit vera_B"),
        ({f"{Q}.vera_lambda_b": torch.ones(15)}, {}, r"wrong shape: lora_B is \[15, 4\], expected \[16, 4\]"),
        ({f"{Q}.vera_lambda_b": None}, {}, "q_proj: lora_B is missing"),
        ({f"{Q}x.vera_lambda_b": torch.ones(4)}, {}, "no linear module 'model.layers.0.self_attn.q_projx'"),
        ({A: torch.ones(4, 24, dtype=torch.int8)}, {}, "vera_A has dtype torch.int8, which is not served"),
        ({f"{Q}.vera_lambda_b": torch.full((16,), float("nan"))}, {}, "q_proj: lora_B is not finite"),
        ({}, {"r": 3}, "rank 3 by the configuration"),
        ({}, {"r": "many"}, "r must be a positive integer"),
        ({}, {"use_novelty": True}, "'use_novelty': True is not known"),
        ({}, {"use_dora": True}, "'use_dora': True is not known"),
        ({}, {"peft_type": "LORA"}, "is no LoRA weight"),
    ],
)
def test_files_that_do_not_fit_are_refused(make_manager, tmp_path, changes, config, message):
    state = {key: tensor for key, tensor in (vera_state() | changes).items() if tensor is not None}
    with pytest.raises(AdapterError, match=message):
        admitted(make_manager(), "x", write_vera(tmp_path / "x", state, **config))


def test_a_rank_above_the_limit_is_refused_before_a_tensor_is_read(make_manager, tmp_path):
    with pytest.raises(AdapterError, match="rank 9 exceeds the limit max_lora_rank=8"):
        admitted(make_manager(), "x", write_vera(tmp_path / "x", vera_state(9), r=9))


def test_shared_matrices_are_read_once():
    state, reads = vera_state(), []

    def read(key):
        reads.append(key)
        return state[key]

    known = {module(layer, name): ModuleShape(*sizes) for layer in (0, 1) for name, sizes in SIZES.items()}
    view = KINDS["VERA"].tensors(TensorFile({key: tuple(tensor.shape) for key, tensor in state.items()}, read), known)
    assert not reads
    for key, shape in view.shapes.items():
        assert tuple(view.read(key).shape) == shape
    assert sorted(reads) == sorted(state)
