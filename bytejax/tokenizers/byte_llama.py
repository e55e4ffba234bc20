"""Ids of byte-ified Llamas (tokenkit): the 256 bytes, and nine strings of the chat template as one id each."""

import dataclasses
import re
from typing import ClassVar

from bytejax.tokenizers.base import Tokenizer, as_bytes, checked_chat

CONTROL = (b"<|begin_of_text|>", b"<|end_header_id|>", b"<|end_of_text|>", b"<|eot_id|>", b"<|start_header_id|>")
PLAIN = (b"assistant", b"system", b"user", b"\n\n")  # ordinary text, anywhere in it
START, END_HEADER, _, END, START_HEADER = range(256, 261)
IDS = {piece: 256 + i for i, piece in enumerate(CONTROL + PLAIN)}
BYTES = [bytes([b]) for b in range(256)] + [b""] * len(CONTROL) + list(PLAIN)


def _backwards(pieces: tuple[bytes, ...]) -> re.Pattern:
    """Finds pieces in reversed text, the longest one where several end."""
    return re.compile(b"|".join(re.escape(p[::-1]) for p in sorted(pieces, key=len, reverse=True)))


FIND = {False: _backwards(PLAIN), True: _backwards(PLAIN + CONTROL)}


@dataclasses.dataclass(frozen=True)
class ByteLlamaTokenizer(Tokenizer):
    """Byte b is id b; 256 to 260 are control tokens, 261 to 264 `assistant`, `system`, `user` and two newlines.

    A text is cut from its end: at each point the longest of these strings that ends there, else one byte. So the ids of
    a text are not those of its beginning and more.
    """

    unit: ClassVar[str] = "tokens"  # some ids are several bytes
    bos: int | None
    stop: tuple[int, ...]
    banned: tuple[int, ...]

    @property
    def vocab(self):
        return len(BYTES)

    def encode(self, text, allow_special=False):
        data = as_bytes(text)[::-1]
        ids, done = [], 0
        for found in FIND[allow_special].finditer(data):
            ids += data[done : found.start()]
            ids.append(IDS[found.group()[::-1]])
            done = found.end()
        ids += data[done:]
        return ([] if self.bos is None else [self.bos]) + ids[::-1]

    def to_bytes(self, ids):
        return b"".join(BYTES[i] for i in ids if 0 <= i < len(BYTES))

    def chat(self, messages, reply=True, allow_special=False):
        """As tokenkit's training has it: contents neither trimmed nor merged with what is around them."""
        header = lambda role: [START_HEADER, IDS[role.encode()], END_HEADER, IDS[b"\n\n"]]
        ids, within = [START], dataclasses.replace(self, bos=None)
        for role, content in checked_chat(messages, ("system", "user", "assistant")):
            ids += [*header(role), *within.encode(content, allow_special), END]
        return ids + header("assistant") if reply else ids

    def save(self, directory):
        return dataclasses.asdict(self)


RELEASED = ByteLlamaTokenizer(bos=START, stop=(END,), banned=())
