"""The EAGLE-3 head: drafting against its training forward, trees, lossless text, training, files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bytejax
from bytejax import InputError, loading, parameters
from bytejax.decoding import loop
from bytejax.decoding.logits import make_warp
from bytejax.drafters import eagle_head
from bytejax.drafters.eagle import Eagle
from bytejax.drafters.eagle_head import EagleConfig, default_taps
from tests.decoding import tiny
from tests.decoding.tiny import bordered, near_tie

PROMPTS = [[1, 2, 3], [4] * 17, [7]]
LONG = 48  # ids of a text, padding included: what follows changes nothing
NUMBERS = {"heads": 4, "kv_heads": 2, "head_dim": 6, "ffn_width": 20, "rope_theta": 300.0, "norm_eps": 1e-3}


def make_target(**changes):
    """Over so few ids that a random head is sometimes right."""
    return tiny.make_target(**({"vocab": 9} | changes))


def make_eagle(target, seed=3, **options):
    """A random head, its laws as sharp as the target's so that some drafts are likely."""
    taps = default_taps(target.config.layers)
    config = EagleConfig(width=target.width, vocab=target.vocab, taps=taps, **NUMBERS)
    params = parameters.init(eagle_head.table(config), jax.random.key(seed))
    params |= {"head": params["head"] * 3.0, "o": params["o"] * 3.0, "down": params["down"] * 3.0}
    params = jax.tree.map(lambda x: x.astype(target.params["embedding"].dtype), params)
    return Eagle.create(params, config, target, **({"beam": 3, "depth": 4, "nodes": 16} | options))


def warp(target, temperature=0.0):
    return make_warp(target.vocab, temperature, 0, 1.0)


def outputs(target, drafter, texts):
    """The training forward: the layer's outputs at every step, [B, steps, T, D]; texts [B] of any lengths."""
    ids = jnp.asarray([[*text, *[0] * (LONG - len(text))] for text in texts])
    return forward(target, drafter, jnp.pad(ids, ((0, 32 - len(ids)), (0, 0))))


@jax.jit
def forward(target, drafter, ids):
    inner = target.tapped_states(ids, drafter.taps)[1]
    steps = eagle_head.unrolled(drafter.params, drafter.config, inner, target.embed(ids), drafter.depth)
    return jnp.stack(steps, axis=1)


def begun(target, drafter, prompts, limit=40):
    """The loop's state after ragged prompts, and a jitted cycle."""
    rules = loop.Rules(warp(target), jnp.zeros((0,), jnp.int32))
    ids = jnp.asarray([p + [0] * (20 - len(p)) for p in prompts])
    lengths, keys = jnp.asarray([len(p) for p in prompts]), jax.random.split(jax.random.key(0), len(prompts))
    limits = jnp.full((len(prompts),), limit)
    start = jax.jit(lambda *args: loop.start(target, drafter, rules, *args, capacity=128, room=64))
    return start(ids, lengths, limits, keys), jax.jit(lambda state: loop.cycle(target, drafter, rules, state))


def test_drafting_is_the_training_forward():
    """After the prompts and after cycles with ragged acceptance: the root's output and those of every expanded node."""
    target = make_target()
    drafter = make_eagle(target)
    state, cycle = begun(target, drafter, PROMPTS)
    grow = jax.jit(lambda state, root: drafter.grow(state, root, warp(target)))
    accepts = set()
    for _ in range(4):
        grown = jax.device_get(grow(state.draft, state.root))
        texts, places = [], []
        for row, text in enumerate(written(state)):
            assert text[-1] == state.root[row] and state.cache.lengths[row] == len(text) - 1
            for node in expanded(grown, row, drafter):
                path = []
                while node >= 0:
                    path.insert(0, int(grown.ids[row, node]))
                    node = grown.parents[row, node]
                texts.append(text + path)
                places.append((len(path), len(text) - 2))  # the newest column whose next id is known
        whole = np.asarray(outputs(target, drafter, texts))
        want = np.stack([whole[i, step, column] for i, (step, column) in enumerate(places)])
        np.testing.assert_allclose(grown.outputs.reshape(want.shape), want, atol=3e-5)
        before, state = state.count, cycle(state)
        accepts |= set((state.count - before).tolist())
    assert len(accepts) > 1


def written(state):
    """Prompts and what follows them so far."""
    return [[*p, *ids[:n].tolist()] for p, ids, n in zip(PROMPTS, np.asarray(state.out), state.count, strict=True)]


def expanded(grown, row, drafter):
    """Candidates whose outputs `grown` has, in order; -1 for the root."""
    w, nodes = drafter.beam, [-1, *range(drafter.beam)]
    for level in range(drafter.depth - 2):
        begin = w + level * w * w
        best = np.argsort(-grown.scores[row, begin : begin + w * w], kind="stable")[:w]
        nodes += (begin + best).tolist()
    return nodes


@pytest.mark.parametrize("options", [{}, {"beam": 1, "depth": 3, "nodes": 4}, {"beam": 5, "depth": 1, "nodes": 6}])
def test_trees_hold_the_likeliest_paths_with_their_parents(options):
    target = make_target()
    drafter = make_eagle(target, **options)
    state, cycle = begun(target, drafter, PROMPTS)
    state = cycle(cycle(state))
    both = lambda s: (drafter.grow(s.draft, s.root, warp(target)), drafter.propose(s.draft, s.root, None, warp(target)))
    grown, draft = jax.jit(both)(state)
    block = draft.block
    parents, depths = np.asarray(block.parents), np.asarray(block.depths())
    assert (parents[:, 0] == 0).all() and (parents[:, 1:] < np.arange(1, drafter.nodes)).all()
    assert depths.max() <= drafter.depth and block.max_levels == drafter.depth + 1
    assert (block.ids[:, 0] == state.root).all() and block.is_draft[:, 1:].all()
    for row, text in enumerate(written(state)):
        best, paths = np.sort(np.asarray(grown.scores[row]))[::-1][: drafter.nodes - 1], []
        for node in range(1, drafter.nodes):
            path = []
            while node:
                path.insert(0, int(block.ids[row, node]))
                node = parents[row, node]
            paths.append(path)
        g = outputs(target, drafter, [text + path for path in paths])[:, :, len(text) - 2]
        law = np.asarray(jax.nn.log_softmax(eagle_head.logits(drafter.params, drafter.config, g)))
        found = [law[i, np.arange(len(path)), path].sum() for i, path in enumerate(paths)]
        np.testing.assert_allclose(sorted(found, reverse=True), best, atol=1e-4)
        siblings = set(zip(parents[row, 1:].tolist(), block.ids[row, 1:].tolist(), strict=True))
        assert len(siblings) == drafter.nodes - 1


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_that_of_autoregression(temperature, batch):
    """Sampling too: the choice at every position has that position's noise."""
    target = make_target(sharpness=1.0 if temperature else 3.0)
    drafter, prompts = make_eagle(target), PROMPTS[:batch]
    options = dict(max_new_tokens=60, temperature=temperature, seed=5)
    plain = bytejax.generate(target, prompts, **options)
    drafted = bytejax.generate(target, prompts, drafter=drafter, **options)
    for prompt, a, b in zip(prompts, plain.ids, drafted.ids, strict=True):
        assert a == b or (temperature == 0 and near_tie(target, prompt, a, b))
    assert drafted.stats.target_forwards < plain.stats.target_forwards
    assert drafted.stats.accepted > 0 and len([n for n in drafted.stats.accept_histogram if n]) > 1


@pytest.mark.parametrize("make", [bordered, lambda target: target.stacked()], ids=["bordered", "stacked"])
def test_cut_blocks_and_stacked_layers(make):
    target = make_target()
    plain = bytejax.generate(target, PROMPTS, max_new_tokens=40)
    drafted = bytejax.generate(make(target), PROMPTS, drafter=make_eagle(target), max_new_tokens=40)
    for prompt, a, b in zip(PROMPTS, plain.ids, drafted.ids, strict=True):
        assert a == b or near_tie(target, prompt, a, b)


def test_rows_that_end_early_leave_the_others_alone():
    target = make_target()
    drafter = make_eagle(target)
    alone = [bytejax.generate(target, [p], drafter=drafter, max_new_tokens=40).ids[0] for p in PROMPTS]
    limits = [40, 3, 22]
    together = bytejax.generate(target, PROMPTS, drafter=drafter, max_new_tokens=limits)
    for prompt, a, b, limit in zip(PROMPTS, alone, together.ids, limits, strict=True):
        assert a[:limit] == b or near_tie(target, prompt, a[:limit], b)


def test_what_does_not_fit_is_refused(tmp_path):
    target = make_target()
    drafter = make_eagle(target)
    loading.save_eagle(tmp_path, target, drafter.config, drafter.params, jnp.float32)
    others = {
        "width 24, the target 12": make_target(width=12),
        "vocab 9, the target 23": make_target(vocab=23),
        "reads layer 2; the target has 1": make_target(layers=1),
        "trained on another target": make_target(seed=1),
    }
    for message, other in others.items():
        with pytest.raises(InputError, match=message) as error:
            bytejax.load_drafter(tmp_path, other)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="width 24, the target 12"):
        bytejax.generate(make_target(width=12), [[1]], drafter=drafter)
    with pytest.raises(InputError, match="'tokens' is unknown; known: beam, depth, nodes"):
        bytejax.load_drafter(tmp_path, target, tokens=3)
    for options, message in (
        ({"beam": 0}, "beam must be an integer of at least 1"),
        ({"beam": 10}, "beam = 10 is more than the target's 9 ids"),
        ({"beam": 2, "depth": 2, "nodes": 8}, "try 6 drafts, too few for 8 nodes"),
    ):
        with pytest.raises(InputError, match=message):
            bytejax.load_drafter(tmp_path, target, **options)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"config": {}}))
    with pytest.raises(InputError, match="does not describe an EAGLE head"):
        bytejax.load_drafter(tmp_path, target)


def test_what_is_saved_drafts_as_before(tmp_path):
    target = make_target()
    drafter = make_eagle(target, beam=2, depth=3, nodes=7)
    loading.save_eagle(tmp_path, target, drafter.config, drafter.params, jnp.float32)
    loaded = bytejax.load_drafter(tmp_path, target.stacked(), beam=2, depth=3, nodes=7)
    assert loaded.config == drafter.config and loaded.block_width == 7 and loaded.rules == ("match",)
    options = dict(max_new_tokens=30)
    want, got = (bytejax.generate(target, PROMPTS, drafter=d, **options) for d in (drafter, loaded))
    assert got.ids == want.ids and got.stats.accept_histogram == want.stats.accept_histogram


def test_weights_keep_the_names_of_the_reference():
    target = make_target()
    drafter = make_eagle(target)
    table = eagle_head.table(drafter.config)
    tensors = parameters.to_reference(table, drafter.params)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (24, 48) and tensors["fc.weight"].shape == (24, 48)
    back = parameters.from_reference(table, tensors)
    assert all((back[name] == drafter.params[name]).all() for name in drafter.params)


@pytest.mark.parametrize(
    ("layers", "taps"), [(1, (1,)), (2, (1, 2)), (5, (1, 3, 5)), (15, (2, 7, 12)), (32, (2, 16, 29))]
)
def test_layers_that_are_read(layers, taps):
    assert default_taps(layers) == taps
