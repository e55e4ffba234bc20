"""The head: from a target's hidden state to the parameters of a circuit (MtPC, arXiv 2511.11346, Appendices G, H).

Both the leaves and the sums are softmaxes of linear maps of the hidden state. The *full* head has one unembedding per
position and component; the *low-memory* head one per position, plus a low-rank adapter per component.

A head may be *fed* its window's first byte: leaf 1 and the mixtures above it come from the hidden state alone, so that
byte 1 has its proper law, and everything else from a small mix of the hidden state and that byte. The window's law is
still
q(x_1) q(x_2.. | x_1), and under bonus conditioning (drafters draft x_2.. given the x_1 that the target chose) it sees
what the evidence on leaf 1 alone can only hint at.

Einsum letters: n window, r and y rank, v vocabulary, d model width, k adapter rank, z rows of the sums, c positions.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from bytejax import parameters
from bytejax.circuits.base import Circuit, Theta
from bytejax.circuits.hmm import HMM
from bytejax.errors import InputError
from bytejax.parameters import Param, Params, Table

UNIFORM = 0.01275  # half-width of the reference's initial weights
STAY = 10.0  # HMM bias on staying in the same state: the other states share about r e^-10 of the mass at first
ADAPTED = ("shared", "down", "up")


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """circuit; width d of the hidden state; vocab v.

    adapter_rank: k of the low-memory head, None for the full one.
    feed_width: size of the feed-forward layer that mixes in the window's first byte, None for a head that is not fed.
    """

    circuit: Circuit
    width: int
    vocab: int
    adapter_rank: int | None
    feed_width: int | None = None

    def __post_init__(self):
        for field in ("width", "vocab", "adapter_rank", "feed_width"):
            value = getattr(self, field)
            optional = field in ("adapter_rank", "feed_width") and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(f"circuit head: {field} must be a positive integer, got {value!r}")


def table(config: HeadConfig) -> Table:
    """Declarations of the head's parameters.

    leaves [n, r, v, d], or shared [n, v, d], down [n, r, k, d] and up [n, r, v, k]; sums [z, r, d], absent where a
    mixture of one needs no weight; bias [z, r] of the HMM. With the initial adapters all components are equal (up is
    zero) and learn apart (down is random).
    """
    circuit, d, v, k = config.circuit, config.width, config.vocab, config.adapter_rank
    n, r, z = circuit.window, circuit.rank, circuit.sum_rows
    if k is None:
        head = {"leaves": Param((n, r, v, d), ("window", "rank", "vocab", "embed"), _uniform)}
    else:
        down, up = parameters.normal(d**-0.5), jax.nn.initializers.zeros
        head = {
            "shared": Param((n, v, d), ("window", "vocab", "embed"), _uniform),
            "down": Param((n, r, k, d), ("window", "rank", "adapter", "embed"), down),
            "up": Param((n, r, v, k), ("window", "rank", "vocab", "adapter"), up),
        }
    if r > 1:
        head["sums"] = Param((z, r, d), ("mixture", "rank", "embed"), _uniform)
    if r > 1 and isinstance(circuit, HMM):
        head["bias"] = Param((z, r), ("mixture", "rank"), _identity)
    if f := config.feed_width:
        zeros, into = jax.nn.initializers.zeros, parameters.normal(d**-0.5)
        head["feed"] = {
            "embedding": Param((v, d), ("vocab", "embed"), zeros),
            "norm": Param((d,), ("embed",), jax.nn.initializers.ones),
            "gate": Param((d, f), ("embed", "ffn"), into),
            "up": Param((d, f), ("embed", "ffn"), into),
            "down": Param((f, d), ("ffn", "embed"), zeros),
        }
    return head


def count(config: HeadConfig) -> int:
    """Number of parameters of the head."""
    return parameters.count(table(config))


def fed(params: Params, config: HeadConfig, hidden: jax.Array, first: jax.Array) -> jax.Array:
    """Features of all but leaf 1 and the mixtures above it: the hidden state, mixed with the first byte if the head
    is fed.

    hidden [..., d]; first [...] int, negative where the byte is not known -> [..., d].
    """
    return hidden if config.feed_width is None else _mixed(params["feed"], hidden, first)


def _mixed(p: Params, hidden: jax.Array, first: jax.Array) -> jax.Array:
    mixed = hidden + jnp.where((first >= 0)[..., None], p["embedding"][jnp.maximum(first, 0)], 0).astype(hidden.dtype)
    wide = mixed.astype(_wide(mixed))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * p["norm"]
    normed = normed.astype(hidden.dtype)
    return mixed + (jax.nn.silu(normed @ p["gate"]) * (normed @ p["up"])) @ p["down"]


def theta(params: Params, config: HeadConfig, hidden: jax.Array, first: jax.Array | None = None) -> Theta:
    """The circuit's parameters for each hidden state, to be conditioned on `first` if the head is fed.

    hidden [..., d], any float dtype; first [...] int, None where not known -> Theta in at least float32.
    """
    return config.circuit.normalise(*logits(params, config, hidden, first))


def logits(
    params: Params, config: HeadConfig, hidden: jax.Array, first: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """`theta` before normalisation: sums [..., z, r] and leaves [..., n, r, v], at least float32."""
    wide = _wide(hidden)
    late = hidden if first is None else fed(params, config, hidden, first)
    if config.adapter_rank is None:
        project = lambda h, w: jnp.einsum("...d,nrvd->...nrv", h, w["leaves"], preferred_element_type=wide)
    else:

        def project(h, w):
            shared = jnp.einsum("...d,nvd->...nv", h, w["shared"], preferred_element_type=wide)
            low = jnp.einsum("...d,nrkd->...nrk", h, w["down"])
            adapted = jnp.einsum("...nrk,nrvk->...nrv", low, w["up"], preferred_element_type=wide)
            return shared[..., None, :] + adapted

    names = ("leaves",) if config.adapter_rank is None else ADAPTED
    if late is hidden:
        leaves = project(hidden, params)
    else:
        one, rest = ({name: params[name][part] for name in names} for part in (slice(0, 1), slice(1, None)))
        leaves = jnp.concatenate([project(hidden, one), project(late, rest)], axis=-3)
    return _sum_logits(params, config, hidden, late), leaves


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
    places do not depend on are zero, which stands for even odds.
    """
    r, v, k, m = config.circuit.rank, config.vocab, config.adapter_rank, weights.places
    z, batch, wide = config.circuit.sum_rows, hidden.shape[:-1], _wide(hidden)

    def project(h, kernel, places):
        columns = jnp.matmul(h, kernel, preferred_element_type=wide)
        sizes = [places * r * v] if k is None else [places * v, places * r * k]
        return jnp.split(columns, np.cumsum(sizes), axis=-1)

    if weights.late is None:
        parts = [(project(hidden, weights.early, m), m)]
    else:
        late = _mixed(weights.feed, hidden, first)
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
    sums = _in_order(groups, [p[-1].reshape(*batch, -1, r) for p, _ in parts])
    return (sums if weights.bias is None else sums + weights.bias), leaves


def sums(params: Params, config: HeadConfig, hidden: jax.Array, late: jax.Array) -> jax.Array:
    """Only `Theta.sums`: hidden and late (see `fed`) [..., d] -> [..., z, r], at least float32."""
    return jax.nn.log_softmax(_sum_logits(params, config, hidden, late))


def leaf_scores(
    params: Params, config: HeadConfig, hidden: jax.Array, late: jax.Array, windows: jax.Array, chunk: int
) -> jax.Array:
    """Log-probability of each window's bytes under each component, without ever holding all the logits.

    hidden and late (see `fed`) [C, d]; windows [C, n] int, negative where ignored (the score is then 0); chunk: how
    many of the C positions at once -> [C, n, r], at least float32. One place in the window is done at a time, `chunk`
    positions of it at a time, so that the logits alive are [r, v, chunk], forwards and backwards; a gradient is summed
    in float32.
    """
    chunks = -(-hidden.shape[0] // chunk)
    padding = chunks * chunk - hidden.shape[0]
    x = jnp.pad(windows.T, ((0, 0), (0, padding)), constant_values=-1).reshape(-1, chunks, chunk)
    split = lambda h: jnp.pad(h, ((0, padding), (0, 0))).reshape(chunks, chunk, -1)
    leaf = {name: params[name] for name in (("leaves",) if config.adapter_rank is None else ADAPTED)}
    scores = _place_scores(leaf, (split(hidden),) if hidden is late else (split(hidden), split(late)), x)
    return scores.transpose(1, 3, 0, 2).reshape(chunks * chunk, config.circuit.window, -1)[: hidden.shape[0]]


@jax.custom_vjp
def _place_scores(leaf: Mapping[str, jax.Array], features: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    """leaf: weights, n leading; features: of place 1 and of the others, or of all; x -> scores [n, chunks, r, chunk].

    features [chunks, chunk, d] each, x [n, chunks, chunk].
    """
    return _place_scores_forward(leaf, features, x)[0]


def _place_scores_forward(leaf, features, x):
    def step(weights, batch):
        hidden, x = batch
        logits = _chunk_logits(weights, hidden)
        total = jax.nn.logsumexp(logits, 1)
        scores = jnp.sum(jnp.where(_hit(logits, x), logits, 0), 1) - total
        return weights, (jnp.where(x >= 0, scores, 0), total)

    def place(_, xs):
        weights, x, first = xs
        return None, jax.lax.scan(step, weights, (_features_of(features, first), x))[1]

    scores, totals = jax.lax.scan(place, None, (leaf, x, jnp.arange(x.shape[0]) == 0))[1]
    return scores, (leaf, features, x, totals)


def _place_scores_backward(saved, cotangent):
    # Only the log-normalisers were kept: the logits are made again, a chunk of a place at a time.
    leaf, features, x, totals = saved
    widened = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, _wide(a)), tree)

    def place(carry, xs):
        weights, x, totals, g, first = xs

        def step(sums, batch):
            hidden, x, total, g = batch
            logits, pull = jax.vjp(_chunk_logits, weights, hidden)
            slope = (_hit(logits, x) - jnp.exp(logits - total[:, None])) * jnp.where(x >= 0, g, 0)[:, None]
            weights_bar, hidden_bar = pull(slope)
            return jax.tree.map(lambda s, w: s + w.astype(s.dtype), sums, weights_bar), hidden_bar.astype(_wide(hidden))

        batches = _features_of(features, first), x, totals, g
        weights_bar, hidden_bar = jax.lax.scan(step, widened(weights), batches)
        if len(carry) == 1:
            carry = (carry[0] + hidden_bar,)
        else:
            carry = carry[0] + jnp.where(first, hidden_bar, 0), carry[1] + jnp.where(first, 0, hidden_bar)
        return carry, jax.tree.map(lambda s, w: s.astype(w.dtype), weights_bar, weights)

    xs = (leaf, x, totals, cotangent, jnp.arange(x.shape[0]) == 0)
    features_bar, leaf_bar = jax.lax.scan(place, widened(features), xs)
    return leaf_bar, jax.tree.map(lambda g, h: g.astype(h.dtype), features_bar, features), None


def _features_of(features: tuple[jax.Array, ...], first: jax.Array) -> jax.Array:
    """The features of a place, given whether it is the first."""
    return features[0] if len(features) == 1 else jnp.where(first, *features)


_place_scores.defvjp(_place_scores_forward, _place_scores_backward)


def window_scores(
    params: Params, config: HeadConfig, hidden: jax.Array, windows: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """What `Circuit.prefix_from_scores` needs: sums [C, z, r] and `leaf_scores` [C, n, r]."""
    late = fed(params, config, hidden, windows[:, 0])
    return sums(params, config, hidden, late), leaf_scores(params, config, hidden, late, windows, chunk)


def from_unembeddings(params: Params, config: HeadConfig, matrices: jax.Array) -> Params:
    """The head with the first positions' leaves copied from a target's (or an FF head's) own heads.

    matrices [m, v, d]: head j predicts byte j of the window; all components of a position get the same one, so that
    whatever the sums, the circuit's marginals over the first min(m, n) positions are those of independent heads.
    """
    matrices = jnp.asarray(matrices)
    if matrices.ndim != 3 or matrices.shape[1:] != (config.vocab, config.width):
        raise InputError(f"circuit head: expected heads [m, {config.vocab}, {config.width}], got {matrices.shape}")
    m = min(matrices.shape[0], config.circuit.window)
    if config.adapter_rank is None:
        leaves = jnp.asarray(params["leaves"])
        return params | {"leaves": leaves.at[:m].set(matrices[:m, None].astype(leaves.dtype))}
    shared, up = jnp.asarray(params["shared"]), jnp.asarray(params["up"])
    return params | {"shared": shared.at[:m].set(matrices[:m].astype(shared.dtype)), "up": up.at[:m].set(0)}


def _hit(logits: jax.Array, x: jax.Array) -> jax.Array:
    """Which logits [r, v, chunk] are those of the bytes x [chunk]. -> [1, v, chunk] bool."""
    return jnp.arange(logits.shape[1])[None, :, None] == x


def _chunk_logits(weights: Mapping[str, jax.Array], hidden: jax.Array) -> jax.Array:
    # The chunk is the last axis, so that sums over the vocabulary run along vector lanes: four times faster on CPU.
    wide = _wide(hidden)
    if "leaves" in weights:
        return jnp.einsum("rvd,cd->rvc", weights["leaves"], hidden, preferred_element_type=wide)
    shared = jnp.einsum("vd,cd->vc", weights["shared"], hidden, preferred_element_type=wide)
    low = jnp.einsum("rkd,cd->rkc", weights["down"], hidden)
    adapted = jnp.einsum("rvk,rkc->rvc", weights["up"], low, preferred_element_type=wide)
    return _repeat(shared, adapted.shape[0]) + adapted


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _repeat(x: jax.Array, times: int) -> jax.Array:
    return jnp.broadcast_to(x, (times, *x.shape))


def _repeat_backward(times: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    # The sum over the leading axis as a matrix product: XLA's own reduction of it is 50 times slower on CPU.
    return (jnp.tensordot(jnp.ones(times, g.dtype), g, 1),)


_repeat.defvjp(lambda x, times: (_repeat(x, times), None), _repeat_backward)


def _sum_logits(params: Params, config: HeadConfig, hidden: jax.Array, late: jax.Array) -> jax.Array:
    if "sums" not in params:
        return jnp.zeros((*hidden.shape[:-1], config.circuit.sum_rows, config.circuit.rank), _wide(hidden))
    project = lambda h, rows: jnp.einsum("...d,zyd->...zy", h, rows, preferred_element_type=_wide(hidden))
    if late is hidden:
        logits = project(hidden, params["sums"])
    else:
        groups = [config.circuit.rows_above(1), ~config.circuit.rows_above(1)]
        parts = [project(h, params["sums"][rows]) for h, rows in zip((hidden, late), groups, strict=True)]
        logits = _in_order(groups, parts)
    return logits + params["bias"] if "bias" in params else logits


def _in_order(groups: list[np.ndarray], parts: list[jax.Array]) -> jax.Array:
    """Parts [..., rows, r], each one group [z] bool of the sums' rows, put together [..., z, r]; zero in no group."""
    source = np.concatenate([*map(np.flatnonzero, groups), np.flatnonzero(~np.any(groups, axis=0))])
    absent = len(groups[0]) - sum(part.shape[-2] for part in parts)
    zeros = jnp.zeros((*parts[0].shape[:-2], absent, parts[0].shape[-1]), parts[0].dtype)
    sums = jnp.concatenate([*parts, zeros], axis=-2)
    return sums if (source == np.arange(len(source))).all() else sums[..., np.argsort(source), :]


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -UNIFORM, UNIFORM)


def _identity(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    rows, rank = shape
    stay = np.tile(np.eye(rank), ((rows - 1) // rank, 1))
    return jnp.asarray(np.concatenate([np.zeros((1, rank)), STAY * stay]), dtype)
