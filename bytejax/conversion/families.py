"""The families of released checkpoints, by the `model_type` of their config.json."""

import importlib

from bytejax.conversion.base import Family
from bytejax.errors import InputError
from bytejax.models.base import Target

MODEL_TYPES = {  # imported when asked for; of two families that serve a target, the first one writes it
    "tpu_llama": "bytejax.conversion.byte_llama:ByteLlamaFamily",
    "llama": "bytejax.conversion.llama:LlamaFamily",
    "qwen3": "bytejax.conversion.llama:Qwen3Family",
    "evabyte": "bytejax.conversion.evabyte:EvaByteFamily",
}


def family(model_type: object, where: str) -> Family:
    """The family of a checkpoint. Raises InputError, with `where` it was asked for, where there is none."""
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise InputError(f"{where} has the model_type {model_type!r}; known: {', '.join(MODEL_TYPES)}")
    module, name = MODEL_TYPES[model_type].split(":")
    return getattr(importlib.import_module(module), name)()


def family_of(target: Target) -> Family:
    """The family as whose checkpoint a target can be written. Raises InputError where there is none."""
    for model_type in MODEL_TYPES:
        found = family(model_type, "")
        if found.serves(target):
            return found
    raise InputError(f"a {type(target).__name__} like this one has no released layout")
