"""What every circuit over a window of bytes shares: its parameters, its queries, and the two passes behind them.

A circuit is a mixture with discrete latents in which leaf i is a categorical over x_i, one per value of the latent it
hangs from (MtPC, arXiv 2511.11346). Each circuit says how messages travel through it, and everything else is
written here once:

- A `Walk` goes over the leaves from left to right and has at each the law of its latent given the bytes before it.
  Prefix marginals, conditionals and sequential drafts are this one walk with different observers; a beam of prefixes
  is several walks at once (`circuits.prefixes`).
- `_upward` goes from the leaves to the root with a sum or with a maximum: likelihood, most probable explanation.

Legend: n window, r rank, v vocabulary, z rows of the sums.
"""

import abc
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bytejax.errors import InputError

Observe = Callable[[int, jax.Array], jax.Array]  # (leaf, log prior [..., r]) -> log likelihood of its byte [..., r]
Reduce = Callable[[int, jax.Array], jax.Array]  # (block of sums, terms [..., rows, r]) -> [..., rows]


class Theta(NamedTuple):
    """Parameters of any circuit: log-probabilities normalised over the last axis, any leading batch axes.

    sums: [..., z, r] float, the mixtures; z and the meaning of a row belong to the circuit.
    leaves: [..., n, r, v] float, one categorical per position and latent value.
    """

    sums: jax.Array
    leaves: jax.Array


class Walk(NamedTuple):
    """Where a walk over the leaves stands: everything that the laws of the bytes from here on depend on.

    prior: [..., r], the law of the next leaf's latent given the bytes before it. held: arrays [..., r] of the circuit's
    own, what it has to remember of those bytes beside that.
    """

    prior: jax.Array
    held: tuple[jax.Array, ...] = ()


def log_sum_exp(a: jax.Array, axis: int = -1) -> jax.Array:
    """log sum exp over `axis`; -inf, with zero gradient instead of NaN, where every term is -inf."""
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(a, axis, keepdims=True), jnp.finfo(a.dtype).min))
    total = jnp.sum(jnp.exp(a - top), axis)
    empty = total == 0
    return jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1, total)) + jnp.squeeze(top, axis))


def posterior(prior: jax.Array, scores: jax.Array) -> jax.Array:
    """Bayes' rule on the last axis, in logs. An observation without any mass leaves the prior as it is."""
    joint = prior + scores
    total = log_sum_exp(joint)[..., None]
    empty = total == -jnp.inf
    return jnp.where(empty, prior, joint - jnp.where(empty, 0, total))


def transition(prior: jax.Array, rows: jax.Array) -> jax.Array:
    """Law of the next latent: log sum_y exp(prior [..., y] + rows [..., y, z]) -> [..., z]."""
    return log_sum_exp(prior[..., :, None] + rows, axis=-2)


def gather_scores(leaves: jax.Array, x: jax.Array) -> jax.Array:
    """Log-probability of each byte under each component. leaves [..., n, r, v], x [..., n] int -> [..., n, r]."""
    batch = np.broadcast_shapes(leaves.shape[:-3], x.shape[:-1])
    leaves = jnp.expand_dims(leaves, tuple(range(len(batch) - leaves.ndim + 3)))
    x = jnp.expand_dims(x, tuple(range(len(batch) - x.ndim + 1)))
    return jnp.take_along_axis(leaves, x[..., None, None], axis=-1)[..., 0]


def pick(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows [..., m], index [..., k] int -> rows[..., index] per batch element, [..., k]."""
    return jnp.take_along_axis(rows, index, axis=-1)


class Circuit(abc.ABC):
    """A distribution over x_1..x_n. Subclasses are frozen dataclasses with the fields `window` and `rank`.

    Every method is pure and works under jit, vmap and grad, in float32 or float64. Batch axes of theta and of x lead,
    and broadcast. Rows of `Theta.sums` come in blocks: block 0 is the one row of the root, each further block holds r
    rows, one per value of the latent above.
    """

    name: ClassVar[str]
    window: int
    rank: int

    def __post_init__(self):
        for field in ("window", "rank"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"circuit {self.name}: {field} must be a positive integer, got {value!r}")

    @property
    @abc.abstractmethod
    def blocks(self) -> int:
        """Number of blocks of rows in `Theta.sums`."""

    @abc.abstractmethod
    def begin(self, sums: jax.Array) -> Walk:
        """The walk before the first byte."""

    @abc.abstractmethod
    def advance(self, sums: jax.Array, walk: Walk, i: int, scores: jax.Array) -> Walk:
        """From leaf i to the next, i < n - 1, given the scores [..., r] of byte i."""

    @abc.abstractmethod
    def _upward(self, sums: jax.Array, scores: jax.Array, reduce: Reduce) -> jax.Array:
        """Messages from the leaves' scores [..., n, r] to the root [...]; `reduce` closes each block of sums."""

    @abc.abstractmethod
    def _leaf_latents(self, choice: jax.Array) -> jax.Array:
        """The latent every leaf sees [..., n] if row k of the sums takes the value choice[..., k]."""

    @abc.abstractmethod
    def _condition_sums(self, sums: jax.Array, scores: jax.Array) -> jax.Array:
        """The sums given the first leaf's scores [..., r]."""

    def _filter(self, sums: jax.Array, observe: Observe) -> None:
        """Calls `observe(i, prior)` for i = 0..n-1, prior the law of leaf i's latent given the bytes before."""
        walk = self.begin(sums)
        for i in range(self.window):
            scores = observe(i, walk.prior)
            if i + 1 < self.window:
                walk = self.advance(sums, walk, i, scores)

    @property
    def sum_rows(self) -> int:
        """z, the number of rows of `Theta.sums`."""
        return 1 + (self.blocks - 1) * self.rank

    def blocks_above(self, places: int) -> tuple[int, ...]:
        """The blocks of sums, in order, that the law of x_1..x_m depends on, m = places."""
        return (0,)

    def blocks_of(self, shorter: "Circuit") -> dict[int, int]:
        """Which of this circuit's blocks plays the part of each block of a circuit with a shorter window."""
        return {k: k for k in range(shorter.blocks)}

    def rows_above(self, places: int) -> np.ndarray:
        """[z] bool: the rows of those blocks."""
        rows = np.zeros(self.sum_rows, bool)
        for k in self.blocks_above(places):
            rows[self.block_rows(k)] = True
        return rows

    def _block(self, sums: jax.Array, k: int) -> jax.Array:
        return sums[..., :1, :] if k == 0 else sums[..., self.block_rows(k), :]

    def block_rows(self, k: int) -> slice:
        """The rows of block k in `Theta.sums`."""
        return slice(1 + (k - 1) * self.rank, 1 + k * self.rank) if k else slice(0, 1)

    # --- parameters ---

    def normalise(self, sum_logits: jax.Array, leaf_logits: jax.Array) -> Theta:
        """Softmax over the last axes, in at least float32. [..., z, r] and [..., n, r, v], any float dtype."""
        wide = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (sum_logits, leaf_logits))
        return Theta(*(jax.nn.log_softmax(x) for x in wide))

    def init(self, key: jax.Array, vocab: int, batch: tuple[int, ...] = ()) -> Theta:
        """Random parameters: the softmax of standard normal logits, leading axes `batch`."""
        sums, leaves = jax.random.split(key)
        return self.normalise(
            jax.random.normal(sums, (*batch, self.sum_rows, self.rank)),
            jax.random.normal(leaves, (*batch, self.window, self.rank, vocab)),
        )

    def condition(self, theta: Theta, first: jax.Array) -> Theta:
        """Posterior parameters given x_1 = first [...] int: the same window and form, leaf 1 a point mass.

        If q gives `first` no mass at all, the latents stay unconditioned and leaf 1 is the point mass all the same.
        """
        first = jnp.asarray(first)
        batch = np.broadcast_shapes(theta.leaves.shape[:-3], first.shape)
        leaves = jnp.broadcast_to(theta.leaves, (*batch, *theta.leaves.shape[-3:]))
        sums = jnp.broadcast_to(theta.sums, (*batch, *theta.sums.shape[-2:]))
        first = jnp.broadcast_to(first, batch)
        scores = gather_scores(leaves[..., :1, :, :], first[..., None])[..., 0, :]
        point = jnp.where(jnp.arange(leaves.shape[-1]) == first[..., None], 0.0, -jnp.inf).astype(leaves.dtype)
        return Theta(self._condition_sums(sums, scores), leaves.at[..., 0, :, :].set(point[..., None, :]))

    # --- likelihood ---

    def log_prob(self, theta: Theta, x: jax.Array) -> jax.Array:
        """log q(x). x [..., n] int -> [...]."""
        x = self._window(x)
        scores = gather_scores(theta.leaves, x)
        return self._upward(theta.sums, scores, lambda _, terms: log_sum_exp(terms))

    def prefix_log_probs(self, theta: Theta, x: jax.Array, observed: jax.Array | None = None) -> jax.Array:
        """log q(x_1..x_i) for every i, in one pass. x [..., n] int, observed [..., n] bool -> [..., n].

        Where `observed` is False the byte is summed out (and its value ignored): the prefix gains exactly nothing.
        """
        x = self._window(x)
        x = x if observed is None else jnp.where(observed, x, 0)
        return self.prefix_from_scores(theta.sums, gather_scores(theta.leaves, x), observed)

    def prefix_from_scores(self, sums: jax.Array, scores: jax.Array, observed: jax.Array | None = None) -> jax.Array:
        """The same from gathered leaf log-probabilities [..., n, r], so that [..., n, r, v] need not exist."""
        steps = self.step_log_probs(sums, scores, observed)
        prefixes = [steps[..., 0]]
        for i in range(1, self.window):  # a plain running sum: adding an ignored position's zero changes no bit
            prefixes.append(prefixes[-1] + steps[..., i])
        return jnp.stack(prefixes, -1)

    def step_log_probs(self, sums: jax.Array, scores: jax.Array, observed: jax.Array | None = None) -> jax.Array:
        """log q(x_i | x_<i) for every i from scores [..., n, r] -> [..., n]; exactly 0 where not observed."""
        if observed is not None:
            scores = jnp.where(observed[..., None], scores, 0)
        steps = []

        def observe(i, prior):
            steps.append(log_sum_exp(prior + scores[..., i, :]))
            return scores[..., i, :]

        self._filter(sums, observe)
        steps = jnp.stack(steps, -1)
        return steps if observed is None else jnp.where(observed, steps, 0)

    # --- conditionals ---

    def conditionals(self, theta: Theta, x: jax.Array, observed: jax.Array | None = None) -> jax.Array:
        """log q(. | x_<i) for every i, in one pass. x [..., n] int, observed [..., n] bool -> [..., n, v].

        Where `observed` is False the byte is summed out (and its value ignored). After a prefix without mass the
        latents go on as if its impossible byte had not been seen.
        """
        scores, rows = gather_scores(theta.leaves, self._window(x)), []

        def observe(i, prior):
            row = transition(prior, theta.leaves[..., i, :, :])
            rows.append(jnp.broadcast_to(row, (*scores.shape[:-2], row.shape[-1])))
            seen = scores[..., i, :]
            return seen if observed is None else jnp.where(observed[..., i, None], seen, 0)

        self._filter(theta.sums, observe)
        return jnp.stack(rows, -2)

    def conditional(self, theta: Theta, prefix: jax.Array) -> jax.Array:
        """log q(x_{i+1} | x_1..x_i). prefix [..., i] int, 0 <= i < n -> [..., v]."""
        prefix = jnp.asarray(prefix, jnp.int32)
        i = prefix.shape[-1]
        if i >= self.window:
            raise InputError(f"circuit {self.name}: a prefix has fewer bytes than the window of {self.window}, got {i}")
        padding = [(0, 0)] * (prefix.ndim - 1) + [(0, self.window - i)]
        return self.conditionals(theta, jnp.pad(prefix, padding))[..., i, :]

    # --- drafts ---

    def sample(self, theta: Theta, key: jax.Array) -> jax.Array:
        """One draw of x [..., n] int32 per batch element, from the root down; independent choices all at once."""
        latent_key, leaf_key = jax.random.split(key)
        batch, dtype = theta.leaves.shape[:-3], theta.leaves.dtype
        noise = jax.random.gumbel(latent_key, (*batch, self.blocks, self.rank), dtype)
        # The rows of a block may share their noise, since only one of them is ever followed.
        block_of_row = (np.arange(self.sum_rows) + self.rank - 1) // self.rank
        choice = jnp.argmax(theta.sums + noise[..., block_of_row, :], -1)
        rows = self._chosen(theta.leaves, self._leaf_latents(choice))
        return jnp.argmax(rows + jax.random.gumbel(leaf_key, rows.shape, dtype), -1).astype(jnp.int32)

    def mode(self, theta: Theta) -> jax.Array:
        """Bytes of the jointly most probable (bytes, latents), by max-product; the greedy draft of the reference.

        -> [..., n] int32. This is neither the most probable x nor the sequential arg-max (`greedy`).
        """
        choices = {}

        def reduce(k, terms):
            choices[k] = jnp.argmax(terms, -1)
            return jnp.max(terms, -1)

        self._upward(theta.sums, jnp.max(theta.leaves, -1), reduce)
        choice = jnp.concatenate([choices[k] for k in range(self.blocks)], -1)
        return jnp.argmax(self._chosen(theta.leaves, self._leaf_latents(choice)), -1).astype(jnp.int32)

    def greedy(self, theta: Theta, first: jax.Array | None = None) -> jax.Array:
        """x_i = arg max q(. | x_<i), one position after the other -> [..., m] int32.

        theta.leaves may hold only the first m <= n leaves; the later bytes are then summed out.
        first [...] int: take x_1 as given; the same as the greedy draft of `condition(theta, first)`, without its copy.
        """
        # The largest probability is at least 1/v, so nothing that matters underflows here.
        probs = jnp.exp(theta.leaves)
        return self._draft(theta, first, lambda i, prior: jnp.argmax(_mix(jnp.exp(prior), probs[..., i, :, :]), -1))

    def sample_with_conditionals(
        self, theta: Theta, key: jax.Array, first: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """One draw of x [..., m] int32 position by position, and log_q [..., m, v], its rows log q(. | x_<i).

        theta.leaves may hold only the first m <= n leaves; the later bytes are then summed out.
        first [...] int: take x_1 as given (row 0 is then a point mass); the same law as from `condition(theta, first)`.
        The rows are exactly what was drawn from; bytes more than some 80 nats below the likeliest component count as
        impossible in float32.
        """
        leaves, v = theta.leaves, theta.leaves.shape[-1]
        top = jnp.maximum(jnp.max(leaves, -2), jnp.finfo(leaves.dtype).min)
        probs = jnp.exp(leaves - top[..., None, :])
        noise = jax.random.gumbel(key, (*leaves.shape[:-2], v), leaves.dtype)
        rows = []

        def choose(i, prior):
            rows.append(jnp.log(_mix(jnp.exp(prior), probs[..., i, :, :])) + top[..., i, :])
            return jnp.argmax(rows[-1] + noise[..., i, :], -1)

        x = self._draft(theta, first, choose)
        if first is not None:
            rows.insert(0, jnp.where(jnp.arange(v) == x[..., :1], 0.0, -jnp.inf).astype(leaves.dtype))
        return x, jnp.stack(rows, -2)

    def _draft(self, theta: Theta, first: jax.Array | None, choose: Callable) -> jax.Array:
        drafted, leaves = [], theta.leaves.shape[-3]

        def observe(i, prior):
            if i >= leaves:
                return jnp.zeros_like(prior)
            given = i == 0 and first is not None
            x = jnp.broadcast_to(first, prior.shape[:-1]) if given else choose(i, prior)
            drafted.append(x.astype(jnp.int32))
            return pick(theta.leaves[..., i, :, :], drafted[-1][..., None, None])[..., 0]

        self._filter(theta.sums, observe)
        return jnp.stack(drafted, -1)

    def _chosen(self, leaves: jax.Array, latents: jax.Array) -> jax.Array:
        return jnp.take_along_axis(leaves, latents[..., None, None], axis=-2)[..., 0, :]

    def _window(self, x: jax.Array) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim == 0 or x.shape[-1] != self.window:
            raise InputError(f"circuit {self.name}: expected windows of {self.window} bytes, got shape {x.shape}")
        return x


def _mix(weights: jax.Array, probs: jax.Array) -> jax.Array:
    return jnp.einsum("...r,...rv->...v", weights, probs)
