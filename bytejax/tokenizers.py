"""Ids of the byte-level families, and turning bytes into text as they arrive."""

import codecs
import dataclasses
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Byte b is id b + offset; every other id is special and stands for no byte.

    vocab: number of ids. offset: id of byte 0. bos: start id put before every prompt, or None where the family has
        none.
    stop: ids that end a text. banned: ids that are never generated.
    """

    vocab: int
    offset: int
    bos: int | None
    stop: tuple[int, ...]
    banned: tuple[int, ...]

    def encode(self, text: str | bytes) -> list[int]:
        """Ids of a text, start id first.

        Bytes need not be UTF-8; lone surrogates of `str` stand for the bytes they escape.
        """
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
        start = [] if self.bos is None else [self.bos]
        return start + [b + self.offset for b in data]

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that the ids stand for; special ids stand for none."""
        values = np.asarray(list(ids), np.int64) - self.offset
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes()

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        return self.to_bytes(ids).decode("utf-8", "replace")


DEMO = ByteTokenizer(vocab=258, offset=0, bos=256, stop=(257,), banned=(256,))


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
