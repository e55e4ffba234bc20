"""What an EAGLE-3 head learns: to follow the target for several steps on its own features ("training-time test")."""

import jax
import jax.numpy as jnp

from bytejax.drafters import eagle_head
from bytejax.drafters.eagle_head import EagleConfig
from bytejax.models.base import Target
from bytejax.parameters import Params
from bytejax.training.losses import IGNORE


def unrolled_loss(
    params: Params, config: EagleConfig, target: Target, ids: jax.Array, labels: jax.Array, steps: int, decay: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy to the target's laws at every step of `eagle_head.unrolled` (EAGLE-3, section 3).

    ids, labels [B, T] as in `training.losses`. Step i of column j is compared with the target's law after position
    j + 1 + i, given the text's own ids; it counts where every label from j to there does, so that no draft crosses the
    end of a document. Returns the loss [], sum_i decay^i ce_i, and {"ce" [steps], nats per column that counts;
    "accept_length" [], 1 + the mean number of leading steps whose arg-max is the target's, over columns that all steps
    count for: the length of a greedy chain, were the text the target's own}.
    """
    hidden, inner = target.tapped_states(ids, config.taps)
    hidden, inner, embedded = map(jax.lax.stop_gradient, (hidden, inner, target.embed(ids)))
    logits = target.unembed(hidden)
    known = jnp.pad(labels != IGNORE, ((0, 0), (0, steps)))
    t, counts, hits, ce = ids.shape[1], known[:, :-steps], [], []
    for i, g in enumerate(eagle_head.unrolled(params, config, inner, embedded, steps)):
        counts = counts & known[:, 1 + i : 1 + i + t]
        said = jnp.pad(logits[:, 1 + i :], ((0, 0), (0, min(1 + i, t)), (0, 0)))
        own = eagle_head.logits(params, config, g)
        log_q = jax.nn.log_softmax(own.astype(jnp.promote_types(own.dtype, jnp.float32)))
        nats = -jnp.sum(jax.nn.softmax(said) * log_q, axis=-1)
        ce.append(jnp.sum(jnp.where(counts, nats, 0)) / jnp.maximum(counts.sum(), 1))
        hits.append(jnp.argmax(said, -1) == jnp.argmax(log_q, -1))
    kept = jnp.cumprod(jnp.stack(hits), axis=0).sum(0)
    length = 1 + jnp.sum(jnp.where(counts, kept, 0)) / jnp.maximum(counts.sum(), 1)
    ce = jnp.stack(ce)
    return jnp.sum(decay ** jnp.arange(steps) * ce), {"ce": ce, "accept_length": length}
