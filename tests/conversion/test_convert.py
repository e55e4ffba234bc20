"""`python -m bytejax.conversion`: there and back bit for bit, pickles, the comparison with PyTorch, all or nothing."""

import json

import ml_dtypes
import numpy as np
import pytest

import bytejax
from bytejax.checkpoints import SafetensorsFile
from bytejax.cli import convert
from bytejax.conversion import parity
from tests.cli.helpers import is_refused
from tests.conversion import cases, test_gguf


def run(capsys, *args):
    """-> the one JSON object that the command prints."""
    assert convert.main([str(a) for a in args]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def same_tensors(path, arrays):
    reader = SafetensorsFile(path)
    assert set(reader.names()) == set(arrays)
    for name, x in arrays.items():
        got = reader.read(name)
        assert got.dtype == x.dtype and got.tobytes() == np.ascontiguousarray(x).tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_there_and_back_every_bit_is_the_same(dtype, tmp_path, capsys):
    arrays = cases.write_released(tmp_path / "a", cases.tensors(dtype), shards=3)
    assert run(capsys, tmp_path / "a", tmp_path / "b") == {"out": str(tmp_path / "b"), "to": "bytejax"}
    assert run(capsys, tmp_path / "b", tmp_path / "c")["to"] == "reference"
    same_tensors(tmp_path / "c" / "model.safetensors", arrays)
    targets = [bytejax.load_target(tmp_path / x, unroll=False) for x in "abc"]
    assert len({(t.config, t.tokenizer) for t in targets}) == 1
    assert all((t.params["layers"]["o"] == targets[0].params["layers"]["o"]).all() for t in targets)
    chat = [{"role": "user", "content": "the fox"}]
    assert len({tuple(t.tokenizer.chat(chat)) for t in targets}) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]


def test_the_written_checkpoint_is_one_for_transformers(tmp_path, capsys):
    from transformers import AutoTokenizer

    cases.write_released(tmp_path / "a")
    found = run(capsys, tmp_path / "a", tmp_path / "b", "--check")
    assert found["max_difference"] < 1e-3 and found["kl"] < 1e-8 and found["top1_agreement"] == 1
    found = run(capsys, tmp_path / "b", tmp_path / "c", "--check")
    assert found["kl"] < 1e-8 and found["top1_agreement"] == 1
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "c"), bytejax.load_target(tmp_path / "c").tokenizer
    chat = [{"role": "user", "content": "the fox"}]
    assert theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] == ours.chat(chat)
    assert theirs.eos_token_id == 2 and ours.stop == (2,)


def test_a_wrong_conversion_is_noticed_and_not_kept(tmp_path, capsys, monkeypatch):
    cases.write_released(tmp_path / "a")
    target = bytejax.load_target(tmp_path / "a")
    wrong = target.replace(config=target.config.__class__(**{**vars(target.config), "rope_theta": 99999.0}))
    monkeypatch.setattr(convert.loading, "load_target", lambda path: wrong)
    assert convert.main([str(tmp_path / "a"), str(tmp_path / "b"), "--check"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["out"] is None and err.count("\n") == 1 and "other logits" in err
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_dtype_is_what_was_asked_for(tmp_path, capsys):
    arrays = cases.write_released(tmp_path / "a")
    run(capsys, tmp_path / "a", tmp_path / "b", "--dtype", "bfloat16", "--to", "bytejax")
    run(capsys, tmp_path / "b", tmp_path / "c")
    same_tensors(tmp_path / "c" / "model.safetensors", {n: x.astype(ml_dtypes.bfloat16) for n, x in arrays.items()})
    assert json.loads((tmp_path / "c" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("quantised", ["Q8_0", "Q4_0"])
def test_gguf_files_are_converted(quantised, tmp_path, capsys):
    kind = test_gguf.gguf.GGMLQuantizationType[quantised]
    expected = test_gguf.write(tmp_path / "a.gguf", test_gguf.tied(), kind)
    run(capsys, tmp_path / "a.gguf", tmp_path / "b")
    run(capsys, tmp_path / "b", tmp_path / "c")
    same_tensors(tmp_path / "c" / "model.safetensors", expected)


@pytest.mark.parametrize("layout", ["file", "directory", "indexed", "one of several"])
def test_pickled_tensors_are_converted(layout, tmp_path, capsys):
    import torch

    arrays = cases.tensors()
    state = {n: torch.from_numpy(x) for n, x in arrays.items()}
    first = next(iter(state))
    state[first] = state[first].bfloat16()
    arrays[first] = arrays[first].astype(ml_dtypes.bfloat16)
    cases.write_released(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").unlink()
    source = tmp_path / "a"
    if layout == "indexed":
        names = sorted(state)
        files = {n: f"pytorch_model-{i % 2}.bin" for i, n in enumerate(names)}
        for file in set(files.values()):
            torch.save({n: state[n] for n in names if files[n] == file}, source / file)
        (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        file = source / ("model.pth" if layout == "one of several" else "pytorch_model.bin")
        torch.save(state, file)
        if layout == "one of several":
            torch.save({}, source / "other.pt")
            status = convert.main([str(source), str(tmp_path / "b")])
            is_refused(status, *capsys.readouterr(), "model.pth, other.pt", "name one")
        source = source if layout == "directory" else file
    run(capsys, source, tmp_path / "b")
    target = bytejax.load_target(tmp_path / "b", unroll=False)
    head = arrays["lm_head.weight"].astype("f")
    np.testing.assert_array_equal(target.params["head"], head.T)
    np.testing.assert_array_equal(target.params["embedding"], arrays["model.embed_tokens.weight"].astype("f"))


def test_a_pickle_that_runs_code_does_not(tmp_path, capsys):
    cases.write_released(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").unlink()
    bad = tmp_path / "a" / "pytorch_model.bin"
    bad.write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "pwned").encode())
    is_refused(
        convert.main([str(bad), str(tmp_path / "b")]), *capsys.readouterr(), "pytorch_model.bin", "tensors alone"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_written_is_refused(tmp_path, capsys):
    cases.write_released(tmp_path / "a")
    refused = lambda *args: is_refused(convert.main([str(a) for a in args[0]]), *capsys.readouterr(), *args[1:])
    refused([tmp_path / "a", tmp_path / "a"], "exists and is not an empty directory")
    refused([tmp_path / "a", tmp_path / "b", "--to", "reference"], "in the layout 'reference' already")
    refused([tmp_path / "a", tmp_path / "b", "--dtype", "int8"], "int8", "--help")
    refused([tmp_path / "nothing", tmp_path / "b"], "nothing", "no such directory")
    (tmp_path / "file").write_text("x")
    refused([tmp_path / "a", tmp_path / "file" / "b"], "file/b")
    (tmp_path / "empty").mkdir()
    run(capsys, tmp_path / "a", tmp_path / "empty")
    refused([tmp_path / "empty", tmp_path / "b", "--to", "bytejax"], "in the layout 'bytejax' already")


def test_the_demo_is_a_llama_for_transformers(tmp_path, capsys):
    """Its tokenizer is its own; its weights and numbers are not."""
    found = run(capsys, "demo", tmp_path / "b", "--check")
    assert found["to"] == "reference" and found["top1_agreement"] == 1
    assert json.loads((tmp_path / "b" / "config.json").read_text())["model_type"] == "llama"


def test_the_thresholds_tell_rounding_from_errors():
    assert parity.agrees({"kl": 2e-4, "top1_agreement": 0.98})
    assert not parity.agrees({"kl": 2e-3, "top1_agreement": 1.0}) and not parity.agrees(
        {"kl": 0, "top1_agreement": 0.9}
    )


def test_what_lies_beside_the_output_stays(tmp_path, capsys):
    cases.write_released(tmp_path / "a")
    (tmp_path / "b.part").mkdir()
    (tmp_path / "b.part" / "mine").write_text("kept")
    run(capsys, tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b.part" / "mine").read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "b.part"]


@pytest.mark.parametrize("out", ["", ".", "/"])
def test_an_output_without_a_name_of_its_own_is_refused(out, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    is_refused(convert.main(["demo", out]), *capsys.readouterr(), "not an empty directory")


def test_a_failure_leaves_no_parents_behind(tmp_path, capsys):
    status = convert.main([str(tmp_path / "no.gguf"), str(tmp_path / "p" / "q" / "r")])
    is_refused(status, *capsys.readouterr(), "no such file")
    assert list(tmp_path.iterdir()) == []
