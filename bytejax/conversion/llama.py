"""Checkpoints of Llama (2, 3.x) and Qwen3, as transformers' LlamaForCausalLM and Qwen3ForCausalLM have them.

config.json is read in the layout of transformers 5 (`rope_parameters`) and in that of earlier versions (`rope_theta`,
`rope_scaling`), and written in the latter, which both read.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bytejax.conversion.base import Family, flag, positive
from bytejax.errors import InputError
from bytejax.models import llama
from bytejax.models.llama import Config, Llama, RopeScaling

SIZES = {  # of ours, by the names in config.json
    "vocab_size": "vocab",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_width",
    "max_position_embeddings": "context",
}
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
}
ONLY = {  # what the model can do, where config.json says anything
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
}


class LlamaFamily(Family):
    model_types = ("llama",)
    ignored = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"lm_head\.weight")  # the head where it is tied
    architecture, qk_norm = "LlamaForCausalLM", False

    def parse(self, config):
        for key, known in ONLY.items():
            if key in config and config[key] not in (None, *known):
                raise InputError(f"{key} = {config[key]!r} is not supported, only {known[0]!r}")
        window, kinds = config.get("sliding_window"), config.get("layer_types") or []
        if window is not None and config.get("use_sliding_window") is not False:
            raise InputError(f"sliding_window = {window!r} is not supported, only full attention")
        if not isinstance(kinds, list):
            raise InputError(f"layer_types = {kinds!r} is no list")
        for kind in kinds:
            if kind != "full_attention":
                raise InputError(f"layer_types has {kind!r}, which is not supported, only full attention")
        numbers = {ours: positive(config, key, int) for key, ours in SIZES.items()}
        heads = numbers["heads"]
        theta, scaling = _rope(config)
        return Config(
            **numbers,
            kv_heads=positive(config, "num_key_value_heads", int, heads),
            head_dim=self._head_dim(config, numbers["width"], heads),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=positive(config, "rms_norm_eps", float),
            tied=flag(config, "tie_word_embeddings"),
            qk_norm=self.qk_norm,
        )

    def table(self, config):
        return llama.table(config)

    def make(self, params, config, directory, raw):
        from bytejax.tokenizers.subword import SubwordTokenizer

        return Llama(params=params, config=config, tokenizer=SubwordTokenizer.from_directory(directory, config.vocab))

    def serves(self, target):
        return type(target) is Llama and target.config.qk_norm == self.qk_norm

    def config_of(self, target):
        c = target.config
        values = {key: getattr(c, ours) for key, ours in SIZES.items()}
        values |= {"num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "hidden_act": "silu"}
        values |= {"rms_norm_eps": c.norm_eps, "tie_word_embeddings": c.tied, "rope_theta": c.rope_theta}
        values |= {"rope_scaling": _scaling_of(c.rope_scaling), "attention_bias": False, "mlp_bias": False}
        values |= {"bos_token_id": target.tokenizer.bos, "eos_token_id": list(target.tokenizer.stop) or None}
        return {"architectures": [self.architecture], "model_type": self.model_types[0]} | values

    def _head_dim(self, config, width, heads) -> int:
        if config.get("head_dim") is None and width % heads:
            raise InputError(f"hidden_size = {width} is no multiple of num_attention_heads = {heads}, and no head_dim")
        return positive(config, "head_dim", int, width // heads)


class Qwen3Family(LlamaFamily):
    model_types = ("qwen3",)
    architecture, qk_norm = "Qwen3ForCausalLM", True

    def _head_dim(self, config, width, heads):
        return positive(config, "head_dim", int)  # it has no relation to the width


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary positions, in either layout. The format's own default base is 10000."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = config.get(key) or {}
    if not isinstance(rope, Mapping):
        raise InputError(f"{key} = {rope!r} must be an object")
    theta = positive(rope if "rope_theta" in rope else config, "rope_theta", float, 10000.0)
    if not rope.keys() - {"rope_theta"}:
        return theta, None
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in ("default", "llama3"):
        raise InputError(f"{key} has the rope_type {kind!r}, which is not supported, only 'default' and 'llama3'")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"partial_rotary_factor = {rope['partial_rotary_factor']!r} is not supported, only 1.0")
    if kind == "default":
        return theta, None
    numbers = {ours: positive(rope, name, int if name.startswith("orig") else float) for name, ours in SCALING.items()}
    return theta, RopeScaling(**numbers)


def _scaling_of(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    numbers = dataclasses.asdict(scaling)
    return {"rope_type": "llama3"} | {name: numbers[ours] for name, ours in SCALING.items()}
