"""What is trained and by which loss: a byte-level target, circuit heads on a frozen one, or an EAGLE head on it.

A task says how its members begin, what their losses are, and how they are written for decoding.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bytejax import circuits, loading, parameters, tokenizers
from bytejax.circuits import head as heads
from bytejax.circuits.grow import from_shorter
from bytejax.circuits.head import HeadConfig
from bytejax.drafters import eagle_head
from bytejax.drafters.eagle_head import EagleConfig
from bytejax.errors import InputError, input_errors_of
from bytejax.models import evabyte, llama, lora
from bytejax.models.base import Target
from bytejax.models.transformer import Transformer
from bytejax.training import losses
from bytejax.training.config import Config
from bytejax.training.data import Batch
from bytejax.training.distill import expected_accept_lengths, window_kl
from bytejax.training.eagle import unrolled_loss
from bytejax.training.step import Members

NATS_PER_BIT = float(np.log(2.0))
LORA = "lora"  # where a member keeps its adapters, beside the head's parameters
ESTIMATE_STRIDE = 16  # of the positions at which validation estimates accept lengths
OWN_HEADS = "mtp"  # directory beside a target's weights with the multi-byte heads it was trained with


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of training.

    init: parameters of every member, float32.
    decayed: the same trees of bools, True where weight decay applies.
    frozen: a pytree that the losses read and nothing changes.
    loss: (params, frozen, batch) -> (loss in nats of each member, further metrics), see `step.make_step`.
    held_out: the same for a batch of validation: all windows count, and heads get expected accept lengths.
    export: writes the given members, all or some, below a directory, ready for decoding.
    headline: name of the metric in bits per byte that stands for the run.
    identity: what besides config and corpus the run depends on, for telling its checkpoints from others'.
    """

    init: Members
    decayed: Members
    frozen: Any
    loss: Callable[[Members, Any, Batch], tuple[dict[str, jax.Array], dict[str, jax.Array]]]
    held_out: Callable[[Members, Any, Batch], tuple[dict[str, jax.Array], dict[str, jax.Array]]]
    export: Callable[[Path, Members], None]
    headline: str
    identity: dict[str, str]


def make(config: Config) -> Task:
    """The task of a config. Raises InputError for a target that cannot be loaded or does not fit."""
    return {"target": _target_task, "head": _head_task, "eagle": _eagle_task}[config.task](config)


def _target_task(config: Config) -> Task:
    tokenizer, dtype, mtp = tokenizers.DEMO, jnp.dtype(config.compute_dtype), config.mtp
    sizes = dataclasses.asdict(config.architecture)
    numbers = dict(vocab=tokenizer.vocab, context=config.data.sequence_length, qk_norm=False, rope_scaling=None)
    architecture = llama.Config(**numbers, **sizes)
    head = mtp and HeadConfig(circuits.FF(mtp.window), architecture.width, tokenizer.vocab, None)
    table = {"model": llama.table(architecture)} | ({"mtp": heads.table(head)} if mtp else {})

    def model(params):
        return llama.Llama(params=params["model"], config=architecture, tokenizer=tokenizer)

    def loss(params, frozen, batch):
        p = cast(params["target"], dtype)
        target = model(p).unrolled()  # on CPU a scan over layers would copy weights, and no layer fuses with the next
        hidden = target.states(batch["ids"])
        total, _ = losses.next_byte_loss(hidden, batch["labels"], target.unembed, config.chunk)
        extra = {"bits_per_byte": total / NATS_PER_BIT}
        if mtp:
            total_window, _ = losses.window_loss(
                p["mtp"], head, hidden, batch["labels"], mtp.gamma, config.chunk, tokenizers.DEMO.stop
            )
            window = total_window / sequences(batch["labels"])
            extra["mtp/bits_per_byte"] = window / NATS_PER_BIT
            total = total + mtp.weight * window
        return {"target": total}, extra

    def export(directory: Path, members: Members) -> None:
        loading.save_target(directory, model(members["target"]))
        if mtp:
            loading.save_head(directory / OWN_HEADS, head, members["target"]["mtp"])

    init = {"target": parameters.init(table, jax.random.key(config.seed))}
    return Task(init, {"target": decayed(table)}, (), loss, loss, export, "bits_per_byte", {})


def _head_task(config: Config) -> Task:
    (path, target), dtype = _frozen_target(config), jnp.dtype(config.compute_dtype)
    matrices, key = own_heads(path, target), jax.random.key(config.seed)
    configs, init, masks, kept = {}, {}, {}, {}  # kept: heads that do not change, under the adapters that do
    identity = {"target_sha256": loading.weights_digest(path)}
    for name, h in config.heads.items():
        circuit = circuits.make(h.circuit, h.window, h.rank)
        configs[name] = c = HeadConfig(circuit, target.width, target.vocab, h.adapter_rank, h.feed_width)
        table = heads.table(c)
        head = heads.from_unembeddings(parameters.init(table, key), c, matrices)
        if h.start is not None:
            with input_errors_of(f"heads.{name}.start"):
                short_config, short, identity[f"{name}_start_sha256"] = loading.load_start(h.start)
                head = from_shorter(head, c, short, short_config)
        (kept if h.freeze_head else init)[name] = head
        masks[name] = {} if h.freeze_head else decayed(table)
        if h.lora_layers:
            with input_errors_of(f"heads.{name}.lora_layers"):
                adapters = {LORA: lora.table(lora.LoraConfig(h.lora_layers, h.lora_rank), target)}
            init[name] = init.get(name, {}) | parameters.init(adapters, key)
            masks[name] |= decayed(adapters)

    def each(params, frozen, batch):
        """(name, config, parameters, hidden states) of every head, and the target. What they share is computed once."""
        model = cast(frozen["target"], dtype)
        for name, h in configs.items():
            p = cast(params[name] | frozen["heads"].get(name, {}), dtype)
            adapter = lora.create(p.pop(LORA), model) if LORA in p else None
            yield name, h, p, model.states(batch["ids"], adapter), model

    def laws(model, batch):
        """The target's log-probabilities of every label."""
        return jax.nn.log_softmax(model.unembed(model.states(batch["ids"])))

    def loss(params, frozen, batch, positions=None):
        nats, metrics = {}, {}
        labels = batch["labels"]
        settings = {"gamma": config.gamma, "chunk": config.chunk, "first": config.first_weight, "positions": positions}
        settings["boundaries"] = tokenizers.DEMO.stop
        for name, h, p, hidden, model in each(params, frozen, batch):
            ce, kl = losses.window_loss(p, h, hidden, labels, **settings)[0] / sequences(labels), 0.0
            metrics[f"{name}/bits_per_byte"] = ce / NATS_PER_BIT
            if config.kl:
                kl = window_kl(p, h, hidden, labels, laws(model, batch), **settings)[0] / sequences(labels)
                metrics[f"{name}/kl_bits"] = kl / NATS_PER_BIT
            nats[name] = config.kl * kl + (1 - config.kl) * ce
        return nats, metrics

    def held_out(params, frozen, batch):
        nats, metrics = loss(params, frozen, batch)
        for name, h, p, hidden, model in each(params, frozen, batch):
            lengths = expected_accept_lengths(p, h, hidden, batch["labels"], laws(model, batch), ESTIMATE_STRIDE)
            metrics |= {f"{name}/accept_length_{kind}": x for kind, x in lengths.items()}
        return nats, metrics

    def export(directory: Path, members: Members) -> None:
        for name, member in members.items():
            p, h = dict(member), config.heads[name]
            adapters = p.pop(LORA, None)
            if adapters is None:
                loading.save_head(directory / name, configs[name], p)
            elif name in kept and loading.ships_head(h.start, h.window):
                loading.save_lora(directory / name, target, adapters, h.start)
            else:
                loading.save_lora(directory / name, target, adapters, (configs[name], kept.get(name, p)))

    frozen = {"target": target.unrolled(), "heads": kept}
    sampled = lambda params, frozen, batch: loss(params, frozen, batch, _sampled_windows(config, batch))
    headline = f"{next(iter(configs))}/bits_per_byte"
    return Task(init, masks, frozen, sampled, held_out, export, headline, identity)


def _eagle_task(config: Config) -> Task:
    """One member, "eagle". Its unembedding and final norm begin as the target's, all else at random."""
    (path, target), dtype, e = _frozen_target(config), jnp.dtype(config.compute_dtype), config.eagle
    if not isinstance(target, Transformer):
        raise InputError(f"target: an EAGLE head reads attention layers, which a {type(target).__name__} has not")
    numbers = {k: x for k, x in dataclasses.asdict(e).items() if k not in ("taps", "unroll", "decay")}
    taps = eagle_head.default_taps(target.config.layers) if e.taps is None else tuple(e.taps)
    with input_errors_of("eagle"):
        c = EagleConfig(width=target.width, vocab=target.vocab, taps=taps, **numbers)
        c.check(target)
    table = eagle_head.table(c)
    begin = {"head": own_heads(path, target)[0].T, "final_norm": target.params["final_norm"]}
    init = parameters.init(table, jax.random.key(config.seed))
    init |= {name: jnp.array(x, jnp.float32, copy=True) for name, x in begin.items()}

    def loss(params, frozen, batch):
        p, model = cast(params["eagle"], dtype), cast(frozen, dtype)
        nats, parts = unrolled_loss(p, c, model, batch["ids"], batch["labels"], e.unroll, e.decay)
        first, last = parts["ce"][0] / NATS_PER_BIT, parts["ce"][-1] / NATS_PER_BIT
        metrics = {"bits_per_byte": first, "bits_per_byte_last": last, "accept_length": parts["accept_length"]}
        return {"eagle": nats}, {f"eagle/{name}": x for name, x in metrics.items()}

    def export(directory: Path, members: Members) -> None:
        loading.save_eagle(directory, target, c, members["eagle"])

    identity = {"target_sha256": loading.weights_digest(path)}
    masks = {"eagle": decayed(table)}
    return Task({"eagle": init}, masks, target.unrolled(), loss, loss, export, "eagle/bits_per_byte", identity)


def _frozen_target(config: Config) -> tuple[Path, Target]:
    """Where the target is that a run trains on, and itself."""
    path = loading.target_path(config.target)
    target = loading.load_target(path)
    if config.data.sequence_length > target.context:
        raise InputError(
            f"data.sequence_length={config.data.sequence_length} is more than the target's context of {target.context}"
        )
    return path, target


def sequences(labels: jax.Array) -> jax.Array:
    """How many sequences have labels, at least 1. labels [B, T] -> [] int."""
    return jnp.maximum((labels != losses.IGNORE).any(1).sum(), 1)


def _sampled_windows(config: Config, batch: Batch) -> jax.Array | None:
    """Where the windows that count begin, [B, K], or None for all. The draw depends on seed and batch only."""
    if config.windows is None:
        return None
    b, t = batch["ids"].shape
    key = jax.random.fold_in(jax.random.key(config.seed), jnp.sum(batch["ids"].astype(jnp.uint32)))
    order = jax.vmap(lambda k: jax.random.permutation(k, t))(jax.random.split(key, b))
    return jnp.sort(order[:, : config.windows], axis=1)


def own_heads(directory: Path, target: Target) -> jax.Array:
    """[m, v, d]: the target's own unembedding, then the later positions of its multi-byte heads where it has them."""
    if isinstance(target, evabyte.EvaByte):
        return target.params["heads"].reshape(-1, target.vocab, target.width)
    p = target.unembedding_in_panels(None).params
    first = (p["embedding"] if target.config.tied else p["head"].T)[None]
    if not (directory / OWN_HEADS).is_dir():
        return first
    _, ff = loading.load_head(directory / OWN_HEADS)
    return jnp.concatenate([first, ff["leaves"][1:, 0]])


def decayed(table: parameters.Table) -> dict[str, Any]:
    """Where weight decay applies: arrays that are matrices in one layer. Stacking does not make a norm's scale one."""
    return {k: decayed(p) if isinstance(p, Mapping) else len(p.shape) >= 2 for k, p in table.items()}


def cast(tree: Any, dtype: jnp.dtype) -> Any:
    """All arrays in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)
