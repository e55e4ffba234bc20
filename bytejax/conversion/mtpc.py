"""Released MtPC drafters (arXiv 2511.11346): circuit heads and LoRA adapters under the reference's tensor names.

The reference folds a circuit's nodes into a few tensors. Which node is where: leaves by the file's own `_scope_idx`;
sums of an HMM from the last transition to the first, its prior last; sums of a BTree one tensor per height of the
regions, within it by depth and start.

Letters: n window, r rank, v vocabulary, d model width, F folds, R adapter rank.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import omegaconf

from bytejax.checkpoints import SafetensorsFile
from bytejax.circuits import Circuit, make
from bytejax.circuits.btree import Region, halves, inner_levels, is_leaf
from bytejax.circuits.head import HeadConfig
from bytejax.conversion import pickles
from bytejax.errors import InputError
from bytejax.models import lora
from bytejax.models.base import Target
from bytejax.parameters import Params, flatten

LEAVES, SCOPE = "mt_head._categorical_log_probs_heads.0.head.proj", "circuit._circuit._nodes.0._scope_idx"
SUMS = "mt_head._sum_weights_heads.{}.head.proj"
GAMMA = "_exp_gamma_weights"
WIRING = re.compile(r"circuit\._(autoregressive|univariate)_mar_mask|circuit\._circuit\._address_book\..*")
LORA = re.compile(
    r"lm\._lm\.base_model\.model\.model\.layers\.(\d+)\."
    r"(?:self_attn\.([qkvo])|mlp\.(gate|up|down))_proj\.lora_([AB])\.default\.weight"
)


@dataclasses.dataclass(frozen=True)
class ReleasedDrafter:
    """A drafter in our layout.

    head, params: the circuit head, in the file's dtype. gamma: the discount it was trained with, or None.
    adapters: LoRA parameters as `models.lora.table` has them, of the layers `lora_layers` (indices from 0), or None.
    """

    head: HeadConfig
    params: Params
    gamma: float | None
    adapters: Params | None
    lora_layers: tuple[int, ...]


def convert(
    tensors: Mapping[str, np.ndarray],
    where: str,
    settings: Mapping[str, Any] | None = None,
    hmm_bias: str | None = None,
    ignore: str | None = None,
) -> ReleasedDrafter:
    """A released drafter from its state dict, keys without a value left out.

    settings: its config.yaml, which is checked against the tensors. hmm_bias: regular expression of tensors to be added
    to the logits of an HMM's transitions (the reference's name for them is not documented). ignore: of tensors to leave
    out. Raises InputError naming every tensor that is missing, has the wrong shape or is not known.
    """
    settings = settings or {}
    leaves, positions = _leaves(tensors, where)
    sums = _numbered(tensors)
    n, r, v, d = leaves.shape
    circuit = _circuit(n, r, len(sums), where)
    _check_settings(settings, circuit, v, d, where)
    biases = sorted((name for name in tensors if hmm_bias and re.fullmatch(hmm_bias, name)), key=_number)
    _check_names(tensors, {LEAVES, SCOPE, GAMMA, *map(SUMS.format, range(len(sums))), *biases}, ignore, where)

    params: Params = {"leaves": leaves[np.argsort(positions)]}
    if r > 1:
        params["sums"] = _blocks(circuit, sums, (d,), where)
    if circuit.name == "hmm" and r > 1:
        params["bias"] = np.zeros((circuit.sum_rows, r), leaves.dtype)
        if biases:
            params["bias"] = params["bias"] + _transition_bias(circuit, [tensors[name] for name in biases], where)
    adapters, layers = _adapters(tensors, settings, where)
    gamma = float(tensors[GAMMA][1]) if GAMMA in tensors and n > 1 else None
    return ReleasedDrafter(HeadConfig(circuit, d, v, None), params, gamma, adapters, layers)


def is_drafter(path: Path) -> bool:
    """Whether a path is a released drafter's directory, or one of its files."""
    try:
        if path.is_dir():
            return any(path.glob("model@*.pt"))
    except OSError:  # a name too long, a directory that may not be read
        return False
    return path.suffix == ".pt" and path.name.startswith("model@")


def read(path: Path | str, **options) -> ReleasedDrafter:
    """A released drafter from its directory (`config.yaml` beside `model@STEP.pt`, of which the last counts), or from
    one such file; also from the same tensors as safetensors.

    options: hmm_bias and ignore, see `convert`. A .pt file needs PyTorch, which reads tensors from it and nothing else.
    """
    path = Path(path)
    files = sorted(path.glob("model@*.pt"), key=lambda p: _number(p.stem)) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path} holds no model@STEP.pt")
    settings = _settings(files[-1].parent / "config.yaml")
    return convert(_state(files[-1]), str(files[-1]), settings, **options)


def _settings(path: Path) -> dict[str, Any]:
    """config.yaml; values that refer to others, which only the reference can resolve, left out. {} without a file."""
    try:
        loaded = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        return {}
    except Exception as e:  # the parser's own errors have no common class
        raise InputError(f"{path} is not YAML ({type(e).__name__})") from None
    if not isinstance(loaded, dict):
        raise InputError(f"{path} is no YAML mapping")
    return _without_references(loaded)


def _without_references(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in values.items() if not (isinstance(v, str) and v.startswith("${"))}
    return {k: _without_references(v) if isinstance(v, dict) else v for k, v in kept.items()}


def _state(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a file by name; the base model's, which are stored as None, left out."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        reader = SafetensorsFile(path)
        return {name: reader.read(name) for name in reader.names()}
    saved = pickles.load(path)
    state = saved.get("model_state_dict") if isinstance(saved, Mapping) else None
    if not isinstance(state, Mapping):
        raise InputError(f"{path} holds no model_state_dict")
    state = {str(name): x for name, x in state.items() if x is not None}
    if other := [name for name, x in state.items() if not hasattr(x, "dtype")]:
        raise InputError(f"{path}: {other[0]} is no tensor")
    return {name: pickles.as_numpy(x) for name, x in state.items()}


def check_target(released: ReleasedDrafter, target: Target, where: str) -> None:
    """Raises InputError where a drafter's sizes or adapted layers are not those of its target."""
    if released.head.width != target.width or released.head.vocab < target.vocab:
        raise InputError(
            f"{where} has a head of width {released.head.width} over {released.head.vocab} ids, the target has "
            f"{target.width} and {target.vocab}"
        )
    if released.lora_layers:
        last, layers = released.lora_layers[-1], target.config.layers
        if last != layers - 1:
            raise InputError(f"{where} adapts layers up to {last}, counted from 0; the target has {layers}")
        rank = released.adapters["q"]["a"].shape[-1]
        config = lora.LoraConfig(len(released.lora_layers), rank)
        shapes = {name: p.full_shape for name, p in flatten(lora.table(config, target)).items()}
        for name, x in flatten(released.adapters).items():
            if x.shape != shapes[name]:
                raise InputError(f"{where}: adapter {name} has shape {x.shape}, the target needs {shapes[name]}")


def fold_table(circuit: Circuit) -> list[list[int]]:
    """For every sum tensor of the reference, bottom-up, the block of our `sums` that each of its folds is."""
    if circuit.rank == 1:
        return []
    if circuit.name == "hmm":
        return [[k] for k in reversed(range(circuit.blocks))]
    if circuit.name != "btree" or circuit.window < 2:
        return [[0]]
    tensors: dict[int, list[int]] = {}
    for k, region in enumerate(region for level in inner_levels(circuit.window) for region in level):
        tensors.setdefault(_height(region), []).append(k)  # breadth first: by depth, then by start
    return [tensors[height] for height in sorted(tensors)]


def _height(region: Region) -> int:
    return 0 if is_leaf(region) else 1 + max(map(_height, halves(region)))


def _leaves(tensors, where) -> tuple[np.ndarray, np.ndarray]:
    missing = [name for name in (LEAVES, SCOPE) if name not in tensors]
    if missing:
        raise InputError(f"{where} is no MtPC drafter: missing {', '.join(missing)}")
    leaves, positions = tensors[LEAVES], np.asarray(tensors[SCOPE]).reshape(-1)
    if leaves.ndim != 4:
        raise InputError(f"{where}: {LEAVES} has shape {leaves.shape}, expected four axes (fold, rank, id, width)")
    if sorted(positions.tolist()) != list(range(len(leaves))):
        raise InputError(
            f"{where}: {SCOPE} is {positions.tolist()}, which is no order of {len(leaves)} places "
            "(a tree with repetitions has no counterpart here)"
        )
    return leaves, positions


def _numbered(tensors) -> list[np.ndarray]:
    sums = []
    while SUMS.format(len(sums)) in tensors:
        sums.append(tensors[SUMS.format(len(sums))])
    return sums


def _circuit(n: int, r: int, count: int, where: str) -> Circuit:
    """The kind of circuit follows from its number of sum tensors: none, one, one per place, or one per height."""
    kind = "ff" if count == 0 else "cp" if count == 1 else "hmm" if count == n else "btree"
    circuit = make(kind, n, r)
    if (count == 0 and r > 1) or (count > 0 and len(fold_table(circuit)) != count):
        raise InputError(f"{where}: {count} sum tensors fit no circuit of window {n} and rank {r}")
    return circuit


def _check_settings(settings, circuit, v, d, where) -> None:
    spec = _section(settings, "circuit")
    kind = _section(spec, "model").get("kind", spec.get("kind"))
    if kind == "random-btree" or spec.get("n_repetition", 1) != 1:
        raise InputError(f"{where}: a {kind} with {spec.get('n_repetition', 1)} repetitions has no counterpart here")
    same = {"cp": ("ff", "cp"), "btree": ("btree", "cp")}.get(kind, (kind,))  # a BTree of two places is a CP
    if kind is not None and circuit.name not in same:
        raise InputError(f"{where}: config.yaml says circuit {kind!r}, its tensors make a {circuit.name!r}")
    said = [("n_token", circuit.window, spec), ("n_component", circuit.rank, spec)]
    said += [("vocab_size", v, _section(settings, "data")), ("n_embd", d, _section(settings, "lm"))]
    for name, value, section in said:
        if section.get(name, value) != value:
            raise InputError(f"{where}: config.yaml says {name} = {section[name]}, its tensors {value}")


def _check_names(tensors, used: set[str], ignore: str | None, where: str) -> None:
    known = lambda name: name in used or WIRING.fullmatch(name) or LORA.fullmatch(name)
    unknown = [name for name in sorted(tensors) if not known(name) and not (ignore and re.fullmatch(ignore, name))]
    if unknown:
        listed = "; ".join(f"{name} {tuple(tensors[name].shape)}" for name in unknown)
        raise InputError(
            f"{where} holds tensors whose meaning is not known: {listed}. If they are an HMM's bias towards staying in "
            "its state, name them with --hmm-bias; if they do not matter, with --ignore"
        )


def _blocks(circuit: Circuit, sums: list[np.ndarray], after: tuple[int, ...], where: str) -> np.ndarray:
    """Sum tensors [F, rows, r, ...] in the reference's order -> ours [z, r, ...]."""
    blocks: dict[int, np.ndarray] = {}
    for number, (tensor, table) in enumerate(zip(sums, fold_table(circuit), strict=True)):
        rows = 1 if 0 in table else circuit.rank
        expected = (len(table), rows, circuit.rank, *after)
        if tensor.shape != expected:
            raise InputError(f"{where}: {SUMS.format(number)} has shape {tensor.shape}, expected {expected}")
        blocks |= {k: tensor[fold] for fold, k in enumerate(table)}
    return np.concatenate([blocks[k] for k in range(circuit.blocks)])


def _transition_bias(circuit: Circuit, tensors: list[np.ndarray], where: str) -> np.ndarray:
    """[z, r] from one [.., r, r] for all transitions or one for each, in the reference's order (last one first)."""
    r, count = circuit.rank, circuit.blocks - 1
    shapes = [tuple(t.shape) for t in tensors]
    if len(tensors) not in (1, count) or any(t.shape[-2:] != (r, r) or t.size != r * r for t in tensors):
        raise InputError(f"{where}: a bias of shapes {shapes} fits no HMM of {count} transitions of rank {r}")
    each = [t.reshape(r, r) for t in tensors] * (count // len(tensors))
    return np.concatenate([np.zeros((1, r), each[0].dtype), *reversed(each)])


def _adapters(tensors, settings, where) -> tuple[Params | None, tuple[int, ...]]:
    found: dict[str, dict[str, dict[int, np.ndarray]]] = {}
    for name, x in tensors.items():
        if m := LORA.fullmatch(name):
            part = {"A": "a", "B": "b"}[m[4]]
            found.setdefault(m[2] or m[3], {}).setdefault(part, {})[int(m[1])] = x.T
    if not found:
        return None, ()
    layers = sorted({layer for parts in found.values() for by_layer in parts.values() for layer in by_layer})
    names = ("q", "k", "v", "o", "gate", "up", "down")
    absent = [
        f"{name}.lora_{part.upper()} of layer {layer}"
        for name in names
        for part in "ab"
        for layer in layers
        if layer not in found.get(name, {}).get(part, {})
    ]
    if absent:
        raise InputError(f"{where}: adapters are missing: {', '.join(absent)}")
    if layers != list(range(layers[0], layers[-1] + 1)):
        raise InputError(f"{where}: adapters on layers {layers}, which are not the last ones in a row")
    rank = found["q"]["a"][layers[0]].shape[-1]
    alpha = _section(_section(settings, "adaptor"), "hyperparameters").get("lora_alpha", rank)  # released: scale 1
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise InputError(f"{where}: config.yaml says lora_alpha = {alpha!r}, which is no number")
    scale = alpha / rank
    stack = lambda name, part: np.stack([found[name][part][layer] for layer in layers])
    return {name: {"a": stack(name, "a"), "b": stack(name, "b") * scale} for name in names}, tuple(layers)


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}


def _number(name: str) -> tuple[int, str]:
    digits = re.findall(r"\d+", name)
    return (int(digits[0]) if digits else 0), name
