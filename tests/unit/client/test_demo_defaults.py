"""Default options of the demo model."""

import pytest

from outrider.models.demo import demo_adapters
from outrider.platform.client.demo_defaults import apply_demo_defaults
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.speculative_config import parse_speculative


@pytest.mark.parametrize("model", [None, "outrider-demo"])
def test_adapters_and_speculation_are_on(model):
    args, adapters = apply_demo_defaults(EngineArgs(model=model))
    assert (args.model, args.enable_lora) == (None, True)
    speculative = parse_speculative(args.speculative_config)
    assert (speculative.method, speculative.adaptive) == ("eagle3", True)
    assert adapters == demo_adapters()


def test_another_model_is_left_alone():
    args = EngineArgs(model="/some/model")
    assert apply_demo_defaults(args) == (args, {})


def test_explicit_options_are_kept():
    given = EngineArgs(speculative_config={"method": "ngram"}, max_loras=2, max_lora_rank=16)
    args, _ = apply_demo_defaults(given)
    assert (args.speculative_config, args.max_loras, args.max_lora_rank) == ({"method": "ngram"}, 2, 16)
    assert not given.enable_lora  # the user's object is not changed


@pytest.mark.parametrize("given", [{}, {"kv_cache_memory_bytes": 1 << 20}, {"num_gpu_blocks_override": 7}])
def test_the_kv_cache_is_bounded(given):
    args, _ = apply_demo_defaults(EngineArgs(**given))
    bounds = {name: getattr(args, name) for name in ("kv_cache_memory_bytes", "num_gpu_blocks_override")}
    default = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": None}
    assert bounds == default | (given or {"kv_cache_memory_bytes": 512 << 20})


def test_explicit_defaults_stay():
    args, adapters = apply_demo_defaults(EngineArgs(), explicit={"enable_lora", "speculative_config"})
    assert (args.enable_lora, args.speculative_config, adapters) == (False, None, {})
