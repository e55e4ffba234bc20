"""What conversion needs to know about a family of reference checkpoints."""

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytejax.errors import InputError
from bytejax.models.base import Target
from bytejax.parameters import Params, Table


class Family(abc.ABC):
    """How the checkpoints of one family, as they were released, become a target, and back.

    model_types: what a checkpoint's config.json may have under "model_type".
    ignored: regular expressions of tensors that a checkpoint may hold and the model does not need (saved buffers).
    """

    model_types: tuple[str, ...]
    ignored: tuple[str, ...] = ()

    @abc.abstractmethod
    def parse(self, config: Mapping[str, Any]) -> Any:
        """The architecture's config from config.json.

        Raises InputError naming the key that is missing, wrong, or asks for what the model cannot do.
        """

    @abc.abstractmethod
    def table(self, config: Any) -> Table:
        """Parameter table; every source named as in the checkpoint."""

    @abc.abstractmethod
    def make(self, params: Params, config: Any, directory: Path, raw: Mapping[str, Any]) -> Target:
        """The target with its tokenizer, which may be read from the directory. raw: config.json."""

    @abc.abstractmethod
    def serves(self, target: Target) -> bool:
        """Whether `config_of` can describe the target."""

    @abc.abstractmethod
    def config_of(self, target: Target) -> dict[str, Any]:
        """config.json of a target, for writing a checkpoint that the reference can load."""


def positive(config: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """A positive number of config.json; `default` where it is absent or null. Raises InputError naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"{key} is missing")
    largest = 2**31 - 1 if kind is int else 1e300
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not 0 < value <= largest:
        raise InputError(f"{key} = {value!r} must be a positive {'integer' if kind is int else 'number'}")
    return kind(value)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """A flag of config.json, False where it is absent. Raises InputError naming the key."""
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise InputError(f"{key} = {value!r} must be true or false")
    return value
