"""Causal attention over whole sequences, made for training: a blockwise forward pass and its own backward pass.

Dao et al., FlashAttention (arXiv 2205.14135), Algorithms 1 and 4, with blocks over queries only. Scores are recomputed
backwards, never above the diagonal block, and lie as [key, query]: every product of either pass is then a plain matrix
product, and sums over keys run along vector lanes (four times as fast on CPU as differentiating `layers.attend`).

Letters: B batch, T time, S keys seen by a block, K kv heads, G heads per kv head, H head size.
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> jax.Array:
    """Grouped-query attention of every position to itself and those before it; softmax in float32.

    q [B, T, K*G, H]; k, v [B, T, K, H]; block: queries at a time (T need not be a multiple). -> [B, T, K*G*H].
    """
    return _forward(q, k, v, block)[0]


def _forward(q, k, v, block):
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    parts = [_attend(q[:, i:j], k[:, :, :j], v[:, :, :j], i) for i, j in _blocks(q.shape[1], block)]
    out = jnp.concatenate([x for x, _ in parts], axis=1)
    return out.reshape(*out.shape[:2], -1), (q, k, v, out, [log_total for _, log_total in parts])


def _backward(block, saved, g):
    q, k, v, out, log_totals = saved
    g = g.reshape(out.shape)
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for (i, j), log_total in zip(_blocks(q.shape[1], block), log_totals, strict=True):
        rows = (q[:, i:j], out[:, i:j], g[:, i:j])
        dq_rows, dk_part, dv_part = _attend_backward(*rows, k[:, :, :j], v[:, :, :j], i, log_total)
        dq.append(dq_rows)
        dk, dv = dk.at[:, :, :j].add(dk_part), dv.at[:, :, :j].add(dv_part)
    dk, dv = (x.transpose(0, 2, 1, 3) for x in (dk, dv))
    return jnp.concatenate(dq, axis=1).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


causal_attention.defvjp(_forward, _backward)


def _blocks(length: int, block: int) -> list[tuple[int, int]]:
    return [(i, min(i + block, length)) for i in range(0, length, block)]


def _attend(q, k, v, start):
    """Attention of one block of queries, and the log of its softmax's denominators [B, K, 1, G*T]."""
    groups = q.shape[2] // k.shape[1]
    scores = _scores(q, k, start)
    top = scores.max(2, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(2, keepdims=True)
    mixed = _product(v.mT, weights.astype(v.dtype)) / total
    return _rows(mixed.astype(q.dtype), groups), top + jnp.log(total)


def _attend_backward(q, out, g, k, v, start, log_total):
    """Gradients of one block: dq [B, T, K*G, H]; dk, dv [B, K, S, H], float32."""
    kv_heads, groups = k.shape[1], q.shape[2] // k.shape[1]
    weights = jnp.exp(_scores(q, k, start) - log_total)
    q_columns, g_columns = _columns(q * (q.shape[-1] ** -0.5), kv_heads), _columns(g, kv_heads)
    dv = _product(weights.astype(v.dtype), g_columns.mT)
    inner = (g_columns.astype(jnp.float32) * _columns(out, kv_heads)).sum(2, keepdims=True)
    d_scores = (weights * (_product(v, g_columns) - inner)).astype(k.dtype)
    dk = _product(d_scores, q_columns.mT)
    dq = _product(k.mT, d_scores) * (q.shape[-1] ** -0.5)
    return _rows(dq, groups), dk, dv


def _scores(q, k, start):
    """[B, K, S, G*T] float32, -inf where a key comes after its query."""
    length, kv_heads = q.shape[1], k.shape[1]
    scores = _product(k, _columns(q * (q.shape[-1] ** -0.5), kv_heads))
    seen = jnp.arange(k.shape[2])[:, None] <= start + jnp.arange(length)
    return jnp.where(jnp.tile(seen, (1, q.shape[2] // kv_heads)), scores, -jnp.inf)


def _product(a, b):
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _columns(x, kv_heads):
    """[B, T, K*G, H] -> [B, K, H, G*T]."""
    b, t, heads, h = x.shape
    return x.reshape(b, t, kv_heads, heads // kv_heads, h).transpose(0, 2, 4, 3, 1).reshape(b, kv_heads, h, -1)


def _rows(x, groups):
    """[B, K, H, G*T] -> [B, T, K*G, H]."""
    b, kv_heads, h, columns = x.shape
    t = columns // groups
    return x.reshape(b, kv_heads, h, groups, t).transpose(0, 4, 1, 3, 2).reshape(b, t, kv_heads * groups, h)
