"""Attention for training against the plain one: values and all three gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax.models.causal import causal_attention


def plain(q, k, v):
    """The definition: softmax over the keys up to the query's own. q [B, T, K*G, H]; k, v [B, T, K, H]."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores), v).reshape(*q.shape[:2], -1)


def arrays(kv_heads, groups, dtype=jnp.float32):
    shapes = [(2, 11, kv_heads * groups, 4), (2, 11, kv_heads, 4), (2, 11, kv_heads, 4), (2, 11, kv_heads * groups * 4)]
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes)]


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize(("kv_heads", "groups"), [(2, 3), (3, 1)])
def test_values_and_gradients(kv_heads, groups, block):
    *qkv, cotangent = arrays(kv_heads, groups)
    want, pull_want = jax.vjp(plain, *qkv)
    got, pull_got = jax.vjp(lambda q, k, v: causal_attention(q, k, v, block), *qkv)
    np.testing.assert_allclose(got, want, atol=2e-6)
    for a, b in zip(pull_got(cotangent), pull_want(cotangent), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_bfloat16_keeps_its_dtype_and_comes_close():
    *qkv, cotangent = arrays(1, 2, jnp.bfloat16)
    got, pull = jax.vjp(lambda q, k, v: causal_attention(q, k, v, 4), *qkv)
    wide = [x.astype(jnp.float32) for x in qkv]
    want, pull_want = jax.vjp(plain, *wide)
    grads = pull(cotangent)
    assert {x.dtype for x in (got, *grads)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.03)
    for a, b in zip(grads, pull_want(cotangent.astype(jnp.float32)), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.1)
