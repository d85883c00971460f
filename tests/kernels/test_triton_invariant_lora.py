"""Adapters' products on the batch-invariant path of a GPU, interpreted: a token's bits alone and in any step."""

import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels.lora.groups import SMALL_STEP, GroupBuffer, RowGroups, Segment

from .test_triton_lora import Pool

pytestmark = pytest.mark.usefixtures("row_products")
RANK = 20
OWN, OTHERS = range(2, 2 + RANK), [range(22 + 4 * i, 26 + 4 * i) for i in range(4)]


def differing(pool: Pool, *, invariant: bool) -> int:
    """Steps in which the first token's bits are others than those that it gets alone."""
    in_features = pool.a.shape[2]
    buffer = GroupBuffer(40, RANK, pool.device)
    x = torch.randn(SMALL_STEP + 1, in_features).to(pool.dtype)
    y = torch.randn(len(x), sum(pool.sizes)).to(pool.dtype)
    ids = torch.arange(len(x)) % in_features
    kernel = pool.kernel()

    def first(num_tokens: int, segments: list[Segment], of_buffer: GroupBuffer | None = None) -> torch.Tensor:
        groups = RowGroups(segments, num_tokens, pool.device, of_buffer, invariant=invariant)
        added = y[:num_tokens].clone()
        kernel.add(added, x[:num_tokens], groups)
        if len(pool.sizes) == 1:
            kernel.add_embeddings(added, ids[:num_tokens], groups)
        return added[0]

    alone = first(1, [(0, 1, OWN)])
    expected = pool.expected(y[:1], x[:1], [(0, 1, OWN)])[0]
    if len(pool.sizes) > 1:
        torch.testing.assert_close(alone, expected, atol=4e-3, rtol=4e-3)
    mixed = [(0, 1, OWN), *((1 + i, 2 + i, OTHERS[i % 4]) for i in range(6))]
    steps = [
        first(1, [(0, 1, OWN)], buffer),
        first(2, [(0, 2, OWN)]),
        first(7, mixed),
        first(7, mixed, buffer),
        first(33, [(0, 33, OWN)]),
        first(5, [(0, 5, OWN)], buffer),  # verification
        first(SMALL_STEP + 1, [(0, 20, OWN), (20, 22, OTHERS[0])]),  # a long prompt
    ]
    return sum(not torch.equal(alone, step) for step in steps)


@pytest.mark.parametrize(
    ("sizes", "dtype"), [([40], torch.float16), ([24, 8, 8], torch.float32)], ids=["one", "slices"]
)
def test_a_token_has_the_same_bits_in_every_step(sizes: list[int], dtype: torch.dtype) -> None:
    assert differing(Pool(40, 1100, sizes, dtype, "cpu"), invariant=True) == 0


def test_the_ordinary_path_depends_on_the_batch() -> None:
    """The steps above distinguish them."""
    assert differing(Pool(40, 1100, [24, 8, 8], torch.float32, "cpu"), invariant=False) > 2
