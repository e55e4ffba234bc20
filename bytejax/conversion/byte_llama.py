"""Checkpoints of byte-ified Llamas, as tokenkit's TPULlamaForCausalLM has them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bytejax.conversion.base import flag, positive
from bytejax.conversion.llama import LlamaFamily
from bytejax.errors import InputError, input_errors_of
from bytejax.models import byte_llama
from bytejax.models.byte_llama import WINDOW, ByteLlama
from bytejax.models.llama import Llama
from bytejax.tokenizers.byte_llama import RELEASED, ByteLlamaTokenizer


class ByteLlamaFamily(LlamaFamily):
    """Without `expand_input_ids` the model is a plain Llama over the same ids.

    As in the reference's PyTorch model, `add_qk_norm` and `skip_out_norm` are without effect. The start and end ids of
    config.json are left over from the subword model, and not the tokenizer's.
    """

    model_types = ("tpu_llama",)
    architecture = "TPULlamaForCausalLM"

    def parse(self, config):
        plain = super().parse(config)
        if plain.vocab != RELEASED.vocab:
            raise InputError(f"vocab_size = {plain.vocab} is not supported, only {RELEASED.vocab}")
        if not flag(config, "expand_input_ids"):
            return plain
        longest = positive(config, "expand_input_ids_maxlen", int)
        if longest > WINDOW:
            raise InputError(f"expand_input_ids_maxlen = {longest} is not supported, only up to {WINDOW}")
        numbers = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
        return byte_llama.Config(**numbers, expand_vocab=positive(config, "expand_input_ids_vocab_size", int))

    def table(self, config):
        return byte_llama.table(config) if isinstance(config, byte_llama.Config) else super().table(config)

    def make(self, params, config, directory, raw):
        if not isinstance(config, byte_llama.Config):
            return Llama(params=params, config=config, tokenizer=RELEASED)
        with input_errors_of(str(directory / "config.json")):
            lookup = byte_llama.build_lookup(*_dictionary(raw), raw["expand_input_ids_maxlen"])
            if (largest := int(lookup.answers.max())) >= config.expand_vocab:
                raise InputError(
                    f"expand_input_ids_dict leads to id {largest}, beyond expand_input_ids_vocab_size = "
                    f"{config.expand_vocab}"
                )
        return ByteLlama(params=params, config=config, tokenizer=RELEASED, lookup=lookup)

    def serves(self, target):
        return type(target) in (Llama, ByteLlama) and isinstance(target.tokenizer, ByteLlamaTokenizer)

    def config_of(self, target):
        values = super().config_of(target) | {"expand_input_ids": isinstance(target, ByteLlama)}
        if not values["expand_input_ids"]:
            return values
        return values | {
            "expand_input_ids_maxlen": WINDOW,
            "expand_input_ids_vocab_size": target.config.expand_vocab,
            "expand_input_ids_dict": [byte_llama.entries_of(target.lookup), []],
        }


def _dictionary(raw: Mapping[str, Any]) -> tuple[dict[str, int], list[int]]:
    match raw.get("expand_input_ids_dict"):
        case [dict() as entries, list() as special] if all(isinstance(s, int) for s in special):
            return entries, special
    raise InputError("expand_input_ids_dict is no pair of a dictionary and a list of special ids")
