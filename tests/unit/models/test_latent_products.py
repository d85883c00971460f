"""Products of latents: the weight that adapters' gains refer to is the loaded one, in each form that is held."""

import pytest
import torch

from outrider.models.latent_config import LatentConfig
from outrider.models.layers.latent_products import LatentProducts

HEADS, LATENT = 3, LatentConfig(query_rank=None, rank=24, rope_dim=8, plain_dim=12, value_dim=10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_is_the_loaded_one_in_both_forms(dtype: torch.dtype) -> None:
    weight = torch.randn(HEADS * (LATENT.plain_dim + LATENT.value_dim), LATENT.rank).to(dtype)
    queries, latents = torch.randn(5, HEADS, LATENT.plain_dim).to(dtype), torch.eye(LATENT.rank, dtype=dtype)
    found = []
    for invariant in (False, True):
        common = {"dtype": dtype, "device": torch.device("cpu"), "batch_invariant": invariant}
        products = LatentProducts("kv_b", "kv_b_proj", HEADS, LATENT, **common)
        products.weight_slots()["kv_b_proj.weight"].load(weight)
        assert torch.equal(products.project(latents), weight.t())
        found.append(products.queries(queries, type("Batch", (), {"adapters": None})()))
    torch.testing.assert_close(*found)
