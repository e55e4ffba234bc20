"""CP and HMM against libcirkit, live: circuits built, initialised and evaluated by it, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cirkit.backend.torch.queries import IntegrateQuery
from cirkit.pipeline import PipelineContext
from cirkit.symbolic.circuit import Circuit as SymbolicCircuit
from cirkit.symbolic.layers import HadamardLayer, SumLayer
from cirkit.templates import pgms
from cirkit.templates.utils import Parameterization, name_to_input_layer_factory, parameterization_to_factory
from cirkit.utils.scope import Scope

from bytejax.circuits import CP, HMM, Theta
from tests.circuits.enumeration import all_windows

VOCAB = 4
SOFTMAX = Parameterization(activation="softmax", initialization="normal")


def symbolic(circuit):
    n, r = circuit.window, circuit.rank
    if isinstance(circuit, HMM):
        leaf = {"input_layer_kwargs": {"num_categories": VOCAB}, "input_params": {"probs": SOFTMAX}}
        return pgms.hmm(list(range(n)), num_latent_states=r, weight_param=SOFTMAX, **leaf)
    factory = parameterization_to_factory(SOFTMAX)
    leaf = name_to_input_layer_factory("categorical", num_categories=VOCAB, probs_factory=factory)
    leaves = [leaf(Scope([i]), r) for i in range(n)]
    product, mixture = HadamardLayer(r, n), SumLayer(r, 1, weight_factory=factory)
    return SymbolicCircuit([*leaves, product, mixture], {product: leaves, mixture: [product]}, [mixture])


def parameters_of(circuit, compiled):
    """The compiled circuit's own probabilities in our layout."""
    leaves, sums = [None] * circuit.window, []
    for layer in compiled.layers:
        values = {name: parameter()[0].detach().numpy() for name, parameter in layer.params.items()}
        if "probs" in values:
            leaves[int(layer.scope_idx)] = values["probs"]
        elif "weight" in values:
            sums.append(values["weight"])
    # Its layers go from the last position to the root: A_{n-1}, ..., A_1, then the law of z_1.
    return np.concatenate(sums[::-1]), np.stack(leaves)


@pytest.mark.parametrize("circuit", [CP(4, 3), CP(5, 2), HMM(4, 3), HMM(5, 2)], ids=str)
def test_likelihoods_and_prefix_marginals(circuit):
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        context = PipelineContext(backend="torch", semiring="lse-sum", fold=False, optimize=False)
        compiled = context.compile(symbolic(circuit))
        x = all_windows(circuit.window, VOCAB)
        integrate = IntegrateQuery(compiled)
        later = [Scope(range(i + 1, circuit.window)) for i in range(circuit.window - 1)]
        batch = torch.tensor(x, dtype=torch.long)
        with torch.no_grad():
            prefixes = [integrate(batch, integrate_vars=scope) for scope in later] + [compiled(batch)]
        prefixes = np.stack([p.numpy().reshape(-1) for p in prefixes], -1)
        sums, leaves = parameters_of(circuit, compiled)
    finally:
        torch.set_default_dtype(before)
    with jax.enable_x64(True):
        theta = Theta(jnp.log(sums), jnp.log(leaves))
        ours = jax.jit(lambda t: (circuit.log_prob(t, x), circuit.prefix_log_probs(t, x)))(theta)
    np.testing.assert_allclose(ours[0], prefixes[:, -1], rtol=0, atol=1e-10)
    np.testing.assert_allclose(ours[1], prefixes, rtol=0, atol=1e-10)
