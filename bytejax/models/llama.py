"""Llama-family decoder (Llama, Qwen3): grouped-query attention, rotary positions, SwiGLU, RMSNorm.

Letters: B batch, T time, N block rows, S cache slots, D model width, K kv heads, G heads per kv head, H head size,
F feed-forward width, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bytejax import parameters
from bytejax.errors import InputError
from bytejax.models import layers as L  # noqa: N812
from bytejax.models.base import Block, Extended
from bytejax.models.causal import causal_attention
from bytejax.models.layers import RopeScaling
from bytejax.models.transformer import Cache, Pending, Transformer
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


class Llama(Transformer):
    """Target of the Llama family. In its caches the slot of a position is the position.

    params: as `table(config)` says; `params["layers"]` stacked, or a tuple (unrolled).
    """

    def layer_table(self) -> Table:
        return layer_table(self.config)

    def init_cache(self, batch: int, capacity: int, block_width: int, adapter=None) -> Cache:
        """Slots for `capacity` positions and one block past them."""
        slots, front = capacity + block_width, L.kv_front(self.config.kv_heads, batch)
        k, v = (*front, self.config.head_dim, slots), (*front, slots, self.config.head_dim)
        return Cache(*self._empty(k, v, adapter), jnp.zeros((batch,), jnp.int32))

    def prefill(self, ids, lengths, cache, adapter=None, taps=()):
        t = ids.shape[1]
        causal = lambda rows: (jnp.arange(t) <= rows[:, None])[None]

        def attend(p, q, k, v, k_slots, v_slots):
            k, v = L.kv_layout(k, v)
            put = lambda slots, rows: jax.lax.dynamic_update_slice(slots, rows.astype(slots.dtype), (0,) * slots.ndim)
            return L.attend_in_chunks(q, k, v, causal), (put(k_slots, k), put(v_slots, v))

        streams, slots, inner = self._run(self._inputs(ids), jnp.arange(t)[None], attend, cache, adapter, taps)
        last = [jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1) for x in streams]
        return self._extended(last, None, inner, taps), Cache(*slots, lengths.astype(jnp.int32))

    def extend(self, block: Block, cache: Cache, adapter=None, taps=()) -> Extended:
        mask = L.block_mask(cache.slots, cache.lengths, block)

        def attend(p, q, k, v, k_slots, v_slots):
            k, v = L.kv_layout(k, v)
            k_slots = L.write_rows(k_slots, k, cache.lengths, axis=-1)
            v_slots = L.write_rows(v_slots, v, cache.lengths, axis=-2)
            return L.attend(q, k_slots, v_slots, mask), (k_slots, v_slots)

        positions = cache.lengths[:, None] + block.depths()
        streams, slots, inner = self._run(self._block_inputs(block, cache), positions, attend, cache, adapter, taps)
        return self._extended(streams, Pending(*slots, chain=block.is_chain), inner, taps)

    def commit(self, cache: Cache, pending: Pending, path, accepted) -> Cache:
        return Cache(*pending.kept(cache.lengths, path), cache.lengths + accepted.astype(jnp.int32))

    def unembed(self, hidden):
        kernel = self.params[self.unembedding]
        return L.dense(hidden, kernel, transposed=self.config.tied and kernel.ndim == 2, dtype=jnp.float32)

    @property
    def unembedding(self):
        return "embedding" if self.config.tied else "head"

    def _whole(self, ids, adapter=None, taps=()):
        attend = lambda p, q, k, v: causal_attention(q, k, v, ATTENTION_BLOCK)
        return self._run_whole(self._inputs(ids), jnp.arange(ids.shape[1])[None], attend, adapter, taps)

    def residuals(self, ids: jax.Array, embeds: jax.Array | None = None, at: jax.Array | None = None) -> jax.Array:
        """The residual stream of whole sequences, before the first layer and after every one.

        ids [B, T] int32. embeds [B, M, D], at [B, M] int32: further rows, each in the place of the id at that position:
            it sees the ids before and itself, and nothing sees it.
        -> [layers + 1, B, T + M, D], the further rows last.
        """
        (b, t), x = ids.shape, self._inputs(ids)
        positions = jnp.broadcast_to(jnp.arange(t), (b, t))
        if embeds is not None:
            x = jnp.concatenate([x, embeds.astype(x.dtype)], axis=1)
            positions = jnp.concatenate([positions, at], axis=1)
        place = jnp.arange(x.shape[1])
        of = lambda rows: jnp.take(positions, rows, axis=1, mode="clip")[..., None]  # the last chunk is padded

        def mask(rows):
            earlier = (place < of(rows)) & (place < t)
            return earlier | (place == rows[:, None])

        attend = lambda p, q, k, v: L.attend_in_chunks(q, *L.kv_layout(k, v), mask)
        return self._residuals(x, positions, attend)

    def _qkv(self, p, x, positions, adapters=None, first=0):
        c, (b, t, _) = self.config, x.shape
        h = self._norm(x, p["attention_norm"])
        if "qkv" in p:
            rows = L.dense_with(h, p["qkv"], adapters and adapters["qkv"], first).reshape(b, t, -1, c.head_dim)
            q, k, v = jnp.split(rows, [c.heads, c.heads + c.kv_heads], axis=2)
        else:
            heads = lambda name: L.dense(h, p[name]).reshape(b, t, -1, c.head_dim)
            q, k, v = heads("q"), heads("k"), heads("v")
        if c.qk_norm:
            q, k = self._norm(q, p["q_norm"]), self._norm(k, p["k_norm"])
        rotated = lambda x: L.rotary(x, positions, c.rope_theta, c.rope_scaling)
        return rotated(q), rotated(k), v

    def _norm(self, x, scale):
        return L.rms_norm(x, scale, self.config.norm_eps)


def create(config: Config, key: jax.Array, tokenizer, dtype=jnp.float32) -> Llama:
    """A Llama with random parameters."""
    return Llama(params=parameters.init(table(config), key, dtype), config=config, tokenizer=tokenizer)
