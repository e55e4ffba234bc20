"""Directories of ours: `config.json`, which says what they hold, beside safetensors."""

import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from bytejax import checkpoints, parameters
from bytejax.errors import InputError
from bytejax.parameters import Params


def save(directory: Path, values: dict, files: dict[str, Params], dtype) -> None:
    """All files are written beside their names first, then renamed, the config last."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, params in files.items():
        host = jax.tree.map(lambda x: jax.device_get(jnp.asarray(x, dtype)), params)
        parameters.save(directory / f"{name}.new", host)
    (directory / "config.json.new").write_text(json.dumps(values, indent=2) + "\n")
    for name in (*files, "config.json"):
        (directory / f"{name}.new").replace(directory / name)


def config(directory: Path) -> dict:
    """Whatever config.json says. Raises InputError where there is none, or it is no JSON object."""
    if not (directory / "config.json").is_file():
        if any(directory.glob("model@*.pt")):
            command = f"python -m bytejax.conversion {directory} OUT"
            raise InputError(f"{directory} is a released MtPC drafter, which has to be converted first: {command}")
        raise InputError(f"{directory} holds no config.json")
    return checkpoints.read_json(directory / "config.json")


def read_config(directory: Path, expected: str) -> dict:
    """The same of a directory in the format `expected`. Raises InputError for any other."""
    values = config(directory)
    if values.get("format") != expected:
        raise InputError(f"{directory / 'config.json'} is not of format {expected!r}")
    return values


def sha256(*paths: Path) -> str:
    """Of the files' bytes, one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with checkpoints.file_errors(path), path.open("rb") as file:
            while piece := file.read(2**24):
                digest.update(piece)
    return digest.hexdigest()


def exists(path: Path) -> bool:
    """Whether a path, however odd, is a directory."""
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name too long, a parent that may not be read, a NUL
        return False
