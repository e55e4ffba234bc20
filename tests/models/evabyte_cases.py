"""Reader of the EvaByte fixtures: the released model's numbers on tiny random checkpoints."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from bytejax import parameters
from bytejax.conversion.evabyte import EvaByteFamily
from bytejax.models.evabyte import EvaByte

FOLDER = Path(__file__).parents[1] / "fixtures" / "evabyte"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())  # window, chunk and heads are in the name
PROMPTS = ("sub_chunk", "sub_window", "one_window", "two_windows", "chunk_multiple", "multi_window")


@dataclasses.dataclass(frozen=True)
class Case:
    """One fixture: the target, and the tensors of io.safetensors."""

    target: EvaByte
    io: dict[str, np.ndarray]

    def prompt(self, name: str) -> list[int]:
        return self.io[f"{name}.input_ids"][0].tolist()

    def having(self, key: str) -> list[str]:
        """The prompts for which the fixture has such a tensor."""
        return [name for name in PROMPTS if f"{name}.{key}" in self.io]

    def new(self, name: str, key: str = "generate") -> list[int]:
        """What the reference wrote after a prompt."""
        return self.io[f"{name}.{key}.output_ids"][len(self.prompt(name)) :].tolist()


@functools.cache
def load(name: str) -> Case:
    family, folder = EvaByteFamily(), FOLDER / name
    raw = json.loads((folder / "config.json").read_text())
    config = family.parse(raw)
    tensors, io = (safetensors.numpy.load_file(folder / f"{part}.safetensors") for part in ("model", "io"))
    params = jax.tree.map(jnp.asarray, parameters.from_reference(family.table(config), tensors))
    # The reference decodes past the end of one of these models' contexts.
    target = family.make(params, dataclasses.replace(config, context=512), folder, raw)
    return Case(target, io)


def padded(rows: list[list[int]], length: int) -> jax.Array:
    return jnp.asarray([row + [0] * (length - len(row)) for row in rows])
