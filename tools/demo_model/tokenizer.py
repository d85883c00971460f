"""The tokenizer: byte-level BPE trained on generated text, so that any string survives a round trip."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .config import BOS, CHAT_TEMPLATE, END, MAX_POSITION, PAD, SEED, SPECIAL_TOKENS, VOCAB_SIZE
from .documents import Document
from .mixture import ADAPTER_GENERATORS, adapter_document, base_document


def texts(rng: Random, documents: int) -> Iterator[str]:
    """Yield the texts that the vocabulary is learned from: the base mixture, and a tenth of adapter answers."""
    for i in range(documents):
        document = base_document(rng)
        if i % 10 == 0:
            document = adapter_document(rng, tuple(ADAPTER_GENERATORS)[i // 10 % 3])
        yield from _parts(document)


def _parts(document: Document) -> list[str]:
    return [content for _, content in document.messages] or [document.text]


def train_tokenizer(folder: Path, documents: int = 30_000) -> None:
    """Train the tokenizer and save it, with its chat template, in ``folder``."""
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
    tokenizer.train_from_iterator(texts(Random(SEED), documents), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
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
    fast.save_pretrained(folder)
    _name_portable_class(folder / "tokenizer_config.json")


def _name_portable_class(path: Path) -> None:
    """Name the tokenizer class that every version of transformers knows."""
    config = json.loads(path.read_text())
    config.pop("backend", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer from ``folder``."""
    return PreTrainedTokenizerFast.from_pretrained(folder)
