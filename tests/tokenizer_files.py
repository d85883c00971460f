"""Small tokenizers in the files of their makers: SentencePiece's, tiktoken's and Mistral's."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

PATTERN = r" ?\p{L}+| ?[^\s\p{L}]+|\s+"
"""Splits a text, for tiktoken and tekken."""
WORDS = [b"he", b"ll", b"hell", b"hello", b" w", b" wo"]
RANKS = {bytes([index]): index for index in range(256)} | {word: 256 + index for index, word in enumerate(WORDS)}


def write_sentencepiece(file: Path) -> None:
    """Train a tokenizer.model on two sentences."""
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    pytest.importorskip("google.protobuf")
    lines = ["the cat sat on the mat", "the dog ran to the house"] * 20
    trainer.train(
        sentence_iterator=iter(lines), model_prefix=str(file.with_suffix("")), vocab_size=290, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip


def write_tiktoken(file: Path) -> None:
    """Write a tokenizer.model of RANKS."""
    lines = [f"{base64.b64encode(word).decode()} {rank}\n" for word, rank in RANKS.items()]
    file.write_text("".join(lines))


def write_tekken(file: Path) -> None:
    """Write a tekken.json of RANKS."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
    content = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(RANKS),
            "default_vocab_size": len(RANKS) + len(special),
            "default_num_special_tokens": len(special),
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
            for word, rank in RANKS.items()
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)
        ],
    }
    file.write_text(json.dumps(content))
