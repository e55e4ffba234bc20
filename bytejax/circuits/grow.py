"""A longer head that starts from a shorter one of the same kind."""

import jax.numpy as jnp

from bytejax.circuits.head import ADAPTED, HeadConfig
from bytejax.errors import InputError
from bytejax.parameters import Params


def from_shorter(params: Params, config: HeadConfig, short: Params, short_config: HeadConfig) -> Params:
    """A head whose first m places are those of `short`, a head with a window of m <= n and otherwise the same numbers.

    params: the longer head's initial parameters, which stay where the shorter head says nothing. Leaves past m start as
    those of place m, the best guess there is. The mixtures of the shorter circuit are found in the longer one; where
    its root becomes an inner region, every value of the latent above gets the root's weights and its own initial
    offset, so that the law of the first m bytes starts almost as it was.

    Raises InputError where the two heads do not fit.
    """
    circuit, small = config.circuit, short_config.circuit
    if type(circuit) is not type(small) or small.window > circuit.window:
        raise InputError(f"a {circuit} cannot start from a {small}: another circuit, or a longer window")
    for name, a, b in (
        ("rank", circuit.rank, small.rank),
        *((f, getattr(config, f), getattr(short_config, f)) for f in ("width", "vocab", "adapter_rank", "feed_width")),
    ):
        if a != b:
            raise InputError(f"a head with {name} = {a} cannot start from one with {name} = {b}")

    if 0 not in circuit.blocks_of(small):
        raise InputError(f"{circuit} has no region of the first {small.window} bytes, so it cannot start from {small}")
    m = small.window
    grown = dict(params)
    for name in ("leaves",) if config.adapter_rank is None else ADAPTED:
        old = jnp.asarray(short[name])
        later = jnp.broadcast_to(old[-1:], (circuit.window - m, *old.shape[1:]))
        grown[name] = jnp.concatenate([old, later]).astype(params[name].dtype)
    for name in ("sums", "bias"):
        if name in params:
            grown[name] = _grown_rows(params[name], config, short[name], short_config)
    if "feed" in params:
        grown["feed"] = {k: jnp.asarray(x).astype(params["feed"][k].dtype) for k, x in short["feed"].items()}
    return grown


def _grown_rows(rows, config: HeadConfig, short, short_config: HeadConfig):
    circuit, small = config.circuit, short_config.circuit
    rows, short = jnp.asarray(rows), jnp.asarray(short)
    for k, block in circuit.blocks_of(small).items():
        old, new = short[small.block_rows(k)], rows[circuit.block_rows(block)]
        offset = new if len(old) < len(new) else 0
        rows = rows.at[circuit.block_rows(block)].set((old + offset).astype(rows.dtype))
    return rows
