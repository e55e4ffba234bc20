"""Circuits by brute force: the whole table of q over all windows, in numpy float64, straight from the definitions."""

import functools
import itertools

import jax
import numpy as np

from bytejax.circuits import HMM, BTree, Circuit, Theta

# These programs are large and run once: compiled with little optimisation, a test takes half the time.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)


def random_theta(circuit: Circuit, vocab: int, seed: int, scale: float = 1.0, banned: tuple[int, ...] = ()) -> Theta:
    """Normalised float64 log-parameters, numpy; `scale` peaks them, the ids in `banned` get -inf in every leaf."""
    rng = np.random.default_rng(seed)
    sums = scale * rng.normal(size=(circuit.sum_rows, circuit.rank))
    leaves = scale * rng.normal(size=(circuit.window, circuit.rank, vocab))
    leaves[..., list(banned)] = -np.inf
    return Theta(
        *(
            x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
            for x in (sums, leaves)
        )
    )


def all_windows(window: int, vocab: int) -> np.ndarray:
    """[v^n, n] int32, the last position fastest."""
    return np.array(list(itertools.product(range(vocab), repeat=window)), np.int32)


def log_joint(circuit: Circuit, theta: Theta, close=np.logaddexp.reduce) -> np.ndarray:
    """log q(x) as a table [v] * n. With close=np.max: the largest log q(x, latents) over the latents."""
    sums, leaves = (np.asarray(x, np.float64) for x in theta)
    n, r = circuit.window, circuit.rank

    def product(left, right):  # [r, ...], [r, ...] -> [r, ..., ...]
        return left.reshape(*left.shape, *[1] * (right.ndim - 1)) + right.reshape(
            r, *[1] * (left.ndim - 1), *right.shape[1:]
        )

    def mix(rows, table):  # [y, r], [r, ...] -> [y, ...]
        return close(rows.reshape(*rows.shape, *[1] * (table.ndim - 1)) + table, axis=1)

    if isinstance(circuit, HMM):
        table = leaves[n - 1]
        for i in reversed(range(n - 1)):
            table = product(leaves[i], mix(sums[1 + i * r : 1 + (i + 1) * r], table))
    elif isinstance(circuit, BTree):
        table = _tree_table(sums, leaves, product, mix)
    else:
        table = leaves[0]
        for leaf in leaves[1:]:
            table = product(table, leaf)
    return mix(sums[:1], table)[0]


def _tree_table(sums, leaves, product, mix):
    n, r, _ = leaves.shape
    queue, order = [(0, n)], []
    while queue:
        start, stop = queue.pop(0)
        if stop - start > 1:
            order.append((start, stop))
            middle = start + {2: 1, 3: 2, 4: 2, 5: 2, 6: 3}[stop - start]
            queue += [(start, middle), (middle, stop)]

    def below(start, stop):
        if stop - start == 1:
            return leaves[start]
        middle = start + {2: 1, 3: 2, 4: 2, 5: 2, 6: 3}[stop - start]
        return product(seen_from_above(start, middle), seen_from_above(middle, stop))

    def seen_from_above(start, stop):
        if stop - start == 1:
            return leaves[start]
        row = 1 + (order.index((start, stop)) - 1) * r
        return mix(sums[row : row + r], below(start, stop))

    return below(0, n)


def log_marginals(table: np.ndarray) -> list[np.ndarray]:
    """[log q(x_1..x_i) for i = 0..n], each a table [v] * i."""
    marginals = [table]
    while marginals[0].ndim:
        marginals.insert(0, np.logaddexp.reduce(marginals[0], axis=-1))
    return marginals


def log_conditionals(table: np.ndarray) -> list[np.ndarray]:
    """[log q(x_{i+1} | x_1..x_i) for i = 0..n-1], each a table [v] * (i + 1)."""
    marginals = log_marginals(table)
    return [joint - before[..., None] for before, joint in zip(marginals, marginals[1:])]
