"""The optimiser: AdamW or Muon after clipping, warm-up and a schedule, an optional moving average of the weights."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from bytejax.training.config import Optimizer


def schedule(o: Optimizer, steps: int) -> optax.Schedule:
    """Learning rate of step 0, 1, ...: linear warm-up from a share of the peak, then as the config says to `steps`."""
    rest, end = max(steps - o.warmup_steps, 1), o.learning_rate * o.final_fraction
    after = {
        "constant": optax.constant_schedule(o.learning_rate),
        "cosine": optax.cosine_decay_schedule(o.learning_rate, rest, o.final_fraction),
        "linear": optax.linear_schedule(o.learning_rate, end, rest),
    }[o.schedule]
    warmup = optax.linear_schedule(o.learning_rate / max(o.warmup_steps, 1), o.learning_rate, o.warmup_steps)
    return optax.join_schedules([warmup, after], [o.warmup_steps])


def make(o: Optimizer, steps: int, decayed: optax.Params) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, 2019, Algorithm 2) or Muon (Jordan et al., 2024) after clipping.

    decayed: a tree of bools, True where weight decay applies, which is at matrices. Muon takes the matrices of the
    stacked layers, scaled to AdamW's typical step (Liu et al., 2025, arXiv 2502.16982); all else stays with AdamW.
    """
    rate = schedule(o, steps)
    if o.name == "adamw":
        rule = optax.adamw(rate, o.beta1, o.beta2, o.eps, weight_decay=o.weight_decay, mask=decayed)
    else:
        matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)

        def rule_of(path, decays):
            stacked = jax.tree_util.DictKey("layers") in path
            return "other" if not decays else "muon" if stacked else "decayed"

        muon = optax.contrib.muon(
            rate,
            weight_decay=o.weight_decay,
            muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: matrix, params),
            consistent_rms=0.2,
        )
        adamw = lambda decay: optax.adamw(rate, o.beta1, o.beta2, o.eps, weight_decay=decay)
        rules = {"muon": muon, "decayed": adamw(o.weight_decay), "other": adamw(0.0)}
        rule = optax.partition(rules, jax.tree_util.tree_map_with_path(rule_of, decayed))
    return optax.chain(optax.clip_by_global_norm(o.clip), rule)


def moving_average(average: optax.Params, params: optax.Params, decay: float, step: jax.Array) -> optax.Params:
    """The average after `step` updates; its decay grows with the steps so that the beginning is forgotten."""
    d = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda a, p: a * d + p * (1 - d), average, params)
