"""Released EvaByte checkpoints (config.json, model*.safetensors) as targets, and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytejax.checkpoints import read_json
from bytejax.conversion.base import Family, flag, positive
from bytejax.errors import InputError
from bytejax.models import evabyte
from bytejax.tokenizers import EvaByteTokenizer
from bytejax.tokenizers.evabyte import BOS, END_OF_TURN, EOS, OFFSET

NAMES = {  # ours: the checkpoint's
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn_width": "intermediate_size",
    "window": "window_size",
    "chunk": "chunk_size",
    "context": "max_position_embeddings",
}
ONLY = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "attention_class": "eva"}


class EvaByteFamily(Family):
    """Keys that inference does not need are not read; a checkpoint may lack them, or have more."""

    model_types = ("evabyte",)
    ignored = (r".*\.rotary_emb\.inv_freq",)

    def parse(self, config: Mapping[str, Any]) -> evabyte.Config:
        for key, value in ONLY.items():
            if config.get(key, value) != value:
                raise InputError(f"{key} = {config[key]!r}; an EvaByte has {value!r}")
        numbers = {ours: positive(config, key, int) for ours, key in NAMES.items()}
        if numbers["vocab"] != OFFSET + 256:
            raise InputError(
                f"vocab_size = {numbers['vocab']}; an EvaByte has {OFFSET + 256}: control tokens and bytes"
            )
        return evabyte.Config(
            **numbers,
            pred_heads=positive(config, "num_pred_heads", int, 1),
            rope_theta=positive(config, "rope_theta", float),
            rope_scale=_scale(config.get("rope_scaling")),
            norm_eps=positive(config, "rms_norm_eps", float),
            unit_offset=flag(config, "norm_add_unit_offset"),
        )

    def table(self, config):
        return evabyte.table(config)

    def make(self, params, config, directory, raw):
        """The tokenizer stops at the end ids of generation_config.json, else of config.json, else at <eos>; and at the
        end of a turn, whether that is among them or not: chats end with it, other text never has it."""
        stop = _end_ids(directory / "generation_config.json") or _as_ids(raw.get("eos_token_id")) or (EOS,)
        stop = (*stop, *(i for i in (END_OF_TURN,) if i not in stop))
        return evabyte.EvaByte(params=params, config=config, tokenizer=EvaByteTokenizer(stop=stop))

    def serves(self, target):
        return isinstance(target, evabyte.EvaByte)

    def config_of(self, target: evabyte.EvaByte) -> dict[str, Any]:
        c, stop = target.config, target.tokenizer.stop
        scaling = None if c.rope_scale == 1 else {"type": "linear", "factor": c.rope_scale}
        return {
            "architectures": ["EvaByteForCausalLM"],
            "model_type": "evabyte",
            **{key: getattr(c, ours) for ours, key in NAMES.items()},
            "num_key_value_heads": c.heads,
            "num_pred_heads": c.pred_heads,
            "rope_theta": c.rope_theta,
            "rope_scaling": scaling,
            "rms_norm_eps": c.norm_eps,
            "norm_add_unit_offset": c.unit_offset,
            **ONLY,
            "attention_dropout": 0.0,
            "fp32_ln": False,
            "fp32_skip_add": True,
            "fp32_logits": True,
            "mixedp_attn": True,
            "bos_token_id": BOS,
            "eos_token_id": stop[0] if len(stop) == 1 else list(stop),
            "pad_token_id": 0,
            "return_dict": False,  # the release's own multibyte decoding fails where it is true
        }


def _scale(scaling: Any) -> float:
    """What positions are divided by. "dynamic" would move the angles of positions that were cached before."""
    if scaling is None:
        return 1.0
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
    if kind == "default":
        return 1.0
    if kind != "linear":
        raise InputError(f"rope_scaling = {scaling!r}; known: null and the type 'linear'")
    return positive(scaling, "factor", float)


def _end_ids(path: Path) -> tuple[int, ...]:
    return _as_ids(read_json(path).get("eos_token_id")) if path.is_file() else ()


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < OFFSET + 256 for i in ids):
        raise InputError(f"eos_token_id = {value!r} is no id, nor a list of ids")
    return ids
