"""Checkpoints that are damaged, or are none: one line that names file and tensor, exit status 2, nothing written."""

import json
import re
import shutil

import numpy as np
import pytest

import bytejax
from bytejax import InputError
from bytejax.cli import convert, decode
from tests.cli.helpers import is_refused
from tests.conversion import cases

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "checkpoint"
    cases.write_released(directory)
    return directory


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sharded") / "checkpoint"
    cases.write_released(directory, shards=3)
    return directory


def edit_json(path, **changes):
    values = json.loads(path.read_text())
    for name, value in changes.items():
        values.pop(name, None) if value is None else values.update({name: value})
    path.write_text(json.dumps(values))


def edit_tensors(d, change):
    arrays = cases.tensors()
    change(arrays)
    cases.write_safetensors(d / "model.safetensors", arrays)


def edit_header(path, change):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + length].decode()).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def edit_index(d, change):
    values = json.loads((d / INDEX).read_text())
    change(values["weight_map"])
    (d / INDEX).write_text(json.dumps(values))


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def only_pickle(d):
    (d / "model.safetensors").unlink()
    (d / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")


UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
WHOLE = {
    "cut short": (lambda d: cut(d / "model.safetensors", -40), ["model.safetensors", "ends at byte"]),
    "cut in the header": (lambda d: cut(d / "model.safetensors", 100), ["model.safetensors", "header is cut short"]),
    "empty": (lambda d: cut(d / "model.safetensors", 0), ["model.safetensors", "header is cut short"]),
    "no safetensors": (
        lambda d: (d / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(60)),
        ["model.safetensors", "not a complete safetensors file"],
    ),
    "header is no JSON": (
        lambda d: edit_header(d / "model.safetensors", lambda h: "x" + h[1:]),
        ["model.safetensors", "header is not JSON"],
    ),
    "wrong offsets": (
        lambda d: edit_header(
            d / "model.safetensors", lambda h: h.replace(f'"{NORM}":{{"dtype":"F32"', f'"{NORM}":{{"dtype":"F64"')
        ),
        ["model.safetensors", f"its entry of {NORM} is malformed"],
    ),
    "unknown dtype": (
        lambda d: edit_header(
            d / "model.safetensors", lambda h: h.replace(f'"{NORM}":{{"dtype":"F32"', f'"{NORM}":{{"dtype":"Q32"')
        ),
        ["model.safetensors", f"{NORM} has the unknown dtype Q32"],
    ),
    "a dtype that is a list": (
        lambda d: edit_header(d / "model.safetensors", lambda h: h.replace('"F32"', "[]", 1)),
        ["model.safetensors", "has the unknown dtype []"],
    ),
    "a number of thousands of digits": (
        lambda d: edit_header(d / "model.safetensors", lambda h: h.replace("[24", "[" + "9" * 5000, 1)),
        ["model.safetensors", "header is not JSON"],
    ),
    "layer types that are no list": (
        lambda d: edit_json(d / "config.json", layer_types=3),
        ["config.json", "layer_types = 3 is no list"],
    ),
    "a template that is not UTF-8": (
        lambda d: (d / "chat_template.jinja").write_bytes(b"\xff"),
        ["chat_template.jinja", "UTF-8"],
    ),
    "the same tensor twice": (
        lambda d: edit_header(d / "model.safetensors", lambda h: h.replace("layers.0.mlp.up_", "layers.1.mlp.up_")),
        ["model.safetensors", f"it has {UP} twice"],
    ),
    "integers": (
        lambda d: edit_tensors(d, lambda a: a.update({UP: a[UP].astype(np.int32)})),
        ["model.safetensors", f"{UP} has dtype int32, expected one of float32"],
    ),
    "a tensor too many": (
        lambda d: edit_tensors(d, lambda a: a.update({"model.extra": a[NORM]})),
        ["model.safetensors", "unexpected model.extra"],
    ),
    "misshapen": (
        lambda d: edit_tensors(d, lambda a: a.update({UP: a[UP].T})),
        ["model.safetensors", f"{UP} has shape (24, 64), expected (64, 24)"],
    ),
    "two missing": (
        lambda d: edit_tensors(d, lambda a: (a.pop(UP), a.pop(NORM))),
        ["model.safetensors", f"missing {UP}", f"missing {NORM}"],
    ),
    "another family's config": (
        lambda d: edit_json(d / "config.json", model_type="qwen3"),
        ["model.safetensors", "missing model.layers.0.self_attn.q_norm.weight"],
    ),
    "unknown family": (
        lambda d: edit_json(d / "config.json", model_type="gpt2"),
        ["config.json", "model_type 'gpt2'", "qwen3"],
    ),
    "no model_type": (lambda d: edit_json(d / "config.json", model_type=None), ["config.json", "no model_type"]),
    "no config": (lambda d: (d / "config.json").unlink(), ["checkpoint", "holds no config.json"]),
    "config is no JSON": (lambda d: cut(d / "config.json", -3), ["config.json", "is not JSON"]),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), ["config.json", "not a JSON object"]),
    "a key is missing": (lambda d: edit_json(d / "config.json", rms_norm_eps=None), ["config.json", "rms_norm_eps"]),
    "unsupported key": (
        lambda d: edit_json(d / "config.json", rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        ["config.json", "rope_scaling", "'yarn'"],
    ),
    "only pickles": (only_pickle, ["pytorch_model.bin", "pickle", "python -m bytejax.conversion"]),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        ["checkpoint", "holds neither model.safetensors nor model.safetensors.index.json"],
    ),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), ["checkpoint", "holds no tokenizer.json"]),
    "tokenizer is no JSON": (lambda d: cut(d / "tokenizer.json", -9), ["tokenizer.json", "describes no tokenizer"]),
    "fewer ids than rows": (
        lambda d: edit_json(d / "config.json", vocab_size=290),
        ["model.safetensors", "model.embed_tokens.weight has shape (310, 24), expected (290, 24)"],
    ),
    "more layers than tensors": (
        lambda d: edit_json(d / "config.json", num_hidden_layers=10_000_000),
        ["checkpoint", "too few for 10000000 layers"],
    ),
    "a number beyond floats": (
        lambda d: edit_json(d / "config.json", rope_theta=10**400),
        ["config.json", "rope_theta"],
    ),
    "a byte too many": (
        lambda d: (d / "model.safetensors").open("ab").write(b"x"),
        ["model.safetensors", "the file at"],
    ),
    "tensors that overlap": (
        lambda d: edit_header(
            d / "model.safetensors",
            lambda h: re.sub(r"data_offsets\":\[(\d+),(\d+)", lambda m: f'data_offsets":[0,{int(m[2]) - int(m[1])}', h),
        ),
        ["model.safetensors", "begins at byte"],
    ),
}
SHARDED = {
    "a shard is cut short": (lambda d: cut(d / SHARD, -40), [SHARD, "ends at byte"]),
    "a shard is missing": (lambda d: (d / SHARD).unlink(), [INDEX, f"lists {SHARD}", "is not in"]),
    "index lists what is not there": (
        lambda d: edit_index(d, lambda m: m.update({"model.more": SHARD})),
        [INDEX, f"{SHARD} lacks model.more"],
    ),
    "index puts it elsewhere": (
        lambda d: edit_index(d, lambda m: m.update(dict.fromkeys(list(m)[:1], SHARD))),
        [INDEX, SHARD, "lacks"],
    ),
    "index misses one": (
        lambda d: edit_index(d, lambda m: m.pop(NORM)),
        [INDEX, f"has {NORM}, which it does not list"],
    ),
    "one tensor in two shards": (
        lambda d: cases.write_safetensors(
            d / SHARD, {k: v for k, v in cases.tensors().items() if k in json_map(d, SHARD) or k == other(d)}
        ),
        [INDEX, f"{SHARD} also has "],
    ),
    "misshapen in a shard": (
        lambda d: cases.write_safetensors(
            d / SHARD, {k: v.reshape(-1) for k, v in cases.tensors().items() if k in json_map(d, SHARD)}
        ),
        [SHARD, "has shape (1536,), expected (64, 24)"],
    ),
    "index is no JSON": (lambda d: cut(d / INDEX, -5), [INDEX, "is not JSON"]),
    "index without a map": (lambda d: (d / INDEX).write_text("{}"), [INDEX, "no weight_map"]),
    "a shard outside": (
        lambda d: edit_index(d, lambda m: m.update({NORM: "../model.safetensors"})),
        [INDEX, "'../model.safetensors'", "not a file beside it"],
    ),
}


def json_map(d, file):
    return {k for k, v in json.loads((d / INDEX).read_text())["weight_map"].items() if v == file}


def other(d):
    return next(k for k, v in json.loads((d / INDEX).read_text())["weight_map"].items() if v != SHARD)


@pytest.mark.parametrize("name", [*WHOLE, *SHARDED])
def test_what_is_wrong_is_named(name, whole, sharded, tmp_path, capsys):
    directory = tmp_path / "checkpoint"
    damage, words = (WHOLE | SHARDED)[name]
    shutil.copytree(whole if name in WHOLE else sharded, directory)
    damage(directory)
    with pytest.raises(InputError) as e:
        bytejax.load_target(directory)
    assert "\n" not in str(e.value) and all(word in str(e.value) for word in words), str(e.value)
    is_refused(decode.main(["--target", str(directory), "--prompt", "x"]), *capsys.readouterr(), *words)
    if "pickles" not in name:
        is_refused(convert.main([str(directory), str(tmp_path / "out")]), *capsys.readouterr(), *words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]


def test_there_are_enough_cases_and_the_undamaged_ones_load(whole, sharded):
    assert len(WHOLE) + len(SHARDED) >= 20
    a, b = (bytejax.load_target(d) for d in (whole, sharded))
    assert a.tokenizer == b.tokenizer and (a.params["head"] == b.params["head"]).all()


@pytest.mark.parametrize("file", ["model.bin", "model.pt", "model.pth"])
def test_a_pickle_file_is_refused_without_being_opened(file, tmp_path, capsys):
    is_refused(
        decode.main(["--target", str(tmp_path / file), "--prompt", "x"]),
        *capsys.readouterr(),
        file,
        "python -m bytejax.conversion",
    )
    with pytest.raises(InputError, match="pickle file"):
        bytejax.load_target(tmp_path / file)


def test_hub_ids_that_cannot_be_had(monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="'nobody/nothing' is no directory here.*give the directory"):
        bytejax.load_target("nobody/nothing")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    is_refused(
        decode.main(["--target", "nobody/nothing", "--prompt", "x"]),
        *capsys.readouterr(),
        "nobody/nothing",
        "bytejax[hf]",
    )
