"""Byte-ified Llama (tokenkit): a Llama over bytes whose inputs also carry the subword token that ends at each byte.

Beside its own embedding, every position gets one of the subword model it was made from: of the longest token whose
spelling is the newest ids. Which token that is, its *expanded id*, depends on the last 16 ids only, and is found on
device, for all positions in parallel.

Letters: B batch, T time, N block rows, D model width, M boundaries, W window.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from bytejax import parameters
from bytejax.checkpoints import SafetensorsFile
from bytejax.errors import InputError
from bytejax.models import llama, transformer
from bytejax.models.base import Block, newest
from bytejax.parameters import Param, Table

WINDOW = 16  # ids that an expanded id can depend on
BITS, PER_WORD = 9, 3  # of a symbol; symbols in a word, the newest on top, so that words compare as symbols do
WORDS = -(-WINDOW // PER_WORD)
SYMBOLS = 1 << BITS


@dataclasses.dataclass(frozen=True)
class Config(llama.Config):
    """expand_vocab: rows of the subword embedding."""

    expand_vocab: int

    def __post_init__(self):
        super().__post_init__()
        if self.expand_vocab < 1:
            raise InputError(f"expand_vocab = {self.expand_vocab} must be at least 1")


def table(c: Config) -> Table:
    """Parameter table, with the names of tokenkit's TPULlamaForCausalLM."""
    shape, near, source = (c.expand_vocab, c.width), parameters.normal(0.02), "model.expand_embed_tokens.weight"
    return llama.table(c) | {"expand": Param(shape, ("vocab", "embed"), near, source, "V D -> V D")}


class Lookup(struct.PyTreeNode):
    """The dictionary of expanded ids as one sorted list, made by `build_lookup`, asked by `expand`.

    A *window* is the newest 16 ids, newest first, as symbols: id + 1, 0 before the start of the text. The windows that
    begin with a key are an interval of all windows in lexicographic order; two keys' intervals are nested or disjoint,
    and the innermost one around a window is the longest key's. So the answer changes at interval ends only.

    boundaries: [M, 6] int32, packed windows in order, the first one all 0.
    answers: [M] int32, the expanded id from each boundary up to the next one.
    first: [2^18 + 1] int32, by a window's two newest symbols: the first boundary with these.
    steps: halvings that the longest stretch of `first` takes.
    """

    boundaries: jax.Array
    answers: jax.Array
    first: jax.Array
    steps: int = struct.field(pytree_node=False)

    @classmethod
    def of(cls, boundaries: np.ndarray, answers: np.ndarray) -> "Lookup":
        """From its sorted list; `first` and `steps` follow from it."""
        first = np.searchsorted(boundaries[:, 0] >> BITS, np.arange(SYMBOLS**2 + 1)).astype(np.int32)
        arrays = (boundaries.astype(np.int32), answers.astype(np.int32), first)
        return cls(*map(jnp.asarray, arrays), steps=int(np.diff(first).max()).bit_length())

    def save(self, path: Path) -> None:
        """Writes safetensors for `load`."""
        parameters.save(path, {"boundaries": np.asarray(self.boundaries), "answers": np.asarray(self.answers)})

    @classmethod
    def load(cls, path: Path) -> "Lookup":
        """Reads what `save` wrote. Raises InputError where the file holds anything else."""
        reader = SafetensorsFile(path)
        tensors = {name: reader.read(name) for name in reader.names()}
        size = tensors["answers"].size if "answers" in tensors else 0
        expected = {"boundaries": ((size, WORDS), np.int32), "answers": ((size,), np.int32)}
        if {name: (x.shape, x.dtype) for name, x in tensors.items()} != expected or tensors["boundaries"][:1].any():
            raise InputError(f"{path} does not hold a dictionary of expanded ids")
        return cls.of(tensors["boundaries"], tensors["answers"])


def build_lookup(entries: Mapping[str, int], special: Sequence[int], longest: int) -> Lookup:
    """The lookup of a checkpoint's dictionary `expand_input_ids_dict` = [entries, special].

    entries: a key's symbols, newest first, joined by commas -> its expanded id + 1. special: symbols after which only
    the key of one symbol counts. longest: symbols that a key may have to count, at most 16.
    Where no key matches, the expanded id is 0. Raises InputError for what is no such dictionary.
    """
    if not 1 <= longest <= WINDOW:
        raise InputError(f"expanded ids over {longest} ids; known: 1 to {WINDOW}")
    keys, lengths, values = _read(entries)
    alone = set(keys[lengths == 1, 0].tolist())
    if missing := sorted(set(special) - alone):
        raise InputError(f"the dictionary of expanded ids has no key of its own for the special symbol {missing[0]}")
    kept = (lengths <= longest) & ((lengths == 1) | ~np.isin(keys[:, 0], list(special)))
    keys, lengths, values = keys[kept], lengths[kept], values[kept]
    ends = keys.copy()
    ends[np.arange(len(ends)), lengths - 1] += 1
    points = np.concatenate([np.zeros((1, WINDOW), keys.dtype), keys, ends])
    packed = _pack(points)
    order = np.lexsort(packed.T[::-1])
    order = order[np.append(True, (np.diff(packed[order], axis=0) != 0).any(1))]
    return Lookup.of(packed[order], _longest_match(keys, lengths, values, points[order]))


def entries_of(lookup: Lookup) -> dict[str, int]:
    """A dictionary, as `build_lookup` takes it, with the same answers: keys that change none are left out."""
    windows, answers = _unpack(np.asarray(lookup.boundaries)), np.asarray(lookup.answers).tolist()
    entries = {}
    for window, length, answer in zip(windows.tolist(), (windows > 0).sum(1).tolist(), answers, strict=True):
        key = tuple(window[:length])
        around = next((entries[key[:n]] for n in range(length - 1, 0, -1) if key[:n] in entries), 0)
        if length == 1 or (length and answer != around):
            entries[key] = answer
    return {",".join(map(str, key)): answer + 1 for key, answer in entries.items()}


def expand(lookup: Lookup, windows: jax.Array) -> jax.Array:
    """Expanded ids. windows [..., 16] int32, see `Lookup` -> [...] int32."""
    words = _pack(windows)
    top = words[..., 0] >> BITS
    low, high = lookup.first[top], lookup.first[top + 1]
    for _ in range(lookup.steps):
        middle = (low + high) // 2
        boundary = jnp.take(lookup.boundaries, middle, axis=0, mode="clip")
        differs = boundary != words
        at = jnp.argmax(differs, axis=-1, keepdims=True)
        of = lambda x, at=at: jnp.take_along_axis(x, at, axis=-1)[..., 0]
        right = (of(boundary) <= of(words)) & (low < high)
        low, high = jnp.where(right, middle + 1, low), jnp.where(right, high, middle)
    return lookup.answers[low - 1]


def _read(entries: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys [K, 16] padded with 0, their lengths and values. Longer keys keep their true length; "" is dropped."""
    names = [name for name in entries if name]
    if wrong := [x for x in entries.values() if type(x) is not int]:
        raise InputError(f"the dictionary of expanded ids holds something other than integers ({wrong[0]!r})")
    try:
        lengths = np.asarray([name.count(",") + 1 for name in names], np.int64)
        symbols = np.asarray(",".join(names).split(",") if names else [], np.int64)
        values = np.asarray([entries[name] for name in names], np.int64) - 1
    except (TypeError, ValueError, OverflowError, AttributeError) as e:
        raise InputError(f"the dictionary of expanded ids holds something other than integers ({e})") from None
    within = lambda x, low, high: not x.size or (x.min() >= low and x.max() < high)
    if not (within(symbols, 1, SYMBOLS - 1) and within(values, 0, 2**31)):
        raise InputError(f"the dictionary of expanded ids needs symbols 1 to {SYMBOLS - 2} and positive values")
    column = np.arange(len(symbols)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    row, inside = np.repeat(np.arange(len(names)), lengths), column < WINDOW
    keys = np.zeros((len(names), WINDOW), np.int64)
    keys[row[inside], column[inside]] = symbols[inside]
    return keys, lengths, values


def _longest_match(keys: np.ndarray, lengths: np.ndarray, values: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Value of the longest key that each window begins with, or 0. A trie, walked level by level for all at once."""
    node, at = np.zeros(len(keys), np.int64), np.zeros(len(windows), np.int64)
    answers = np.zeros(len(windows), np.int64)
    for depth in range(int(lengths.max(initial=0))):
        alive, ending = lengths > depth, lengths == depth + 1
        children, node[alive] = np.unique(node[alive] * SYMBOLS + keys[alive, depth], return_inverse=True)
        value = np.full(len(children), -1)
        value[node[ending]] = values[ending]
        wanted = at * SYMBOLS + windows[:, depth]
        child = np.minimum(np.searchsorted(children, wanted), len(children) - 1)
        at = np.where((at >= 0) & (children[child] == wanted), child, -1)
        answers = np.where((at >= 0) & (value[at] >= 0), value[at], answers)
    return answers


def _pack(windows: Any) -> Any:
    """[..., 16] symbols -> [..., 6] words; of numpy or jax arrays."""
    word = lambda i: sum(
        windows[..., j] << BITS * (PER_WORD - 1 - j % PER_WORD)
        for j in range(i * PER_WORD, min((i + 1) * PER_WORD, WINDOW))
    )
    stack = np.stack if isinstance(windows, np.ndarray) else jnp.stack
    return stack([word(i) for i in range(WORDS)], axis=-1)


def _unpack(words: np.ndarray) -> np.ndarray:
    """Inverse of `_pack`."""
    shifts = BITS * np.arange(PER_WORD - 1, -1, -1)
    return (words[:, :, None] >> shifts & SYMBOLS - 1).reshape(len(words), -1)[:, :WINDOW]


class Cache(transformer.Cache):
    """history: [B, 16] int32, the window of each row's last committed position, or zeros before the first."""

    history: jax.Array

    def place(self):
        return super().place() | {"history": self.history}


class Pending(transformer.Pending):
    """windows: [B, N, 16] int32, of every row of the block."""

    windows: jax.Array


class ByteLlama(llama.Llama):
    """Target of byte-ified Llamas.

    params: as `table(config)` says. `embed` gives an id's own embedding, without the expanded id's, which depends on
    what came before. In a block a key follows ancestors; a row given as an embedding stands for no id, and no key
    reaches past it.
    """

    lookup: Lookup
    extras = {"lookup": Lookup}

    def init_cache(self, batch, capacity, block_width, adapter=None):
        cache = super().init_cache(batch, capacity, block_width, adapter)
        return Cache(**vars(cache), history=jnp.zeros((batch, WINDOW), jnp.int32))

    def prefill(self, ids, lengths, cache, adapter=None, taps=()):
        extended, cache = super().prefill(ids, lengths, cache, adapter, taps)
        last = jnp.take_along_axis(_windows(ids), (lengths - 1)[:, None, None], axis=1)[:, 0]
        return extended, Cache(**vars(cache), history=last)

    def extend(self, block, cache, adapter=None, taps=()):
        extended = super().extend(block, cache, adapter, taps)
        windows = _block_windows(block, cache.history)
        return extended.replace(pending=Pending(**vars(extended.pending), windows=windows))

    def commit(self, cache, pending, path, accepted):
        history = newest(pending.windows, path, accepted, cache.history)
        return Cache(**vars(super().commit(cache, pending, path, accepted)), history=history)

    def _inputs(self, ids, block=None, cache=None):
        windows = _windows(ids) if block is None else _block_windows(block, cache.history)
        return self.embed(ids) + jnp.take(self.params["expand"], expand(self.lookup, windows), axis=0)


def _windows(ids: jax.Array) -> jax.Array:
    """Windows of whole texts. ids [B, T] -> [B, T, 16]."""
    symbols = jnp.pad(ids + 1, ((0, 0), (WINDOW - 1, 0)))
    return symbols[:, np.arange(ids.shape[1])[:, None] + WINDOW - 1 - np.arange(WINDOW)]


def _block_windows(block: Block, history: jax.Array) -> jax.Array:
    """Windows of a block's rows, along their ancestors and then back into `history` [B, 16]. -> [B, N, 16]."""
    symbols = block.ids + 1
    if block.embeds_mask is not None:
        symbols = jnp.where(block.embeds_mask, 0, symbols)
    known = jnp.concatenate([history, symbols], axis=1)
    static = block.static_parents is not None
    xp, parents = (np, np.asarray([block.static_parents])) if static else (jnp, block.parents)
    place = xp.arange(WINDOW + block.width)[None]
    inside = xp.pad(parents + WINDOW, ((0, 0), (WINDOW, 0)))
    before = xp.where(place < WINDOW, xp.minimum(place + 1, WINDOW - 1), xp.where(place == WINDOW, 0, inside))
    steps = [xp.broadcast_to(place[:, WINDOW:], parents.shape)]
    for _ in range(WINDOW - 1):
        steps.append(xp.take_along_axis(before, steps[-1], axis=1))
    index = xp.stack(steps, axis=-1)
    if static:
        return known[:, index[0]]
    return jnp.take_along_axis(known, index.reshape(len(index), -1), axis=1).reshape(index.shape)
