"""The search for a truncation threshold against a sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax.decoding.logits import make_warp


def reference(logits, temperature, top_k, top_p):
    """Temperature, then top-k, then the nucleus of what is left, by sorting. logits [..., V] float64."""
    p = np.exp(logits / temperature - (logits / temperature).max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    order = np.argsort(-p, -1)
    sorted_p = np.take_along_axis(p, order, -1)
    if top_k:
        sorted_p[..., top_k:] = 0
        sorted_p /= sorted_p.sum(-1, keepdims=True)
    sorted_p *= np.cumsum(sorted_p, -1) - sorted_p < top_p
    sorted_p /= sorted_p.sum(-1, keepdims=True)
    return np.take_along_axis(sorted_p, np.argsort(order, -1), -1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 0.9), (0.7, 5, 1.0), (1.3, 40, 0.5), (0.2, 1, 0.3), (2.0, 0, 1e-6)]
)
def test_truncation_keeps_what_a_sort_keeps(temperature, top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(50, 261)) * 3
    got = jnp.exp(make_warp(261, temperature, top_k, top_p).log_probs(jnp.asarray(logits, jnp.float32)))
    np.testing.assert_allclose(got, reference(logits, temperature, top_k, top_p), atol=2e-6)


def test_ties_with_the_last_kept_id_are_kept():
    p = jnp.exp(make_warp(4, 1.0, 2, 1.0).log_probs(jnp.log(jnp.asarray([0.4, 0.25, 0.25, 0.1]))))
    np.testing.assert_allclose(p, np.array([0.4, 0.25, 0.25, 0]) / 0.9, rtol=1e-6)


def test_banned_and_surplus_ids_have_no_mass():
    warp = make_warp(4, 1.0, 0, 1.0, banned=[1])
    p = jnp.exp(warp.log_probs(jnp.zeros((2, 6))))
    assert p.shape == (2, 4)
    np.testing.assert_allclose(p, [[1 / 3, 0, 1 / 3, 1 / 3]] * 2, rtol=1e-6)


def test_half_precision_logits_are_warped_in_float32():
    p = make_warp(300, 0.9, 0, 0.95).log_probs(jax.random.normal(jax.random.key(0), (300,), jnp.bfloat16))
    assert p.dtype == jnp.float32
    np.testing.assert_allclose(jnp.exp(p).sum(), 1, rtol=1e-6)
