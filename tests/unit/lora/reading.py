"""What reads adapters, in another process and without."""

import torch

from outrider.lora.adapter import AdapterSource
from outrider.lora.device.sites import AdapterHooks, make_sites
from outrider.lora.files.folder import AdapterFiles
from outrider.lora.reader.client import AdapterReader
from outrider.lora.tiers.row_writer import Placer
from outrider.models.layers.embedding import Embedding

from .conftest import HIDDEN, make_linears

VOCAB = 40
CPU = torch.device("cpu")


def random_linears(num_layers=2):
    linears = make_linears(num_layers)
    for linear in linears:
        for slot in linear.weight_slots().values():
            slot.load(torch.randn(slot.shape, generator=torch.Generator().manual_seed(3)))
    return linears


def vocabulary_weight():
    """The base's embeddings, and its head."""
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(4))


class Both:
    """An engine's part in reading, with the process and without."""

    def __init__(self, dtype=torch.float32):
        self.embedding = Embedding(VOCAB, HIDDEN, tied=False, dtype=dtype, device=CPU)
        for slot in self.embedding.weight_slots().values():
            slot.load(vocabulary_weight())
        hooks = AdapterHooks(self.embedding, "draft_model", random_linears(1))
        sites = make_sites(random_linears(), hooks, dtype, CPU)
        self.files = AdapterFiles(sites[0].modules, "draft_model", sites[1].modules, max_rank=8, dtype=dtype)
        self.quick = AdapterFiles(
            sites[0].modules, "draft_model", sites[1].modules, max_rank=8, dtype=dtype, layout=sites[0].layout
        )
        """The same, which remembers."""
        self.placer = Placer(sites, CPU)
        self.reader = AdapterReader(self.files, self.placer.layouts)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.reader.close()

    def by_process(self, path, draft_path=None):
        found = self.reader.read(AdapterSource(str(path), draft_path))
        return None if found is None else self.placer.adopt(*found)

    def by_thread(self, path, draft_path=None):
        return self.placer.pack(self.files.read(AdapterSource(str(path), draft_path)))


def assert_same(got, expected):
    """The same to the last bit, and the same account of it."""
    assert (got.adapter.digest, got.adapter.rows, got.adapter.draft) == (
        expected.adapter.digest,
        expected.adapter.rows,
        expected.adapter.draft,
    )
    assert got.num_bytes == expected.num_bytes
    for one, other in zip(got.packed, expected.packed, strict=True):
        assert one.rank == other.rank
        assert (dict(one.gains), dict(other.gains)) == ({}, {})
        for rows, wanted in ((one.linears, other.linears), (one.vocabulary, other.vocabulary)):
            assert rows.spans == wanted.spans
            assert rows.data.dtype == wanted.data.dtype
            assert torch.equal(rows.data.view(torch.uint8), wanted.data.view(torch.uint8))
            assert (rows.live == wanted.live).all()
            assert rows.live.shape == wanted.live.shape
    for mine, theirs in (
        (got.adapter.modules, expected.adapter.modules),
        (got.adapter.draft_modules, expected.adapter.draft_modules),
    ):
        assert list(mine) == list(theirs)
        for name, weights in mine.items():
            assert torch.equal(weights.a, theirs[name].a)
            assert torch.equal(weights.b, theirs[name].b)
