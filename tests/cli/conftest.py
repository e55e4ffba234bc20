"""Saved targets and heads, and the decode command run on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax import circuits, loading, parameters
from bytejax.circuits import head as heads
from bytejax.cli import decode
from bytejax.tokenizers import ByteTokenizer
from tests.cli.helpers import CONTEXT, NEW, save_cp, tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of a random target, of a head that suits it, and of what does not."""
    root = tmp_path_factory.mktemp("saved")
    target = tiny()
    loading.save_target(root / "target", target, jnp.float32)
    loading.save_target(root / "startless", tiny(tokenizer=ByteTokenizer(256, 0, None, (), ())), jnp.float32)
    save_cp(root / "wide", width=32)
    save_cp(root / "poor", vocab=200)
    config = heads.HeadConfig(circuits.make("cp", 4, 2), 16, 258, None)
    params = parameters.init(heads.table(config), jax.random.key(1))
    # The target's own unembedding at every position: some drafts are right.
    params = heads.from_unembeddings(params, config, jnp.stack([target.params["head"].T] * 4))
    loading.save_head(root / "head", config, params, jnp.float32)
    for name, change in {
        "cut": lambda b: b[:-100],
        "noise": lambda b: b"no tensors here",
        "empty": lambda b: b"",
    }.items():
        loading.save_target(root / name, target, jnp.float32)
        weights = root / name / loading.WEIGHTS
        weights.write_bytes(change(weights.read_bytes()))
    loading.save_target(root / "foreign", target, jnp.float32)
    parameters.save(root / "foreign" / loading.WEIGHTS, {"encoder": np.zeros((2, 2), np.float32)})
    (root / "long.txt").write_bytes(b"x" * CONTEXT)
    return root


@pytest.fixture
def command(saved, capsys):
    """(*arguments, drafter="head") -> (exit status, standard output, standard error) of a run on the tiny target."""

    def run(*arguments, target="target", drafter="head"):
        argv = ["--target", str(saved / target), "--max-new-tokens", str(NEW), *map(str, arguments)]
        if drafter is not None:
            argv += ["--drafter", str(saved / drafter)]
        status = decode.main(argv)
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def loaded(saved):
    target = bytejax.load_target(saved / "target")
    return target, bytejax.load_drafter(saved / "head", target)
