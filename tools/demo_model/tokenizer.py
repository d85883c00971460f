"""The tokenizer: byte-level BPE trained on generated text, so that any string survives a round trip."""

import json
import shutil
from collections.abc import Iterator
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .config import BOS, BOS_ID, CHAT_TEMPLATE, END, MAX_POSITION, PAD, SEED, SPECIAL_TOKENS, VOCAB_SIZE, Demo
from .mixture import ADAPTERS, adapter_document, base_document


def _texts(rng: Random, documents: int) -> Iterator[str]:
    """The texts that the vocabulary is learned from: the base mixture, and a tenth of adapter documents."""
    for i in range(documents):
        document = base_document(rng) if i % 10 else adapter_document(rng, rng.choice(tuple(ADAPTERS)))
        yield from [content for _, content in document.messages] or [document.text]


def train_tokenizer(demo: Demo) -> None:
    """Train the tokenizer and save it, with its chat template, next to the base and the draft model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(Random(SEED), demo.scaled(30_000)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, BOS_ID)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_POSITION,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(demo.base)
    path = demo.base / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("backend", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # every version of transformers knows this one
    path.write_text(json.dumps(config, indent=2) + "\n")
    demo.drafters["draft_model"].mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo.base / name, demo.drafters["draft_model"] / name)
