"""EvaByte's ids: bytes after 64 control tokens, and a chat template in the manner of Llama 3."""

import dataclasses
import re

from bytejax.errors import InputError
from bytejax.tokenizers.base import Tokenizer, as_bytes, checked_chat

OFFSET = 64  # of bytes
BOS, EOS, OPEN, CLOSE, END_OF_TURN = 1, 2, 9, 10, 11
SPECIAL = (
    *("<pad>", "<bos>", "<eos>", "<unk>", "<sep>", "<repo_name>", "<file_sep>", "<t2v_token>", "<v2t_token>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *(f"<extra_id_{i}>" for i in range(12, OFFSET)),
)
_IDS = {text.encode(): i for i, text in enumerate(SPECIAL)}
_PATTERN = re.compile(b"(" + b"|".join(map(re.escape, _IDS)) + b")")


@dataclasses.dataclass(frozen=True)
class EvaByteTokenizer(Tokenizer):
    """Byte b is id b + 64; ids 0 to 63 are control tokens (`SPECIAL`) and stand for no byte.

    stop: (EOS,) for text, (END_OF_TURN,) or both for chats.
    """

    stop: tuple[int, ...] = (EOS,)
    banned: tuple[int, ...] = ()
    vocab: int = dataclasses.field(default=OFFSET + 256, init=False)
    bos: int = dataclasses.field(default=BOS, init=False)

    def encode(self, text, allow_special=False):
        return [BOS, *_content(text, allow_special)]

    def to_bytes(self, ids):
        return bytes(i - OFFSET for i in map(int, ids) if OFFSET <= i < self.vocab)

    def chat(self, messages, reply=True, allow_special=False):
        """As `Tokenizer.chat`; roles: user, assistant, and system for the first message.

        There always is a system turn, empty where the conversation has none: that is how the model was trained.
        """
        turns = checked_chat(messages, ("system", "user", "assistant"))
        if turns[0][0] != "system":
            turns.insert(0, ("system", ""))
        ids = [BOS]
        for number, (role, content) in enumerate(turns):
            if role == "system" and number > 0:
                raise InputError(f"message {number} has the role 'system', which only the first one may have")
            ids += [*_header(role), *_content(content, allow_special), END_OF_TURN]
        return [*ids, *_header("assistant")] if reply else ids

    def save(self, directory):
        return {"stop": self.stop, "banned": self.banned}


def _header(role: str) -> list[int]:
    return [OPEN, *_content(role, False), CLOSE, *_content("\n\n", False)]


def _content(text: str | bytes, allow_special: bool) -> list[int]:
    data = as_bytes(text)
    if not allow_special:
        return [b + OFFSET for b in data]
    ids = []
    for part in _PATTERN.split(data):
        ids += [_IDS[part]] if part in _IDS else [b + OFFSET for b in part]
    return ids
