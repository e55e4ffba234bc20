"""GGUF files, written with the gguf package: tensors, metadata, tokenizer, and what is refused."""

import json
import struct

import gguf
import jax
import numpy as np
import pytest

import bytejax
from bytejax import InputError
from bytejax.cli import decode
from bytejax.gguf import LAYER, GGUFFile
from bytejax.models.llama import RopeScaling
from bytejax.tokenizers import SubwordTokenizer
from tests.cli.helpers import is_refused
from tests.conversion import cases

CONFIG = cases.CONFIG | {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 512}
CONFIG |= {"num_hidden_layers": 2, "tie_word_embeddings": True}
STORED = {v: k for k, v in LAYER.items()}
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def stored_name(name):
    if name in WHOLE:
        return WHOLE[name]
    if name == "rope_freqs":
        return "rope_freqs.weight"
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{STORED['.'.join(middle)]}.{kind}"


def paired(x, heads):
    """Rows of each head as llama.cpp stores them: partners of a rotation side by side."""
    return x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def write(path, arrays, kind, config=CONFIG, arch="llama", tokens=True, **metadata):
    """-> what the file's tensors are once quantised, under the names of transformers."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_key_length(config["head_dim"])
    if tokens:
        write_tokenizer(writer, **metadata)
    expected = {}
    for name, x in arrays.items():
        stored, heads = x.astype(np.float32), {"q": "num_attention_heads", "k": "num_key_value_heads"}
        letter = name.rsplit("_proj", 1)[0][-1]
        permuted = arch == "llama" and letter in heads and "_proj.weight" in name
        if permuted:
            stored = paired(stored, config[heads[letter]])
        if x.ndim > 1 and kind is not gguf.GGMLQuantizationType.F32:
            data = gguf.quantize(stored, kind)
            stored = gguf.dequantize(data, kind)
            writer.add_tensor(stored_name(name), data, raw_dtype=kind)
        else:
            writer.add_tensor(stored_name(name), stored)
        if permuted:
            n = config[heads[letter]]
            stored = stored.reshape(n, -1, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        expected[name] = stored
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def write_tokenizer(writer, pre="gpt-2", model="gpt2"):
    made = json.loads(cases.tokenizer_json())
    tokens = sorted(made["model"]["vocab"], key=made["model"]["vocab"].get)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), cases.VOCAB)]
    kinds = [3 if t in cases.CONTROLS else 5 if t.startswith("[PAD") else 1 for t in tokens]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(m) for m in made["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(cases.TEMPLATE)


def tied(config=CONFIG):
    return cases.tensors(config=config)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_tensors_are_what_the_package_makes_of_them(kind, tmp_path):
    path = tmp_path / "model.gguf"
    expected = write(path, tied(), gguf.GGMLQuantizationType[kind])
    reader = GGUFFile(path)
    assert set(reader.names()) == set(expected)
    for name, x in expected.items():
        assert reader.shape(name) == x.shape
        got = reader.read(name)
        assert got.dtype == reader.dtype(name)
        np.testing.assert_array_equal(got.astype(np.float32), x, err_msg=name)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_read_as_the_package_reads_them(kind, tmp_path):
    """The package cannot write these: the blocks are random bits with scales that are finite."""
    kind = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng, down = np.random.default_rng(0), "model.layers.0.mlp.down_proj.weight"
    data = rng.integers(0, 255, (256, 512 // block * size), np.uint8).reshape(256, 2, size)
    data[..., -4:] = np.frombuffer(np.float16([0.01, 0.02]).tobytes(), np.uint8)
    data[..., :4] = data[..., -4:]
    data = data.reshape(256, -1)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor(stored_name(down), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GGUFFile(tmp_path / "k.gguf").read(down)
    assert got.shape == (256, 512) and np.isfinite(got).all() and got.std() > 0
    np.testing.assert_array_equal(got, gguf.dequantize(data, kind))


def test_a_gguf_file_is_the_target_that_its_tensors_make(tmp_path):
    arrays = tied()
    cases.write_released(tmp_path / "directory", arrays, config=CONFIG)
    write(tmp_path / "model.gguf", arrays, gguf.GGMLQuantizationType.F32)
    want, got = (bytejax.load_target(tmp_path / x) for x in ("directory", "model.gguf"))
    assert got.config == want.config
    assert jax.tree.structure(got.params) == jax.tree.structure(want.params)
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
    a, b = got.tokenizer, want.tokenizer
    text = "the fox — 漢字 <|im_end|> 12"
    assert a.encode(text) == b.encode(text) and a.stop == b.stop == (2,) and a.banned == b.banned != ()
    chat = [{"role": "user", "content": "say <|im_end|>"}]
    assert a.chat(chat) == b.chat(chat)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_recovered_from_its_factors(factor, tmp_path):
    theta, arrays = 500000.0, tied()
    wave = 2 * np.pi * theta ** (np.arange(0, 64, 2) / 64)
    smooth = (8192 / wave - 1) / 3
    stored = np.where(wave < 8192 / 4, 1, np.where(wave > 8192, factor, 1 / ((1 - smooth) / factor + smooth)))
    for name, x in (("right", stored), ("wrong", stored**1.5)):
        with_factors = arrays | {"rope_freqs": x.astype(np.float32)}
        write(tmp_path / f"{name}.gguf", with_factors, gguf.GGMLQuantizationType.F16, CONFIG | {"rope_theta": theta})
    scaling = bytejax.load_target(tmp_path / "right.gguf").config.rope_scaling
    assert scaling == RopeScaling(factor, 1.0, 4.0, 8192)
    with pytest.raises(InputError, match=r"wrong\.gguf: rope_freqs\.weight is not"):
        bytejax.load_target(tmp_path / "wrong.gguf")


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def patch(path, old, new):
    data = path.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))


def unknown_type(path):
    """Gives blk.1.ffn_up.weight the type number 99."""
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", 99)
    path.write_bytes(data)


REFUSED = {
    "cut short": (cut, ["ends at byte"]),
    "cut in the header": (lambda p: p.write_bytes(p.read_bytes()[:300]), ["header is cut short"]),
    "no GGUF": (lambda p: p.write_bytes(b"GGML" + p.read_bytes()[4:]), ["is not a GGUF file"]),
    "unknown quantisation": (unknown_type, ["blk.1.ffn_up.weight is quantised as type 99"]),
    "unknown version": (lambda p: p.write_bytes(b"GGUF\x09" + p.read_bytes()[5:]), ["GGUF version 9"]),
    "a tensor of another model": (
        lambda p: patch(p, b"blk.1.ffn_up.w", b"blk.1.ffn_xp.w"),
        ["missing model.layers.1.mlp.up_proj.weight", "unexpected blk.1.ffn_xp.weight"],
    ),
    "a missing key": (
        lambda p: patch(p, b"llama.block_count", b"llama.block_coint"),
        ["lacks the key llama.block_count"],
    ),
    "misshapen": (
        lambda p: patch(p, b"llama.feed_forward_length\x04\0\0\0\0\x02", b"llama.feed_forward_length\x04\0\0\0\0\x03"),
        [
            "model.layers.0.mlp.gate_proj.weight in",
            "(as blk.0.ffn_gate.weight) has shape (512, 256), expected (768, 256)",
        ],
    ),
    "no file": (lambda p: p.unlink(), ["no such file"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_named(name, tmp_path, capsys):
    path = tmp_path / "model.gguf"
    write(path, tied(), gguf.GGMLQuantizationType.Q8_0)
    damage, words = REFUSED[name]
    damage(path)
    with pytest.raises(InputError) as e:
        bytejax.load_target(path)
    assert "\n" not in str(e.value) and all(w in str(e.value) for w in ("model.gguf", *words)), str(e.value)
    is_refused(decode.main(["--target", str(path), "--prompt", "x"]), *capsys.readouterr(), "model.gguf", *words)


def test_other_architectures_and_tokenizers_are_refused(tmp_path):
    for name, options, message in (
        ("a", {"arch": "mamba"}, "general.architecture 'mamba'; known: llama, qwen3"),
        ("b", {"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ("c", {"pre": "odd"}, "tokenizer.ggml.pre is 'odd'; known: gpt-2"),
    ):
        write(tmp_path / f"{name}.gguf", tied(), gguf.GGMLQuantizationType.F16, **options)
        with pytest.raises(InputError, match=message):
            bytejax.load_target(tmp_path / f"{name}.gguf")


def test_the_package_is_asked_for_by_name(tmp_path, monkeypatch):
    write(tmp_path / "a.gguf", tied(), gguf.GGMLQuantizationType.F16)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(InputError, match=r"a\.gguf.*package gguf"):
        bytejax.load_target(tmp_path / "a.gguf")


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_texts_survive_every_way_of_cutting_them(pre, tmp_path):
    write(tmp_path / "a.gguf", tied(), gguf.GGMLQuantizationType.F16, pre=pre)
    tokenizer = SubwordTokenizer.from_directory(tmp_path / "a.gguf", cases.VOCAB)
    for text in ("12345 and 6", "don't\r\n\r\n  stop ", "漢字\u0301 \U0001f600x", " " * 9, "the quick THE 1\n\n2"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    digits = [tokenizer.to_bytes([i]) for i in tokenizer.encode("12345")]
    assert b"".join(digits) == b"12345" and (pre not in ("smollm", "qwen2") or len(digits) == 5)
