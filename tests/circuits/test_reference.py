"""The reference's numbers: parameters, likelihoods, conditionals, drafts of every fixture."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax import parameters
from bytejax.circuits import CP, HMM, Theta, head
from tests.circuits import reference_cases
from tests.circuits.enumeration import quick_jit
from tests.circuits.reference_cases import NAMES

TOLERANCE = {"rtol": 0, "atol": 1e-5}
LAST = 11  # position of the stored drafts of row 0


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    return reference_cases.load(request.param)


@pytest.fixture(scope="module")
def results(case):
    """All queries in one program: the head on the stored features, the rest on the stored parameters."""
    circuit, io, stored = case.circuit, case.io, case.theta()
    last = Theta(*(x[LAST:][:1] for x in stored))
    banned = last._replace(leaves=np.where(np.arange(case.head.vocab) == case.eos, -np.inf, last.leaves))

    @quick_jit
    def queries(params, hidden, stored, variants, drafted, windows):
        return {
            "theta": head.theta(params, case.head, hidden),
            "ll": circuit.log_prob(stored, windows),
            "conditionals": circuit.conditionals(Theta(*(x[:6] for x in stored)), windows[:6]),
            "greedy": circuit.greedy(stored),
            "mode": circuit.mode(variants),
            "prefix": circuit.prefix_log_probs(drafted, jnp.concatenate([windows, *[io["verify.draft"]] * 2])),
        }

    variants, drafted = (
        Theta(*map(np.concatenate, zip(stored, other, banned))) for other in (case.theta("top_p0.7."), last)
    )
    found = queries(case.params, io["xx"].reshape(-1, case.head.width), stored, variants, drafted, io["windows"])
    found["mode"], found["top_p"], found["banned"] = np.split(found["mode"], [-2, -1])
    found["prefix"], found["draft"], found["banned_prefix"] = np.split(found["prefix"], [-2, -1])
    return jax.device_get(found)


def test_parameters_from_the_head(case, results):
    stored = case.theta()
    np.testing.assert_allclose(results["theta"].leaves, stored.leaves, **TOLERANCE)
    np.testing.assert_allclose(np.exp(results["theta"].sums), np.exp(stored.sums), **TOLERANCE)


def test_likelihood(case, results):
    np.testing.assert_allclose(results["ll"], case.io["ll"], **TOLERANCE)
    np.testing.assert_allclose(results["prefix"], case.io["prefix_log_marginals"].T, **TOLERANCE)
    np.testing.assert_allclose(results["conditionals"], case.io["cond_logprobs_full"].swapaxes(0, 1), **TOLERANCE)
    np.testing.assert_allclose(results["draft"][0], case.io["verify.log_prefix_q"], **TOLERANCE)


def test_greedy_drafts(case, results):
    assert np.array_equal(results["mode"], case.io["greedy_mpe"])
    assert np.array_equal(results["greedy"], case.io["aux_sequential_argmax"])


def test_value_of_the_greedy_draft(case, results):
    best, circuit = case.theta(), case.circuit
    value = circuit._upward(best.sums, best.leaves.max(-1), lambda _, terms: terms.max(-1))
    np.testing.assert_allclose(value, case.io["greedy_mpe_value"], **TOLERANCE)


def test_top_p(case, results):
    """Row-wise truncation of leaves and sums is a circuit again, and drafts what the reference drafts."""
    for stored, truncated in zip(case.theta(), case.theta("top_p0.7.")):
        kept = truncate(stored[LAST], 0.7)
        np.testing.assert_allclose(np.exp(kept), np.exp(truncated[0]), **TOLERANCE)
    assert np.array_equal(results["top_p"], case.io["top_p0.7.greedy_mpe"])


def truncate(rows, p):
    order = np.argsort(-rows, axis=-1, kind="stable")
    mass = np.cumsum(np.exp(np.take_along_axis(rows, order, -1)), -1)
    before = np.concatenate([np.zeros_like(mass[..., :1]), mass[..., :-1]], -1)
    kept = np.take_along_axis(before <= p, np.argsort(order, -1), -1)
    rows = np.where(kept, rows, -np.inf)
    return rows - np.logaddexp.reduce(rows, -1)[..., None]


def test_end_of_sequence_disabled(case, results):
    """The reference bans an id in the leaves without renormalising; the passes do not mind."""
    assert np.array_equal(results["banned"], case.io["eos_disabled.greedy_mpe"])
    stored = case.io["eos_disabled.log_prefix_q"]
    possible = stored > -700  # it writes log 0 as a number
    assert np.all(results["banned_prefix"][0][~possible] == -np.inf)
    np.testing.assert_allclose(results["banned_prefix"][0][possible], stored[possible], **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in NAMES if "hmm" in name])
def test_identity_transitions_make_an_hmm_a_cp(name):
    case = reference_cases.load(name)
    circuit, stored, windows = case.circuit, case.theta(), case.io["windows"]
    r = circuit.rank
    with np.errstate(divide="ignore"):
        identity = np.log(np.tile(np.eye(r, dtype=np.float32), (len(stored.sums), circuit.window - 1, 1)))
    hmm = stored._replace(sums=np.concatenate([stored.sums[:, :1], identity], 1))
    cp = CP(circuit.window, r)
    got, draft, same = jax.jit(
        lambda: (
            circuit.log_prob(hmm, windows),
            circuit.mode(hmm),
            cp.log_prob(Theta(hmm.sums[:, :1], hmm.leaves), windows),
        )
    )()
    np.testing.assert_allclose(got, case.io["identity.ll"], **TOLERANCE)
    np.testing.assert_allclose(got, case.io["identity.cp_ll"], **TOLERANCE)
    np.testing.assert_allclose(got, same, **TOLERANCE)
    assert np.array_equal(draft, case.io["identity.greedy_mpe"])


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("init_")])
def test_initialisation_from_pretrained_heads(name):
    """The reference's head after copying 4 heads is what `from_unembeddings` makes of the same matrices."""
    case = reference_cases.load(name)
    matrices = case.io["lm_head.weight"].reshape(4, case.head.vocab, case.head.width)
    scrambled = case.params | {"leaves": case.params["leaves"].copy()}
    scrambled["leaves"][:4] = 7.0
    params = head.from_unembeddings(scrambled, case.head, matrices)
    for key, value in case.params.items():
        np.testing.assert_array_equal(params[key], value)
    theta = head.theta(params, case.head, case.io["xx"].reshape(-1, case.head.width))
    prefix = case.circuit.prefix_log_probs(theta, case.io["windows"])[:, :4]
    independent = np.take_along_axis(np.asarray(theta.leaves[:, :4, 0]), case.io["windows"][:, :4, None], -1)[..., 0]
    np.testing.assert_allclose(prefix, independent.cumsum(-1), **TOLERANCE)


def test_an_hmm_head_starts_as_cp():
    """Appendix H: the identity comes from a bias, so at first the HMM is the CP of the same weights to about 1e-3."""
    cp, hmm = (head.HeadConfig(circuit, 16, 12, 2) for circuit in (CP(5, 4), HMM(5, 4)))
    params = parameters.init(head.table(hmm), jax.random.key(0))
    params["up"] = jax.random.normal(jax.random.key(1), params["up"].shape)
    hidden = jax.random.normal(jax.random.key(2), (6, 16))
    x = jax.random.randint(jax.random.key(3), (6, 5), 0, 12)
    one = hmm.circuit.log_prob(head.theta(params, hmm, hidden), x)
    two = cp.circuit.log_prob(head.theta({**params, "sums": params["sums"][:1]} | {"bias": 0.0}, cp, hidden), x)
    assert 0 < np.abs(one - two).max() < 5e-3
