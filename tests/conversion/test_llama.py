"""Checkpoints of Llama and Qwen3, in both layouts of config.json, against transformers."""

import dataclasses
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax import InputError, parameters
from bytejax.conversion.llama import LlamaFamily, Qwen3Family
from bytejax.models.base import Block
from bytejax.models.llama import Config, Llama, RopeScaling
from bytejax.tokenizers import ByteTokenizer

FAMILIES = {"llama": LlamaFamily(), "qwen3": Qwen3Family()}
COMMON = {"hidden_act": "silu", "attention_bias": False, "rope_theta": 500000.0}
SMALL = COMMON | {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 300,
    "rms_norm_eps": 1e-3,
}
TOKENIZER = ByteTokenizer(31, 0, 3, (5, 6), ())


def random_config(model_type, seed):
    """transformers' arguments, every number other than its default."""
    rng = random.Random(seed)
    kv_heads, groups, size = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([4, 6, 10, 14])
    heads = kv_heads * groups
    width = next(w for w in range(rng.randint(16, 40), 99) if w % heads == 0 and w != heads * size)
    rope = {"rope_type": "default", "rope_theta": rng.uniform(50, 5000)}
    if seed % 2:
        low = rng.uniform(0.5, 2)
        rope |= {"rope_type": "llama3", "factor": rng.uniform(2, 9), "low_freq_factor": low}
        rope |= {"high_freq_factor": low + rng.uniform(0.5, 4), "original_max_position_embeddings": rng.randint(20, 90)}
    return dict(
        vocab_size=rng.randint(17, 47),
        hidden_size=width,
        num_hidden_layers=rng.choice([2, 3]),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        intermediate_size=rng.randint(17, 48),
        rope_parameters=rope,
        rms_norm_eps=10 ** rng.uniform(-4, -1.5),
        tie_word_embeddings=seed % 3 == 0,
        max_position_embeddings=rng.randint(100, 400),
        initializer_range=0.2,
    )


def older(config):
    """The same config.json as transformers 4 has it."""
    rope = dict(config.pop("rope_parameters"))
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    return config | {"rope_theta": theta, "rope_scaling": {"type": kind, **rope} if kind != "default" else None}


@jax.jit
def both_ways(target, ids):
    """Logits of whole texts [2, 24], and of the same texts from a ragged prefill and two blocks of 5."""
    whole, lengths = target.logits(ids), jnp.asarray([11, 14])
    prefilled, cache = target.prefill(ids[:, :14], lengths, target.init_cache(2, 40, 5))
    cached = [target.unembed(prefilled.hidden)]
    for _ in range(2):
        at = cache.lengths[:, None] + jnp.arange(5)
        extended = target.extend(Block.chain(jnp.take_along_axis(ids, at, 1)), cache)
        cached.append(target.unembed(extended.hidden))
        cache = target.commit(cache, extended.pending, jnp.tile(jnp.arange(5), (2, 1)), jnp.full(2, 5))
    return whole, jnp.concatenate(cached, 1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model_type", FAMILIES)
def test_random_models_equal_transformers(model_type, seed):
    import torch
    import transformers

    name = {"llama": "Llama", "qwen3": "Qwen3"}[model_type]
    torch.manual_seed(seed)
    made = getattr(transformers, f"{name}Config")(**random_config(model_type, seed))
    reference = getattr(transformers, f"{name}ForCausalLM")(made).eval()
    for p in reference.parameters():
        if p.ndim == 1:
            p.data = 1 + 0.3 * torch.randn_like(p)  # norms that matter
    family, raw = FAMILIES[model_type], made.to_dict()
    config = family.parse(raw)
    assert config == family.parse(older(dict(raw)))
    tensors = {name: x.numpy() for name, x in reference.state_dict().items()}
    assert ("lm_head.weight" in tensors) and config.tied == (seed % 3 == 0)
    table = family.table(config)
    sources = {s for p in parameters.flatten(table).values() for s in p.sources()}
    extra = set(tensors) - sources
    assert all(any(re.fullmatch(pattern, x) for pattern in family.ignored) for x in extra)
    params = parameters.from_reference(table, {name: x for name, x in tensors.items() if name in sources})
    target = Llama(params=params, config=config, tokenizer=TOKENIZER)
    ids = jax.random.randint(jax.random.key(seed), (2, 24), 0, config.vocab)
    with torch.no_grad():
        want = reference(torch.from_numpy(np.array(ids)).long()).logits.numpy()
    whole, cached = both_ways(target, ids)
    close = dict(rtol=1e-5, atol=1e-5 * np.abs(want).max())
    np.testing.assert_allclose(whole, want, **close)
    for row, first in enumerate((10, 13)):
        np.testing.assert_allclose(cached[row], want[row, first : first + 11], **close)
    written = family.config_of(target)
    assert family.parse(written) == config
    again = getattr(transformers, f"{name}Config")(**written)
    numbers = [x for x in random_config(model_type, seed) if x not in ("rope_parameters", "initializer_range")]
    assert {x: getattr(again, x) for x in numbers} == {x: getattr(made, x) for x in numbers}
    assert dict(again.rope_parameters) == dict(made.rope_parameters)
    assert (again.bos_token_id, again.eos_token_id) == (3, [5, 6])


def test_released_configs_are_read():
    llama32 = {
        **dict(COMMON, model_type="llama", vocab_size=128256, hidden_size=3072, num_hidden_layers=28),
        **dict(num_attention_heads=24, num_key_value_heads=8, head_dim=128, intermediate_size=8192, mlp_bias=False),
        **dict(max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True, pretraining_tp=1),
        "rope_scaling": {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
    }
    sizes = (128256, 3072, 28, 24, 8, 128, 8192, 5e5, 1e-5, True, 131072)
    assert LlamaFamily().parse(llama32) == Config(*sizes, False, RopeScaling(32.0, 1.0, 4.0, 8192))
    llama2 = {
        **dict(vocab_size=32000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, rope_scaling=None),
        **dict(intermediate_size=11008, max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=False),
    }
    sizes = (32000, 4096, 32, 32, 32, 128, 11008, 1e4, 1e-5, False, 4096)
    assert LlamaFamily().parse(llama2) == Config(*sizes, False, None)
    qwen3 = {
        **dict(COMMON, vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, head_dim=128),
        **dict(num_key_value_heads=8, intermediate_size=3072, max_position_embeddings=40960, rms_norm_eps=1e-6),
        **dict(rope_theta=1000000, rope_scaling=None, sliding_window=None, use_sliding_window=False),
        **dict(tie_word_embeddings=True, max_window_layers=28),
    }
    sizes = (151936, 1024, 28, 16, 8, 128, 3072, 1e6, 1e-6, True, 40960)
    assert Qwen3Family().parse(qwen3) == Config(*sizes, True, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias = True is not supported, only False"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling has the rope_type 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters has the rope_type 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters has the rope_type None"),
        ({"rope_scaling": "llama3"}, "rope_scaling = 'llama3' must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_theta": -1.0}, "rope_theta = -1.0 must be a positive number"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 24.5}, "hidden_size = 24.5 must be a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True must be a positive integer"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5' must be a positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1 must be true or false"),
        ({"hidden_size": 26}, "hidden_size = 26 is no multiple of num_attention_heads = 4"),
        ({"num_key_value_heads": 3}, "heads = 4 is not a multiple of kv_heads = 3"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_key_and_value(change, message):
    LlamaFamily().parse(SMALL)
    with pytest.raises(InputError, match=re.escape(message)):
        LlamaFamily().parse(SMALL | change)


def test_absent_numbers_have_the_formats_own_meaning():
    plain = LlamaFamily().parse({k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "rope_theta")})
    assert (plain.kv_heads, plain.head_dim, plain.rope_theta, plain.tied) == (4, 6, 10000.0, False)
    with pytest.raises(InputError, match="head_dim is missing"):
        Qwen3Family().parse(SMALL)
    assert LlamaFamily().parse(SMALL | {"sliding_window": 9, "use_sliding_window": False}).width == 24


def test_a_family_serves_its_own_targets():
    config = LlamaFamily().parse(SMALL)
    normed = dataclasses.replace(config, qk_norm=True)
    targets = [Llama(params=None, config=c, tokenizer=TOKENIZER) for c in (config, normed)]
    assert [[f.serves(t) for t in targets] for f in FAMILIES.values()] == [[True, False], [False, True]]
