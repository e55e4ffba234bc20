"""The head: from a target's hidden state to the parameters of a circuit (MtPC, arXiv 2511.11346, Appendices G, H).

Both the leaves and the sums are softmaxes of linear maps of the hidden state. The *full* head has one unembedding per
position and component; the *low-memory* head one per position, plus a low-rank adapter per component.

A head may be *fed* its window's first byte: leaf 1 and the mixtures above it come from the hidden state alone, so that
byte 1 has its proper law, and everything else from a small mix of the hidden state and that byte. The window's law is
still
q(x_1) q(x_2.. | x_1), and under bonus conditioning (drafters draft x_2.. given the x_1 that the target chose) it sees
what the evidence on leaf 1 alone can only hint at.

Einsum letters: n window, r and y rank, v vocabulary, d model width, k adapter rank, z rows of the sums.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

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
    return hidden if config.feed_width is None else mix(params["feed"], hidden, first)


def mix(p: Params, hidden: jax.Array, first: jax.Array) -> jax.Array:
    """The layer of a fed head: `hidden` with the byte's embedding added, and a gated feed-forward layer on top."""
    mixed = hidden + jnp.where((first >= 0)[..., None], p["embedding"][jnp.maximum(first, 0)], 0).astype(hidden.dtype)
    wide = mixed.astype(wide_dtype(mixed))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * p["norm"]
    normed = normed.astype(hidden.dtype)
    return mixed + (jax.nn.silu(normed @ p["gate"]) * (normed @ p["up"])) @ p["down"]


def theta(params: Params, config: HeadConfig, hidden: jax.Array, first: jax.Array | None = None) -> Theta:
    """The circuit's parameters for each hidden state, to be conditioned on `first` if the head is fed.

    hidden [..., d], any float dtype; first [...] int, negative or None where not known (for a fed head, only the law of
    byte 1 then means anything) -> Theta in at least float32.
    """
    return config.circuit.normalise(*logits(params, config, hidden, first))


def logits(
    params: Params, config: HeadConfig, hidden: jax.Array, first: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """`theta` before normalisation: sums [..., z, r] and leaves [..., n, r, v], at least float32."""
    wide = wide_dtype(hidden)
    late = fed(params, config, hidden, jnp.full(hidden.shape[:-1], -1) if first is None else first)
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
    return sum_logits(params, config, hidden, late), leaves


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


def sum_logits(params: Params, config: HeadConfig, hidden: jax.Array, late: jax.Array) -> jax.Array:
    """`Theta.sums` before normalisation: hidden and late (see `fed`) [..., d] -> [..., z, r], at least float32."""
    if "sums" not in params:
        return jnp.zeros((*hidden.shape[:-1], config.circuit.sum_rows, config.circuit.rank), wide_dtype(hidden))

    def project(h, rows):  # in this order XLA reads the weights as they lie, else it copies them
        y = jnp.einsum("zyd,cd->zyc", rows, h.reshape(-1, h.shape[-1]), preferred_element_type=wide_dtype(h))
        return y.transpose(2, 0, 1).reshape(*h.shape[:-1], *rows.shape[:2])

    if late is hidden:
        logits = project(hidden, params["sums"])
    else:
        groups = [config.circuit.rows_above(1), ~config.circuit.rows_above(1)]
        parts = [project(h, params["sums"][rows]) for h, rows in zip((hidden, late), groups, strict=True)]
        logits = sums_in_order(groups, parts)
    return logits + params["bias"] if "bias" in params else logits


def sums_in_order(groups: list[np.ndarray], parts: list[jax.Array]) -> jax.Array:
    """Parts [..., rows, r], each one group [z] bool of the sums' rows, put together [..., z, r]; zero in no group."""
    source = np.concatenate([*map(np.flatnonzero, groups), np.flatnonzero(~np.any(groups, axis=0))])
    absent = len(groups[0]) - sum(part.shape[-2] for part in parts)
    zeros = jnp.zeros((*parts[0].shape[:-2], absent, parts[0].shape[-1]), parts[0].dtype)
    sums = jnp.concatenate([*parts, zeros], axis=-2)
    return sums if (source == np.arange(len(source))).all() else sums[..., np.argsort(source), :]


def wide_dtype(x: jax.Array) -> jnp.dtype:
    """x's dtype, but at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -UNIFORM, UNIFORM)


def _identity(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    rows, rank = shape
    stay = np.tile(np.eye(rank), ((rows - 1) // rank, 1))
    return jnp.asarray(np.concatenate([np.zeros((1, rank)), STAY * stay]), dtype)
