"""A circuit head arranged for drafting: few products with kernels in the layout that a single row likes.

Letters: c columns, n window, m places drafted, r rank, v vocabulary, d model width, k adapter rank, z rows of the sums.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from bytejax.circuits.head import HeadConfig, mix, sums_in_order, wide_dtype
from bytejax.parameters import Params


class DraftWeights(struct.PyTreeNode):
    """A head's parameters for one hidden state at a time, with the leaves of the first m places only.

    early: [d, c] kernel applied to the hidden state, late: the same for what the first byte is mixed into, or None for
        a head that is not fed. Columns: unembeddings of the places (place, [component,] byte), adapters' down
        projections (place, component, adapter), sums (row, component).
    up: [m, k, r, v], the adapters' up projections, or None. bias [z, r] and feed: the head's own, or None.
    """

    early: jax.Array
    late: jax.Array | None
    up: jax.Array | None
    bias: jax.Array | None
    feed: Params | None
    places: int = struct.field(pytree_node=False)


def draft_weights(params: Params, config: HeadConfig, places: int) -> DraftWeights:
    """Arranges a head for drafting the first `places` bytes of its window, 1 <= places <= n."""
    is_fed = config.feed_width is not None
    opening, needed = config.circuit.rows_above(1), config.circuit.rows_above(places)

    def kernel(part: slice, rows: np.ndarray) -> jax.Array:
        names = ("leaves",) if config.adapter_rank is None else ("shared", "down")
        pieces = [jnp.asarray(params[name])[part].reshape(-1, config.width) for name in names]
        if "sums" in params:
            pieces.append(jnp.asarray(params["sums"])[rows].reshape(-1, config.width))
        return jnp.concatenate(pieces).T

    return DraftWeights(
        early=kernel(slice(0, 1), opening) if is_fed else kernel(slice(0, places), needed),
        late=kernel(slice(1, places), needed & ~opening) if is_fed else None,
        up=jnp.asarray(params["up"])[:places].transpose(0, 3, 1, 2) if "up" in params else None,
        bias=params.get("bias"),
        feed=params.get("feed"),
        places=places,
    )


def draft_logits(
    weights: DraftWeights, config: HeadConfig, hidden: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`logits` of the first m places, from a few products with one kernel each.

    hidden [..., d], first [...] int -> sums [..., z, r] and leaves [..., m, r, v], at least float32. Sums that these
    places do not depend on are zero before the bias: whatever they are, they sum to one.
    """
    r, v, k, m = config.circuit.rank, config.vocab, config.adapter_rank, weights.places
    z, batch, wide = config.circuit.sum_rows, hidden.shape[:-1], wide_dtype(hidden)

    def project(h, kernel, places):
        columns = jnp.matmul(h, kernel, preferred_element_type=wide)
        sizes = [places * r * v] if k is None else [places * v, places * r * k]
        return jnp.split(columns, np.cumsum(sizes), axis=-1)

    if weights.late is None:
        parts = [(project(hidden, weights.early, m), m)]
    else:
        late = mix(weights.feed, hidden, first)
        parts = [(project(hidden, weights.early, 1), 1), (project(late, weights.late, m - 1), m - 1)]
    joined = lambda i, *shape: jnp.concatenate([p[i].reshape(*batch, n, *shape) for p, n in parts], len(batch))
    if k is None:
        leaves = joined(0, r, v)
    else:
        # Adapters are so narrow that a sum over them fuses into what reads the logits; a product would not.
        low, leaves = joined(1, r, k), joined(0, 1, v)
        for j in range(k):
            leaves = leaves + low[..., j, None] * weights.up[:, j].astype(wide)
    if r == 1:
        return jnp.zeros((*batch, z, r), wide), leaves
    opening, needed = config.circuit.rows_above(1), config.circuit.rows_above(m)
    groups = [needed] if weights.late is None else [opening, needed & ~opening]
    sums = sums_in_order(groups, [p[-1].reshape(*batch, -1, r) for p, _ in parts])
    return (sums if weights.bias is None else sums + weights.bias), leaves
