"""Byte-level BPE, as Llama 3, Qwen3 and SmolLM have it: ids of subwords that stand for bytes, and chat templates."""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from bytejax.errors import InputError
from bytejax.tokenizers.base import Tokenizer, as_bytes, checked_chat

FILE = "tokenizer.json"
ROLES = ("system", "user", "assistant")
ESCAPED = re.compile("([\udc80-\udcff])")  # bytes that are no UTF-8, as `surrogateescape` spells them
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")  # what chat templates may ask for


@dataclasses.dataclass(frozen=True)
class SubwordTokenizer(Tokenizer):
    """Around a tokenizer of the `tokenizers` package, which is imported when it is needed.

    The tokenizer's own normaliser applies (Qwen's makes text NFC); without one, `to_bytes(encode(x))` is x. Every id
    stands for bytes of its own, so text can be cut anywhere.

    template: of chats, in Jinja, or None. specials: spellings that the template may ask for, as (name, spelling).
    digest: SHA-256 of `json`, the text of a tokenizer.json, by which tokenizers are told apart.
    """

    unit: ClassVar[str] = "tokens"
    vocab: int
    bos: int | None
    stop: tuple[int, ...]
    banned: tuple[int, ...]
    template: str | None
    specials: tuple[tuple[str, str], ...]
    digest: str
    json: str = dataclasses.field(repr=False, compare=False)

    @classmethod
    def from_directory(cls, directory: Path, vocab: int | None = None) -> "SubwordTokenizer":
        """From tokenizer.json and the configs beside it; also from a .gguf file.

        vocab: the model's number of ids, where it has more than the tokenizer; what is beyond is banned.
        Raises InputError naming the file at fault.
        """
        from bytejax.tokenizers import subword_files

        if directory.suffix == ".gguf":
            return cls.create(vocab=vocab, where=str(directory), **subword_files.from_gguf(directory))
        return cls.create(vocab=vocab, where=str(directory), **subword_files.from_directory(directory))

    @classmethod
    def create(
        cls,
        text: str,
        vocab: int | None,
        bos: int | None,
        stop: Sequence[int],
        unused: Sequence[int],
        template: str | None,
        specials: Mapping[str, str],
        where: str,
    ) -> "SubwordTokenizer":
        """From the text of a tokenizer.json. unused: ids that the model was never shown. where: for messages."""
        backend = _backend(text, False, where)
        used = set(backend.get_vocab(with_added_tokens=True).values())
        vocab = max(used) + 1 if vocab is None else vocab
        for what, i in (("largest id", max(used)), *(("end id", i) for i in stop), ("start id", bos or 0)):
            if not 0 <= i < vocab:
                raise InputError(f"{where}: the tokenizer's {what} is {i}, the model has {vocab}")
        banned = tuple(sorted((set(range(vocab)) - used) | set(unused)))
        pairs = tuple(sorted(specials.items()))
        digest = hashlib.sha256(text.encode()).hexdigest()
        made = cls(vocab, bos, tuple(dict.fromkeys(stop)), banned, template, pairs, digest, text)
        if "ByteLevel" not in json.dumps(json.loads(text).get("decoder")) or made._round_trip("a b") != b"a b":
            raise InputError(f"{where}: its tokenizer is not byte-level BPE, the only kind that is supported")
        return made

    def encode(self, text, allow_special=False):
        start = [] if self.bos is None else [self.bos]
        return start + self._ids(as_bytes(text).decode("utf-8", "surrogateescape"), allow_special)

    def to_bytes(self, ids):
        pieces = self._pieces
        return b"".join(pieces[i] for i in ids if 0 <= i < len(pieces))

    @property
    def has_template(self):
        return self.template is not None

    def chat(self, messages, reply=True, allow_special=False):
        """Ids as transformers makes them of the same text, but for what only looks like a control token in contents."""
        if self.template is None:
            raise InputError("the tokenizer has no chat template; give the text as a plain prompt")
        pairs = checked_chat(messages, ROLES)
        hide = _Hiding(self._controls, [content for _, content in pairs])
        shown = [{"role": role, "content": text if allow_special else hide(text)} for role, text in pairs]
        ids = []
        for part in re.split(f"({self._control_pattern})", self._render(shown, reply)):
            if part in self._controls:
                ids.append(self._controls[part])
            elif part:
                ids += self._ids(hide.undo(part), allow_special=False)
        return ids

    def save(self, directory):
        part = directory / (FILE + ".part")
        part.write_text(self.json, encoding="utf-8")
        part.replace(directory / FILE)
        values = dataclasses.asdict(self) | {"specials": dict(self.specials)}
        return {name: x for name, x in values.items() if name != "json"}

    @classmethod
    def load(cls, values: Mapping[str, Any], directory: Path) -> "SubwordTokenizer":
        """What `save` wrote. Raises InputError where tokenizer.json is another one."""
        try:
            text = (directory / FILE).read_bytes().decode()
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f"{directory / FILE}: {getattr(e, 'strerror', None) or 'is not UTF-8'}") from None
        if hashlib.sha256(text.encode()).hexdigest() != values["digest"]:
            raise InputError(f"{directory / FILE} is not the one that the target was saved with")
        _backend(text, False, str(directory))
        return cls(**{**values, "specials": tuple(sorted(values["specials"].items()))}, json=text)

    def release(self, directory):
        """Writes tokenizer.json, tokenizer_config.json and generation_config.json, as transformers reads them."""
        self.save(directory)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": self.bos is not None}
        config |= dict(self.specials) | ({} if self.template is None else {"chat_template": self.template})
        generation = {"bos_token_id": self.bos, "eos_token_id": list(self.stop)}
        for name, values in (("tokenizer_config.json", config), ("generation_config.json", generation)):
            (directory / name).write_text(json.dumps(values, indent=2) + "\n")

    @functools.cached_property
    def _backends(self) -> dict[bool, Any]:
        """By whether control tokens are recognised in text."""
        return {special: _backend(self.json, special, FILE) for special in (False, True)}

    @functools.cached_property
    def _pieces(self) -> list[bytes]:
        backend = self._backends[False]
        added, byte_of = backend.get_added_tokens_decoder(), {c: b for b, c in enumerate(byte_alphabet())}
        pieces = [b""] * self.vocab
        for token, i in backend.get_vocab(with_added_tokens=True).items():
            if i in added:
                pieces[i] = b"" if added[i].special else added[i].content.encode()
            elif all(c in byte_of for c in token):
                pieces[i] = bytes(byte_of[c] for c in token)
            else:
                pieces[i] = token.encode()
        return pieces

    @functools.cached_property
    def _controls(self) -> dict[str, int]:
        """Control tokens by spelling."""
        added = self._backends[False].get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @property
    def _control_pattern(self) -> str:
        """Longest first: one spelling may begin another. Matches nothing where there are none."""
        return "|".join(map(re.escape, sorted(self._controls, key=len, reverse=True))) or "(?!)"

    def _ids(self, text: str, allow_special: bool) -> list[int]:
        ids = []
        for part in ESCAPED.split(text):
            if ESCAPED.fullmatch(part):
                ids.append(self._byte(ord(part) - 0xDC00))
            elif part:
                self._check(part.encode())
                ids += self._backends[allow_special].encode(part, add_special_tokens=False).ids
        return ids

    def _byte(self, byte: int) -> int:
        self._check(bytes([byte]))
        return self._backends[False].token_to_id(byte_alphabet()[byte])

    @functools.cached_property
    def _without_token(self) -> frozenset[int]:
        """Bytes that no token can spell; the package would leave them out."""
        return frozenset(b for b, c in enumerate(byte_alphabet()) if self._backends[False].token_to_id(c) is None)

    def _check(self, data: bytes) -> None:
        lost = self._without_token.intersection(data)
        if lost:
            raise InputError(f"the tokenizer has no token for the byte 0x{min(lost):02x} of the text")

    def _round_trip(self, text: str) -> bytes:
        return self.to_bytes(self._ids(text, False))

    def _render(self, messages: Sequence[Mapping[str, str]], reply: bool) -> str:
        try:
            from jinja2 import TemplateError
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as e:
            raise InputError(f"chat templates need the package {e.name}: pip install 'bytejax[hf]'") from None
        try:
            rendered, _ = render_jinja_template(
                [list(messages)], chat_template=self.template, add_generation_prompt=reply, **dict(self.specials)
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as e:
            raise InputError(f"the chat template refuses these messages ({e})") from None
        return rendered[0]


class _Hiding:
    """Puts something that no content has in the place of control tokens in contents, and back."""

    def __init__(self, controls: Mapping[str, int], contents: Sequence[str]):
        self._spellings = sorted(controls, key=len, reverse=True)
        mark = "\ue000"
        while any(mark in content for content in contents):
            mark += "\ue000"
        self._open, self._close = mark + "\ue001", "\ue002"

    def __call__(self, content: str) -> str:
        pattern = "|".join(map(re.escape, self._spellings))
        number = lambda found: f"{self._open}{self._spellings.index(found[0])}{self._close}"
        return re.sub(pattern, number, content) if pattern else content

    def undo(self, text: str) -> str:
        pattern = f"{self._open}([0-9]+){self._close}"
        return re.sub(pattern, lambda found: self._spellings[int(found[1])], text)


@functools.cache
def byte_alphabet() -> str:
    """The character that stands for each byte in byte-level vocabularies (GPT-2).

    Printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on, in order.
    """
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return "".join(chr(b if b in plain else next(others)) for b in range(256))


def _backend(text: str, special: bool, where: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise InputError(f"{where}: its tokenizer needs the package tokenizers: pip install 'bytejax[hf]'") from None
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as e:  # the package raises nothing narrower
        raise InputError(f"{where}: its tokenizer.json cannot be read ({e})") from None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = not special
    return backend
