"""Exported files give, in a plain forward pass, the drafts of the training modules."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from outrider.platform.core.errors import InvalidRequestError
from outrider.spec_decode.training.build import load_head, new_drafter, read_head

pytestmark = pytest.mark.slow

K = 3


def rms(x, weight, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


class PlainHead:
    """A head from its files, one position at a time over a growing list of keys; written from the format alone."""

    def __init__(self, folder, features, lora=None):
        self.config = json.loads((folder / "config.json").read_text())
        self.w = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
        self.eagle3 = "eagle_aux_hidden_state_layer_ids" in self.config
        self.layer = "midlayer." if self.eagle3 else "layers.0."
        for name, delta in (lora or {}).items():
            self.w[name.replace("layers.0.", self.layer) + ".weight"] += delta

    def attend(self, x, position, keys, values):
        config, w = self.config, self.w
        dim = config["head_dim"]

        def heads(name):
            return (x @ w[f"{self.layer}self_attn.{name}.weight"].T).view(-1, dim)

        def turn(y):
            angle = position * config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
            a, b = y.chunk(2, -1)
            return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

        q = turn(heads("q_proj"))
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        keys.append(turn(heads("k_proj")).repeat_interleave(group, 0))
        values.append(heads("v_proj").repeat_interleave(group, 0))
        scores = torch.einsum("hd,thd->ht", q, torch.stack(keys)) / dim**0.5
        out = torch.einsum("ht,thd->hd", scores.softmax(-1), torch.stack(values)).flatten()
        return out @ w[f"{self.layer}self_attn.o_proj.weight"].T

    def forward(self, embedded, g, position, keys, values):
        w, p = self.w, self.layer
        if self.eagle3:
            x = torch.cat((rms(embedded, w[p + "input_layernorm.weight"]), rms(g, w[p + "hidden_norm.weight"])))
            h = g + self.attend(x, position, keys, values)
        else:
            x = torch.cat((embedded, g)) @ w["fc.weight"].T
            h = x + self.attend(x, position, keys, values)
        y = rms(h, w[p + "post_attention_layernorm.weight"])
        gate, up = (y @ w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return h + (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T

    def drafts_of(self, tokens, states, target):
        """K greedy drafts, up to a near-tie, after each prefix of `tokens` but the last two and the empty one: all but
        the last token of a prefix have been read by the target."""
        keys, values, found = [], [], []
        embeddings = self.w.get("embed_tokens.weight", target.embeddings)
        for position, (token, state) in enumerate(zip(tokens[1:-1], states, strict=False)):
            g = state @ self.w["fc.weight"].T if self.eagle3 else state
            h = self.forward(embeddings[token], g, position, keys, values)
            found.append(self.go_on(h, position + 1, list(keys), list(values), embeddings, target.lm_head))
        return found

    def go_on(self, h, position, keys, values, embeddings, lm_head):
        w, found = self.w, []
        for step in range(K):
            normed = rms(h, w["norm.weight"]) if self.eagle3 else h
            best = (normed @ w.get("lm_head.weight", lm_head).T).topk(2)
            if best.values[0] - best.values[1] < 1e-3:  # rounding may decide otherwise
                break
            draft = int(best.indices[0])
            found.append(draft + int(w["d2t"][draft]) if "d2t" in w else draft)
            h = self.forward(embeddings[found[-1]], h, position + step, keys, values)
        return found


def check_guesses(drafter, plain, target, features, lengths):
    """Guess after every prefix, as a round would, and compare with the unrolled guesses.

    A guess of the unroll at step j holds for the text's tokens, so it is compared if the drafts before it were the
    text.
    """
    guesses = drafter.guesses(features, K)
    labels = features.labels
    place = {(int(r), int(p)): n for n, (r, p) in enumerate(zip(labels.rows, labels.positions, strict=True))}
    compared = [0] * K
    for row, length in enumerate(lengths):
        states = torch.cat(features.aux, -1)[row] if features.aux else features.hidden[row]
        ids = features.ids[row, :length].tolist()
        for root, drafts in enumerate(plain.drafts_of(ids, states, target)):
            for step, draft in enumerate(drafts):
                label = place.get((row, root + 1 + step))
                if label is not None:
                    assert int(guesses[label, step]) == draft
                    compared[step] += 1
                if root + 2 + step >= length or draft != ids[root + 2 + step]:
                    break
    return compared


def make_exact(drafter):
    """Trained weights that bfloat16 holds, so that the files lose nothing."""
    drafter.load_state({name: tensor.bfloat16().float() for name, tensor in drafter.state().items()})


def teach(drafter, features, steps=60):
    """Train on one batch until some chains of guesses are right; returns the last loss."""
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        loss = drafter.loss(features)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    make_exact(drafter)
    drafter.eval()
    return float(loss.detach())


CASES = {
    "eagle3": {},
    "eagle3 with a draft vocabulary": {"draft_vocab_size": 300},
    "eagle3 of another size": {"hidden_size": 24, "num_heads": 2, "num_kv_heads": 1, "head_dim": 6},
    "eagle3 with its own matrices": {"own_embeddings": True, "own_lm_head": True, "aux_layers": (0, 2, 4)},
    "eagle": {},
}


@pytest.mark.parametrize("case", CASES)
def test_exported_heads_guess_the_same(case, options, samples, read_batch, tmp_path):
    chosen = options(case.split()[0], **CASES[case])
    aux = chosen.aux_layers if chosen.method == "eagle3" else ()
    target, features = read_batch(samples[:6], aux)
    drafter = new_drafter(chosen, target, samples)
    teach(drafter, features)
    drafter.export(tmp_path)
    plain = PlainHead(tmp_path, features)
    compared = check_guesses(drafter, plain, target, features, [len(s.token_ids) for s in samples[:6]])
    assert min(compared) > 0, "no chain was long enough to be compared"
    assert compared[0] > 60
    assert ("embed_tokens.weight" in plain.w) == (case != "eagle3" and case != "eagle3 with a draft vocabulary")
    # and it can be read again
    stored = read_head(options("draft-lora", draft=str(tmp_path)))
    again = load_head(stored, target).eval()
    assert torch.equal(again.guesses(features, K), drafter.guesses(features, K))


def test_draft_vocabulary_is_written_as_offsets(options, samples, read_batch, tmp_path):
    target, _ = read_batch(samples[:2], None)
    drafter = new_drafter(options(draft_vocab_size=50), target, samples)
    drafter.export(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(50)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert torch.equal(tensors["lm_head.weight"], target.lm_head[ids].bfloat16())
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["draft_vocab_size"], config["vocab_size"], config["target_hidden_size"]) == (50, 2048, 32)


def test_exported_medusa_heads_guess_the_same(options, samples, read_batch, tmp_path):
    target, features = read_batch(samples[:6], ())
    drafter = new_drafter(options("medusa", medusa_heads=2, medusa_layers=2, base_name="tiny"), target, samples)
    teach(drafter, features)
    drafter.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "tiny"}
    w = {k: v.float() for k, v in torch.load(tmp_path / "medusa_lm_head.pt", weights_only=True).items()}
    guesses, labels = drafter.guesses(features, 3), features.labels
    for head in range(2):
        h = features.hidden[labels.rows, (labels.positions - 1 - head).clamp(min=0)]
        for layer in range(2):
            h = h + F.silu(h @ w[f"{head}.{layer}.linear.weight"].T + w[f"{head}.{layer}.linear.bias"])
        wanted = torch.where(labels.positions > head, (h @ w[f"{head}.2.weight"].T).argmax(-1), -1)
        assert torch.equal(guesses[:, head], wanted)
    assert (guesses[:, 2] == -1).all()


def test_untrained_medusa_heads_repeat_the_targets_token(options, samples, read_batch):
    target, features = read_batch(samples[:4], ())
    drafter = new_drafter(options("medusa", medusa_heads=1), target, samples)
    labels = features.labels
    before = features.hidden[labels.rows, (labels.positions - 1).clamp(min=0)] @ target.lm_head.T
    seen = labels.positions > 0
    assert torch.equal(drafter.guesses(features, 1)[seen, 0], before.argmax(-1)[seen])


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_draft_weights_of_a_head(method, options, samples, read_batch, folders, tmp_path):
    from outrider.lora.files.peft_config import read_config
    from outrider.platform.core.adapter_files import AdapterFolder

    aux = None if method == "eagle3" else ()
    target, features = read_batch(samples[:6], aux, folders.adapter)
    head = new_drafter(options(method), target, samples)
    make_exact(head)
    head_folder, lora_folder = tmp_path / "head", tmp_path / "lora"
    head_folder.mkdir()
    head.eval().export(head_folder)
    chosen = options("draft-lora", draft=str(head_folder), rank=3, output=str(lora_folder), base_name="tiny-head")
    lora = new_drafter(chosen, target, samples).eval()
    assert torch.equal(lora.guesses(features, K), head.guesses(features, K))  # it begins as the head
    frozen = {n: p.clone() for n, p in lora.named_parameters() if not p.requires_grad}
    first = float(lora.loss(features).detach())
    assert teach(lora, features, steps=30) < first
    assert all(torch.equal(p, dict(lora.named_parameters())[n]) for n, p in frozen.items())
    lora.export(lora_folder)
    config = json.loads((lora_folder / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == ("tiny-head", 3, 6)
    assert read_config(AdapterFolder(str(lora_folder))).scale_of("fc") == 2.0
    tensors = load_file(lora_folder / "adapter_model.safetensors")
    names = {key.removeprefix("base_model.model.").split(".lora_")[0] for key in tensors}
    assert names == {"fc"} | {
        f"layers.0.{part}_proj"
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }
    deltas = {
        n: 2.0
        * tensors[f"base_model.model.{n}.lora_B.weight"].float()
        @ tensors[f"base_model.model.{n}.lora_A.weight"].float()
        for n in names
    }
    plain = PlainHead(head_folder, features, deltas)
    compared = check_guesses(lora, plain, target, features, [len(s.token_ids) for s in samples[:6]])
    assert compared[0] > 60


def test_draft_weights_of_a_draft_model_load_with_peft(options, samples, read_batch, folders, tmp_path):
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    target, features = read_batch(samples[:6], (), folders.adapter)
    lora = new_drafter(options("draft-lora", draft=folders.draft), target, samples)
    first = float(lora.loss(features).detach())
    assert teach(lora, features) < first
    lora.export(tmp_path)
    loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folders.draft), tmp_path).eval()
    labels = features.labels
    with torch.no_grad():
        wanted = loaded(input_ids=features.ids).logits[labels.rows, labels.positions].argmax(-1)
    guesses = lora.guesses(features, 2)
    assert torch.equal(guesses[:, 0], torch.where(labels.positions > 0, wanted, -1))
    assert torch.equal(guesses[:, 1], torch.where(labels.positions > 1, wanted, -1))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"draft_vocab_size": 3000}, "3000 exceeds the target's vocabulary of 2048"),
        ({"num_heads": 4, "num_kv_heads": 3}, "3 must divide --num-heads 4"),
        ({"head_dim": 7}, "must be even, got 7"),
    ],
)
def test_sizes_that_do_not_fit(more, words, options, samples, read_batch):
    target, _ = read_batch(samples[:1], None)
    with pytest.raises(InvalidRequestError, match=words):
        new_drafter(options(**more), target, samples)


def test_drafters_that_do_not_fit(options, samples, read_batch, tmp_path, folders):
    target, _ = read_batch(samples[:1], None)
    drafter = new_drafter(options(), target, samples)
    drafter.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, words in (
        ({"vocab_size": 5}, "vocabulary has 5 tokens, the target's 2048"),
        ({"fc_norm": True}, "fc_norm"),
        ({"num_hidden_layers": 2}, "several_layers, whose draft weights are not trained"),
        ({"pard_token": 3}, "drafts_in_parallel, whose draft weights are not trained"),
        ({"intermediate_size": 7}, r"mlp\.gate_proj\.weight \[48, 32\] instead of \[7, 32\]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InvalidRequestError, match=words):
            new_drafter(options("draft-lora", draft=str(tmp_path)), target, samples)
