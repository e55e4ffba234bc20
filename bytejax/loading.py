"""Reading and writing targets and drafters as directories: `config.json` beside `model.safetensors`.

A source is "demo", a directory, or for drafters the name of one that ships with the demo; for targets also a checkpoint
as it was released: a directory, a .gguf file, or a hub id.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bytejax import checkpoints, circuits, directories, parameters, tokenizers
from bytejax.checkpoints import Reader, SafetensorsFile
from bytejax.circuits import head as heads
from bytejax.conversion import hub
from bytejax.conversion.released import open_released
from bytejax.drafters import eagle_head, named
from bytejax.drafters.base import Drafter
from bytejax.drafters.circuit import CircuitDrafter
from bytejax.drafters.circuit_tree import CircuitTree
from bytejax.drafters.eagle import Eagle
from bytejax.drafters.eagle_head import EagleConfig
from bytejax.drafters.model import DraftModel
from bytejax.errors import InputError, check_flag, input_errors_of
from bytejax.models import byte_llama, evabyte, llama, lora
from bytejax.models.base import Target
from bytejax.models.layouts import LayerForm, OuterForm
from bytejax.models.transformer import Transformer
from bytejax.parameters import Params, Table

DEMO = Path(__file__).parent / "demo"
DEFAULT_DRAFTER = "hmm-8"  # of the demo target
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
FAMILIES = {
    "llama": (llama.Config.load, llama.table, llama.Llama),
    "byte_llama": (byte_llama.Config.load, byte_llama.table, byte_llama.ByteLlama),
    "evabyte": (evabyte.Config.load, evabyte.table, evabyte.EvaByte),
}
BUILT_IN = (*named.NAMED, "model")  # drafters without files; the names come before directories
WEIGHTS, ADAPTERS = "model.safetensors", "lora.safetensors"


def demo_drafters() -> list[str]:
    """Names of the drafters that ship with the demo target."""
    return sorted(p.parent.name for p in DEMO.glob("*/config.json") if p.parent.name != "target")


def save_target(directory: Path | str, target: Target, dtype=jnp.bfloat16) -> None:
    """Writes a target: weights in `dtype`, config and tokenizer as JSON."""
    target, directory = target.stacked(), Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    directories.save(directory, target_values(target, directory), {WEIGHTS: target.params}, dtype)


def target_values(target: Target, directory: Path) -> dict[str, Any]:
    """What the config.json of a saved target holds; what lies in files of its own is written into the directory."""
    for name in target.extras:
        getattr(target, name).save(directory / f"{name}.safetensors")
    return {
        "format": "bytejax-target",
        "family": next(name for name, (_, _, cls) in FAMILIES.items() if type(target) is cls),
        "config": dataclasses.asdict(target.config),
        "tokenizer": tokenizers.save(target.tokenizer, directory),
    }


def target_path(source: Path | str) -> Path:
    """Where a target's files are: a directory, or a .gguf file; a hub id is downloaded.

    Raises InputError where there is no such target.
    """
    path = DEMO / "target" if str(source) == "demo" else Path(source)
    if directories.exists(path):
        return path
    if path.suffix in checkpoints.PICKLES:
        raise checkpoints.pickled(path, path)
    if path.suffix == ".gguf":
        return path
    if path.suffix == ".safetensors":
        raise InputError(f"target {str(source)!r} is a file of weights; give the directory that holds it")
    if str(source).startswith((".", "/", "~")):
        raise InputError(f"target {str(source)!r}: no such directory")
    if hub.is_id(str(source)):
        return hub.download(str(source))
    raise InputError(f"target {str(source)!r} is neither 'demo' nor a directory, a .gguf file or a hub id (owner/name)")


def load_target(
    source: Path | str,
    dtype: str = "float32",
    unroll: bool | None = None,
    mesh: jax.sharding.Mesh | None = None,
    rules: Mapping[str, Any] | None = None,
) -> Target:
    """A target from "demo", a directory that `save_target` wrote, or a checkpoint as it was released: a directory with
    config.json and safetensors, a .gguf file, or a hub id ("owner/name", which needs the extra `hf`).

    Weights in `dtype` ("float32" or "bfloat16"), each tensor read straight into its place.

    unroll: hold the layers one by one instead of stacked, on CPU with their kernels in panels; None does so on CPU
        only, where a scan would copy the weights.
    mesh, rules: shard the weights; rules map logical axes to mesh axes (`parameters.shardings`). Layers then stay
        stacked unless `unroll` says otherwise, and kernels out of panels.
    """
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    path = target_path(source)
    on_cpu = jax.default_backend() == "cpu" and mesh is None
    unroll = on_cpu if unroll is None else unroll
    sharding = None if mesh is None else parameters.sharding_by(mesh, rules or {})

    def read(target, table, reader, **options):
        options |= {"sharding": sharding}
        if unroll:
            options |= {"layer_form": LayerForm(type(target), target.config, panels=on_cpu)}
            options |= {"outer_form": OuterForm(type(target), target.config)} if on_cpu else {}
        return target.replace(params=parameters.read(table, reader, DTYPES[dtype], **options))

    if is_saved_target(path):
        return read(*saved_target(path))
    released = open_released(path)
    return read(released.target, released.table, released.reader, reference=True, ignored=released.family.ignored)


def is_saved_target(path: Path) -> bool:
    """Whether a target's path is a directory of ours, and not a checkpoint as it was released."""
    return path.is_dir() and "format" in directories.config(path)


def saved_target(directory: Path) -> tuple[Target, Table, Reader]:
    """What `save_target` wrote: the target without its parameters, their table, and where they are."""
    saved = directories.read_config(directory, "bytejax-target")
    try:
        make_config, table, make_target = FAMILIES[saved["family"]]
        config = make_config(saved["config"])
        tokenizer = tokenizers.load(saved["tokenizer"], directory)
    except (KeyError, TypeError, AttributeError) as e:
        raise InputError(f"{directory / 'config.json'} does not describe a target ({e})") from None
    extras = {name: kind.load(directory / f"{name}.safetensors") for name, kind in make_target.extras.items()}
    target = make_target(params=None, config=config, tokenizer=tokenizer, **extras)
    return target, table(config), SafetensorsFile(directory / WEIGHTS)


def load_drafter(source: Path | str, target: Target, /, **options) -> Drafter:
    """A drafter for a target: a name that ships with the demo ("btree-8"), a directory, or one of these:

    "none" for one byte at a time; without training, "pld" (prompt lookup), "esp" (embedding-space probing), "pld+esp"
    (both in one tree), "lade" (lookahead) and "stand" (n-gram tables), whose options are those of their `create`; for
    an EvaByte "evabyte", a tree from its prediction heads (options tree, or accuracies and nodes, see
    `drafters.medusa.Medusa.create`), or "heads", the same heads as an FF circuit (options draft_tokens, tree, beam,
    lookup); "model", a smaller target with the same ids (options source, as `load_target` takes it, and draft_tokens).

    options: the drafter's own. A circuit drafter has draft_tokens and greedy_rule (see its `create`), tree, how many
        nodes, beam and lookup (`drafters.circuit_tree`) and, with LoRA, merged: whether the adapters are added into
        draft layers of their own (see `models.lora.create`). An EAGLE head has beam, depth and nodes (see
        `drafters.eagle.Eagle.create`).
    Parameters get the target's dtype.
    Raises InputError where there is no such drafter, it has no such option, or it cannot serve the target.
    """
    if str(source) in named.NAMED:
        drafter = named.make(str(source), target, options)
    elif str(source) == "model":
        drafter = named.create(_draft_model, (target,), options)
    else:
        directory = drafter_directory(source)
        if directory is None:
            known = ", ".join([*BUILT_IN, *demo_drafters()])
            raise InputError(f"unknown drafter {str(source)!r}: neither a directory nor one of {known}")
        if drafter_kind(directory) == "eagle":
            config, params = load_eagle(directory, target)
            drafter = named.create(Eagle.create, (params, config, target), options)
        else:
            config, params = load_head(directory, _dtype_name(target))
            adapters = load_adapters(directory, target)
            drafter = named.create(_circuit_drafter, (params, config, adapters, target), options)
    drafter.check(target)
    return drafter


def _circuit_drafter(
    params: Params,
    config: heads.HeadConfig,
    adapters: Params | None,
    target: Target,
    draft_tokens: int | None = None,
    greedy_rule: str = "sequential",
    merged: bool = False,
    tree: int | None = None,
    beam: int | None = None,
    lookup: str | None = None,
) -> Drafter:
    check_flag("merged", merged)
    if adapters is None and merged:
        raise InputError("merged is an option of LoRA drafters; this one has no adapters to merge")
    adapter = None if adapters is None else lora.create(adapters, target, merged)
    chains = CircuitDrafter.create(params, config, draft_tokens, greedy_rule, adapter)
    return CircuitTree.over(chains, tree, beam, lookup)


def _draft_model(target: Target, source: Path | str | None = None, draft_tokens: int = 4) -> DraftModel:
    if source is None:
        raise InputError("drafter 'model' needs the option source: a target with the same ids to draft with")
    if not isinstance(source, str | Path):
        raise InputError(f"drafter 'model': source must name a target, got {source!r}")
    return DraftModel.create(load_target(source, _dtype_name(target)), draft_tokens)


def drafter_directory(source: Path | str) -> Path | None:
    """Where a head's files are: a directory, or the demo's of that name. None where there is neither."""
    directory = Path(source) if directories.exists(Path(source)) else DEMO / str(source)
    return None if str(source) in ("", ".", "target", *BUILT_IN) or not directories.exists(directory) else directory


def drafter_kind(directory: Path) -> str | None:
    """What a drafter directory holds: "circuit" or "eagle"."""
    return directories.read_config(directory, "bytejax-drafter").get("kind")


def save_eagle(
    directory: Path | str, target: Transformer, config: EagleConfig, params: Params, dtype=jnp.bfloat16
) -> None:
    """Writes an EAGLE head of this target as a drafter directory."""
    values = {"format": "bytejax-drafter", "kind": "eagle", "target": fingerprint(target)}
    directories.save(Path(directory), values | {"config": dataclasses.asdict(config)}, {WEIGHTS: params}, dtype)


def load_eagle(directory: Path | str, target: Target) -> tuple[EagleConfig, Params]:
    """Config and parameters of an EAGLE head, in the target's dtype. Raises InputError where it is another target's."""
    directory = Path(directory)
    saved = directories.read_config(directory, "bytejax-drafter")
    try:
        config, digest = EagleConfig.load(saved["config"]), saved["target"]
    except (KeyError, TypeError) as e:
        raise InputError(f"{directory / 'config.json'} does not describe an EAGLE head ({e})") from None
    with input_errors_of(str(directory)):
        config.check(target)
    if digest != fingerprint(target):
        raise InputError(f"{directory}: its EAGLE head was trained on another target than this one")
    return config, parameters.load(directory / WEIGHTS, eagle_head.table(config), DTYPES[_dtype_name(target)])


def save_head(directory: Path | str, config: heads.HeadConfig, params: Params, dtype=jnp.bfloat16) -> None:
    """Writes a circuit head as a drafter directory."""
    directories.save(Path(directory), _head_values(config), {WEIGHTS: params}, dtype)


def save_lora(
    directory: Path | str,
    target: Transformer,
    adapters: Params,
    head: tuple[heads.HeadConfig, Params] | str,
    dtype=jnp.bfloat16,
) -> None:
    """Writes a drafter with LoRA adapters on the target's last layers.

    head: the head that reads the adapted states; or the name of one that ships with the package, to which the drafter
        then refers.
    """
    layers, _, rank = adapters["q"]["a"].shape
    values = {"lora": {"layers": layers, "rank": rank, "target": fingerprint(target)}}
    files = {ADAPTERS: adapters}
    if isinstance(head, str):
        pinned = {"name": head, "sha256": directories.sha256(DEMO / head / WEIGHTS)}
        values |= {"format": "bytejax-drafter", "kind": "circuit", "head": pinned}
    else:
        values |= _head_values(head[0])
        files[WEIGHTS] = head[1]
    directories.save(Path(directory), values, files, dtype)


def needs_unrolled(source: Path | str) -> bool:
    """Whether a drafter, as `load_drafter` takes it, works only with a target whose layers are unrolled."""
    directory = drafter_directory(source)
    return directory is not None and "lora" in directories.read_config(directory, "bytejax-drafter")


def ships_head(name: str, window: int) -> bool:
    """Whether `name` is a head of the demo, without adapters, with that window."""
    if name not in demo_drafters() or directories.exists(Path(name)):
        return False
    saved = directories.read_config(DEMO / name, "bytejax-drafter")
    return "lora" not in saved and saved.get("window") == window


def load_start(source: Path | str) -> tuple[heads.HeadConfig, Params, str]:
    """A head that another one may start from, as `load_head`, and the SHA-256 of its weights."""
    directory = drafter_directory(source)
    if directory is None:
        raise InputError(f"{source} is neither a directory nor a drafter that ships with the package")
    if "lora" in directories.read_config(directory, "bytejax-drafter"):
        raise InputError(f"{source} is a LoRA drafter; its head reads a draft stream, not the target's states")
    config, params = load_head(directory)
    return config, params, directories.sha256(directory / WEIGHTS)


def load_adapters(directory: Path | str, target: Target) -> Params | None:
    """The LoRA adapters of a drafter directory, in the target's dtype; None where it has none.

    Raises InputError where they belong to another target.
    """
    directory = Path(directory)
    saved = directories.read_config(directory, "bytejax-drafter").get("lora")
    if saved is None:
        return None
    if not isinstance(target, Transformer):
        raise InputError(f"{directory}: its LoRA adapters belong to attention layers, not to {type(target).__name__}")
    try:
        config, digest = lora.LoraConfig(saved["layers"], saved["rank"]), saved["target"]
    except (KeyError, TypeError) as e:
        raise InputError(f"{directory / 'config.json'} does not describe its LoRA adapters ({e})") from None
    with input_errors_of(str(directory)):
        table = lora.table(config, target)
    if digest != fingerprint(target):
        raise InputError(f"{directory}: its LoRA adapters were trained on another target than this one")
    return parameters.load(directory / ADAPTERS, table, DTYPES[_dtype_name(target)])


def fingerprint(target: Transformer) -> str:
    """Tells targets apart, however they are held: a hash of embeddings, last layer and final norm in bfloat16."""
    digest, p = hashlib.sha256(), target.params
    last = target.layer(target.config.layers - 1)
    for x in (target.embedding_table(), p["final_norm"], *(last[name] for name in sorted(last))):
        digest.update(np.asarray(x.astype(jnp.bfloat16)).tobytes())
    return digest.hexdigest()[:16]


def _head_values(config: heads.HeadConfig) -> dict[str, Any]:
    return {
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


def load_head(directory: Path | str, dtype: str = "float32") -> tuple[heads.HeadConfig, Any]:
    """Config and parameters of a circuit head that `save_head` wrote, or of the one that a LoRA drafter builds on."""
    directory = Path(directory)
    saved = directories.read_config(directory, "bytejax-drafter")
    if "head" in saved:
        return load_head(_pinned_head(directory, saved["head"]), dtype)
    try:
        circuit = circuits.make(saved["circuit"], saved["window"], saved["rank"])
        sizes = (saved[name] for name in ("width", "vocab", "adapter_rank", "feed_width"))
        config = heads.HeadConfig(circuit, *sizes)
    except (KeyError, TypeError) as e:
        raise InputError(f"{directory / 'config.json'} does not describe a circuit head ({e})") from None
    return config, parameters.load(directory / WEIGHTS, heads.table(config), DTYPES[dtype])


def _pinned_head(directory: Path, pinned: Any) -> Path:
    try:
        name, digest = pinned["name"], pinned["sha256"]
    except (KeyError, TypeError) as e:
        raise InputError(f"{directory / 'config.json'} does not say which head it builds on ({e})") from None
    if name not in demo_drafters():
        raise InputError(f"{directory} builds on the head {name!r}, which does not ship with this version")
    if directories.sha256(DEMO / name / WEIGHTS) != digest:
        raise InputError(f"{directory} builds on the head {name!r} as another version shipped it")
    return DEMO / name


def weights_digest(path: Path) -> str:
    """SHA-256 of the files that hold a target's weights, given where `target_path` found it."""
    own = path / WEIGHTS
    return directories.sha256(
        *([path] if path.is_file() else [own] if own.is_file() else sorted(path.glob("*.safetensors")))
    )


def files_digest(path: Path) -> str:
    """SHA-256 of all that a checkpoint's results depend on: its weights, config, tokenizer and template."""
    kinds = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
    return directories.sha256(*([path] if path.is_file() else sorted(f for kind in kinds for f in path.glob(kind))))


def drafter_digest(source: Path | str, options: Mapping[str, Any]) -> str | None:
    """`files_digest` of a drafter, as `load_drafter` takes it; None for one without files."""
    if str(source) == "model":
        return files_digest(target_path(options["source"]))
    directory = drafter_directory(source)
    return None if directory is None else files_digest(directory)


def _dtype_name(target: Target) -> str:
    dtype = jax.tree.leaves(target.params)[0].dtype
    names = [name for name, known in DTYPES.items() if known == dtype]
    if not names:
        raise InputError(f"the target's parameters are {dtype}; known: {', '.join(DTYPES)}")
    return names[0]
