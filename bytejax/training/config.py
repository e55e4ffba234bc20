"""What a training run is made of: one frozen dataclass per section, read from YAML with `key=value` overrides.

Unknown keys, wrong types, impossible values and missing files end in one `InputError` line that names the key.
"""

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from bytejax import configs
from bytejax.errors import InputError

TASKS = ("target", "head", "eagle")
SOURCES = ("stdlib", "files")
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("constant", "cosine", "linear")
DTYPES = ("float32", "bfloat16")
OF_HEADS = "kl, windows, first_weight"
CIRCUITS = ("ff", "cp", "hmm", "btree")


@dataclasses.dataclass(frozen=True)
class Data:
    """Which bytes, and how they are cut.

    source: "stdlib" (the running interpreter's own sources) or "files" (the globs in `files`).
    files, held_out: globs, relative to the current directory; only with source "files". held_out is never trained on.
    sequence_length: T, bytes per sequence; batch: sequences per step, in `accumulate` parts whose gradients are
    averaged.
    """

    source: str = MISSING
    sequence_length: int = MISSING
    batch: int = MISSING
    accumulate: int = 1
    files: list[str] = dataclasses.field(default_factory=list)
    held_out: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A Llama-family target over byte ids; the names are those of `models.llama.Config`."""

    width: int = MISSING
    layers: int = MISSING
    heads: int = MISSING
    kv_heads: int = MISSING
    head_dim: int = MISSING
    ffn_width: int = MISSING
    rope_theta: float = MISSING
    norm_eps: float = MISSING
    tied: bool = MISSING


@dataclasses.dataclass(frozen=True)
class MultiByte:
    """Auxiliary multi-byte prediction: an FF head over `window` bytes, trained with the target.

    weight: of its loss beside the next-byte loss.
    gamma: discount per position of the window, in (0, 1].
    """

    window: int = MISSING
    weight: float = MISSING
    gamma: float = MISSING


@dataclasses.dataclass(frozen=True)
class Head:
    """A circuit head: circuit "ff", "cp", "hmm" or "btree"; window n; rank r; rank of the per-component adapters.

    feed_width: see `circuits.head.HeadConfig`.
    start: a head (a directory, or one that ships with the package) of the same kind and at most the same window, from
    which this one begins; null for the target's own unembeddings.
    lora_layers, lora_rank: adapters on so many of the target's last layers, which give the head states of its own.
    freeze_head: train the adapters only; the head stays that of `start`, which the drafter then refers to.
    """

    circuit: str = MISSING
    window: int = MISSING
    rank: int = MISSING
    adapter_rank: int | None = MISSING
    feed_width: int | None = None
    start: str | None = None
    lora_layers: int = 0
    lora_rank: int = 16
    freeze_head: bool = False


@dataclasses.dataclass(frozen=True)
class Eagle:
    """An EAGLE-3 head; the names are those of `drafters.eagle_head.EagleConfig`.

    taps: null for `eagle_head.default_taps` of the target.
    unroll: steps that the head is trained to go on its own; decay: what each counts beside the one before.
    """

    heads: int = MISSING
    kv_heads: int = MISSING
    head_dim: int = MISSING
    ffn_width: int = MISSING
    rope_theta: float = MISSING
    norm_eps: float = MISSING
    taps: list[int] | None = None
    unroll: int = 8
    decay: float = 0.8


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Weight decay on matrices only, after clipping by the global norm.

    name: "adamw", or "muon", which moves the matrices of stacked layers by Muon and everything else by AdamW.
    schedule: what the rate does after `warmup_steps`: stays ("constant") or falls ("cosine", "linear") to
    `final_fraction` of its peak at the last step.
    ema: decay of the exponential moving average that is validated and exported; null for none.
    """

    learning_rate: float = MISSING
    name: str = "adamw"
    warmup_steps: int = MISSING
    schedule: str = MISSING
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    ema: float | None = None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint is written after `every_minutes` or `every_steps`, whichever comes first; the last `keep` stay.

    The weights with the lowest validation loss so far are exported beside them, in `best`.
    """

    every_minutes: float = 5.0
    every_steps: int | None = None
    keep: int = 2


@dataclasses.dataclass(frozen=True)
class Validation:
    """Held-out loss: every `every_steps` steps on `batches` batches spread over the held-out bytes; at the end all."""

    every_steps: int = MISSING
    batches: int = MISSING


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run.

    task: "target" (next-byte training of `architecture`, perhaps `mtp`), "head" (`heads` on the frozen `target`) or
    "eagle" (`eagle` on the frozen `target`).
    compute_dtype: of the forward and backward pass; masters and optimiser state are float32.
    gamma, first_weight, chunk: of the window loss of the heads: discount per position, a further weight of position 1
    (which is drafted only where the target's extra byte is dropped), and positions whose logits exist at once.
    kl: share, from 0 to 1, of distillation (KL divergence from the target's laws) in the heads' loss beside likelihood.
    windows: positions per sequence whose windows count, drawn anew for every batch; null for all.
    """

    task: str = MISSING
    workdir: str = MISSING
    steps: int = MISSING
    data: Data = dataclasses.field(default_factory=Data)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    validation: Validation = dataclasses.field(default_factory=Validation)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    architecture: Architecture | None = None
    mtp: MultiByte | None = None
    target: str | None = None
    heads: dict[str, Head] = dataclasses.field(default_factory=dict)
    eagle: Eagle | None = None
    gamma: float = 1.0
    first_weight: float = 1.0
    kl: float = 0.0
    windows: int | None = None
    chunk: int = 1024
    compute_dtype: str = "float32"
    seed: int = 0
    log_every: int = 10


# Changing these continues the same run; changing anything else makes it another run, whose checkpoints are refused.
FREE_TO_CHANGE = ("workdir", "log_every", "steps", "checkpoint", "validation")


def load(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file and applies `key=value` overrides, e.g. "optimizer.learning_rate=1e-3"."""
    return from_values(configs.read(path, overrides), str(path))


def from_values(values: Any, where: str = "config") -> Config:
    """A checked Config from nested mappings. `where` is named in errors."""
    config = configs.structured(Config, values, where)
    problem = _problem(config)
    if problem:
        raise InputError(f"{where}: {problem}")
    return config


def to_values(config: Config) -> dict[str, Any]:
    """Nested dict of plain values, as `from_values` reads it."""
    return dataclasses.asdict(config)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Keys whose values make two runs incompatible, as "key: old -> new"."""
    with contextlib.suppress(InputError):
        old = to_values(from_values(old))  # a key that did not exist yet had its default
    a, b = (_flat({k: v for k, v in x.items() if k not in FREE_TO_CHANGE}) for x in (old, new))
    return [f"{k}: {a.get(k)} -> {b.get(k)}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]


def _problem(c: Config) -> str | None:
    """The first impossible value, or None."""
    checks = _choices(c) + _sizes(c) + _task(c)
    return next((message for bad, message in checks if bad), None)


def _choices(c: Config) -> list[tuple[bool, str]]:
    named = [("task", c.task, TASKS), ("data.source", c.data.source, SOURCES)]
    named += [("optimizer.name", c.optimizer.name, OPTIMIZERS)]
    named += [("optimizer.schedule", c.optimizer.schedule, SCHEDULES), ("compute_dtype", c.compute_dtype, DTYPES)]
    named += [(f"heads.{name}.circuit", h.circuit, CIRCUITS) for name, h in c.heads.items()]
    return [(x not in known, f"{key}={x} is unknown; known: {', '.join(known)}") for key, x, known in named]


def _sizes(c: Config) -> list[tuple[bool, str]]:
    o = c.optimizer
    positive = {"steps": c.steps, "data.sequence_length": c.data.sequence_length, "data.batch": c.data.batch}
    positive |= {"optimizer.learning_rate": o.learning_rate, "optimizer.clip": o.clip, "optimizer.eps": o.eps}
    positive["data.accumulate"] = c.data.accumulate
    if c.windows is not None:
        positive["windows"] = c.windows
    positive |= {"chunk": c.chunk, "log_every": c.log_every, "checkpoint.keep": c.checkpoint.keep}
    positive |= {"validation.every_steps": c.validation.every_steps, "validation.batches": c.validation.batches}
    positive |= {"checkpoint.every_minutes": c.checkpoint.every_minutes}
    if c.checkpoint.every_steps is not None:
        positive["checkpoint.every_steps"] = c.checkpoint.every_steps
    if c.architecture:
        positive |= {f"architecture.{k}": x for k, x in dataclasses.asdict(c.architecture).items() if k != "tied"}
    if c.mtp:
        positive |= {"mtp.window": c.mtp.window, "mtp.weight": c.mtp.weight}
    if c.eagle:
        sizes = ("heads", "kv_heads", "head_dim", "ffn_width", "rope_theta", "norm_eps", "unroll")
        positive |= {f"eagle.{k}": getattr(c.eagle, k) for k in sizes}
    for name, h in c.heads.items():
        positive |= {f"heads.{name}.window": h.window, f"heads.{name}.rank": h.rank}
        if h.adapter_rank is not None:
            positive[f"heads.{name}.adapter_rank"] = h.adapter_rank
        positive[f"heads.{name}.lora_rank"] = h.lora_rank
        if h.feed_width is not None:
            positive[f"heads.{name}.feed_width"] = h.feed_width
    fractions = {"gamma": c.gamma, "mtp.gamma": c.mtp.gamma if c.mtp else 1.0}
    fractions["eagle.decay"] = c.eagle.decay if c.eagle else 1.0
    from_zero = {"optimizer.final_fraction": o.final_fraction, "first_weight": c.first_weight, "kl": c.kl}
    below_one = {"optimizer.beta1": o.beta1, "optimizer.beta2": o.beta2, "optimizer.ema": o.ema or 0.0}
    checks = [(not x > 0, f"{key}={x} must be positive") for key, x in positive.items()]
    checks += [(not 0 < x <= 1, f"{key}={x} must be above 0 and at most 1") for key, x in fractions.items()]
    checks += [(not 0 <= x <= 1, f"{key}={x} must be between 0 and 1") for key, x in from_zero.items()]
    checks += [(not 0 <= x < 1, f"{key}={x} must be at least 0 and below 1") for key, x in below_one.items()]
    negative = [name for name, h in c.heads.items() if h.lora_layers < 0]
    checks += [(bool(negative), f"heads: lora_layers of {', '.join(negative)} must not be negative")]
    checks += [(o.weight_decay < 0, f"optimizer.weight_decay={o.weight_decay} must not be negative")]
    uneven = c.data.accumulate > 0 and c.data.batch % c.data.accumulate != 0
    checks += [(uneven, f"data.accumulate={c.data.accumulate} must divide data.batch={c.data.batch}")]
    longer = c.windows is not None and c.windows > c.data.sequence_length
    checks += [(longer, f"windows={c.windows} is more than data.sequence_length={c.data.sequence_length}")]
    far = c.eagle is not None and c.eagle.unroll > c.data.sequence_length - 2
    checks += [(far, f"eagle.unroll={c.eagle and c.eagle.unroll} needs a longer data.sequence_length")]
    checks += [(o.warmup_steps < 0, f"optimizer.warmup_steps={o.warmup_steps} must not be negative")]
    checks += [(not 0 <= c.seed < 2**32, f"seed={c.seed} must be between 0 and 2**32 - 1")]
    return checks


def _task(c: Config) -> list[tuple[bool, str]]:
    a, e, is_target, is_head = c.architecture, c.eagle, c.task == "target", c.task == "head"
    files = c.data.source == "files"
    checks = [
        (is_target and a is None, "task target needs the section architecture"),
        (is_target and (bool(c.heads) or c.target is not None), "task target takes neither heads nor target; use mtp"),
        (
            not is_head and (c.kl > 0 or c.windows is not None or c.first_weight != 1),
            f"task {c.task} takes none of {OF_HEADS}",
        ),
        (is_head and not c.heads, "task head needs at least one entry under heads"),
        (not is_target and c.target is None, f"task {c.task} needs target: the directory of a trained target"),
        (not is_target and (a is not None or c.mtp is not None), f"task {c.task} takes neither architecture nor mtp"),
        (c.task == "eagle" and e is None, "task eagle needs the section eagle"),
        (c.task == "eagle" and bool(c.heads), "task eagle takes no heads"),
        (c.task != "eagle" and e is not None, f"task {c.task} takes no section eagle; use task=eagle"),
        (files and not c.data.files, "data.source=files needs data.files, a list of globs"),
        (not files and bool(c.data.files or c.data.held_out), "data.files and data.held_out need data.source=files"),
    ]
    for section, x in (("architecture", a), ("eagle", e)):
        if x is not None:
            checks += [
                (x.heads % x.kv_heads != 0, f"{section}.kv_heads={x.kv_heads} must divide heads={x.heads}"),
                (x.head_dim % 2 != 0, f"{section}.head_dim={x.head_dim} must be even (rotary pairs)"),
            ]
    unsafe = [name for name in c.heads if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)]
    ff = [n for n, h in c.heads.items() if h.circuit == "ff" and h.rank != 1]
    idle = [n for n, h in c.heads.items() if h.freeze_head and (h.start is None or not h.lora_layers)]
    checks += [(bool(idle), f"heads: freeze_head of {', '.join(idle)} needs start and lora_layers")]
    ones = [n for n, h in c.heads.items() if h.window == 1 and c.first_weight == 0]
    checks += [(bool(ones), f"first_weight=0 leaves nothing to learn for heads of window 1: {', '.join(ones)}")]
    checks += [(bool(unsafe), f"heads: {unsafe} cannot name a directory; use letters, digits, '.', '-' and '_'")]
    checks += [(bool(ff), f"heads: {', '.join(ff)}: circuit ff has rank 1; use cp for a higher rank")]
    return checks


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, x in tree.items():
        flat |= _flat(x, f"{prefix}{key}.") if isinstance(x, dict) and x else {prefix + key: x}
    return flat
