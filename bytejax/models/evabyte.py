"""EvaByte: EVA attention over byte windows and chunk summaries, and several prediction heads.

EVA: Zheng et al., arXiv 2302.04542, with one random feature, its control variates being the current window itself.
Positions lie in fixed windows of W, and these in chunks of C. A query sees the positions of its own window up to its
own, and one summary per chunk of every earlier window, all in one softmax; its own window's summaries never.

Letters: B batch, T time, N block rows, S cache slots, M chunk summaries, C chunk, D model width, K heads, H head size,
F feed-forward width, V vocabulary, P prediction heads.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from bytejax import parameters
from bytejax.errors import InputError
from bytejax.models import layers as L  # noqa: N812
from bytejax.models import transformer
from bytejax.models.base import Block, Extended
from bytejax.models.causal import causal_attention
from bytejax.models.transformer import Pending, Transformer
from bytejax.parameters import Param, Table

TRAINING_BLOCK = 256  # queries at a time in a whole sequence of one window
QUERIES = 512  # at most so many at a time where there are several windows


@dataclasses.dataclass(frozen=True)
class Config:
    """Numbers of the architecture.

    window, chunk: W and C, in positions. pred_heads: head j predicts the byte after the j next ones. rope_scale divides
    positions before they become angles. unit_offset: norms scale by one plus their weight. context is how many
    positions it was trained for.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    ffn_width: int
    window: int
    chunk: int
    pred_heads: int
    rope_theta: float
    rope_scale: float
    norm_eps: float
    unit_offset: bool
    context: int

    def __post_init__(self):
        sizes = ("vocab", "width", "layers", "heads", "ffn_width", "window", "chunk", "pred_heads")
        if min(getattr(self, name) for name in sizes) < 1:
            raise InputError(f"every size of an EvaByte config must be at least 1: {self}")
        if self.window % self.chunk:
            raise InputError(f"window = {self.window} is not a multiple of chunk = {self.chunk}")
        if self.width % (2 * self.heads):
            raise InputError(f"width = {self.width} is not a multiple of 2 * heads = {2 * self.heads}")

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> "Config":
        """From `dataclasses.asdict` that went through JSON. Raises TypeError for anything else."""
        return cls(**saved)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def chunks(self) -> int:
        """Summaries that a window leaves behind."""
        return self.window // self.chunk


def layer_table(c: Config) -> dict[str, Param]:
    """One layer's parameters, with the names of the released checkpoint."""
    D, F, K, H = c.width, c.ffn_width, c.heads, c.head_dim
    norm = jax.nn.initializers.zeros if c.unit_offset else jax.nn.initializers.ones
    into = lambda fan_in: parameters.normal(fan_in**-0.5)
    back = lambda fan_in: parameters.normal((2 * c.layers * fan_in) ** -0.5)  # keeps the residual stream's size
    at, attention = "model.layers.{layer}.", "model.layers.{layer}.self_attn."
    # The reference's axes of size 1 stay, since layouts only move axes.
    feature = lambda name: Param(
        (1, K, 1, 1, H), ("one", "heads", "one", "one", "head"), into(H), attention + name, "A K B C H -> A K B C H"
    )
    return {
        "attention_norm": Param((D,), ("embed",), norm, at + "input_layernorm.weight", "D -> D"),
        "q": Param((D, D), ("embed", "heads"), into(D), attention + "q_proj.weight", "Q D -> D Q"),
        "k": Param((D, D), ("embed", "heads"), into(D), attention + "k_proj.weight", "Q D -> D Q"),
        "v": Param((D, D), ("embed", "heads"), into(D), attention + "v_proj.weight", "Q D -> D Q"),
        "o": Param((D, D), ("heads", "embed"), back(D), attention + "o_proj.weight", "D Q -> Q D"),
        "mu": feature("adaptive_mu_k"),
        "phi": feature("adaptive_phi"),
        "mlp_norm": Param((D,), ("embed",), norm, at + "post_attention_layernorm.weight", "D -> D"),
        "gate": Param((D, F), ("embed", "ffn"), into(D), at + "mlp.gate_proj.weight", "F D -> D F"),
        "up": Param((D, F), ("embed", "ffn"), into(D), at + "mlp.up_proj.weight", "F D -> D F"),
        "down": Param((F, D), ("ffn", "embed"), back(F), at + "mlp.down_proj.weight", "D F -> F D"),
    }


def table(c: Config) -> Table:
    """Parameter table. Row j V + v of `heads` is byte v of prediction head j: a head is a contiguous slice."""
    D, O = c.width, c.pred_heads * c.vocab
    norm = jax.nn.initializers.zeros if c.unit_offset else jax.nn.initializers.ones
    return {
        "embedding": Param(
            (c.vocab, D), ("vocab", "embed"), parameters.normal(0.02), "model.embed_tokens.weight", "V D -> V D"
        ),
        "layers": parameters.stacked(layer_table(c), c.layers),
        "final_norm": Param((D,), ("embed",), norm, "model.norm.weight", "D -> D"),
        "heads": Param((O, D), ("vocab", "embed"), parameters.normal(D**-0.5), "lm_head.weight", "O D -> O D"),
    }


class Cache(transformer.Cache):
    """What the committed positions leave behind, in S slots per row.

    Slot m < M holds the summary of chunk m, once its window is complete; a position of the current window lies in slot
    M + (position mod window), and a block in the slots after it. Rows may be in different phases of different windows.

    summaries: M.
    """

    summaries: int = struct.field(pytree_node=False)


class EvaByte(Transformer):
    """EvaByte as a target: prediction head 0 is the model's law; the others are for drafters (`all_logits`).

    params: as `table(config)` says; `params["layers"]` stacked, or a tuple (unrolled).
    """

    def layer_table(self) -> Table:
        return layer_table(self.config)

    def init_cache(self, batch: int, capacity: int, block_width: int, adapter=None) -> Cache:
        """Slots for the summaries of every window that `capacity` positions and one block can complete."""
        c = self.config
        summaries = (capacity + block_width) // c.window * c.chunks
        slots = summaries + min(c.window, capacity + block_width) + block_width
        front = L.kv_front(c.heads, batch)
        k, v = (*front, c.head_dim, slots), (*front, slots, c.head_dim)
        return Cache(*self._empty(k, v, adapter), jnp.zeros((batch,), jnp.int32), summaries)

    def room(self, cache: Cache) -> jax.Array:
        """Up to the end of the current window: the next one sees this one's summaries, which do not exist before."""
        return self.config.window - cache.lengths % self.config.window

    def prefill(self, ids, lengths, cache, adapter=None, taps=()):
        c, t = self.config, ids.shape[1]
        lengths = lengths.astype(jnp.int32)
        begin = (lengths // c.window * c.window)[:, None]
        current = jnp.minimum(begin + jnp.arange(min(t, c.window)), t - 1)[..., None, None]

        def attend(p, q, k, v, k_slots, v_slots):
            rows = [jnp.take_along_axis(a, current, axis=1) for a in (k, v)]
            complete = t // c.window * c.window
            sums = summarise(p, c.chunk, k[:, :complete], v[:, :complete])
            for at, columns in ((0, sums), (cache.summaries, rows)):
                k_rows, v_rows = L.kv_layout(*(a.astype(k_slots.dtype) for a in columns))
                k_slots = jax.lax.dynamic_update_slice_in_dim(k_slots, k_rows, at, -1)
                v_slots = jax.lax.dynamic_update_slice_in_dim(v_slots, v_rows, at, -2)
            causal = lambda rows: (jnp.arange(t) <= rows[:, None])[None]
            short = t <= c.window
            mixed = L.attend_in_chunks(q, *L.kv_layout(k, v), causal) if short else _windows(c, q, k, v, *sums)
            return mixed, (k_slots, v_slots)

        streams, slots, inner = self._run(self._inputs(ids), jnp.arange(t)[None], attend, cache, adapter, taps)
        last = [jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1) for x in streams]
        return self._extended(last, None, inner, taps), Cache(*slots, lengths, cache.summaries)

    def extend(self, block: Block, cache: Cache, adapter=None, taps=()) -> Extended:
        """Rows at depths from `room` on are computed as if the window went on: no real position is like that."""
        c, m = self.config, cache.summaries
        inside = cache.lengths % c.window
        window = L.block_mask(cache.slots - m, inside, block)
        earlier = jnp.arange(m) < (cache.lengths // c.window * c.chunks)[:, None, None]
        mask = jnp.concatenate([jnp.broadcast_to(earlier, (*window.shape[:2], m)), window], axis=-1)

        def attend(p, q, k, v, k_slots, v_slots):
            k, v = L.kv_layout(k, v)
            k_slots = L.write_rows(k_slots, k, m + inside, axis=-1)
            v_slots = L.write_rows(v_slots, v, m + inside, axis=-2)
            return L.attend(q, k_slots, v_slots, mask), (k_slots, v_slots)

        positions = cache.lengths[:, None] + block.depths()
        streams, slots, inner = self._run(self._block_inputs(block, cache), positions, attend, cache, adapter, taps)
        return self._extended(streams, Pending(*slots, chain=block.is_chain), inner, taps)

    def commit(self, cache: Cache, pending: Pending, path, accepted) -> Cache:
        """A window that `accepted` rows make complete is summarised at once; accepted is at most `room`."""
        c, m = self.config, cache.summaries
        lengths = cache.lengths + accepted.astype(jnp.int32)
        k, v, draft_k, draft_v = pending.kept(m + cache.lengths % c.window, path)
        if m > 0:
            complete = (accepted > 0) & (lengths % c.window == 0)
            k, v = self._fold(k, v, m, lengths, complete)
            if draft_k:
                draft_k, draft_v = self._fold(draft_k, draft_v, m, lengths, complete)
        return Cache(k, v, draft_k, draft_v, lengths, m)

    def unembed(self, hidden):
        return L.dense(hidden, self.params["heads"][: self.config.vocab], transposed=True, dtype=jnp.float32)

    def all_logits(self, hidden):
        """Logits of every prediction head. hidden [..., D] -> [..., P, V] float32.

        Head j after position t is about position t + 1 + j; head 0 is `unembed`.
        """
        logits = L.dense(hidden, self.params["heads"], transposed=True, dtype=jnp.float32)
        return logits.reshape(*hidden.shape[:-1], self.config.pred_heads, self.config.vocab)

    def residual(self, ids, adapter=None):
        """The residual stream after the last layer, before the final norm. ids [B, T] int32 -> [B, T, D]."""
        return self._whole(ids, adapter)[0]

    def _whole(self, ids, adapter=None, taps=()):
        c, t = self.config, ids.shape[1]
        earlier = (t - 1) // c.window * c.window

        def attend(p, q, k, v):
            if earlier == 0:
                return causal_attention(q, k, v, TRAINING_BLOCK)
            return _windows(c, q, k, v, *summarise(p, c.chunk, k[:, :earlier], v[:, :earlier]))

        return self._run_whole(self._inputs(ids), jnp.arange(t)[None], attend, adapter, taps)

    def _fold(self, k, v, m, lengths, complete):
        """Puts the summaries of the windows that are `complete` [B] after those of the windows before them.

        k, v: slots of all layers, or of the last ones, which are the draft stream's. What is chosen between is a
        window's worth of summaries, not the slots: XLA would copy these in every cycle.
        """
        c, b = self.config, len(lengths)
        start = jnp.clip((lengths // c.window - 1) * c.chunks, 0, m - c.chunks)
        place = start[:, None] + jnp.arange(c.chunks)
        there = lambda k, v: (L.read_rows(k, place, -1), L.read_rows(v, place, -2))

        def summaries(k, v, p):
            k_rows = k[..., m : m + c.window].reshape(c.heads, b, c.head_dim, c.window).transpose(1, 3, 0, 2)
            v_rows = v[..., m : m + c.window, :].reshape(c.heads, b, c.window, c.head_dim).transpose(1, 2, 0, 3)
            new = L.kv_layout(*summarise(p, c.chunk, k_rows, v_rows))
            chosen = jnp.tile(complete, c.heads).reshape(-1, 1, 1) if k.ndim == 3 else complete[0]
            return tuple(jnp.where(chosen, x, old) for x, old in zip(new, there(k, v), strict=True))

        features = self._features()[-len(k) :] if isinstance(k, tuple) else self._features()
        rows = jax.lax.cond(
            complete.any(),
            lambda k, v: L.over_layers(summaries, k, v, features),
            lambda k, v: L.over_layers(there, k, v),
            k,
            v,
        )
        put = lambda k, v, k_rows, v_rows: (L.write_rows(k, k_rows, start, -1), L.write_rows(v, v_rows, start, -2))
        return L.over_layers(put, k, v, *rows)

    def _features(self):
        pick = lambda layer: {name: layer[name] for name in ("mu", "phi")}
        layers = self.params["layers"]
        return tuple(map(pick, layers)) if isinstance(layers, tuple) else pick(layers)

    def _qkv(self, p, x, positions, adapters=None, first=0):
        c, (b, t, _) = self.config, x.shape
        h = self._norm(x, p["attention_norm"])
        if "qkv" in p:
            rows = L.dense_with(h, p["qkv"], adapters and adapters["qkv"], first)
            q, k, v = jnp.split(rows.reshape(b, t, -1, c.head_dim), 3, axis=2)
        else:
            q, k, v = (L.dense(h, p[name]).reshape(b, t, -1, c.head_dim) for name in ("q", "k", "v"))
        places = positions if c.rope_scale == 1 else positions / c.rope_scale
        return L.rotary(q, places, c.rope_theta), L.rotary(k, places, c.rope_theta), v

    def _norm(self, x, scale):
        scale = scale.astype(jnp.float32) + 1 if self.config.unit_offset else scale
        return L.rms_norm(x, scale, self.config.norm_eps)


def summarise(p: dict, chunk: int, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One key and one value per chunk of C positions, from rotated keys and values, in float32.

    The key is the mean of the chunk's keys weighted by softmax(mu . k); the value that of its values weighted by
    softmax((phi . k - |k|^2 / 2) / sqrt(H)), the log of EVA's random feature. k, v [B, M*C, K, H] -> [B, M, K, H] each.
    """
    b, _, heads, h = k.shape
    k32, v32 = (x.astype(jnp.float32).reshape(b, -1, chunk, heads, h) for x in (k, v))
    mu, phi = (p[name].astype(jnp.float32).reshape(heads, h) for name in ("mu", "phi"))
    of_keys = jax.nn.softmax(jnp.einsum("BMCKH,KH->BMCK", k32, mu), axis=2)
    feature = jnp.einsum("BMCKH,KH->BMCK", k32, phi) - 0.5 * jnp.sum(k32 * k32, axis=-1)
    of_values = jax.nn.softmax(feature * h**-0.5, axis=2)
    k_sums = jnp.einsum("BMCK,BMCKH->BMKH", of_keys, k32)
    v_sums = jnp.einsum("BMCK,BMCKH->BMKH", of_values, v32)
    return k_sums.astype(k.dtype), v_sums.astype(v.dtype)


def _windows(c: Config, q, k, v, k_sums, v_sums):
    """EVA attention over a whole sequence of more than one window.

    q, k, v [B, T, K, H]; k_sums, v_sums [B, M, K, H], those of all windows before the last at least -> [B, T, K*H].
    """
    b, t, _, _ = q.shape
    step = next(n for n in range(min(QUERIES, c.window), 0, -1) if c.window % n == 0)
    summaries = (t - 1) // c.window * c.chunks
    pad = lambda x, to: jnp.pad(x, ((0, 0), (0, -t % to), (0, 0), (0, 0)))
    q, k, v = pad(q, step), pad(k, c.window), pad(v, c.window)

    def one(start):
        begin = start // c.window * c.window
        rows = jax.lax.dynamic_slice_in_dim(q, start, step, axis=1)
        keys, values = (
            jnp.concatenate([s[:, :summaries], jax.lax.dynamic_slice_in_dim(x, begin, c.window, axis=1)], axis=1)
            for s, x in ((k_sums, k), (v_sums, v))
        )
        earlier = jnp.arange(summaries) < begin // c.chunk
        own = jnp.arange(c.window) <= (start - begin) + jnp.arange(step)[:, None]
        mask = jnp.concatenate([jnp.broadcast_to(earlier, (step, summaries)), own], axis=-1)
        return L.attend(rows, *L.kv_layout(keys, values), mask[None])

    starts = jnp.arange(0, q.shape[1], step)
    return jax.lax.map(jax.checkpoint(one), starts).transpose(1, 0, 2, 3).reshape(b, q.shape[1], -1)[:, :t]


def create(config: Config, key: jax.Array, tokenizer, dtype=jnp.float32) -> EvaByte:
    """An EvaByte with random parameters."""
    return EvaByte(params=parameters.init(table(config), key, dtype), config=config, tokenizer=tokenizer)
