"""Tiny random targets and drafters that decoding tests share."""

import jax
import jax.numpy as jnp
from flax import struct

from bytejax import circuits, parameters
from bytejax.circuits import head as heads
from bytejax.drafters.base import Draft, Drafter
from bytejax.drafters.circuit import CircuitDrafter
from bytejax.models import llama, lora
from bytejax.models.base import Block
from bytejax.tokenizers import ByteTokenizer


def make_target(vocab=23, dtype=jnp.float32, sharpness=3.0, stop=(), banned=(), seed=0, unrolled=True, **changes):
    """A two-layer Llama with odd numbers; sharpness scales its logits, so that its text has some variety."""
    numbers = dict(
        vocab=vocab, width=24, layers=2, heads=4, kv_heads=2, head_dim=10, ffn_width=36, rope_theta=300.0, norm_eps=1e-3
    )
    config = llama.Config(**(numbers | dict(tied=False, context=400, qk_norm=False, rope_scaling=None) | changes))
    tokenizer = ByteTokenizer(vocab=vocab, offset=0, bos=None, stop=stop, banned=banned)
    target = llama.create(config, jax.random.key(seed), tokenizer)
    params = target.params | {"embedding": target.params["embedding"] * 40, "head": target.params["head"] * sharpness}
    target = target.replace(params=jax.tree.map(lambda x: x.astype(dtype), params))
    return target.unrolled() if unrolled else target


def make_head(target, name, window=5, rank=3, seed=1, extra_ids=0, scale=60.0, feed_width=None):
    """Parameters and config of a random head, far from the target's law."""
    circuit = circuits.make(name, window, 1 if name == "ff" else rank)
    config = heads.HeadConfig(circuit, target.width, target.vocab + extra_ids, None, feed_width)
    params = parameters.init(heads.table(config), jax.random.key(seed))
    params |= {k: params[k] * scale for k in ("leaves", "sums") if k in params}
    if feed_width is not None:
        keys = iter(jax.random.split(jax.random.key(seed), len(params["feed"])))
        params["feed"] = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), params["feed"])
    dtype = target.params["embedding"].dtype
    return jax.tree.map(lambda x: x.astype(dtype), params), config


def make_adapters(target, layers, rank=3, scale=0.2):
    """Random LoRA parameters for the last layers."""
    params = parameters.init(lora.table(lora.LoraConfig(layers, rank), target), jax.random.key(7))
    draw = lambda x: scale * jax.random.normal(jax.random.key(x.size), x.shape)
    return jax.tree.map(lambda x: draw(x).astype(target.params["embedding"].dtype), params)


def make_drafter(target, name, draft_tokens=None, greedy_rule="sequential", lora_layers=0, merged=False, **numbers):
    """A circuit drafter with such a head, perhaps on a draft stream of its own."""
    adapter = lora.create(make_adapters(target, lora_layers), target, merged) if lora_layers else None
    return CircuitDrafter.create(*make_head(target, name, **numbers), draft_tokens, greedy_rule, adapter)


class Oracle(Drafter):
    """Knows the target's greedy text and drafts it rightly for a number of bytes that varies from cycle to cycle.

    truth: [B, L] int32, each row's whole greedy continuation. State: [B] int32, index in it of the block's first row.
    """

    truth: jax.Array
    width: int = struct.field(pytree_node=False)
    right: int | None = struct.field(pytree_node=False, default=None)  # right drafts per cycle; None varies them

    @property
    def block_width(self):
        return self.width

    @property
    def drafts_first(self):
        return True

    def init(self, target, prompt):
        return jnp.zeros_like(prompt.lengths)

    def propose(self, state, root, keys, warp):
        offsets = jnp.arange(self.width)
        noise = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(jax.random.key(0), i)))(state)
        right = (noise % self.width).astype(jnp.int32) if self.right is None else jnp.full_like(state, self.right)
        index = jnp.minimum(state[:, None] + offsets, self.truth.shape[1] - 1)
        truth = jnp.take_along_axis(self.truth, index, axis=1)
        good = (offsets <= right[:, None]) & ((right[:, None] > 0) | (root is not None))
        drafts = jnp.where(good, truth, (truth + 1) % 2)  # some other id
        if root is not None:
            return Draft(Block.chain(drafts.at[:, 0].set(root)))
        block = Block.chain(drafts)
        return Draft(block.replace(is_draft=jnp.ones_like(block.is_draft)))

    def observe(self, state, target, outcome):
        return state + outcome.accepted


class Tree(Oracle):
    """Proposes a tree of `width` nodes. In each cycle the right ids lie on random nodes, the others are random.

    static: whether the loop is told the parents when compiling. Every parent lies at most three rows back.
    """

    static: bool = struct.field(pytree_node=False, default=True)

    @property
    def drafts_first(self):
        return False

    @property
    def proposes_chains(self):
        return False

    def propose(self, state, root, keys, warp):
        parents = tuple(max(0, i - 1 - i % 3) for i in range(self.width))
        block = Block.tree(jnp.zeros((len(state), self.width), jnp.int32), parents)
        index = jnp.minimum(state[:, None] + block.depths(), self.truth.shape[1] - 1)
        right = jnp.take_along_axis(self.truth, index, axis=1)
        bits = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(jax.random.key(0), i), (self.width,)))(state)
        ids = jnp.where(bits % 4 > 0, right, (bits // 4 % 3).astype(jnp.int32)).at[:, 0].set(root)
        return Draft(block.replace(ids=ids, static_parents=parents if self.static else None))


class Bordered(llama.Llama):
    """A Llama whose blocks must end where a position is a multiple of 5, as those of a target with windows."""

    def room(self, cache):
        return 5 - cache.lengths % 5


def bordered(target):
    return Bordered(params=target.params, config=target.config, tokenizer=target.tokenizer)


def near_tie(target, prompt, ids, other, tolerance=1e-4):
    """Whether two greedy continuations first part where the target's two best logits differ by less than
    `tolerance`.
    """
    same = next(i for i, (a, b) in enumerate(zip(ids, other, strict=True)) if a != b)
    logits = target.logits(jnp.asarray([[*prompt, *ids[:same]]]))[0, -1]
    best = jax.lax.top_k(logits, 2)[0]
    return float(best[0] - best[1]) < tolerance
