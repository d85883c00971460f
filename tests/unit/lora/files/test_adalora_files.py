"""Files of AdaLoRA adapters that are broken, or do not fit."""

import pytest
import torch

from outrider.platform.core.errors import AdapterError

from ..conftest import SIZES, adalora_state, admitted, level, module, write_adapter
from ..reading import Both

Q = f"base_model.model.{module(0, 'q_proj')}"
Q_PATTERN = f"{module(0, 'q_proj')}.lora_E"


def write_adalora(folder, state=None, **config):
    state = adalora_state() if state is None else state
    return write_adapter(folder, state, **{"peft_type": "ADALORA", "init_r": 4, **config})


def pruned(state, rows, middle=""):
    """The tensors after PEFT has pruned the ranks of q_proj but for `rows`."""
    a, b, e = (f"{Q}.lora_{part}{middle}" for part in "ABE")
    return state | {a: state[a][rows], b: state[b][:, rows].contiguous(), e: state[e][rows]}


def no_rows(name, in_features=16):
    """Tensors of a module without rows."""
    shapes = {"A": (0, in_features), "B": (16, 0), "E": (0, 1)}
    return {f"{name}.lora_{part}": torch.ones(shape) for part, shape in shapes.items()}


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("middle", ["", ".default"])
@pytest.mark.parametrize("wrapper", ["", "_orig_mod."])
def test_rank_rows_are_the_products(tmp_path, binary, middle, wrapper):
    mask = [True, False, False, True]
    plain = adalora_state(middle=middle)
    state = {f"{wrapper}{key}": tensor for key, tensor in pruned(plain, mask, middle).items()}
    pattern = {f"{wrapper}{Q_PATTERN}{middle}": mask, f"{module(1, 'q_proj')}.lora_E{middle}": [True] * 4}
    options = {"r": 100, "lora_alpha": 6, "rank_pattern": pattern}
    with Both() as both:
        adapter = both.by_thread(write_adalora(tmp_path / "x", state, binary=binary, **options))
    assert len(adapter.target.modules()) == 2 * len(SIZES)
    for name, weights in adapter.target.modules().items():
        key = f"{wrapper}base_model.model.{name}.lora"
        torch.testing.assert_close(weights.a, state[f"{key}_A{middle}"] * state[f"{key}_E{middle}"])
        # Of modules that have lost ranks too: alpha / (init_r + 1e-5).
        torch.testing.assert_close(weights.b, state[f"{key}_B{middle}"].t() * (6 / (4 + 1e-5)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_of_other_dtypes_give_the_rows_of_their_values(make_manager, tmp_path, dtype):
    state = {key: tensor.to(dtype) for key, tensor in adalora_state().items()}
    exact = {key: tensor.float() for key, tensor in state.items()}
    manager = make_manager()
    one = admitted(manager, "one", write_adalora(tmp_path / "one", state), "1")
    other = admitted(manager, "other", write_adalora(tmp_path / "other", exact), "2")
    assert one.adapter.digest == other.adapter.digest
    for request in (one, other):
        manager.forget(request)


def test_modules_of_rank_zero_have_no_rows(tmp_path):
    state = pruned(adalora_state(), [False] * 4)
    with Both() as both:
        adapter = both.by_thread(write_adalora(tmp_path / "x", state, rank_pattern={Q_PATTERN: [False] * 4}))
    assert len(adapter.target.modules()) == 2 * len(SIZES) - 1
    assert module(0, "q_proj") not in adapter.target.modules()


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        *(({f"{Q}.lora_{part}": None}, {}, f"q_proj: lora_{part} is missing") for part in "ABE"),
        ({f"{Q}.lora_E.default": torch.ones(4, 1)}, {}, "two tensors for the same weight"),
        ({f"{Q}.lora_E": torch.ones(4)}, {}, r"must be .* got \[4, 16\], \[16, 4\] and \[4\]"),
        ({f"{Q}.lora_E": torch.ones(3, 1)}, {}, r"must be .* and \[3, 1\]"),
        ({f"{Q}.lora_E": torch.ones(0, 1)}, {}, r"must be .* and \[0, 1\]"),
        ({f"{Q}.lora_A": torch.ones(4)}, {}, r"must be .* got \[4\]"),
        ({f"{Q}.lora_B": torch.ones(16, 3)}, {}, r"must be .* \[16, 3\]"),
        ({f"{Q}.lora_A": torch.ones(4, 15)}, {}, r"wrong shape: lora_A is \[4, 15\]"),
        ({f"{Q}.lora_embedding_A": torch.ones(4, 16)}, {}, "is not an AdaLoRA tensor"),
        ({f"{Q}.lora_magnitude_vector": torch.ones(16)}, {}, "is not an AdaLoRA tensor"),
        ({f"{Q}.lora_E": torch.ones(4, 1, dtype=torch.int8)}, {}, "has dtype torch.int8, which is not served"),
        ({f"{Q}.lora_E": torch.full((4, 1), float("nan"))}, {}, "q_proj: lora_A is not finite"),
        ({}, {"peft_type": "LORA"}, "is no LoRA weight"),
        ({}, {"use_novelty": True}, "'use_novelty': True is not known"),
        *(({}, {"init_r": r}, "init_r must be a positive integer") for r in (None, "many", 2.5, True, 0, 2**31)),
        *(({}, {"lora_alpha": x}, "lora_alpha must be a positive") for x in (None, [], 0, 1e300, float("nan"))),
        ({}, {"lora_alpha": 5e-324}, "lora_alpha must be a positive number"),
        ({}, {"init_r": 3}, "rank 3 by the configuration"),
        ({}, {"init_r": 9}, "rank 9 exceeds the limit max_lora_rank=8"),
        ({}, {"rank_pattern": [1]}, r"rank_pattern=\[1\] is not served"),
        ({}, {"rank_pattern": {Q_PATTERN: 3}}, "rank_pattern=.* is not served"),
        ({}, {"rank_pattern": {Q_PATTERN: [1, 0]}}, "rank_pattern=.* is not served"),
        ({}, {"rank_pattern": {Q_PATTERN: [True, False, False, False]}}, "rank 1 by the configuration"),
        ({}, {"rank_pattern": {Q_PATTERN: [True]}}, r"rank_pattern\[.*\] must have init_r=4 values, got 1"),
        ({}, {"rank_pattern": {Q_PATTERN: [True] * 50_000}}, "must have init_r=4 values, got 50000"),
        (
            {},
            {"rank_pattern": {Q_PATTERN: [True] * 4}, "init_r": 1, "lora_alpha": 2**31 - 1},
            "must have init_r=1 values, got 4",
        ),
        (no_rows(Q), {}, r"lora_A is \[0, 16\], expected \[4, 16\]"),
        (no_rows(Q), {"rank_pattern": {Q_PATTERN: [True] * 4}}, "rank 4 by the configuration"),
        (no_rows(Q, 999), {"rank_pattern": {Q_PATTERN: [False] * 4}}, r"lora_A is \[0, 999\], expected \[0, 16\]"),
        (no_rows("base_model.model.other", 999), {"rank_pattern": {"other": [False] * 4}}, "no linear module 'other'"),
        ({}, {"rank_pattern": {Q_PATTERN: [False] * 4}}, "rank 0 by the configuration"),
        ({}, {"rank_pattern": {f"m{i}": [True] for i in range(20_000)}}, "has 20000 patterns; at most 16384"),
        ({}, {"rank_pattern": {"(": [True] * 4}}, "is no regular expression"),
        ({}, {"rank_pattern": {"x" * 1001: [True]}}, "a pattern has 1001 characters"),
    ],
)
def test_files_that_do_not_fit_are_refused(make_manager, tmp_path, changes, config, message):
    state = {key: tensor for key, tensor in (adalora_state() | changes).items() if tensor is not None}
    with pytest.raises(AdapterError, match=message):
        admitted(make_manager(), "x", write_adalora(tmp_path / "x", state, **config))


def test_an_adapter_of_another_model_is_refused(make_manager, tmp_path):
    state = {key.replace("q_proj", "x_proj"): tensor for key, tensor in adalora_state().items()}
    with pytest.raises(AdapterError, match=r"no linear module .*x_proj"):
        admitted(make_manager(), "x", write_adalora(tmp_path / "x", state))


def test_an_adapter_without_rows_is_refused(make_manager, tmp_path):
    with pytest.raises(AdapterError, match="holds no LoRA weights"):
        admitted(make_manager(), "x", write_adalora(tmp_path / "x", adalora_state(0)))


def test_rows_that_are_left_count_for_the_limit(make_manager, tmp_path):
    masks = {f"{module(layer, name)}.lora_E": [True] * 4 + [False] * 96 for layer in (0, 1) for name in SIZES}
    folder = write_adalora(tmp_path / "x", init_r=100, lora_alpha=2**31 - 1, rank_pattern=masks)
    manager = make_manager()
    request = admitted(manager, "x", folder)
    assert level(manager, "x") == "device"
    manager.forget(request)
