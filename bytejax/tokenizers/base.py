"""What decoding needs from a tokenizer, the plain byte one, and turning bytes into text as they arrive."""

import abc
import codecs
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bytejax.errors import InputError

Message = Mapping[str, str]  # {"role": ..., "content": ...}


class Tokenizer(abc.ABC):
    """Ids of a family. Hashable, and equal to another that does the same: compiled programs are kept per tokenizer.

    unit: what an id is, in the plural. vocab: number of ids. bos: start id put before every prompt, or None where the
    family has none. stop: ids that end a text. banned: ids that are never generated.
    """

    unit: ClassVar[str] = "bytes"
    vocab: int
    bos: int | None
    stop: tuple[int, ...]
    banned: tuple[int, ...]

    @abc.abstractmethod
    def encode(self, text: str | bytes, allow_special: bool = False) -> list[int]:
        """Ids of a text, start id first.

        Bytes need not be UTF-8; lone surrogates of `str` stand for the bytes they escape. allow_special: whether the
        spelling of a control token becomes that token; else it is text like any other.
        """

    @abc.abstractmethod
    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that the ids stand for; control tokens stand for none."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        return self.to_bytes(ids).decode("utf-8", "replace")

    @property
    def has_template(self) -> bool:
        """Whether there is a template for `chat`."""
        return type(self).chat is not Tokenizer.chat

    def chat(self, messages: Sequence[Message], reply: bool = True, allow_special: bool = False) -> list[int]:
        """Ids of a conversation in the family's own template, start id first.

        messages: {"role", "content"} each. reply: ends with the opening of the assistant's turn. allow_special: as in
        `encode`, of contents. Raises InputError for an empty chat, an unknown role, or a family without a template.
        """
        raise InputError(f"a {type(self).__name__} has no chat template; give the text as a plain prompt")

    @classmethod
    def load(cls, values: Mapping[str, Any], directory: Path) -> "Tokenizer":
        """From what `save` returned, and the files it wrote. Raises KeyError or TypeError for what it never wrote."""
        return cls(**values)

    @abc.abstractmethod
    def save(self, directory: Path) -> dict[str, Any]:
        """What `tokenizers.load` needs, as JSON values; further files go into the directory, which exists."""

    def release(self, directory: Path) -> None:
        """Writes the files that the family's released checkpoints have for their tokenizer, if any."""
        return


@dataclasses.dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """Byte b is id b + offset; every other id is special and stands for no byte."""

    vocab: int
    offset: int
    bos: int | None
    stop: tuple[int, ...]
    banned: tuple[int, ...]

    def encode(self, text, allow_special=False):
        start = [] if self.bos is None else [self.bos]
        return start + [b + self.offset for b in as_bytes(text)]

    def to_bytes(self, ids):
        values = np.asarray(list(ids), np.int64) - self.offset
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes()

    def save(self, directory):
        return dataclasses.asdict(self)


DEMO = ByteTokenizer(vocab=258, offset=0, bos=256, stop=(257,), banned=(256,))


def as_bytes(text: str | bytes) -> bytes:
    """The bytes of a text, as `Tokenizer.encode` takes it."""
    try:
        return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as e:
        raise InputError(f"the text holds {text[e.start]!r}, half a character, which stands for no bytes") from None


def checked_chat(messages: Sequence[Message], roles: Sequence[str]) -> list[tuple[str, str]]:
    """The messages as (role, content). Raises InputError where the chat is empty or a message is not one of these."""
    if not messages:
        raise InputError("the chat is empty; it needs at least one message")
    pairs = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in roles:
            raise InputError(f"message {number} has the role {role!r}; known: {', '.join(roles)}")
        if not isinstance(content, str):
            raise InputError(f"message {number} has no text as its content")
        pairs.append((role, content))
    return pairs


class TextStream:
    """Bytes in, whole characters out: never half a character, and nothing held back longer than its own bytes take."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """The text that is now certain."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end; an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
