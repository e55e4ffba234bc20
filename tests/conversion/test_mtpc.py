"""Released MtPC drafters: the reference's fold tables against the fixtures' own, and files that must be refused."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
import yaml

import bytejax
from bytejax import circuits
from bytejax.circuits import head as heads
from bytejax.cli import convert
from bytejax.conversion import mtpc
from bytejax.errors import InputError
from bytejax.models import evabyte, llama, lora
from bytejax.tokenizers import ByteTokenizer
from tests.circuits import reference_cases

TABLE_OF_16 = [[7, 8, 9, 10, 11, 12, 13, 14], [3, 4, 5, 6], [1, 2], [0]]


def tensors_of(name):
    return safetensors.numpy.load_file(reference_cases.FOLDER / name / "model.safetensors")


@pytest.mark.parametrize("name", [n for n in reference_cases.NAMES if not n.startswith("init_")])
def test_heads_are_those_of_the_fixtures_own_fold_tables(name):
    case, tensors = reference_cases.load(name), tensors_of(name)
    released = mtpc.convert(tensors, name, {"circuit": case.meta["circuit"], "lm": {"n_embd": 16}})
    assert released.head == case.head
    assert set(released.params) - set(case.params) <= {"bias"}
    for key, x in case.params.items():
        np.testing.assert_array_equal(released.params[key], x)
    assert np.all(released.params.get("bias", 0) == 0)
    assert released.gamma == pytest.approx(0.9) and released.adapters is None


def test_the_fold_table_of_a_window_of_16_goes_from_left_to_right():
    assert mtpc.fold_table(circuits.BTree(window=16, rank=2)) == TABLE_OF_16
    assert mtpc.fold_table(circuits.HMM(window=3, rank=2)) == [[2], [1], [0]]


def released_directory(tmp_path, name="btree_n4_r3", layers=(2, 3), dtype=torch.bfloat16, **changes):
    """A repository as the reference writes it: None for the base model, adapters, and a config with references."""
    state = {k: torch.from_numpy(x) for k, x in tensors_of(name).items()}
    state |= {k: x.to(dtype) for k, x in state.items() if k.startswith("mt_head")}
    state["lm._lm.base_model.model.lm_head.weight"] = None
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"):
            for side, shape in (("A", (2, 16)), ("B", (24, 2))):
                key = f"lm._lm.base_model.model.model.layers.{layer}.{part}_proj.lora_{side}.default.weight"
                state[key] = torch.randn(shape, generator=generator)
    state |= changes
    settings = {
        "circuit": {"n_token": "${x}", "n_component": 3, "model": {"kind": name.split("_")[0], "n_token": 99}},
        "adaptor": {"hyperparameters": {"r": 2, "lora_alpha": 4}},
        "data": {"vocab_size": 12},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    torch.save({"global_step": 0, "model_state_dict": {}}, tmp_path / "model@0.pt")
    torch.save({"global_step": 900, "model_state_dict": state, "optimizer_state_dict": None}, tmp_path / "model@900.pt")
    return state


def test_a_released_directory(tmp_path):
    state = released_directory(tmp_path)
    released = mtpc.read(tmp_path)
    assert released.lora_layers == (2, 3)
    assert released.params["leaves"].dtype == ml_dtypes.bfloat16
    case = reference_cases.load("btree_n4_r3")
    np.testing.assert_array_equal(released.params["sums"], case.params["sums"].astype(ml_dtypes.bfloat16))
    key = "lm._lm.base_model.model.model.layers.3.mlp.up_proj.lora_{}.default.weight"
    np.testing.assert_array_equal(released.adapters["up"]["a"][1], state[key.format("A")].numpy().T)
    np.testing.assert_array_equal(released.adapters["up"]["b"][1], 2 * state[key.format("B")].numpy().T)


def test_an_unknown_tensor_is_named_with_its_shape_and_may_be_the_bias(tmp_path):
    tensors = tensors_of("hmm_n4_r3")
    for k in range(3):
        tensors[f"mt_head.stay.{k}"] = np.full((1, 3, 3), k, np.float32)
    with pytest.raises(InputError, match=r"not known: mt_head\.stay\.0 \(1, 3, 3\); .*--hmm-bias"):
        mtpc.convert(tensors, "x")
    bias = mtpc.convert(tensors, "x", hmm_bias=r"mt_head\.stay\.\d").params["bias"]
    assert bias.shape == (10, 3) and bias[:, 0].tolist() == [0, 2, 2, 2, 1, 1, 1, 0, 0, 0]  # the file begins at the end
    assert not mtpc.convert(tensors, "x", ignore=r"mt_head\.stay.*").params["bias"].any()


def without(name):
    return lambda t: t.pop(name)


def changed(name, make):
    return lambda t: t.update({name: make(t.get(name))})


LAST_SUM = "mt_head._sum_weights_heads.1.head.proj"
QUERY = "lm._lm.base_model.model.model.layers.{}.self_attn.q_proj.lora_A.default.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(mtpc.LEAVES), "missing mt_head._categorical"),
        (without(mtpc.SCOPE), "missing circuit._circuit._nodes"),
        (changed(mtpc.LEAVES, lambda x: x[0]), "expected four axes"),
        (changed(mtpc.SCOPE, lambda x: x * 0), "no order of 4 places"),
        (changed(LAST_SUM, lambda x: x[..., :-1]), r"heads\.1\.head\.proj has shape \(1, 1, 3, 15\), expected"),
        (changed("mt_head._sum_weights_heads.2.head.proj", lambda _: np.ones((1, 3, 3, 16))), "3 sum tensors fit no"),
        (changed(QUERY.format(3), lambda _: np.ones((2, 16))), "q.lora_B of layer 3"),
        (changed("mt_head._norm.weight", lambda _: np.ones(16)), r"mt_head\._norm\.weight \(16,\)"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    tensors = tensors_of("btree_n4_r3")
    change(tensors)
    with pytest.raises(InputError, match=message):
        mtpc.convert(tensors, "drafter")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"circuit": {"n_component": 4}}, "n_component = 4, its tensors 3"),
        ({"circuit": {"model": {"kind": "hmm"}}}, "circuit 'hmm', its tensors make a 'btree'"),
        ({"circuit": {"model": {"kind": "random-btree"}, "n_repetition": 3}}, "3 repetitions"),
        ({"data": {"vocab_size": 320}}, "vocab_size = 320, its tensors 12"),
    ],
)
def test_a_config_of_another_drafter_is_noticed(settings, message):
    with pytest.raises(InputError, match=message):
        mtpc.convert(tensors_of("btree_n4_r3"), "drafter", settings)


def test_files_that_are_none(tmp_path):
    with pytest.raises(InputError, match="holds no model@STEP"):
        mtpc.read(tmp_path)
    (tmp_path / "model@1.pt").write_bytes(b"no pickle")
    with pytest.raises(InputError, match="does not hold tensors alone"):
        mtpc.read(tmp_path)
    torch.save({"model_state_dict": yaml.safe_dump}, tmp_path / "model@1.pt")
    with pytest.raises(InputError, match="does not hold tensors alone"):  # code is not loaded
        mtpc.read(tmp_path)
    torch.save({}, tmp_path / "model@1.pt")
    with pytest.raises(InputError, match="no model_state_dict"):
        mtpc.read(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(InputError, match="config.yaml is not YAML"):
        mtpc.read(tmp_path)


TARGETS = {
    "llama": (llama, llama.Config(12, 16, 3, 2, 1, 6, 20, 1e4, 1e-5, False, 128, False, None)),
    "evabyte": (evabyte, evabyte.Config(12, 16, 3, 4, 20, 16, 4, 2, 1e4, 1.0, 1e-5, True, 128)),
}


@pytest.fixture(scope="module", params=TARGETS)
def target(request, tmp_path_factory):
    """A target whose width and ids are those of the fixtures' heads; and where it is saved."""
    family, config = TARGETS[request.param]
    made = family.create(config, jax.random.key(0), ByteTokenizer(12, 0, None, (), ()))
    path = tmp_path_factory.mktemp("target")
    bytejax.save_target(path, made, jnp.float32)
    return path, bytejax.load_target(path)


def adapters_of(target, layers, rank=2):
    """Adapters of the last layers under the reference's names."""
    table, state = lora.table(lora.LoraConfig(layers, rank), target), {}
    for name, parts in table.items():
        module = "mlp" if name in ("gate", "up", "down") else "self_attn"
        for side, p in zip("AB", (parts["a"], parts["b"])):
            for i in range(layers):
                index = target.config.layers - layers + i
                key = f"lm._lm.base_model.model.model.layers.{index}.{module}.{name}_proj.lora_{side}.default.weight"
                state[key] = torch.randn(p.shape[::-1], generator=torch.Generator().manual_seed(len(state)))
    return state


def run(capsys, *args):
    status = convert.main([str(a) for a in args])
    said = capsys.readouterr()
    return status, json.loads(said.out) if status == 0 else said.err


def test_the_command_makes_a_drafter_that_writes_the_targets_text(target, tmp_path, capsys):
    path, model = target
    released_directory(tmp_path, layers=(), **adapters_of(model, 2))
    status, said = run(capsys, tmp_path, tmp_path / "out")
    assert status == 2 and "adapters on layers 1 to 2; name their target with --target" in said
    status, said = run(capsys, tmp_path, tmp_path / "out", "--target", path)
    assert (status, said["circuit"], said["window"], said["lora_layers"]) == (0, "btree", 4, 2)
    drafter = bytejax.load_drafter(tmp_path / "out", model)
    prompts, options = [[1, 2, 3], [5]], dict(max_new_tokens=40)
    drafted = bytejax.generate(model, prompts, drafter=drafter, **options)
    plain = bytejax.generate(model, prompts, **options)
    assert drafted.ids == plain.ids and drafted.stats.drafted > 0


def test_the_command_refuses_what_does_not_belong_together(target, tmp_path, capsys):
    path, model = target
    released_directory(tmp_path, layers=(), **adapters_of(model, 1))
    with pytest.raises(InputError, match="python -m bytejax.conversion"):
        bytejax.load_drafter(tmp_path, model)
    assert run(capsys, tmp_path, tmp_path / "out", "--check")[0] == 2
    status, said = run(capsys, tmp_path / "model@900.pt", tmp_path / "out", "--target", "demo")
    assert status == 2 and "a head of width 16 over 12 ids, the target has 128 and 258" in said
    released_directory(tmp_path, layers=(0, 1))
    status, said = run(capsys, tmp_path, tmp_path / "out", "--target", path)
    assert status == 2 and "adapts layers up to 1, counted from 0; the target has 3" in said
    released_directory(tmp_path, layers=(1, 2))
    status, said = run(capsys, tmp_path, tmp_path / "out", "--target", path)
    queries = model.layer_table()["q"].shape[1]
    assert status == 2 and f"adapter q.b has shape (2, 2, 24), the target needs (2, 2, {queries})" in said
    assert not (tmp_path / "out").exists()


def test_the_list_of_released_drafters():
    path = Path(__file__).parents[2] / "configs" / "drafters" / "released.yaml"
    listed = yaml.safe_load(path.read_text())
    assert len({entry["repository"] for entry in listed}) == len(listed) == 55
    for entry in listed:
        assert circuits.make(entry["circuit"], entry["window"], entry["rank"]).rank == entry["rank"]
        assert f"{entry['circuit']}-n-{entry['window']}-r-{entry['rank']}" in entry["repository"]
        assert (f"lora-last-{entry['lora_layers']}" in entry["repository"]) == (entry["lora_layers"] > 0)
    sizes = {"cp": 671.2e6, "btree": 729.9e6, "hmm": 734.1e6}  # of EvaByte's heads, n = 16, r = 32 (the paper's table)
    for name, size in sizes.items():
        assert heads.count(heads.HeadConfig(circuits.make(name, 16, 32), 4096, 320, None)) == pytest.approx(size, 1e-3)
