"""Tiny byte-ified Llamas with what tokenkit's own code says of them (tests/fixtures/byte_llama)."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import safetensors
import safetensors.numpy

from bytejax import parameters
from bytejax.conversion.byte_llama import ByteLlamaFamily

FIXTURES = Path(__file__).parents[1] / "fixtures" / "byte_llama"
EXPANDING = ["a_untied_expand", "c_qknorm_expand"]
CASES = [*EXPANDING, "b_tied_noexpand"]


def raw(name):
    return json.loads((FIXTURES / name / "config.json").read_text())


@functools.cache
def load(name):
    family, directory = ByteLlamaFamily(), FIXTURES / name
    config = family.parse(raw(name))
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    params = parameters.from_reference(family.table(config), tensors)
    return family.make(params, config, directory, raw(name))


@functools.cache
def prompts(name):
    """What the reference says of each prompt, by the kind of value, and the prompt's text or None."""
    path = FIXTURES / name / "io.safetensors"
    with safetensors.safe_open(path, "np") as file:
        texts = json.loads(file.metadata()["texts"])
    tensors = safetensors.numpy.load_file(path)
    numbers = sorted({key.split(".")[0] for key in tensors if key[0] == "t"})
    of = lambda t: {key.split(".")[1]: x for key, x in tensors.items() if key.startswith(t + ".")}
    return [of(t) | {"text": None if texts[int(t[1])] == "RAW" else texts[int(t[1])]} for t in numbers]


def padded(rows):
    """Ids of several lengths as [B, T], padded with 258, and the lengths."""
    longest = max(map(len, rows))
    ids = jnp.asarray([[*map(int, row)] + [258] * (longest - len(row)) for row in rows], jnp.int32)
    return ids, jnp.asarray([len(row) for row in rows], jnp.int32)
