"""A tiny target to decode with, and what tests of commands look for."""

import jax
import jax.numpy as jnp

import bytejax
from bytejax import circuits, loading, parameters
from bytejax.circuits import head as heads
from bytejax.cli import render
from bytejax.models import llama
from bytejax.tokenizers import DEMO

CONTEXT, NEW = 100, 24


def tiny(seed=5, width=16, tokenizer=DEMO):
    config = llama.Config(
        vocab=tokenizer.vocab,
        width=width,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        ffn_width=32,  # gate and up together fill a panel
        rope_theta=10000.0,
        norm_eps=1e-5,
        tied=False,
        context=CONTEXT,
        qk_norm=False,
        rope_scaling=None,
    )
    return llama.create(config, jax.random.key(seed), tokenizer)


def save_cp(directory, width=16, vocab=258):
    config = heads.HeadConfig(circuits.make("cp", 4, 2), width, vocab, None)
    loading.save_head(directory, config, parameters.init(heads.table(config), jax.random.key(1)), jnp.float32)


def generated(loaded, *prompts, **options):
    target, drafter = loaded
    return bytejax.generate(target, list(prompts), drafter=drafter, **({"max_new_tokens": NEW} | options))


def shown(text):
    """A text as the terminal gets it, on lines of its own."""
    text = render.printable(text)
    return text if text.endswith("\n") else text + "\n"


def is_refused(status, out, err, *words):
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert "Traceback" not in err
    for word in words:
        assert word in err
