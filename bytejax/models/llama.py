"""Llama-family decoder (Llama, Qwen3): grouped-query attention, rotary positions, SwiGLU, RMSNorm.

Letters: B batch, T time, N block rows, S cache slots, D model width, K kv heads, G heads per kv head, H head size,
F feed-forward width, V vocabulary.
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
from bytejax.models.base import Block, Extended
from bytejax.models.causal import causal_attention
from bytejax.models.layers import RopeScaling
from bytejax.models.layouts import Layered
from bytejax.parameters import Param, Table

ATTENTION_BLOCK = 256  # queries at a time in whole sequences


@dataclasses.dataclass(frozen=True)
class Config:
    """Numbers of the architecture.

    head_dim need not be width / heads; context is how many positions it was trained for. qk_norm: whether queries and
    keys pass an RMSNorm over each head before they are rotated (Qwen3).
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    rope_theta: float
    norm_eps: float
    tied: bool
    context: int
    qk_norm: bool
    rope_scaling: RopeScaling | None

    def __post_init__(self):
        if min(self.vocab, self.width, self.layers, self.heads, self.kv_heads, self.head_dim, self.ffn_width) < 1:
            raise InputError(f"every size of a Llama config must be at least 1: {self}")
        if self.heads % self.kv_heads:
            raise InputError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise InputError(f"head_dim = {self.head_dim} is odd; rotary positions need an even one")

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> "Config":
        """From `dataclasses.asdict` that went through JSON. Raises KeyError or TypeError for anything else."""
        scaling = saved["rope_scaling"]
        return cls(**{**saved, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})


def layer_table(c: Config) -> dict[str, Param]:
    """One layer's parameters, with the names of transformers' LlamaForCausalLM."""
    D, F, H = c.width, c.ffn_width, c.head_dim
    Q, K, ones = c.heads * c.head_dim, c.kv_heads * c.head_dim, jax.nn.initializers.ones
    into = lambda fan_in: parameters.normal(fan_in**-0.5)
    back = lambda fan_in: parameters.normal((2 * c.layers * fan_in) ** -0.5)  # keeps the residual stream's size
    at = "model.layers.{layer}."
    layer = {
        "attention_norm": Param((D,), ("embed",), ones, at + "input_layernorm.weight", "D -> D"),
        "q": Param((D, Q), ("embed", "heads"), into(D), at + "self_attn.q_proj.weight", "Q D -> D Q"),
        "k": Param((D, K), ("embed", "kv_heads"), into(D), at + "self_attn.k_proj.weight", "K D -> D K"),
        "v": Param((D, K), ("embed", "kv_heads"), into(D), at + "self_attn.v_proj.weight", "K D -> D K"),
        "o": Param((Q, D), ("heads", "embed"), back(Q), at + "self_attn.o_proj.weight", "D Q -> Q D"),
        "mlp_norm": Param((D,), ("embed",), ones, at + "post_attention_layernorm.weight", "D -> D"),
        "gate": Param((D, F), ("embed", "ffn"), into(D), at + "mlp.gate_proj.weight", "F D -> D F"),
        "up": Param((D, F), ("embed", "ffn"), into(D), at + "mlp.up_proj.weight", "F D -> D F"),
        "down": Param((F, D), ("ffn", "embed"), back(F), at + "mlp.down_proj.weight", "D F -> F D"),
    }
    if c.qk_norm:
        layer["q_norm"] = Param((H,), ("head",), ones, at + "self_attn.q_norm.weight", "H -> H")
        layer["k_norm"] = Param((H,), ("head",), ones, at + "self_attn.k_norm.weight", "H -> H")
    return layer


def table(c: Config) -> Table:
    """Parameter table, with the names of transformers' LlamaForCausalLM."""
    D, V, ones, near = c.width, c.vocab, jax.nn.initializers.ones, parameters.normal(0.02)
    whole = {
        "embedding": Param((V, D), ("vocab", "embed"), near, "model.embed_tokens.weight", "V D -> V D"),
        "layers": parameters.stacked(layer_table(c), c.layers),
        "final_norm": Param((D,), ("embed",), ones, "model.norm.weight", "D -> D"),
    }
    if not c.tied:
        whole["head"] = Param((D, V), ("embed", "vocab"), parameters.normal(D**-0.5), "lm_head.weight", "V D -> D V")
    return whole


class Cache(struct.PyTreeNode):
    """Keys and values of the committed positions, each in the slot of its position.

    k: [layers, (K*B,) H, S], v: [layers, (K*B,) S, H] (see `layers.kv_layout`), or tuples of arrays without the leading
        axis where the target's layers are unrolled. Slots at and past `lengths` hold leftovers that no mask lets
        through.
    draft_k, draft_v: tuples of the same arrays for the draft stream's own layers, empty without one.
    lengths: [B] int32.
    """

    k: Any
    v: Any
    draft_k: Any
    draft_v: Any
    lengths: jax.Array


class Pending(struct.PyTreeNode):
    """The cache's slots with the block's rows written after the committed ones, row i in slot lengths + i.

    They are written before attention, not after acceptance, so that a position's key lies in the same column whatever
    row of a chain it came from: sums then run in the same order, and a chain equals autoregression bit for bit.
    """

    k: Any
    v: Any
    draft_k: Any
    draft_v: Any
    chain: bool = struct.field(pytree_node=False)


class Llama(Layered):
    """Target of the Llama family.

    params: as `table(config)` says; `params["layers"]` stacked, or a tuple (unrolled).
    """

    def layer_table(self) -> Table:
        return layer_table(self.config)

    def init_cache(self, batch: int, capacity: int, block_width: int, adapter=None) -> Cache:
        """Slots for `capacity` positions and one block past them."""
        c, dtype = self.config, self.params["embedding"].dtype
        slots = capacity + block_width
        front = L.kv_front(c.kv_heads, batch)
        k, v = (*front, c.head_dim, slots), (*front, slots, c.head_dim)
        drafting = 0 if adapter is None else len(adapter.layers)
        each = lambda shape: tuple(jnp.zeros(shape, dtype) for _ in range(drafting))
        lengths = jnp.zeros((batch,), jnp.int32)
        return Cache(self._empty_slots(k), self._empty_slots(v), each(k), each(v), lengths)

    def prefill(self, ids, lengths, cache, adapter=None):
        t = ids.shape[1]
        causal = lambda rows: (jnp.arange(t) <= rows[:, None])[None]

        def attend(q, k, v, k_slots, v_slots):
            k, v = L.kv_layout(k, v)
            put = lambda slots, rows: jax.lax.dynamic_update_slice(slots, rows.astype(slots.dtype), (0,) * slots.ndim)
            return L.attend_in_chunks(q, k, v, causal), (put(k_slots, k), put(v_slots, v))

        streams, slots = self._run(self._inputs(ids), jnp.arange(t)[None], attend, cache, adapter)
        last = [jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1) for x in streams]
        return self._extended(last, None), Cache(*slots, lengths.astype(jnp.int32))

    def extend(self, block: Block, cache: Cache, adapter=None) -> Extended:
        x = self._inputs(block.ids, block, cache)
        if block.embeds is not None:
            x = jnp.where(block.embeds_mask[..., None], block.embeds.astype(x.dtype), x)
        slots = jax.tree.leaves(cache.v)[0].shape[-2]
        mask = L.block_mask(slots, cache.lengths, block)

        def attend(q, k, v, k_slots, v_slots):
            k, v = L.kv_layout(k, v)
            k_slots = L.write_rows(k_slots, k, cache.lengths, axis=-1)
            v_slots = L.write_rows(v_slots, v, cache.lengths, axis=-2)
            return L.attend(q, k_slots, v_slots, mask), (k_slots, v_slots)

        streams, slots = self._run(x, cache.lengths[:, None] + block.depths(), attend, cache, adapter)
        return self._extended(streams, Pending(*slots, chain=block.is_chain))

    def commit(self, cache: Cache, pending: Pending, path, accepted) -> Cache:
        lengths = cache.lengths + accepted.astype(jnp.int32)
        if pending.chain:
            return Cache(pending.k, pending.v, pending.draft_k, pending.draft_v, lengths)

        k, v = L.keep_path(pending.k, pending.v, cache.lengths, path)
        draft = (pending.draft_k, pending.draft_v)
        return Cache(k, v, *(L.keep_path(*draft, cache.lengths, path) if pending.draft_k else draft), lengths)

    def embed(self, ids):
        return jnp.take(self.params["embedding"], ids, axis=0)

    def unembed(self, hidden):
        if self.config.tied:
            return L.dense(hidden, self.params["embedding"], transposed=True, dtype=jnp.float32)
        return L.dense(hidden, self.params["head"], dtype=jnp.float32)

    def states(self, ids, adapter=None):
        positions = jnp.arange(ids.shape[1])[None]

        def step(x, p, adapters=None):
            mixed = causal_attention(*self._qkv(p, x, positions, adapters), ATTENTION_BLOCK)
            return self._after_attention(p, x, mixed, adapters), None

        shared, own = self._layers(adapter)
        x, _ = L.run_layers(shared, step, self._inputs(ids))
        for p, adapters in own:
            x, _ = step(x, adapters, None) if adapter.merged else step(x, p, adapters)
        return self._final_norm(x)

    def _inputs(self, ids, block: Block | None = None, cache: Cache | None = None):
        """What the first layer reads: of texts from their start, or of a block's ids after those of the cache."""
        return self.embed(ids)

    def _layers(self, adapter):
        """The layers that both streams pass, and those that each passes in its own way, with the adapter's."""
        layers = self.params["layers"]
        if adapter is None:
            return layers, ()
        if not isinstance(layers, tuple):
            raise InputError("an adapter needs the target's layers unrolled: load_target(..., unroll=True)")
        shared = len(layers) - len(adapter.layers)
        return layers[:shared], tuple(zip(layers[shared:], adapter.layers, strict=True))

    def _run(self, x, positions, attend, cache, adapter):
        """All layers. attend: (q, k, v, k slots, v slots) -> (mixed, (k slots, v slots)), for one stream.

        -> the streams' last states, the target's and, with an adapter, the draft's; the four fields of slots.
        """
        b = x.shape[0]
        shared, own = self._layers(adapter)

        def step(x, p, *slots, adapters=None):
            """One layer; x holds one stream or, on the batch axis, two, each with its own two slots."""
            streams = len(slots) // 2
            places = positions if len(positions) == 1 else jnp.tile(positions, (streams, 1))
            parts = zip(*(jnp.split(rows, streams) for rows in self._qkv(p, x, places, adapters, b)), strict=True)
            done = [attend(*part, *slots[2 * i : 2 * i + 2]) for i, part in enumerate(parts)]
            mixed = jnp.concatenate([m for m, _ in done]) if streams > 1 else done[0][0]
            return self._after_attention(p, x, mixed, adapters, b), sum((s for _, s in done), ())

        if not own:
            x, slots = L.run_layers(shared, step, x, cache.k, cache.v)
            return [x], (*(zip(*slots, strict=True) if isinstance(shared, tuple) else slots), (), ())
        n = len(shared)
        x, below = L.run_layers(shared, step, x, cache.k[:n], cache.v[:n])
        draft, upper = x, []
        for (p, a), *slots in zip(own, cache.k[n:], cache.v[n:], cache.draft_k, cache.draft_v, strict=True):
            if adapter.merged:
                x, mine = step(x, p, *slots[:2])
                draft, its = step(draft, a, *slots[2:])
                upper.append(mine + its)
            else:
                both, new = step(jnp.concatenate([x, draft]), p, *slots, adapters=a)
                x, draft = jnp.split(both, 2)
                upper.append(new)
        k, v, draft_k, draft_v = zip(*upper, strict=True)
        return [x, draft], (tuple(s[0] for s in below) + k, tuple(s[1] for s in below) + v, draft_k, draft_v)

    def _extended(self, streams, pending) -> Extended:
        hidden, *draft = map(self._final_norm, streams)
        return Extended(hidden, {"draft": draft[0]} if draft else {}, pending)

    def _qkv(self, p, x, positions, adapters=None, first=0):
        """q [B, T, K*G, H]; k, v [B, T, K, H]. adapters, first: see `layers.dense_with`."""
        c, (b, t, _) = self.config, x.shape
        h = L.rms_norm(x, p["attention_norm"], c.norm_eps)
        if "qkv" in p:
            rows = L.dense_with(h, p["qkv"], adapters and adapters["qkv"], first).reshape(b, t, -1, c.head_dim)
            q, k, v = jnp.split(rows, [c.heads, c.heads + c.kv_heads], axis=2)
        else:
            heads = lambda name: L.dense(h, p[name]).reshape(b, t, -1, c.head_dim)
            q, k, v = heads("q"), heads("k"), heads("v")
        if c.qk_norm:
            q, k = L.rms_norm(q, p["q_norm"], c.norm_eps), L.rms_norm(k, p["k_norm"], c.norm_eps)
        rotated = lambda x: L.rotary(x, positions, c.rope_theta, c.rope_scaling)
        return rotated(q), rotated(k), v

    def _after_attention(self, p, x, mixed, adapters=None, first=0):
        x = x + L.dense_with(mixed, p["o"], adapters and adapters["o"], first)
        return x + L.swiglu(p, L.rms_norm(x, p["mlp_norm"], self.config.norm_eps), adapters, first)

    def _final_norm(self, x):
        return L.rms_norm(x, self.params["final_norm"], self.config.norm_eps)


def create(config: Config, key: jax.Array, tokenizer, dtype=jnp.float32) -> Llama:
    """A Llama with random parameters."""
    return Llama(params=parameters.init(table(config), key, dtype), config=config, tokenizer=tokenizer)
