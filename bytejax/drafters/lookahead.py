"""Lookahead decoding (LADE, Fu et al. 2024, arXiv 2402.02057): n-grams from Jacobi iteration beside the text.

A window of W columns and L - 1 rows of guessed ids rides along in every block; what the target says after its last row
completes W n-grams of L ids, which go into a pool by their first id. The pool's n-grams that begin with the root are
drafts, side by side.

Letters: B batch, L ids of an n-gram, W columns, G guesses per id, K places of the pool, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import struct

from bytejax.drafters.base import Draft, Drafter, Prompt
from bytejax.errors import ROWS, InputError, check_flag, check_integer
from bytejax.models.base import Block, Target

DIRECT = 4096  # up to so many ids have a place of their own in the pool


class State(struct.PyTreeNode):
    """window: [B, L - 1, W] int32; its first entry stands for the root.

    pool: [B, K, G, L - 1] int32, what follows an id, the newest first, -1 where there is nothing. keys: [B, K] int32,
    the id that a place belongs to, or -1. cycles: [B] int32, passes so far, counted up to when the window is full.
    """

    window: jax.Array
    pool: jax.Array
    keys: jax.Array
    cycles: jax.Array


class Lookahead(Drafter):
    """Drafts the pool's n-grams. Made by `create`; a block has (L - 1) (W + G) rows.

    size: L. from_prompt: the pool starts with the prompt's own n-grams. places: K.
    """

    size: int = struct.field(pytree_node=False)
    columns: int = struct.field(pytree_node=False)
    guesses: int = struct.field(pytree_node=False)
    from_prompt: bool = struct.field(pytree_node=False)
    places: int = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls, target: Target, window: int = 5, ngram: int = 4, guesses: int = 5, from_prompt: bool = False
    ) -> "Lookahead":
        """window: W, ngram: L, guesses: G. In the ESP paper L, W, G are (3, 4, 1), (4, 5, 5) and (5, 8, 7), which makes
        blocks of 10, 30 and 60 rows. Raises InputError.
        """
        for name, value, least in (("window", window, 1), ("ngram", ngram, 2), ("guesses", guesses, 1)):
            check_integer(f"lade: {name}", value, least, ROWS)
        check_flag("lade: from_prompt", from_prompt)
        if (rows := (ngram - 1) * (window + guesses)) > ROWS:
            raise InputError(f"lade: blocks of {rows} rows, (ngram - 1) (window + guesses), are more than {ROWS}")
        return cls(ngram, window, guesses, from_prompt, target.vocab if target.vocab <= DIRECT else DIRECT)

    @property
    def block_width(self) -> int:
        return (self.size - 1) * (self.columns + self.guesses)

    @property
    def proposes_chains(self) -> bool:
        return False

    def init(self, target, prompt):
        b, w, rows = len(prompt.ids), self.columns, self.size - 1
        seeds = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), prompt.lengths)
        draw = jax.vmap(lambda key, n: jax.random.randint(key, (rows * w,), 0, n))
        window = jnp.take_along_axis(prompt.ids, draw(seeds, prompt.lengths), axis=1).reshape(b, rows, w)
        pool = jnp.full((b, self.places, self.guesses, rows), -1, jnp.int32)
        state = State(window, pool, jnp.full((b, self.places), -1, jnp.int32), jnp.zeros((b,), jnp.int32))
        return self._with_prompt(state, prompt) if self.from_prompt else state

    def propose(self, state, root, keys, warp):
        b = len(root)
        place = root % self.places
        own = jnp.take_along_axis(state.keys, place[:, None], axis=1)[:, 0] == root
        guesses = jnp.take_along_axis(state.pool, place[:, None, None, None], axis=1)[:, 0].reshape(b, -1)
        good = (guesses >= 0) & own[:, None]
        probes = state.window.reshape(b, -1)[:, 1:]
        ids = jnp.concatenate([root[:, None], jnp.where(good, guesses, 0), probes], axis=1)
        valid = jnp.concatenate([jnp.ones((b, 1), bool), good, jnp.ones(probes.shape, bool)], axis=1)
        return Draft(Block.tree(ids, self._parents(), nodes=1 + guesses.shape[1], valid=valid))

    def observe(self, state, target, outcome):
        """The head is applied to the window's last row alone; its ids are arg-maxes, however the text is drawn."""
        w, n = self.columns, self.size
        last = outcome.extended.hidden[:, -w:]
        if n == 2:  # the window's only row begins with the root
            root = outcome.extended.hidden[:, :1]
            last = jnp.concatenate([root, outcome.extended.hidden[:, self.block_width - (w - 1) :]], axis=1)
        new = jnp.argmax(outcome.warp.masked(target.unembed(last)), axis=-1).astype(jnp.int32)
        root = outcome.draft.block.ids[:, 0]
        window = state.window.at[:, 0, 0].set(root)
        grown = jnp.concatenate([window, new[:, None]], axis=1)  # [B, L, W], each column an n-gram
        full, active = state.cycles >= n - 2, outcome.accepted > 0
        pool, keys = state.pool, state.keys
        for column in range(w):
            pool, keys = self._insert(pool, keys, grown[:, :, column], full & active)
        shifted = jnp.where(active[:, None, None], grown[:, 1:], state.window)
        return State(shifted, pool, keys, jnp.minimum(state.cycles + active, n))

    def _parents(self) -> tuple[int, ...]:
        """Root, guesses one after the other, then the window row by row without its first entry, which is the root."""
        rows, w = self.size - 1, self.columns
        guesses = [1 + g * rows + j - 1 if j else 0 for g in range(self.guesses) for j in range(rows)]
        row_of = lambda line, column: self.guesses * rows + line * w + column if line or column else 0
        window = [
            row_of(line - 1, column) if line else row_of(0, column - 1)
            for line in range(rows)
            for column in range(w)
            if line or column
        ]
        return (0, *guesses, *window)

    def _insert(self, pool, keys, ngrams, where):
        """Puts n-grams [B, L] into the pool, the newest first; one that is there moves, the oldest one makes room."""
        batch, key, tail = jnp.arange(len(keys)), ngrams[:, 0], ngrams[:, 1:]
        place = key % self.places
        old = jnp.where((keys[batch, place] == key)[:, None, None], pool[batch, place], -1)
        same = (old == tail[:, None]).all(-1)
        gone = jnp.where(same.any(-1), jnp.argmax(same, -1), self.guesses - 1)
        moved = jnp.concatenate([tail[:, None], old[:, :-1]], axis=1)
        new = jnp.where((jnp.arange(self.guesses) <= gone[:, None])[..., None], moved, old)
        place = jnp.where(where, place, self.places)  # out of bounds: dropped
        return pool.at[batch, place].set(new, mode="drop"), keys.at[batch, place].set(key, mode="drop")

    def _with_prompt(self, state: State, prompt: Prompt) -> State:
        """The pool with every n-gram of the prompt."""
        n = self.size

        def add(i, carry):
            ngrams = jax.lax.dynamic_slice_in_dim(prompt.ids, i, n, axis=1)
            return self._insert(*carry, ngrams, i + n <= prompt.lengths)

        count = max(prompt.ids.shape[1] - n + 1, 0)
        pool, keys = jax.lax.fori_loop(0, count, add, (state.pool, state.keys))
        return state.replace(pool=pool, keys=keys)
