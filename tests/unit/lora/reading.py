"""Readers of adapters, with the reader process and without."""

from unittest.mock import patch

import torch

from outrider.lora.adapter import AdapterSource
from outrider.lora.device.sites import AdapterHooks, make_sites
from outrider.lora.files.folder import AdapterFiles
from outrider.lora.files.read_plan import ReadPlans
from outrider.lora.reader.reader_client import AdapterReader
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
    """The engine's side of reading, with the process and without."""

    def __init__(self, dtype=torch.float32):
        self.embedding = Embedding(VOCAB, HIDDEN, tied=False, dtype=dtype, device=CPU)
        for slot in self.embedding.weight_slots().values():
            slot.load(vocabulary_weight())
        hooks = AdapterHooks(self.embedding, "draft_model", random_linears(1))
        self._models = [sites.model for sites in make_sites(random_linears(), hooks, dtype, CPU)]
        self.files = self.make_files()
        self.reader = AdapterReader(self.files)

    def make_files(self):
        """A reader that has read nothing yet, so that it has no plans."""
        return AdapterFiles(*self._models, draft_method="draft_model", max_rank=8)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.reader.close()

    def by_process(self, path, draft_path=None):
        return self.reader.read(AdapterSource(str(path), draft_path))

    def by_thread(self, path, draft_path=None):
        """Each tensor by itself, without a plan."""
        with patch.multiple(ReadPlans, find=lambda *_: None, make=lambda *_: None):
            return self.make_files().read(AdapterSource(str(path), draft_path))


def assert_same(got, expected):
    """The same to the last bit, with the same properties."""
    assert (got.digest, got.rows, got.draft, got.num_bytes) == (
        expected.digest,
        expected.rows,
        expected.draft,
        expected.num_bytes,
    )
    for one, other in zip(got.packed, expected.packed, strict=True):
        assert one.rank == other.rank
        assert (dict(one.gains), dict(other.gains)) == ({}, {})
        for rows, wanted in ((one.linears, other.linears), (one.vocabulary, other.vocabulary)):
            assert rows.spans == wanted.spans
            assert rows.data.dtype == wanted.data.dtype
            assert torch.equal(rows.data.view(torch.uint8), wanted.data.view(torch.uint8))
            assert (rows.live == wanted.live).all()
            assert rows.live.shape == wanted.live.shape
        assert list(one.modules()) == list(other.modules())
        for name, weights in one.modules().items():
            assert torch.equal(weights.a, other.modules()[name].a)
            assert torch.equal(weights.b, other.modules()[name].b)
