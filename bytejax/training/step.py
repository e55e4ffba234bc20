"""One optimiser step: a pure function from state and batch to state and metrics.

What is trained is a dict of *members*: the target (with its multi-byte head), or several heads side by side. Each
member has its own loss, its own clipping and its own optimiser state; they share the batch and the one compiled step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from bytejax.training import optimizer

Members = dict[str, Any]  # member name -> parameters
Losses = dict[str, jax.Array]
LossFn = Callable[[Members, Any, Mapping[str, jax.Array]], tuple[Losses, dict[str, jax.Array]]]
StepFn = Callable[["State", Any, Mapping[str, jax.Array]], tuple["State", dict[str, jax.Array]]]


class State(struct.PyTreeNode):
    """Everything that training changes. step: [] int32, updates made; average: params' moving average, or None."""

    step: jax.Array
    params: Members
    opt_state: Members
    average: Members | None

    @property
    def exported(self) -> Members:
        """The parameters that are validated and written: the moving average where there is one."""
        return self.params if self.average is None else self.average


def init(params: Members, optimizers: Mapping[str, optax.GradientTransformation], ema: float | None) -> State:
    """The state before the first step."""
    opt_state = {name: optimizers[name].init(p) for name, p in params.items()}
    average = None if ema is None else jax.tree.map(jnp.copy, params)  # both are donated, so they cannot share buffers
    return State(step=jnp.zeros((), jnp.int32), params=params, opt_state=opt_state, average=average)


def make_step(
    loss_fn: LossFn, optimizers: Mapping[str, optax.GradientTransformation], ema: float | None, accumulate: int = 1
) -> StepFn:
    """Compiles (state, frozen, batch) -> (state, metrics); the state is donated.

    loss_fn: (params, frozen, batch) -> (loss of each member, further metrics); losses are [] float32.
    metrics: the losses as `loss/<member>`, `grad_norm/<member>`, `finite` and what loss_fn adds. A step whose loss or
    gradient is not finite leaves the state as it was. accumulate: parts that a batch is cut into, along its first axis;
    gradients, losses and metrics are the means over them, and only one part's activations exist at once.
    """

    def total(params, frozen, batch):
        losses, extra = loss_fn(params, frozen, batch)
        # Members share no parameters: the gradient of the sum is each member's own.
        return sum(losses.values()), (losses, extra)

    def gradient(params, frozen, batch):
        once = lambda part: jax.grad(total, has_aux=True)(params, frozen, part)
        if accumulate == 1:
            return once(batch)
        parts = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), dict(batch))
        first, rest = (jax.tree.map(lambda x, cut=cut: x[cut], parts) for cut in (0, slice(1, None)))
        add = lambda sums, part: (jax.tree.map(jnp.add, sums, once(part)), None)
        sums, _ = jax.lax.scan(add, once(first), rest)
        return jax.tree.map(lambda x: x / accumulate, sums)

    def step(state, frozen, batch):
        grads, (losses, extra) = gradient(state.params, frozen, batch)
        norms = {name: optax.global_norm(g) for name, g in grads.items()}
        finite = jnp.isfinite(jnp.stack([*losses.values(), *norms.values()])).all()
        new = _update(state, grads, optimizers, ema)
        state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        metrics = {f"loss/{k}": x for k, x in losses.items()} | {f"grad_norm/{k}": x for k, x in norms.items()}
        return state, metrics | extra | {"finite": finite}

    return jax.jit(step, donate_argnums=0)


def _update(state: State, grads: Members, optimizers: Mapping, ema: float | None) -> State:
    params, opt_state = {}, {}
    for name, g in grads.items():
        updates, opt_state[name] = optimizers[name].update(g, state.opt_state[name], state.params[name])
        params[name] = optax.apply_updates(state.params[name], updates)
    average = None if ema is None else optimizer.moving_average(state.average, params, ema, state.step)
    return State(step=state.step + 1, params=params, opt_state=opt_state, average=average)
