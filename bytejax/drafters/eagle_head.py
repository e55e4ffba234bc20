"""The head of EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a decoder layer that writes on from a target's features.

Column j of a text pairs a feature of position j with the embedding of the id at j + 1, and predicts the id at j + 2.
The feature is either the target's own, several layers' inputs side by side mapped to the model's width, or, where the
target has not been yet, what the layer itself gave for the column before.

Letters: B batch, T time, N rows, S slots, D model width, K kv heads, G heads per kv head, H head size, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bytejax import parameters
from bytejax.errors import InputError
from bytejax.models import layers as L  # noqa: N812
from bytejax.models.base import Target
from bytejax.models.causal import causal_attention
from bytejax.models.transformer import Transformer
from bytejax.parameters import Param, Params, Table

ATTENTION_BLOCK = 256  # queries at a time in whole sequences
SIZES = ("width", "vocab", "heads", "kv_heads", "head_dim", "ffn_width")


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """Numbers of a head: those of its layer, and which layers' inputs it reads (see `models.base.Target.extend`).

    width, vocab: the target's. taps: ascending.
    """

    width: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    rope_theta: float
    norm_eps: float
    taps: tuple[int, ...]

    def __post_init__(self):
        for name in SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"EAGLE head: {name} must be a positive integer, got {value!r}")
        if self.heads % self.kv_heads:
            raise InputError(f"EAGLE head: heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise InputError(f"EAGLE head: head_dim = {self.head_dim} is odd; rotary positions need an even one")
        whole = all(isinstance(tap, int) and not isinstance(tap, bool) and tap >= 0 for tap in self.taps)
        if not self.taps or not whole or list(self.taps) != sorted(set(self.taps)):
            raise InputError(f"EAGLE head: taps must be ascending numbers of layers, got {list(self.taps)}")

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> "EagleConfig":
        """From `dataclasses.asdict` that went through JSON. Raises TypeError or KeyError for anything else."""
        return cls(**{**saved, "taps": tuple(saved["taps"])})

    def check(self, target: Target) -> None:
        """Raises InputError where the head does not fit the target."""
        if not isinstance(target, Transformer):
            raise InputError(f"an EAGLE head reads attention layers, which a {type(target).__name__} has not")
        for name in ("width", "vocab"):
            mine, its = getattr(self, name), getattr(target, name)
            if mine != its:
                raise InputError(f"the EAGLE head has {name} {mine}, the target {its}: it belongs to another target")
        if self.taps[-1] > target.config.layers:
            raise InputError(f"the EAGLE head reads layer {self.taps[-1]}; the target has {target.config.layers}")


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high layers; with fewer than six layers the outputs of the first, middle and last."""
    return (2, layers // 2, layers - 3) if layers >= 6 else tuple(sorted({1, (layers + 2) // 2, layers}))


def table(c: EagleConfig) -> Table:
    """Parameter table, with the names of the released EAGLE-3 checkpoints."""
    D, F, V, ones = c.width, c.ffn_width, c.vocab, jax.nn.initializers.ones
    I, Q, K = len(c.taps) * D, c.heads * c.head_dim, c.kv_heads * c.head_dim
    into, near = lambda fan_in: parameters.normal(fan_in**-0.5), parameters.normal((2 * D) ** -0.5)
    at, layer = "midlayer.", {}
    for name, size, axis in (("q", Q, "heads"), ("k", K, "kv_heads"), ("v", K, "kv_heads")):
        layer[name] = Param((2 * D, size), ("embed", axis), near, f"{at}self_attn.{name}_proj.weight", "Q I -> I Q")
    return {
        "features": Param((I, D), ("taps", "embed"), into(I), "fc.weight", "D I -> I D"),
        "embedding_norm": Param((D,), ("embed",), ones, at + "input_layernorm.weight", "D -> D"),
        "feature_norm": Param((D,), ("embed",), ones, at + "hidden_norm.weight", "D -> D"),
        **layer,
        "o": Param((Q, D), ("heads", "embed"), into(2 * Q), at + "self_attn.o_proj.weight", "D Q -> Q D"),
        "mlp_norm": Param((D,), ("embed",), ones, at + "post_attention_layernorm.weight", "D -> D"),
        "gate": Param((D, F), ("embed", "ffn"), into(D), at + "mlp.gate_proj.weight", "F D -> D F"),
        "up": Param((D, F), ("embed", "ffn"), into(D), at + "mlp.up_proj.weight", "F D -> D F"),
        "down": Param((F, D), ("ffn", "embed"), into(2 * F), at + "mlp.down_proj.weight", "D F -> F D"),
        "final_norm": Param((D,), ("embed",), ones, "norm.weight", "D -> D"),
        "head": Param((D, V), ("embed", "vocab"), into(D), "lm_head.weight", "V D -> D V"),
    }


def features(p: Params, inner: jax.Array) -> jax.Array:
    """What the layer reads of a target's inner features. [..., len(taps) * D] -> [..., D]."""
    return L.dense(inner, p["features"])


def inputs(p: Params, c: EagleConfig, embedded: jax.Array, g: jax.Array) -> jax.Array:
    """embedded [B, N, D] of the ids one position later, features g [B, N, D] -> [B, N, 2D]."""
    normed = (L.rms_norm(embedded, p["embedding_norm"], c.norm_eps), L.rms_norm(g, p["feature_norm"], c.norm_eps))
    return jnp.concatenate(normed, axis=-1)


def keys_values(p: Params, c: EagleConfig, h: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of inputs h [B, N, 2D] at positions [B or 1, N] -> k, v [B, N, K, H], keys rotated."""
    k, v = (L.dense(h, p[name]).reshape(*h.shape[:2], -1, c.head_dim) for name in ("k", "v"))
    return L.rotary(k, positions, c.rope_theta), v


def queries(p: Params, c: EagleConfig, h: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotated queries, [B, N, K*G, H]."""
    return L.rotary(L.dense(h, p["q"]).reshape(*h.shape[:2], -1, c.head_dim), positions, c.rope_theta)


def after_attention(p: Params, c: EagleConfig, g: jax.Array, mixed: jax.Array) -> jax.Array:
    """The layer's output, which is the next column's feature. g [B, N, D], mixed [B, N, K*G*H] -> [B, N, D]."""
    x = g + L.dense(mixed, p["o"])
    return x + L.swiglu(p, L.rms_norm(x, p["mlp_norm"], c.norm_eps))


def logits(p: Params, c: EagleConfig, g: jax.Array) -> jax.Array:
    """What the layer's outputs g [..., D] say about the id after their column's. -> [..., V] float32."""
    return L.dense(L.rms_norm(g, p["final_norm"], c.norm_eps), p["head"], dtype=jnp.float32)


def unrolled(p: Params, c: EagleConfig, inner: jax.Array, embedded: jax.Array, steps: int) -> list[jax.Array]:
    """The layer's outputs on whole texts, its own taken for features step after step ("training-time test").

    At step i column j pairs the output of step i - 1 (at step 0 the target's feature) with the id at j + 1 + i, and
    predicts the one at j + 2 + i: as drafting does that began at column j. So it sees the target's features up to
    column j and its own for those drafted before: of step 0 the columns up to j, of later steps column j alone.

    inner [B, T, len(taps) * D], the target's; embedded [B, T, D], of the texts' ids. Columns with j + 1 + i >= T pair
    with embeddings that are zero and mean nothing. -> per step [B, T, D]. Attention takes B x T x T memory per step.
    """
    t = inner.shape[1]
    g, seen, outputs = features(p, inner), [], []
    for i in range(steps):
        ahead = jnp.pad(embedded[:, 1 + i :], ((0, 0), (0, min(1 + i, t)), (0, 0)))
        h, positions = inputs(p, c, ahead, g), jnp.arange(t)[None] + i
        q = queries(p, c, h, positions)
        seen.append(keys_values(p, c, h, positions))
        mixed = causal_attention(q, *seen[0], ATTENTION_BLOCK) if i == 0 else _attend_in_columns(q, seen)
        g = after_attention(p, c, g, mixed)
        outputs.append(g)
    return outputs


def _attend_in_columns(q: jax.Array, seen: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Attention of every column to the keys of step 0 up to it, and to those of later steps in the same column.

    q [B, T, K*G, H]; seen: k, v [B, T, K, H] of every step -> [B, T, K*G*H]. Softmax in float32.
    """
    b, t, _, h = q.shape
    (k0, v0), later = seen[0], seen[1:]
    q = q.reshape(b, t, k0.shape[2], -1, h) * h**-0.5
    before = jnp.einsum("BTKGH,BSKH->BKGTS", q, k0, preferred_element_type=jnp.float32)
    before = jnp.where(jnp.tril(jnp.ones((t, t), bool)), before, -jnp.inf)
    own = [jnp.einsum("BTKGH,BTKH->BKGT", q, k, preferred_element_type=jnp.float32) for k, _ in later]
    weights = jax.nn.softmax(jnp.concatenate([before, jnp.stack(own, -1)], axis=-1)).astype(v0.dtype)
    mixed = jnp.einsum("BKGTS,BSKH->BTKGH", weights[..., :t], v0)
    for i, (_, v) in enumerate(later):
        mixed += jnp.moveaxis(weights[..., t + i], -1, 1)[..., None] * v[:, :, :, None]
    return mixed.reshape(b, t, -1)
