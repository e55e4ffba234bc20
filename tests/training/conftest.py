"""Configs of runs that take a second or two: a toy corpus, models of a few thousand parameters."""

import pytest

from bytejax.training import config as configs

TOY = b"".join(b"line %d of the toy corpus: the same again and again\n" % i for i in range(200))


def values(directory, **changes):
    """Nested values of a tiny target run below `directory`; changes are "a.b=c" overrides with "__" for the dot."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "train.txt").write_bytes(TOY)
    (directory / "held.txt").write_bytes(TOY[:700])
    tree = {
        "task": "target",
        "workdir": str(directory / "work"),
        "steps": 6,
        "data": {
            "source": "files",
            "files": [str(directory / "*.txt")],
            "held_out": [str(directory / "held.txt")],
            "sequence_length": 32,
            "batch": 2,
        },
        "architecture": {
            "width": 16,
            "layers": 1,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 8,
            "ffn_width": 24,
            "rope_theta": 10000.0,
            "norm_eps": 1e-5,
            "tied": False,
        },
        "mtp": {"window": 3, "weight": 0.5, "gamma": 0.9},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2, "schedule": "cosine", "ema": 0.9},
        "validation": {"every_steps": 4, "batches": 2},
        "checkpoint": {"keep": 2},
        "log_every": 2,
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = tree
        for parent in parents:
            node = node[parent]
        node[last] = value
    return tree


@pytest.fixture
def tiny(tmp_path):
    """(**changes) -> the Config of a tiny target run in tmp_path."""
    return lambda **changes: configs.from_values(values(tmp_path, **changes))
