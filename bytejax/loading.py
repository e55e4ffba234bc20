"""Reading and writing targets and drafters as directories: `config.json` beside `model.safetensors`.

A source is "demo", a directory, or for drafters the name of one that ships with the demo.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bytejax import circuits, parameters
from bytejax.circuits import head as heads
from bytejax.drafters.base import Autoregressive, Drafter
from bytejax.drafters.circuit import CircuitDrafter
from bytejax.errors import InputError
from bytejax.models import llama
from bytejax.models.base import Target
from bytejax.tokenizers import ByteTokenizer

DEMO = Path(__file__).parent / "demo"
DEFAULT_DRAFTER = "hmm-8"  # of the demo target
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
FAMILIES = {"llama": (llama.Config, llama.table, llama.Llama)}
WEIGHTS = "model.safetensors"


def demo_drafters() -> list[str]:
    """Names of the drafters that ship with the demo target."""
    return sorted(p.parent.name for p in DEMO.glob("*/config.json") if p.parent.name != "target")


def save_target(directory: Path | str, target: Target, dtype=jnp.bfloat16) -> None:
    """Writes a target: weights in `dtype`, config and tokenizer as JSON."""
    target = target.stacked()
    config = {
        "format": "bytejax-target",
        "family": next(name for name, (_, _, cls) in FAMILIES.items() if isinstance(target, cls)),
        "config": dataclasses.asdict(target.config),
        "tokenizer": dataclasses.asdict(target.tokenizer),
    }
    _save(Path(directory), config, target.params, dtype)


def target_directory(source: Path | str) -> Path:
    """Where a target's files are. Raises InputError where there is no such target."""
    directory = DEMO / "target" if str(source) == "demo" else Path(source)
    if not _is_directory(directory):
        raise InputError(f"target {str(source)!r} is neither 'demo' nor a directory")
    return directory


def load_target(source: Path | str, dtype: str = "float32", unroll: bool | None = None) -> Target:
    """A target from "demo" or a directory that `save_target` wrote; weights in `dtype` ("float32" or "bfloat16").

    unroll: hold the layers one by one instead of stacked, their kernels in panels; None does so on CPU, where a scan
        would copy the weights.
    """
    directory = target_directory(source)
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    saved = _read_config(directory, "bytejax-target")
    try:
        make_config, table, make_target = FAMILIES[saved["family"]]
        config = make_config(**saved["config"])
        tokenizer = ByteTokenizer(**_tuples(saved["tokenizer"]))
    except (KeyError, TypeError, AttributeError) as e:
        raise InputError(f"{directory / 'config.json'} does not describe a target ({e})") from None
    params = parameters.load(directory / WEIGHTS, table(config), DTYPES[dtype])
    target = make_target(params=params, config=config, tokenizer=tokenizer)
    unroll = jax.default_backend() == "cpu" if unroll is None else unroll
    return target.in_panels() if unroll else target


def load_drafter(source: Path | str, target: Target, **options) -> Drafter:
    """A drafter for a target: a name that ships with the demo ("btree-8"), a directory, or "none".

    options: the drafter's own, e.g. draft_tokens=4 or greedy_rule="joint" of a circuit drafter (see its `create`).
    Parameters get the target's dtype.
    Raises InputError where there is no such drafter, it has no such option, or it cannot serve the target.
    """
    if str(source) == "none":
        drafter = _create(Autoregressive, (), options)
    else:
        directory = drafter_directory(source)
        if directory is None:
            known = ", ".join(["none", *demo_drafters()])
            raise InputError(f"unknown drafter {str(source)!r}: neither a directory nor one of {known}")
        config, params = load_head(directory, _dtype_name(target))
        drafter = _create(CircuitDrafter.create, (params, config), options)
    drafter.check(target)
    return drafter


def drafter_directory(source: Path | str) -> Path | None:
    """Where a head's files are: a directory, or the demo's of that name. None where there is neither."""
    directory = Path(source) if _is_directory(Path(source)) else DEMO / str(source)
    return None if str(source) in ("", ".", "target") or not _is_directory(directory) else directory


def save_head(directory: Path | str, config: heads.HeadConfig, params: Any, dtype=jnp.bfloat16) -> None:
    """Writes a circuit head as a drafter directory."""
    saved = {
        "format": "bytejax-drafter",
        "kind": "circuit",
        "circuit": type(config.circuit).__name__.lower(),
        "window": config.circuit.window,
        "rank": config.circuit.rank,
        "width": config.width,
        "vocab": config.vocab,
        "adapter_rank": config.adapter_rank,
        "feed_width": config.feed_width,
    }
    _save(Path(directory), saved, params, dtype)


def load_head(directory: Path | str, dtype: str = "float32") -> tuple[heads.HeadConfig, Any]:
    """Config and parameters of a circuit head that `save_head` wrote."""
    directory = Path(directory)
    saved = _read_config(directory, "bytejax-drafter")
    try:
        circuit = circuits.make(saved["circuit"], saved["window"], saved["rank"])
        sizes = (saved[name] for name in ("width", "vocab", "adapter_rank", "feed_width"))
        config = heads.HeadConfig(circuit, *sizes)
    except (KeyError, TypeError) as e:
        raise InputError(f"{directory / 'config.json'} does not describe a circuit head ({e})") from None
    return config, parameters.load(directory / WEIGHTS, heads.table(config), DTYPES[dtype])


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name too long, a parent that may not be read, a NUL
        return False


def _create(make: Callable[..., Drafter], arguments: tuple, options: dict) -> Drafter:
    known = list(inspect.signature(make).parameters)[len(arguments) :]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise InputError(f"drafter option {unknown[0]!r} is unknown; known: {', '.join(known) or 'none'}")
    return make(*arguments, **options)


def _dtype_name(target: Target) -> str:
    dtype = jax.tree.leaves(target.params)[0].dtype
    return next(name for name, known in DTYPES.items() if known == dtype)


def _save(directory: Path, config: dict, params: Any, dtype) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    parameters.save(directory / WEIGHTS, jax.tree.map(lambda x: jax.device_get(jnp.asarray(x, dtype)), params))
    part = directory / "config.json.part"
    part.write_text(json.dumps(config, indent=2) + "\n")
    part.replace(directory / "config.json")


def _read_config(directory: Path, expected: str) -> dict:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{directory} holds no config.json") from None
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise InputError(f"{path} is not JSON ({e})") from None
    if not isinstance(config, dict) or config.get("format") != expected:
        raise InputError(f"{path} is not of format {expected!r}")
    return config


def _tuples(fields: dict) -> dict:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
