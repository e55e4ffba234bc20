"""A tiny released checkpoint with a tokenizer, as files."""

import functools
import json

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bytejax import checkpoints, parameters
from bytejax.checkpoints import Entry
from bytejax.conversion.llama import LlamaFamily

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROLS = (END, START, STOP)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB = 310  # of the model; the tokenizer has 300
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 700.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
TEXTS = [
    "the quick brown fox jumps over the lazy dog, " * 3,
    "naïve façade 123 — 漢字 and the other things",
    "def f(x): return x",
]


@functools.cache
def tokenizer_json():
    """Byte-level BPE with every byte, 300 ids."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=list(CONTROLS), initial_alphabet=alphabet)
    )
    assert made.get_vocab_size() == 300
    return made.to_str()


def write_tokenizer(directory, **config):
    (directory / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": {"__type": "AddedToken", "content": STOP},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(values | {"chat_template": TEMPLATE} | config))


def tensors(dtype="float32", config=CONFIG, seed=0):
    """A random state dict."""
    rng = np.random.default_rng(seed)
    found = {}
    for p in parameters.flatten(LlamaFamily().table(LlamaFamily().parse(config))).values():
        for name in p.sources():
            x = rng.normal(size=parameters.reference_shape(p)) * 0.3 + ("norm" in name)
            found[name] = x.astype(checkpoints.DTYPES[{"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]])
    return found


def write_safetensors(path, arrays):
    checkpoints.write(path, [Entry(n, x.dtype, x.shape, lambda x=x: [x]) for n, x in arrays.items()])


def write_released(directory, arrays=None, shards=0, config=CONFIG):
    """config.json, tokenizer and weights, in one file or in shards. -> the state dict."""
    directory.mkdir(parents=True, exist_ok=True)
    arrays = tensors(config=config) if arrays is None else arrays
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    if not shards:
        write_safetensors(directory / "model.safetensors", arrays)
        return arrays
    names, weight_map = sorted(arrays), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        write_safetensors(directory / file, {n: arrays[n] for n in part})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(x.nbytes for x in arrays.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return arrays
