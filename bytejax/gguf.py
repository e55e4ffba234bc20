"""GGUF files: their tensors under the names of transformers, and their metadata as a config.json.

The file is read here, tensor by tensor; the `gguf` package knows the quantised formats.
"""

import math
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from bytejax.checkpoints import Reader, file_errors, mapped
from bytejax.errors import InputError

ARCHITECTURES = ("llama", "qwen3")  # and, under the same names, the model_type of their config.json
SCALARS = dict(enumerate("BbHhIif?..Qqd"))  # value types, as `struct` has them
STRING, ARRAY = 8, 9
PLAIN = {"F32": np.dtype("f4"), "F16": np.dtype("f2"), "BF16": np.dtype(ml_dtypes.bfloat16), "F64": np.dtype("f8")}
ROWS = 1024  # dequantised at a time
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class _Info(NamedTuple):
    stored: str  # name in the file
    kind: str
    dims: tuple[int, ...]
    offset: int


class GGUFFile(Reader):
    """One .gguf file of an architecture of `ARCHITECTURES`; quantised tensors read as float32.

    metadata: the file's keys and values; arrays are lists.
    Raises InputError where it is damaged, of another architecture, or quantised in an unknown way (naming the tensor).
    """

    def __init__(self, path: Path | str):
        self.path, self.where = Path(path), str(path)
        self._package = _package(self.where)
        self.metadata: dict[str, Any] = {}
        with file_errors(path), self.path.open("rb") as file:
            try:
                infos = self._header(file)
            except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, KeyError, RecursionError):
                raise InputError(f"{path} is not a complete GGUF file (its header is cut short or damaged)") from None
            alignment = self._number("general.alignment", 32)
            start = file.tell() + -file.tell() % alignment
        self.architecture = self.metadata.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise InputError(f"{path} has the general.architecture {self.architecture!r}; known: {known}")
        if self._number("split.count", 1) > 1:
            raise InputError(f"{path} is one of split.count = {self.metadata['split.count']} files; merge them first")
        self._infos = {_name(i.stored): i._replace(offset=start + i.offset) for i in infos}
        size, stored = self.path.stat().st_size, [i.stored for i in infos]
        if twice := [name for name in stored if stored.count(name) > 1]:
            raise InputError(f"{path} has {twice[0]} twice")
        for info in self._infos.values():
            if (info.offset - start) % alignment:
                raise InputError(f"{path}: the offset of {info.stored} is no multiple of general.alignment")
            end = info.offset + self._bytes(info)
            if end > size:
                raise InputError(
                    f"{path} is not a complete GGUF file ({info.stored} ends at byte {end}, the file at {size})"
                )

    def names(self):
        return [name for name in self._infos if name != ROPE_FACTORS]

    def shape(self, name):
        return self._infos[name].dims

    def dtype(self, name):
        return PLAIN.get(self._infos[name].kind, np.dtype("f4"))

    def read(self, name):
        info = self._infos[name]
        with file_errors(self.path):
            x = self._stored(info)
        if self.architecture == "llama" and re.search(r"self_attn\.[qk]_proj\.weight$", name):
            return _halves(x, self._heads("head_count_kv" if ".k_proj" in name else "head_count"))
        return x

    def file(self, name):
        return f"{self.where} (as {self._infos[name].stored})"

    def config(self) -> dict[str, Any]:
        """What the metadata says, as a config.json of transformers. Raises InputError naming a key that is missing."""
        own = f"{self.architecture}."
        heads, width = self._heads("head_count"), self._number(own + "embedding_length", None)
        if self._value("expert_count", 0):
            raise InputError(f"{self.where}: {self.architecture}.expert_count: mixtures of experts are not supported")
        if "model.embed_tokens.weight" not in self._infos:
            raise InputError(f"{self.where} has no token_embd.weight")
        head_dim = self._value("attention.key_length", self._value("rope.dimension_count", width // heads))
        if self._value("rope.dimension_count", head_dim) != head_dim:
            raise InputError(f"{self.where}: {self.architecture}.rope.dimension_count is not the head size {head_dim}")
        return {
            "model_type": self.architecture,
            "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.architecture]],
            "vocab_size": self._infos["model.embed_tokens.weight"].dims[0],
            "hidden_size": width,
            "num_hidden_layers": self._value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._heads("head_count_kv"),
            "head_dim": head_dim,
            "intermediate_size": self._value("feed_forward_length"),
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": _shortest(self._number(own + "attention.layer_norm_rms_epsilon", None, float)),
            "rope_theta": float(self._number(own + "rope.freq_base", 10000.0, float)),
            "rope_scaling": self._rope_scaling(head_dim),
            "max_position_embeddings": self._value("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self._infos,
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata.get("tokenizer.ggml.eos_token_id"),
        }

    def _heads(self, key: str) -> int:
        count = self._value("attention.head_count")
        count = count if key == "head_count" else self._value(f"attention.{key}", count)
        if not isinstance(count, int) or count < 1:
            raise InputError(
                f"{self.where}: {self.architecture}.attention.{key} = {count!r} is not one positive number"
            )
        return count

    def _value(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise InputError(f"{self.where} lacks the key {self.architecture}.{key}")
        return value

    def _number(self, key: str, default: float | None, kind: type = int) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise InputError(f"{self.where} lacks the key {key}")
        if isinstance(value, bool) or not isinstance(value, int | kind) or not 0 < value < 2**63:
            raise InputError(f"{self.where}: {key} = {value!r} is not one positive number")
        return value

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        """Llama 3.1's scaling is stored as what it divides each frequency by; only its factor varies."""
        kind = self._value("rope.scaling.type", "none")
        if kind != "none":
            return {"rope_type": kind, "factor": self._value("rope.scaling.factor", 1.0)}
        if ROPE_FACTORS not in self._infos:
            return None
        got = np.asarray(self.read(ROPE_FACTORS), np.float64)
        factor = round(float(got.max()), 4)
        turns = self._number(f"{self.architecture}.rope.freq_base", 10000.0, float) ** (
            -np.arange(head_dim // 2) * 2 / head_dim
        )
        turns *= LLAMA3["original_max_position_embeddings"] / (2 * np.pi)
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if got.shape != expected.shape or not np.allclose(got, expected, rtol=1e-3):
            raise InputError(
                f"{self.where}: {ROPE_FACTORS} is not the scaling of Llama 3.1, the only one that is known"
            )
        return {"rope_type": "llama3", "factor": factor, **LLAMA3}

    def _bytes(self, info: _Info) -> int:
        if info.kind in PLAIN:
            return math.prod(info.dims) * PLAIN[info.kind].itemsize
        block, size = self._package.GGML_QUANT_SIZES[self._package.GGMLQuantizationType[info.kind]]
        if info.dims[-1] % block:
            raise InputError(f"{self.where}: {info.stored} has rows of {info.dims[-1]}, no multiple of {block}")
        return math.prod(info.dims) // block * size

    def _stored(self, info: _Info) -> np.ndarray:
        if info.kind in PLAIN:
            return mapped(self.path, PLAIN[info.kind], info.dims, info.offset)
        rows = math.prod(info.dims[:-1])
        data = mapped(self.path, np.dtype("u1"), (rows, self._bytes(info) // max(rows, 1)), info.offset)
        out, kind = np.empty((rows, info.dims[-1]), np.float32), self._package.GGMLQuantizationType[info.kind]
        for i in range(0, rows, ROWS):
            out[i : i + ROWS] = self._package.dequantize(data[i : i + ROWS], kind)
        return out.reshape(info.dims)

    def _header(self, file: BinaryIO) -> list[_Info]:
        magic, version, tensors, values = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF":
            raise InputError(f"{self.where} is not a GGUF file")
        if version not in (2, 3):
            raise InputError(f"{self.where} is of GGUF version {version}; known: 2, 3")
        for _ in range(values):
            key = _string(file)
            self.metadata[key] = _value(file, *struct.unpack("<I", file.read(4)))
        return [self._info(file) for _ in range(tensors)]

    def _info(self, file: BinaryIO) -> _Info:
        name, (rank,) = _string(file), struct.unpack("<I", file.read(4))
        dims = struct.unpack(f"<{rank}Q", file.read(8 * rank))[::-1]
        number, offset = struct.unpack("<IQ", file.read(12))
        if not 1 <= rank <= 4:
            raise InputError(f"{self.where}: {name} has {rank} axes; GGUF knows 1 to 4")
        known = {kind.value: kind for kind in self._package.GGMLQuantizationType}
        kind = known.get(number)
        if kind is None or (kind.name not in PLAIN and kind not in self._package.quants._type_traits):
            what = number if kind is None else kind.name
            raise InputError(f"{self.where}: {name} is quantised as type {what}, which is not supported")
        return _Info(name, kind.name, dims, offset)


def _package(where: str) -> Any:
    try:
        import gguf
    except ImportError:
        raise InputError(f"{where}: reading GGUF files needs the package gguf: pip install 'bytejax[hf]'") from None
    return gguf


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    data = file.read(length)
    if len(data) < length:
        raise struct.error
    return data.decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind == ARRAY:
        inner, count = struct.unpack("<IQ", file.read(12))
        if inner in (STRING, ARRAY):
            return [_value(file, inner) for _ in range(count)]
        code = SCALARS[inner]
        return list(struct.unpack(f"<{count}{code}", file.read(struct.calcsize(f"<{count}{code}"))))
    code = SCALARS[kind]
    return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]


def _name(stored: str) -> str:
    """The name in transformers; a tensor that the architectures do not have keeps its own."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", stored)
    if layer and layer[2] in LAYER:
        return f"model.layers.{layer[1]}.{LAYER[layer[2]]}.{layer[3]}"
    return WHOLE.get(stored, stored)


def _halves(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs that are rotated against each other to halves that are."""
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _shortest(x: float) -> float:
    """The shortest decimal that is this number in float32, which is how it was stored."""
    return float(str(np.float32(x)))
