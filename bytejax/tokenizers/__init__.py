"""Ids of every family, chat templates, and incremental UTF-8 decoding."""

from pathlib import Path
from typing import Any

from bytejax.tokenizers.base import DEMO, ByteTokenizer, Message, TextStream, Tokenizer
from bytejax.tokenizers.byte_llama import ByteLlamaTokenizer
from bytejax.tokenizers.evabyte import EvaByteTokenizer
from bytejax.tokenizers.subword import SubwordTokenizer

KINDS: dict[str, Any] = {
    "byte": ByteTokenizer,
    "byte-llama": ByteLlamaTokenizer,
    "subword": SubwordTokenizer,
    "evabyte": EvaByteTokenizer,
}  # by the name that a saved target gives its tokenizer

__all__ = [
    "DEMO",
    "ByteLlamaTokenizer",
    "ByteTokenizer",
    "EvaByteTokenizer",
    "Message",
    "SubwordTokenizer",
    "TextStream",
    "Tokenizer",
    "load",
    "save",
]


def save(tokenizer: Tokenizer, directory: Path) -> dict[str, Any]:
    """A tokenizer as JSON values, for `load`; further files go into the directory, which exists."""
    kind = next(name for name, cls in KINDS.items() if type(tokenizer) is cls)
    return {"kind": kind} | tokenizer.save(directory)


def load(saved: dict[str, Any], directory: Path) -> Tokenizer:
    """The tokenizer that `save` described. Raises KeyError or TypeError for what it never wrote."""
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items() if name != "kind"}
    return KINDS[saved.get("kind", "byte")].load(values, directory)
