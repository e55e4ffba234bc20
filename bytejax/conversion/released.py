"""Checkpoints as they were released: a directory with config.json and safetensors, or a GGUF file."""

import dataclasses
from pathlib import Path
from typing import Any

from bytejax import checkpoints, gguf, parameters
from bytejax.checkpoints import Reader
from bytejax.conversion import families
from bytejax.conversion.base import Family
from bytejax.errors import InputError, input_errors_of
from bytejax.models.base import Target
from bytejax.parameters import Table


@dataclasses.dataclass(frozen=True)
class Released:
    """A checkpoint, its weights not yet read.

    path: the directory or file. raw: config.json, or what stands for it. target: with shapes for its parameters.
    """

    path: Path
    family: Family
    raw: dict[str, Any]
    reader: Reader
    table: Table
    target: Target


def open_released(path: Path, weights: Reader | None = None) -> Released:
    """A checkpoint from a directory or a .gguf file. weights: what to read instead of the directory's safetensors.

    Raises InputError naming the file, and the tensor or key, at fault.
    """
    if path.suffix == ".gguf":
        reader = gguf.GGUFFile(path)
        raw, where = reader.config(), str(path)
    else:
        raw, where, reader = checkpoints.read_json(path / "config.json"), str(path / "config.json"), weights
        if "model_type" not in raw:
            raise InputError(f"{where} has no model_type, and no format: it describes no checkpoint that is known")
    family = families.family(raw["model_type"], where)
    with input_errors_of(where):
        config = family.parse(raw)
    table, reader = family.table(config), reader or checkpoints.open_directory(path)
    parameters.check(table, reader, reference=True, ignored=family.ignored)  # before anything as large as config says
    return Released(path, family, raw, reader, table, family.make(parameters.abstract(table), config, path, raw))
