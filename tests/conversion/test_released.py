"""Released checkpoints through `load_target`: against transformers, in shards, on a mesh, and in little memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType

import bytejax
from bytejax import checkpoints, loading
from bytejax.checkpoints import Entry, SafetensorsFile, Shards, Tensors
from tests.conversion import cases

ROOT = Path(__file__).parents[2]
LOGITS = jax.jit(lambda target, ids: target.logits(ids))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_what_transformers_saves_in_shards_has_its_logits(model_type, tmp_path):
    import torch
    import transformers

    name = {"llama": "Llama", "qwen3": "Qwen3"}[model_type]
    torch.manual_seed(0)
    numbers = {k: v for k, v in cases.CONFIG.items() if k not in ("model_type", "architectures", "rope_theta")}
    numbers |= {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}, "initializer_range": 0.3}
    reference = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**numbers)).eval()
    reference.save_pretrained(tmp_path, max_shard_size="30KB")
    cases.write_tokenizer(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    target = bytejax.load_target(tmp_path)
    assert isinstance(target.params["layers"], tuple) and target.params["layers"][0]["gate_up"].ndim == 3
    ids = np.random.default_rng(0).integers(0, cases.VOCAB, (2, 30))
    with torch.no_grad():
        want = reference(torch.from_numpy(ids)).logits.numpy()
    for form in (target, bytejax.load_target(tmp_path, unroll=False)):
        np.testing.assert_allclose(LOGITS(form, ids), want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
    prompt = target.tokenizer.chat([{"role": "user", "content": "the fox"}])
    got = bytejax.generate(target, [prompt], max_new_tokens=12).ids[0]
    options = dict(do_sample=False, pad_token_id=0, eos_token_id=2, suppress_tokens=list(target.tokenizer.banned))
    out = reference.generate(torch.tensor([prompt]), max_new_tokens=12, **options)
    assert got == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_form_holds_the_same_numbers_bit_for_bit(dtype, tmp_path):
    arrays = cases.write_released(tmp_path, cases.tensors(dtype), shards=2)
    stacked = bytejax.load_target(tmp_path, unroll=False)
    up = np.stack([arrays[f"model.layers.{i}.mlp.up_proj.weight"].astype("f").T for i in range(3)])
    np.testing.assert_array_equal(stacked.params["layers"]["up"], up)
    np.testing.assert_array_equal(stacked.params["head"], arrays["lm_head.weight"].astype("f").T)
    panels = stacked.in_panels().params
    got = bytejax.load_target(tmp_path).params
    assert jax.tree.structure(got) == jax.tree.structure(panels)
    jax.tree.map(np.testing.assert_array_equal, got, panels)
    half = bytejax.load_target(tmp_path, dtype="bfloat16", unroll=False).params
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.bfloat16.dtype}
    np.testing.assert_array_equal(half["layers"]["up"], up.astype(ml_dtypes.bfloat16))


def test_a_saved_target_goes_straight_into_its_form_too(tmp_path):
    cases.write_released(tmp_path / "released")
    target = bytejax.load_target(tmp_path / "released", unroll=False)
    bytejax.save_target(tmp_path / "saved", target, jnp.float32)
    for unroll in (None, False):
        a, b = (bytejax.load_target(tmp_path / x, unroll=unroll) for x in ("released", "saved"))
        assert jax.tree.structure(a) == jax.tree.structure(b)
        jax.tree.map(np.testing.assert_array_equal, a.params, b.params)


def test_what_was_loaded_is_no_view_of_the_file(tmp_path):
    cases.write_released(tmp_path)
    target = bytejax.load_target(tmp_path)
    before = [np.array(x) for x in jax.tree.leaves(target.params)]
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 100_000)
    for x, y in zip(before, jax.tree.leaves(target.params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_readers_give_back_what_was_written_in_every_dtype(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        code: rng.integers(0, 256, (3, 5, np.dtype(kind).itemsize), np.uint8).view(kind)[..., 0]
        for code, kind in checkpoints.CODES.items()
        if code != "BOOL"
    }
    arrays |= {"scalar": np.array(3, np.float32), "none": np.zeros((0, 4), np.float16), "bool": np.eye(3, dtype=bool)}
    cases.write_safetensors(tmp_path / "a.safetensors", arrays)
    for reader in (SafetensorsFile(tmp_path / "a.safetensors"), Tensors(arrays)):
        assert set(reader.names()) == set(arrays)
        for name, x in arrays.items():
            got = reader.read(name)
            assert (got.dtype, got.shape) == (x.dtype, x.shape) == (reader.dtype(name), reader.shape(name))
            assert got.tobytes() == x.tobytes()
    import safetensors.numpy

    arrays = {n: x for n, x in arrays.items() if not n.startswith("F8")}  # which the package reads for PyTorch only
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="np") as theirs:
        assert all(theirs.get_tensor(n).tobytes() == x.tobytes() for n, x in arrays.items())
    names = sorted(arrays)
    for i in (0, 1):
        safetensors.numpy.save_file({n: arrays[n] for n in names[i::2]}, tmp_path / f"{i}.safetensors")
    weight_map = {n: f"{i % 2}.safetensors" for i, n in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shards = Shards(tmp_path / "model.safetensors.index.json")
    assert all(shards.read(n).tobytes() == x.tobytes() for n, x in arrays.items())
    assert shards.file(names[0]).endswith("0.safetensors")


def test_a_file_that_cannot_be_finished_leaves_nothing(tmp_path):
    def broken():
        yield np.ones((2,), np.float32)
        raise OSError("disk full")

    for parts in (broken, lambda: [np.ones(3, np.float32)]):
        with pytest.raises((OSError, ValueError)):
            checkpoints.write(tmp_path / "a.safetensors", [Entry("x", np.dtype("f4"), (4,), parts)])
        assert not list(tmp_path.iterdir())


MESH = """
import jax, numpy as np, bytejax
from jax.sharding import AxisType
mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
rules = {"embed": "fsdp", "ffn": "tensor", "heads": "tensor"}
for path in %r:
    alone = bytejax.load_target(path, unroll=False)
    for unroll in (None, True):
        target = bytejax.load_target(path, unroll=unroll, mesh=mesh, rules=rules)
        np.testing.assert_allclose(target.logits([[1, 2, 3]]), alone.logits([[1, 2, 3]]), rtol=2e-5, atol=1e-5)
        if unroll is None:
            jax.tree.map(np.testing.assert_array_equal, target.params, alone.params)
            up = target.params["layers"]["up"]
            assert up.sharding.spec == jax.P(None, "fsdp", "tensor"), up.sharding
            assert up.addressable_shards[0].data.shape == (3, 12, 32)
print("sharded", len(jax.devices()))
"""


def test_weights_land_sharded(tmp_path):
    cases.write_released(tmp_path / "released", shards=2)
    target = bytejax.load_target(tmp_path / "released")
    bytejax.save_target(tmp_path / "saved", target, jnp.float32)
    program = MESH % [str(tmp_path / "released"), str(tmp_path / "saved")]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=flags, capture_output=True, text=True)
    assert done.stdout == "sharded 4\n", done.stderr[-2000:]


def test_a_mesh_of_one_device_changes_nothing(tmp_path):
    cases.write_released(tmp_path)
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    target = bytejax.load_target(tmp_path, mesh=mesh, rules={"embed": "fsdp"})
    jax.tree.map(np.testing.assert_array_equal, target.params, bytejax.load_target(tmp_path, unroll=False).params)


MEMORY = """
import re, sys
import jax
from bytejax import loading
from bytejax.conversion import llama
from bytejax.tokenizers import DEMO
llama.LlamaFamily.make = lambda self, params, config, directory, raw: llama.Llama(params, config, DEMO)
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
loading.load_target(%r, "bfloat16")  # what compiling takes is not the weights'
before = peak()
target = loading.load_target(%r, "bfloat16", unroll=%s)
jax.block_until_ready(target.params)
print(before, peak(), sum(x.nbytes for x in jax.tree.leaves(target.params)))
"""


def synthetic(directory, layers, width, ffn, vocab, shards):
    """A checkpoint of random bits, in bfloat16. -> its config."""
    directory.mkdir()
    config = cases.CONFIG | {"vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers}
    config |= {"num_attention_heads": width // 64, "num_key_value_heads": width // 256, "head_dim": 64}
    config |= {"intermediate_size": ffn, "tie_word_embeddings": True}
    from bytejax import parameters
    from bytejax.conversion.llama import LlamaFamily

    table = parameters.flatten(LlamaFamily().table(LlamaFamily().parse(config)))
    shapes = [(name, parameters.reference_shape(p)) for p in table.values() for name in p.sources()]
    rng, kind, weight_map = np.random.default_rng(0), np.dtype(ml_dtypes.bfloat16), {}
    bits = lambda shape: [rng.integers(0, 2**15, shape, np.int16).view(kind)]
    for i in range(shards):
        entries = [Entry(n, kind, s, lambda s=s: bits(s)) for n, s in shapes[i::shards]]
        checkpoints.write(directory / f"{i}.safetensors", entries)
        weight_map |= {e.name: f"{i}.safetensors" for e in entries}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config))


def measured(tmp_path, unroll, **sizes):
    """Bytes: the peak before, the peak with the target loaded, the target's parameters."""
    cases.write_released(tmp_path / "small", config=cases.CONFIG | {"tie_word_embeddings": True})
    synthetic(tmp_path / "large", **sizes)
    program = MEMORY % (str(tmp_path / "small"), str(tmp_path / "large"), unroll)
    usual = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}  # as users compile
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=usual, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return map(int, done.stdout.split())


@pytest.mark.parametrize("unroll", [None, False])
def test_loading_takes_little_more_memory_than_the_weights(unroll, tmp_path):
    before, peak, size = measured(tmp_path, unroll, layers=12, width=1024, ffn=3072, vocab=4000, shards=4)
    assert size > 250e6
    assert peak - before < 1.15 * size + 80e6  # the allowance is for programs compiled for these shapes


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [None, False])
def test_loading_two_gigabytes_takes_at_most_1_3_times_their_memory(unroll, tmp_path):
    before, peak, size = measured(tmp_path, unroll, layers=21, width=2048, ffn=5632, vocab=32000, shards=4)
    assert size > 2e9
    assert peak < 1.3 * size  # the interpreter included


def test_the_directories_hold_what_their_names_say(tmp_path):
    assert loading.target_path("demo") == loading.DEMO / "target"
    assert loading.target_path(tmp_path) == tmp_path
    assert loading.target_path(tmp_path / "x.gguf") == tmp_path / "x.gguf"
