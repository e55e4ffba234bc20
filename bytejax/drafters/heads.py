"""A target's own prediction heads as a circuit: to draft with at once, and to start training from."""

import jax
import jax.numpy as jnp

from bytejax import circuits, parameters
from bytejax.circuits import head as heads
from bytejax.drafters.base import Drafter
from bytejax.drafters.circuit import CircuitDrafter
from bytejax.drafters.circuit_tree import CircuitTree
from bytejax.errors import InputError
from bytejax.models.base import Target
from bytejax.models.evabyte import EvaByte
from bytejax.parameters import Params


def from_heads(
    target: Target,
    circuit: circuits.Circuit,
    key: jax.Array,
    adapter_rank: int | None = None,
    feed_width: int | None = None,
) -> tuple[heads.HeadConfig, Params]:
    """A circuit head whose law is, at first, the product of the target's prediction heads.

    All components of a place start with that place's head, so that the mixtures, which are random, do not matter yet.
    Places past the last head start as that head, the nearest guess there is (as in `circuits.grow`). key: for what the
    heads do not say. adapter_rank, feed_width: as in `heads.HeadConfig`. Parameters are in the target's dtype.
    Raises InputError where the target has no prediction heads.
    """
    if not isinstance(target, EvaByte):
        raise InputError(f"a {type(target).__name__} has no prediction heads to start a circuit from")
    config = heads.HeadConfig(circuit, target.width, target.vocab, adapter_rank, feed_width)
    own = target.params["heads"].reshape(-1, target.vocab, target.width)
    own = own[jnp.minimum(jnp.arange(circuit.window), len(own) - 1)]
    initial = parameters.init(heads.table(config), key, own.dtype)
    return config, heads.from_unembeddings(initial, config, own)


def drafter(
    target: Target,
    draft_tokens: int | None = None,
    tree: int | None = None,
    beam: int | None = None,
    lookup: str | None = None,
) -> Drafter:
    """The target's prediction heads as an FF circuit, and that as a drafter.

    Options: see `CircuitDrafter.create` and, for a tree instead of a chain, `CircuitTree.create`.
    """
    window = target.config.pred_heads if isinstance(target, EvaByte) else 1
    config, params = from_heads(target, circuits.FF(window), jax.random.key(0))
    return CircuitTree.over(CircuitDrafter.create(params, config, draft_tokens), tree, beam, lookup)
