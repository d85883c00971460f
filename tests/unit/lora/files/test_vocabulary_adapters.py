"""Adapters on embed_tokens and lm_head: their files, and rows that are untouched if not needed."""

import pytest
import torch
from safetensors.torch import save_file

from outrider.lora.device.sites import AdapterHooks
from outrider.lora.files.tensor_keys import ModuleShape
from outrider.lora.manager import AdapterManager
from outrider.models.layers.embedding import EMBEDDING, LM_HEAD, Embedding
from outrider.platform.core.config import LoRAConfig
from outrider.platform.core.errors import AdapterError

from ..conftest import HIDDEN, admitted, make_linears, tensors, write_adapter
from ..parsing import parse
from ..registry.mix_requests import admit, mixed_request

VOCAB = 300
E, H = "base_model.model.model.embed_tokens", "base_model.model.lm_head"


def make_embedding(tied=False, dtype=torch.float32):
    embedding = Embedding(VOCAB, HIDDEN, tied=tied, dtype=dtype, device=torch.device("cpu"))
    torch.manual_seed(0)
    table, head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    slots = embedding.weight_slots()
    slots[f"{EMBEDDING}.weight"].load(table)
    if not tied:
        slots[LM_HEAD].load(head)
    return embedding, table, table if tied else head


def known(embedding):
    return {
        "model.embed_tokens": ModuleShape(VOCAB, HIDDEN, embedding=True, is_base=embedding.is_table),
        "lm_head": ModuleShape(HIDDEN, VOCAB, is_base=embedding.is_head),
    }


def state(rank=4, embedding=True, head=True, middle=""):
    generator = torch.Generator().manual_seed(1)
    made = {}
    if embedding:
        made[f"{E}.lora_embedding_A{middle}"] = torch.randn(rank, VOCAB, generator=generator)
        made[f"{E}.lora_embedding_B{middle}"] = torch.randn(HIDDEN, rank, generator=generator)
    if head:
        made[f"{H}.lora_A{middle}.weight"] = torch.randn(rank, HIDDEN, generator=generator)
        made[f"{H}.lora_B{middle}.weight"] = torch.randn(VOCAB, rank, generator=generator)
    return made


def read(path, embedding, dtype=torch.float32):
    return parse(path, known(embedding), max_rank=8, dtype=dtype)


@pytest.mark.parametrize("middle", ["", ".default"])
def test_keys(tmp_path, middle):
    embedding, _, _ = make_embedding()
    adapter = read(write_adapter(tmp_path, state(middle=middle)), embedding)
    assert adapter.digest == read(write_adapter(tmp_path / "plain", state()), embedding).digest
    assert adapter.modules["model.embed_tokens"].a.shape == (4, VOCAB)
    assert adapter.modules["model.embed_tokens"].b.shape == (4, HIDDEN)
    torch.testing.assert_close(adapter.modules["lm_head"].b, 2 * state()[f"{H}.lora_B.weight"].T)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["{}.base_layer.weight", "{}.weight"])
def test_copies_of_the_base_weights_are_no_part_of_the_adapter(tmp_path, tied, dtype, form):
    """PEFT writes them in addition to the adapter's own; a copy in a wider dtype than the served one is the same
    weight."""
    embedding, table, head = make_embedding(tied, dtype)
    copies = {form.format(E): table, form.format(H): head.clone()}
    adapter = read(write_adapter(tmp_path / "x", state() | copies), embedding, dtype)
    assert adapter.digest == read(write_adapter(tmp_path / "y", state()), embedding, dtype).digest


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("where", [E, H])
@pytest.mark.parametrize("element", [(0, 0), (VOCAB - 1, HIDDEN - 1)])
def test_trained_copies_that_no_field_names_are_refused(tmp_path, tied, where, element):
    embedding, table, head = make_embedding(tied)
    weight = (table if where is E else head).clone()
    weight[element] += 1e-3
    name = "embed_tokens" if where is E else "lm_head"
    with pytest.raises(AdapterError, match=f"{name}.*modules_to_save does not name it"):
        read(write_adapter(tmp_path, state() | {f"{where}.base_layer.weight": weight}), embedding)
    with pytest.raises(AdapterError, match="the shapes differ"):
        read(write_adapter(tmp_path, state() | {f"{where}.base_layer.weight": weight[:-1]}), embedding)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({f"{E}.lora_A.weight": torch.ones(4, VOCAB), f"{E}.lora_B.weight": torch.ones(HIDDEN, 4)}, "lora_embedding_A"),
        ({f"{H}.lora_embedding_A": torch.ones(4, VOCAB)}, "lora_A and lora_B"),
        ({f"{E}.lora_embedding_A": torch.ones(4, VOCAB + 1), f"{E}.lora_embedding_B": torch.ones(HIDDEN, 4)}, "301"),
        ({f"{E}.lora_embedding_A": torch.ones(4, VOCAB)}, "lora_B is missing"),
        ({f"{H}.lora_A.weight": torch.ones(4, HIDDEN), f"{H}.lora_B.weight": torch.ones(VOCAB - 1, 4)}, "299"),
        ({f"{H}.bias": torch.ones(VOCAB)}, "holds no LoRA weights"),
    ],
    ids=["linear keys", "embedding keys", "vocabulary", "half", "head", "bias"],
)
def test_refusals(tmp_path, extra, message):
    embedding, _, _ = make_embedding()
    with pytest.raises(AdapterError, match=message):
        read(write_adapter(tmp_path, extra), embedding)
    with pytest.raises(AdapterError, match="not served"):  # if the model has no such sites
        parse(write_adapter(tmp_path / "y", state()), {}, max_rank=8, dtype=torch.float32)


NAMED = {"modules_to_save": ["embed_tokens"]}
DELTA = f"{E}.token_adapter.trainable_tokens_delta"


@pytest.mark.parametrize(
    ("extra", "config", "message"),
    [
        ({f"{E}.weight": torch.ones(VOCAB, HIDDEN + 1)}, NAMED, r"\[300, 17\].*the shapes differ"),
        ({f"{E}.weight": torch.ones(())}, NAMED, "the shapes differ"),
        ({f"{E}.weight": torch.full((VOCAB, HIDDEN), torch.inf)}, NAMED, "not finite"),
        ({f"{E}.weight": torch.ones(VOCAB, HIDDEN, dtype=torch.int8)}, NAMED, "not finite"),
        ({}, NAMED, "modules_to_save names 'embed_tokens', of which the file has no weight"),
        ({f"{E}.weight": torch.ones(VOCAB, HIDDEN)} | state(4, head=False), NAMED, "with other weights"),
        ({DELTA: torch.ones(2, HIDDEN)}, {}, "trainable_token_indices names no tokens"),
        ({DELTA: torch.ones(2, HIDDEN)}, {"trainable_token_indices": [1]}, r"1 tokens below 300 do not fit"),
        ({DELTA: torch.ones(1, HIDDEN)}, {"trainable_token_indices": [VOCAB]}, "do not fit"),
        ({DELTA: torch.ones(1, HIDDEN)}, {"trainable_token_indices": {"lm_head": [1]}}, "names no tokens"),
        ({DELTA: torch.ones(1, HIDDEN)}, {"trainable_token_indices": [-1]}, "lists of different tokens"),
        ({DELTA: torch.ones(1, HIDDEN)}, {"trainable_token_indices": "1"}, "lists of different tokens"),
        ({}, {"trainable_token_indices": [1]}, "no trainable_tokens_delta"),
    ],
)
def test_own_rows_that_do_not_fit(tmp_path, extra, config, message):
    embedding, _, _ = make_embedding()
    known_linear = {"model.layers.0.self_attn.q_proj": ModuleShape(HIDDEN, 16)}
    weights = tensors(modules=("q_proj",), layers=(0,)) | extra
    with pytest.raises(AdapterError, match=message):
        parse(
            write_adapter(tmp_path, weights, **config), known(embedding) | known_linear, max_rank=8, dtype=torch.float32
        )


# --- rows ---


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def managed(tmp_path, request):
    """A manager with embeddings and a head, and folders of adapters that reach them or not."""
    embedding, table, head = make_embedding(dtype=request.param)
    config = LoRAConfig(max_loras=4, max_cpu_loras=4, max_lora_rank=8)
    manager = AdapterManager(make_linears(), config, request.param, "cpu", AdapterHooks(embedding=embedding))
    manager.dtype = request.param
    folders = {
        "head": write_adapter(tmp_path / "head", state(3, embedding=False), rank=3),
        "tokens": write_adapter(tmp_path / "tokens", state(5, head=False), rank=5),
        "both": write_adapter(tmp_path / "both", state(8), rank=8),
        "neither": write_adapter(tmp_path / "neither", tensors(4)),
    }
    yield manager, embedding, table, head, folders
    manager.check_integrity()
    manager.close()


@pytest.mark.parametrize("lengths", [(1, 1, 1, 1, 1), (4, 70, 2, 66, 3)], ids=["short", "long"])
def test_lookups_and_logits_of_mixed_rows(managed, lengths):
    manager, embedding, table, head, folders = managed
    names = [None, "head", "tokens", "neither", "both"]
    requests = {name: admitted(manager, name, folders[name]) for name in names if name}
    rows = [(requests[name].adapter if name else None, n) for name, n in zip(names, lengths, strict=True)]
    ids, hidden = torch.randint(0, VOCAB, (sum(lengths),)), torch.randn(sum(lengths), HIDDEN)
    # Sums of terms up to about 30 are rounded to 8 bits in bfloat16; another adapter's delta is off by far more.
    near = {"atol": 1e-4, "rtol": 1e-5} if manager.dtype == torch.float32 else {"atol": 0.7, "rtol": 0.03}
    for _ in range(8):  # the later ones packed
        looked_up = embedding.lookup(ids, manager.prepare(rows)).split(lengths)
        logits = embedding.logits(hidden.to(manager.dtype), manager.prepare_head(rows)).split(lengths)
    for name, x, h, got, out in zip(names, ids.split(lengths), hidden.split(lengths), looked_up, logits, strict=True):
        modules = (
            parse(folders[name], manager._files.target.shapes, max_rank=8, dtype=torch.float32).modules if name else {}
        )
        tokens, lm_head = modules.get("model.embed_tokens"), modules.get("lm_head")
        expected = table[x] + (tokens.a[:, x].T @ tokens.b if tokens else 0)
        torch.testing.assert_close(got.float(), expected, **near)
        expected = h @ head.T + (h @ lm_head.a.T @ lm_head.b if lm_head else 0)
        torch.testing.assert_close(out, expected, **near)
    for request in requests.values():
        manager.forget(request)


def test_own_rows_of_a_smaller_vocabulary_and_their_memory(managed, tmp_path):
    """They count in host memory, leave the device with their adapter, and cannot be mixed."""
    manager, embedding, table, _, folders = managed
    own = torch.randn(VOCAB - 7, HIDDEN)
    weights = tensors(2) | {f"{E}.weight": own, f"{H}.weight": own.clone()}
    path = write_adapter(tmp_path / "own", weights, rank=2, modules_to_save=["embed_tokens", "lm_head"])
    request, other = admitted(manager, "own", path), admitted(manager, "neither", folders["neither"])
    assert request.adapter.num_bytes > 2 * own.numel() * table.to(manager.dtype).itemsize
    rows = [(None, 2), (request.adapter, 3), (other.adapter, 1)]
    ids = torch.tensor([1, 2, 3, 1, VOCAB - 1, 3])
    looked_up, hidden = embedding.lookup(ids, manager.prepare(rows)), torch.randn(6, HIDDEN).to(manager.dtype)
    expected = table.clone()
    expected[: len(own)] = own
    assert torch.equal(looked_up[2:5], expected[ids[2:5]].to(manager.dtype))
    assert torch.equal(looked_up[[0, 1, 5]], table[ids[[0, 1, 5]]].to(manager.dtype))
    logits, base = embedding.logits(hidden, manager.prepare_head(rows)), embedding.logits(hidden)
    near = {"atol": 1e-4, "rtol": 1e-5} if manager.dtype == torch.float32 else {"atol": 0.2, "rtol": 0.03}
    torch.testing.assert_close(logits[2:5, : len(own)], hidden[2:5].float() @ own.T, **near)
    assert (logits[2:5, len(own) :] == -torch.inf).all()
    torch.testing.assert_close(logits[[0, 1, 5]], base[[0, 1, 5]], **near)
    with pytest.raises(AdapterError, match=r"rows of lm_head and model\.embed_tokens of its own"):
        admit(manager, mixed_request(("own", path, 0.5)))
    manager.forget(request)
    assert len(embedding.own_rows) == 1
    for index in range(9):  # they evict it
        one = write_adapter(tmp_path / str(index), tensors(8, seed=index), rank=8)
        manager.forget(admitted(manager, str(index), one))
    manager.forget(other)
    for prepare in (manager.prepare, manager.prepare_head):
        prepare([(None, 1)])
    assert len(embedding.own_rows) == 0


def test_the_head_costs_nothing_without_adapters_of_it(managed):
    manager, _, _, _, folders = managed
    requests = [admitted(manager, name, folders[name]) for name in ("tokens", "neither", "head")]
    tokens, neither, head = (request.adapter for request in requests)
    assert manager.prepare_head([(tokens, 4), (None, 1), (neither, 2)]) is None
    batch = manager.prepare_head([(tokens, 4), (head, 2), (neither, 2)])
    assert [(run.owner, run.start, run.stop) for run in batch.runs] == [
        (manager.prepare([(head, 1)]).runs[0].owner, 4, 6)
    ]
    for request in requests:
        manager.forget(request)


def test_a_file_with_a_copy_as_peft_saves_it(managed, tmp_path):
    manager, _, table, _, folders = managed
    folder = tmp_path / "copy"
    write_adapter(folder, state(8), rank=8)
    save_file(state(8) | {f"{E}.base_layer.weight": table}, folder / "adapter_model.safetensors")
    request, other = admitted(manager, "copy", str(folder)), admitted(manager, "both", folders["both"])
    assert request.adapter.digest == other.adapter.digest
    manager.forget(request)
    manager.forget(other)
