"""A longer head begins with the law of the shorter one it starts from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax import circuits, parameters
from bytejax.circuits import head as heads
from bytejax.circuits.grow import from_shorter
from bytejax.errors import InputError

D, V = 6, 5


def make(name, window, seed, adapter_rank=None, feed_width=None):
    circuit = circuits.make(name, window, 1 if name == "ff" else 3)
    config = heads.HeadConfig(circuit, D, V, adapter_rank, feed_width)
    shapes = parameters.init(heads.table(config), jax.random.key(seed))
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    return structure.unflatten([jax.random.normal(k, x.shape) for k, x in zip(keys, leaves)]), config


@pytest.mark.parametrize(("adapter_rank", "feed_width"), [(None, None), (2, 4)])
@pytest.mark.parametrize(("name", "m", "n"), [("ff", 3, 7), ("cp", 3, 8), ("hmm", 4, 9), ("btree", 4, 8), ("cp", 4, 4)])
def test_first_bytes_keep_their_law(name, m, n, adapter_rank, feed_width):
    short, short_config = make(name, m, 0, adapter_rank, feed_width)
    fresh, config = make(name, n, 5, adapter_rank, feed_width)
    if name == "btree":  # without offsets every value of the new root starts alike
        fresh["sums"] = (
            fresh["sums"].at[config.circuit.block_rows(config.circuit.blocks_of(short_config.circuit)[0])].set(0)
        )
    grown = from_shorter(fresh, config, short, short_config)
    hidden, x = jax.random.normal(jax.random.key(9), (20, D)), jax.random.randint(jax.random.key(8), (20, n), 0, V)
    law = lambda p, c, x: c.circuit.prefix_log_probs(heads.theta(p, c, hidden, x[:, 0]), x)
    want = law(short, short_config, x[:, :m])
    np.testing.assert_allclose(law(grown, config, x)[:, :m], want, atol=2e-5)
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(jnp.shape, fresh)


def test_values_of_a_new_root_start_apart():
    short, short_config = make("btree", 4, 0)
    fresh, config = make("btree", 8, 5)
    grown = from_shorter(fresh, config, short, short_config)
    block = config.circuit.block_rows(config.circuit.blocks_of(short_config.circuit)[0])
    rows = grown["sums"][block]
    assert rows.shape[0] == 3
    np.testing.assert_allclose(rows - fresh["sums"][block], jnp.broadcast_to(short["sums"][:1], rows.shape), atol=1e-6)


@pytest.mark.parametrize(("m", "n"), [(5, 8), (4, 6), (8, 12), (1, 4)])
def test_a_tree_in_which_the_shorter_one_is_no_region(m, n):
    fresh, config = make("btree", n, 5)
    with pytest.raises(InputError, match=f"no region of the first {m} bytes"):
        from_shorter(fresh, config, *make("btree", m, 0))


@pytest.mark.parametrize(
    ("short", "message"),
    [
        (("cp", 9, 0), "longer window"),
        (("hmm", 3, 0), "another circuit"),
        (("cp", 3, 0, 2), "adapter_rank"),
        (("cp", 3, 0, None, 4), "feed_width"),
    ],
)
def test_heads_that_do_not_fit(short, message):
    fresh, config = make("cp", 8, 5)
    with pytest.raises(InputError, match=message):
        from_shorter(fresh, config, *make(*short))
