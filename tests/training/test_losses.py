"""Windows and losses against the reference's numbers, plain formulas, and a budget of memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax import parameters
from bytejax.circuits import BTree, head, make, scores
from bytejax.training.losses import IGNORE, discounts, next_byte_loss, window_loss, windows
from tests.circuits import reference_cases

GIB = 2**30


@pytest.mark.parametrize("name", reference_cases.NAMES)
def test_reference(name):
    """Both window builders, the loss at three discounts, the cross-entropy per place, and the gradient."""
    case = reference_cases.load(name)
    labels, n, boundaries = case.io["labels"], case.circuit.window, {"plain": (), "packed": (case.eos,)}
    for kind in boundaries:
        assert np.array_equal(windows(labels, n, boundaries[kind]), case.io[f"windows_{kind}"])

    def loss(params, hidden, gamma, kind):
        return window_loss(params, case.head, hidden, labels, gamma, chunk=7, boundaries=boundaries[kind])

    @jax.jit
    def both(params, hidden, gamma):
        packed, gradient = jax.value_and_grad(loss, has_aux=True)(params, hidden, gamma, "packed")
        return {"packed": packed, "plain": loss(params, hidden, gamma, "plain")}, gradient

    for gamma in (1.0, 0.8, 0.9):
        losses, gradient = both(case.params, case.io["xx"], gamma)
        for kind, (value, aux) in losses.items():
            np.testing.assert_allclose(value, case.io[f"loss_{kind}_gamma{gamma}"][0], rtol=0, atol=1e-5)
            np.testing.assert_allclose(aux["ce"], case.io[f"ce_per_head_{kind}"], rtol=0, atol=1e-5)
    expected = case.pack(*reference_cases.head_tensors(case.io, "grad."))
    for key in case.params:
        np.testing.assert_allclose(gradient[key], expected[key], rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", reference_cases.NAMES[:1] + reference_cases.NAMES[-1:])
def test_conditionals_of_the_reference(name):
    """log q(x_j | x_<j) with ignored places summed out, exactly 0 there."""
    case = reference_cases.load(name)
    theta = case.theta()
    for kind in ("plain", "packed"):
        x = case.io[f"windows_{kind}"].reshape(-1, case.circuit.window)
        prefixes = np.asarray(jax.jit(case.circuit.prefix_log_probs)(theta, x, x != IGNORE))
        steps = np.diff(prefixes, axis=-1, prepend=0)
        expected = np.moveaxis(case.io[f"cond_logprobs_{kind}"], 0, -1).reshape(steps.shape)
        np.testing.assert_allclose(steps, expected, rtol=0, atol=1e-5)
        assert np.all(steps[x == IGNORE] == 0)


def test_windows():
    labels = jnp.array([[5, 2, 6, 7, IGNORE], [2, 2, 8, 9, 4]])
    i = IGNORE
    plain = [[5, 2, 6], [2, 6, 7], [6, 7, i], [7, i, i], [i, i, i]]
    assert windows(labels, 3)[0].tolist() == plain
    packed = [[5, 2, i], [2, i, i], [6, 7, i], [7, i, i], [i, i, i]]
    assert windows(labels, 3, (2,))[0].tolist() == packed
    assert windows(labels, 3, (2, 9))[1].tolist() == [[2, i, i], [2, i, i], [8, 9, i], [9, i, i], [4, i, i]]
    assert windows(labels[:, :2], 4)[0].tolist() == [[5, 2, i, i], [2, i, i, i]]


def test_discounts():
    np.testing.assert_allclose(discounts(3, 0.5), np.array([4, 2, 1]) / 7, rtol=1e-6)


@pytest.mark.parametrize("chunk", [5, 18, 64])
def test_the_chunk_changes_nothing(chunk):
    config = head.HeadConfig(BTree(4, 3), 6, 7, 2)
    params = parameters.init(head.table(config), jax.random.key(0))
    hidden = jax.random.normal(jax.random.key(1), (2, 9, 6))
    labels = jax.random.randint(jax.random.key(2), (2, 9), 0, 7).at[0, :4].set(IGNORE).at[1].set(IGNORE)

    def both(chunk):
        loss = lambda p, h: window_loss(p, config, h, labels, 0.9, chunk)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, hidden)

    (loss, aux), _ = both(chunk)
    assert np.isfinite(loss) and aux["count"].tolist() == [5, 5, 5, 5]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), both(chunk), both(1))


def test_next_byte_loss():
    hidden = jax.random.normal(jax.random.key(0), (3, 7, 6))
    matrix = jax.random.normal(jax.random.key(1), (6, 9))
    labels = jax.random.randint(jax.random.key(2), (3, 7), 0, 9).at[1, :5].set(IGNORE)

    def plain(matrix):
        log_probs = jax.nn.log_softmax(hidden @ matrix).reshape(-1, 9)
        flat = np.asarray(labels).reshape(-1)
        return -log_probs[np.arange(21), flat][flat != IGNORE].mean()

    def chunked(matrix):
        return next_byte_loss(hidden, labels, lambda h: h @ matrix, chunk=4)[0]

    expected = jax.value_and_grad(plain)(matrix)
    for loss in (chunked, lambda m: next_byte_loss(hidden @ m, labels)[0]):
        for got, want in zip(jax.jit(jax.value_and_grad(loss))(matrix), expected):
            np.testing.assert_allclose(got, want, atol=1e-6)
    assert next_byte_loss(hidden @ matrix, labels)[1]["count"] == 16
    nothing, aux = next_byte_loss(hidden @ matrix, jnp.full((3, 7), IGNORE))
    assert nothing == 0 and aux["count"] == 0


def temporaries(name: str, dtype, width: int, window: int, rank: int, vocab: int, length: int) -> tuple[int, int]:
    """Bytes that compiled `value_and_grad` of the loss of a full head needs beside its arguments and results; bytes of
    the head. Nothing is allocated: the shapes are abstract. The loss is the mean over one sequence."""
    config = head.HeadConfig(make(name, window, rank), width, vocab, adapter_rank=None)

    def loss(params, hidden, labels):
        return window_loss(params, config, hidden, labels, gamma=0.9, chunk=1024)[0]

    shapes = parameters.abstract(head.table(config), dtype)
    hidden, labels = jax.ShapeDtypeStruct((1, length, width), dtype), jax.ShapeDtypeStruct((1, length), jnp.int32)
    compiled = jax.jit(jax.value_and_grad(loss)).lower(shapes, hidden, labels).compile()
    return compiled.memory_analysis().temp_size_in_bytes, head.count(config) * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("feed", [None, 4])
def test_components_in_parts_change_nothing(monkeypatch, feed):
    config = head.HeadConfig(make("hmm", 3, 4), 6, 5, None, feed)
    params = parameters.init(head.table(config), jax.random.key(0))
    params = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
    hidden, labels = (
        jax.random.normal(jax.random.key(1), (2, 9, 6)),
        jax.random.randint(jax.random.key(2), (2, 9), 0, 5),
    )

    def both(parts):
        monkeypatch.setattr(scores, "COMPONENTS", 4 // parts)
        loss = lambda p, h: window_loss(p, config, h, labels, 0.9, 4)[0]
        return jax.value_and_grad(loss, argnums=(0, 1))(params, hidden)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), both(1), both(2))


def test_no_full_logits_and_no_second_gradient_in_memory():
    """A smaller head of the same kind: its logits at once would be 671 MB, its gradient is 168 MB."""
    used, size = temporaries("btree", jnp.float32, width=2048, window=8, rank=8, vocab=320, length=8192)
    assert size > 160e6
    assert used < 100e6


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank"), [("cp", 32), ("btree", 32), ("hmm", 32), ("cp", 128), ("btree", 128)])
def test_memory_of_the_papers_head(name, rank):
    """d=4096, n=16, v=320, T=8192, float32. `pytest -m slow -s tests/training/test_losses.py` prints them."""
    used, size = temporaries(name, jnp.float32, width=4096, window=16, rank=rank, vocab=320, length=8192)
    print(f"{name}, rank {rank}: head and gradient {size / GIB:.2f} GiB each, temporaries {used / GIB:.2f} GiB")
    assert used <= 2 * GIB
