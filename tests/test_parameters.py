"""One table, many uses: init, loading, strict checks."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType, PartitionSpec

from bytejax import InputError, parameters
from bytejax.parameters import Param

LAYER = {"up": Param((4, 6), ("embed", "ffn"), parameters.normal(1.0), "layer.{layer}.up", "F D -> D F")}
TABLE = {
    "table": Param((5, 4), ("vocab", "embed"), parameters.normal(1.0), "table", "V D -> V D"),
    "layers": parameters.stacked(LAYER, 3),
}


def reference_tensors():
    rng = np.random.default_rng(0)
    shapes = {"table": (5, 4)} | {f"layer.{i}.up": (6, 4) for i in range(3)}
    return {name: rng.normal(size=shape).astype("f") for name, shape in shapes.items()}


def test_init_gives_every_layer_its_own_values_and_counts_them():
    params = parameters.init(TABLE, jax.random.key(0))
    assert params["layers"]["up"].shape == (3, 4, 6)
    assert parameters.count(TABLE) == 5 * 4 + 3 * 4 * 6 == sum(x.size for x in jax.tree.leaves(params))
    assert len(np.unique(params["layers"]["up"])) == 72
    alone = parameters.init({"table": TABLE["table"]}, jax.random.key(0))
    np.testing.assert_array_equal(alone["table"], params["table"])


def test_a_reference_state_dict_goes_in_and_out():
    tensors = reference_tensors()
    params = parameters.from_reference(TABLE, tensors)
    np.testing.assert_array_equal(params["layers"]["up"][2], tensors["layer.2.up"].T)
    back = parameters.to_reference(TABLE, params)
    assert back.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(back[name], x)


def test_every_problem_of_a_reference_is_named_in_one_line():
    tensors = reference_tensors()
    del tensors["table"]
    tensors["layer.1.up"] = np.zeros((4, 6), "f")
    tensors["extra"] = np.zeros(1, "f")
    with pytest.raises(InputError) as e:
        parameters.from_reference(TABLE, tensors)
    assert "missing table" in str(e.value)
    assert "layer.1.up has shape (4, 6), expected (6, 4)" in str(e.value)
    assert "unexpected extra" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_files_keep_values_and_dtype(tmp_path, dtype):
    params = parameters.init(TABLE, jax.random.key(0), dtype)
    parameters.save(tmp_path / "x.safetensors", params)
    loaded = parameters.load(tmp_path / "x.safetensors", TABLE)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_array_equal(a, b)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors"]


def damage(kind, path):
    params = parameters.flatten(parameters.init(TABLE, jax.random.key(0)))
    params = {k: np.asarray(v) for k, v in params.items()}
    if kind == "foreign":
        params = {"model.weight": np.zeros((2, 2), ml_dtypes.bfloat16)}
    if kind == "misshapen":
        params["table"] = params["table"].T.copy()
    safetensors.numpy.save_file(params, path)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-7])
    if kind == "not safetensors":
        path.write_bytes(b"PK\x03\x04 some zip")
    if kind == "absent":
        path.unlink()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "not a complete safetensors file"),
        ("not safetensors", "not a complete safetensors file"),
        ("absent", "no such file"),
        ("foreign", "missing layers.up; missing table; unexpected model.weight"),
        ("misshapen", r"table has shape \(4, 5\), expected \(5, 4\)"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, kind, message):
    path = tmp_path / "weights.safetensors"
    damage(kind, path)
    with pytest.raises(InputError, match=message) as e:
        parameters.load(path, TABLE)
    assert "weights.safetensors" in str(e.value) and "\n" not in str(e.value)


def test_shardings_follow_the_logical_axes():
    mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = parameters.shardings(TABLE, mesh, {"embed": "fsdp", "ffn": "tensor"})
    assert specs["layers"]["up"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert specs["table"].spec == PartitionSpec(None, "fsdp")
