"""What the files of a checkpoint say about its subword tokenizer: tokenizer.json with configs beside it, or a GGUF."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytejax.errors import InputError

GPT2 = None  # the pattern that the byte-level pre-tokenizer has built in
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = WORDS % r"\p{N}{1,3}", WORDS % r"\p{N}"
PATTERNS = {  # by tokenizer.ggml.pre: how text is cut before merging, whether digits are cut apart before that
    "gpt-2": (GPT2, False),
    "smollm": (GPT2, True),
    "llama-bpe": (LLAMA3, False),
    "llama3": (LLAMA3, False),
    "llama-v3": (LLAMA3, False),
    "qwen2": (QWEN2, False),
    "deepseek-r1-qwen": (QWEN2, False),
}
BEGINS_ITSELF = (
    "llama-bpe",
    "llama3",
    "llama-v3",
)  # a start id unless the file says otherwise; whole words skip merges
ENDS = ("bos", "eos", "eot", "eom", "padding", "unknown")
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # tokenizer.ggml.token_type


def from_directory(directory: Path) -> dict[str, Any]:
    """Arguments of `SubwordTokenizer.create`."""
    try:
        text = (directory / "tokenizer.json").read_bytes().decode()
        model = json.loads(text)
        added = {token["content"]: token["id"] for token in model["added_tokens"]}
    except FileNotFoundError:
        raise InputError(f"{directory} holds no tokenizer.json") from None
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise InputError(f"{directory / 'tokenizer.json'} describes no tokenizer ({e})") from None
    config = _optional(directory / "tokenizer_config.json")
    specials = {name: _spelling(config[name]) for name in config if name.endswith("_token") and config[name]}
    specials = {name: x for name, x in specials.items() if isinstance(x, str)}
    id_of = lambda name: added.get(specials.get(name))
    return {
        "text": text,
        "bos": _bos(config, model, id_of("bos_token"), added),
        "stop": _stop(directory, id_of("eos_token")),
        "unused": (),
        "template": _template(directory, config),
        "specials": specials,
    }


def from_gguf(path: Path) -> dict[str, Any]:
    """Arguments of `SubwordTokenizer.create`, from a file's metadata."""
    from bytejax.gguf import GGUFFile

    values = {name.removeprefix("tokenizer."): x for name, x in GGUFFile(path).metadata.items()}
    kind, pre = values.get("ggml.model"), values.get("ggml.pre", "gpt-2")
    expected = {"ggml.pre": str, "chat_template": str, "ggml.add_bos_token": bool, "ggml.token_type": list}
    expected |= {f"ggml.{name}_token_id": int for name in ENDS}
    for name, wanted in expected.items():
        if not isinstance(values.get(name), wanted | None):
            raise InputError(f"{path}: tokenizer.{name} = {values[name]!r} is no {wanted.__name__}")
    if kind != "gpt2":
        raise InputError(f"{path}: tokenizer.ggml.model is {kind!r}; only byte-level BPE ('gpt2') is supported")
    if pre not in PATTERNS:
        raise InputError(f"{path}: tokenizer.ggml.pre is {pre!r}; known: {', '.join(PATTERNS)}")
    for name in ("ggml.tokens", "ggml.merges"):
        if not isinstance(values.get(name), list) or not all(isinstance(x, str) for x in values[name]):
            raise InputError(f"{path} lacks the key tokenizer.{name}, a list of strings")
    tokens, types = values["ggml.tokens"], values.get("ggml.token_type") or []
    at = lambda name: values.get(f"ggml.{name}_token_id")
    for name in ENDS:
        if at(name) is not None and not 0 <= at(name) < len(tokens):
            raise InputError(f"{path}: tokenizer.ggml.{name}_token_id is {at(name)}, there are {len(tokens)} tokens")
    begins = values.get("ggml.add_bos_token", pre in BEGINS_ITSELF)
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        "text": _gguf_backend(tokens, values["ggml.merges"], types, pre, path).to_str(),
        "bos": at("bos") if begins else None,
        "stop": [at(name) for name in ("eos", "eot", "eom") if at(name) is not None],
        "unused": [i for i, kind in enumerate(types) if kind == UNUSED],
        "template": values.get("chat_template"),
        "specials": {name: tokens[at(of)] for name, of in names.items() if at(of) is not None},
    }


def _gguf_backend(tokens: list[str], merges: list[str], types: list[int], pre: str, path: Path) -> Any:
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        raise InputError(f"{path}: its tokenizer needs the package tokenizers: pip install 'bytejax[hf]'") from None
    pattern, digits = PATTERNS[pre]
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in BEGINS_ITSELF))
    except Exception as e:  # the package raises nothing narrower
        raise InputError(f"{path}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({e})") from None
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [] if pattern is GPT2 else [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is GPT2))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        these = [AddedToken(t, normalized=False, special=special) for t, of in zip(tokens, types) if of == kind]
        (backend.add_special_tokens if special else backend.add_tokens)(these)
    return backend


def _optional(path: Path) -> dict[str, Any]:
    from bytejax.checkpoints import read_json

    return read_json(path) if path.is_file() else {}


def _spelling(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _bos(config: Mapping[str, Any], model: Mapping[str, Any], bos: int | None, added: Mapping[str, int]) -> int | None:
    """The start id: as tokenizer_config.json says, else what the post-processor puts first."""
    says = config.get("add_bos_token")
    if says is not None:
        return bos if says else None
    processor = model.get("post_processor") or {}
    try:
        for step in (processor, *processor.get("processors", ())):
            for piece in (step.get("single") or ())[:1]:
                if "SpecialToken" in piece:
                    return added.get(piece["SpecialToken"]["id"])
    except (AttributeError, TypeError, KeyError):
        raise InputError("the post_processor of tokenizer.json is not of a form that is known") from None
    return None


def _stop(directory: Path, eos: int | None) -> list[int]:
    """End ids of generation_config.json, else of config.json, else of the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        value = _optional(directory / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(i) is int for i in ids):
                raise InputError(f"{directory / name}: eos_token_id = {value!r} is neither an id nor a list of ids")
            return ids
    return [] if eos is None else [eos]


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f"{path} cannot be read as UTF-8 ({e})") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
