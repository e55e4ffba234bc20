"""The Llama target: against transformers, cached against whole, blocks, trees, rollback, layouts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytejax import InputError, parameters
from bytejax.models import layouts, llama
from bytejax.models.base import Block
from bytejax.tokenizers import ByteTokenizer

CONFIGS = {
    "untied": llama.Config(29, 24, 3, 6, 2, 10, 44, 777.0, 3e-3, False, 200, False, None),
    "qk norm, tied": llama.Config(31, 40, 2, 5, 5, 6, 36, 2.5e4, 1e-6, True, 200, True, None),
    "one kv head, scaled": llama.Config(
        33, 18, 4, 3, 1, 12, 20, 1e4, 1e-5, False, 200, False, llama.RopeScaling(7.0, 1.5, 3.0, 40)
    ),
}


def make(name, dtype=jnp.float32, seed=0, **changes):
    config = dataclasses.replace(CONFIGS[name], **changes)
    target = llama.create(config, jax.random.key(seed), ByteTokenizer(config.vocab, 0, None, (), ()))
    spread = jax.tree.map(lambda x: x * (1 + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape)), target.params)
    return target.replace(params=jax.tree.map(lambda x: x.astype(dtype), spread))


def random_ids(target, *shape, seed=1):
    return jax.random.randint(jax.random.key(seed), shape, 0, target.vocab)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name):
    import torch
    import transformers

    c = CONFIGS[name]
    family = "Qwen3" if c.qk_norm else "Llama"
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    if s := c.rope_scaling:
        rope |= {"rope_type": "llama3", "factor": s.factor, "original_max_position_embeddings": s.original_context}
        rope |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    reference = getattr(transformers, family + "ForCausalLM")(
        getattr(transformers, family + "Config")(
            vocab_size=c.vocab,
            hidden_size=c.width,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_dim,
            intermediate_size=c.ffn_width,
            rope_parameters=rope,
            rms_norm_eps=c.norm_eps,
            tie_word_embeddings=c.tied,
            max_position_embeddings=c.context,
        )
    ).eval()
    target = make(name)
    state = parameters.to_reference(llama.table(c), target.params)
    if c.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    reference.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in state.items()}, strict=True)
    ids = random_ids(target, 2, 50)
    with torch.no_grad():
        want = reference(torch.from_numpy(np.array(ids)).long()).logits.numpy()
    np.testing.assert_allclose(target.logits(ids), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 9])
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_blocks_equal_the_whole_sequence(name, batch, unrolled):
    """Ragged prompts, then blocks of which every number of rows from 0 to all is kept."""
    target = make(name).unrolled() if unrolled else make(name)
    width, total = 4, 60
    ids = random_ids(target, batch, total)
    whole = target.logits(ids)
    lengths = 5 + 3 * jnp.arange(batch) % 11
    prefilled, cache = target.prefill(ids[:, :16], lengths, target.init_cache(batch, total, width))
    rows = jnp.arange(batch)
    np.testing.assert_allclose(target.unembed(prefilled.hidden)[:, 0], whole[rows, lengths - 1], atol=2e-4)
    extend, commit = jax.jit(lambda t, b, c: t.extend(b, c)), jax.jit(lambda t, c, p, q, a: t.commit(c, p, q, a))
    path = jnp.broadcast_to(jnp.arange(width), (batch, width))
    for cycle in range(9):
        positions = cache.lengths[:, None] + jnp.arange(width)
        keep = (rows + cycle) % (width + 1)
        good = jnp.arange(width) < jnp.maximum(keep, 1)[:, None]
        block = Block.chain(jnp.where(good, jnp.take_along_axis(ids, positions, 1), 0))
        extended = extend(target, block, cache)
        want = jnp.take_along_axis(whole, positions[..., None], 1)
        logits = target.unembed(extended.hidden)
        np.testing.assert_allclose(logits[good], want[good], atol=2e-4)
        before = cache.lengths
        cache = commit(target, cache, extended.pending, path, keep)
        np.testing.assert_array_equal(cache.lengths, before + keep)


@pytest.mark.parametrize("unrolled", [False, True])
def test_a_tree_is_its_paths_and_keeps_the_accepted_one(unrolled):
    target = make("untied").unrolled() if unrolled else make("untied")
    ids = random_ids(target, 2, 30)
    prompt, lengths = ids[:, :9], jnp.asarray([9, 6])
    _, cache = target.prefill(prompt, lengths, target.init_cache(2, 40, 6))
    parents = ((0, 0, 0, 1, 2, 4), (0, 0, 1, 1, 0, 4))
    tree = Block(
        ids=random_ids(target, 2, 6, seed=5),
        parents=jnp.asarray(parents),
        valid=jnp.ones((2, 6), bool),
        is_draft=jnp.ones((2, 6), bool),
    )
    extended = target.extend(tree, cache)
    logits = target.unembed(extended.hidden)
    paths = []
    for row in range(2):
        for node in range(6):
            path = [node]
            while path[0]:
                path.insert(0, parents[row][path[0]])
            text = [*ids[row, : lengths[row]].tolist(), *tree.ids[row, jnp.asarray(path)].tolist()]
            np.testing.assert_allclose(logits[row, node], target.logits([text])[0, -1], atol=2e-4)
            paths.append((row, path, text))
    kept = [p for p in paths if (p[0], p[1][-1]) in ((0, 5), (1, 3))]
    path = jnp.asarray([(p + [0] * 6)[:6] for _, p, _ in kept])
    cache = target.commit(cache, extended.pending, path, jnp.asarray([len(p) for _, p, _ in kept]))
    after = target.extend(Block.chain(jnp.full((2, 3), 7)), cache)
    for row, _, text in kept:
        want = target.logits([text + [7, 7, 7]])[0, -3:]
        np.testing.assert_allclose(target.unembed(after.hidden)[row], want, atol=2e-4)


def test_a_static_tree_equals_the_same_tree_given_at_run_time():
    target = make("qk norm, tied")
    _, cache = target.prefill(random_ids(target, 1, 7), jnp.asarray([7]), target.init_cache(1, 20, 5))
    parents = (0, 0, 0, 2, 3)
    dynamic = Block(random_ids(target, 1, 5), jnp.asarray([parents]), jnp.ones((1, 5), bool), jnp.ones((1, 5), bool))
    static = dynamic.replace(static_parents=parents)
    np.testing.assert_array_equal(static.depths(), dynamic.depths())
    np.testing.assert_array_equal(target.extend(static, cache).hidden, target.extend(dynamic, cache).hidden)


def test_rows_given_as_embeddings_equal_rows_given_as_ids():
    target = make("untied")
    _, cache = target.prefill(random_ids(target, 1, 7), jnp.asarray([7]), target.init_cache(1, 20, 3))
    ids = random_ids(target, 1, 3)
    embeds = Block.chain(ids * 0).replace(embeds=target.embed(ids), embeds_mask=jnp.ones((1, 3), bool))
    np.testing.assert_array_equal(target.extend(Block.chain(ids), cache).hidden, target.extend(embeds, cache).hidden)


def test_long_prompts_are_attended_in_chunks():
    target = make("one kv head, scaled")
    ids = random_ids(target, 1, 1280)
    prefilled, _ = target.prefill(ids, jnp.asarray([1275]), target.init_cache(1, 1280, 1))
    np.testing.assert_allclose(target.unembed(prefilled.hidden)[0, 0], target.logits(ids)[0, 1274], atol=2e-4)


@pytest.mark.parametrize("name", ["untied", "qk norm, tied"])
def test_layouts_do_not_change_the_logits(name):
    target = make(name, vocab=32)
    ids = random_ids(target, 2, 20)
    panels = target.in_panels(2)
    np.testing.assert_allclose(panels.logits(ids), target.logits(ids), atol=1e-5)
    assert {x.ndim for x in jax.tree.leaves(panels.params["layers"])} == {1, 3}
    assert panels.params[target.unembedding].ndim == 3
    np.testing.assert_array_equal(panels.embed(ids), target.embed(ids))
    np.testing.assert_array_equal(panels.embedding_table(), target.params["embedding"])
    for form in (panels.unrolled(), panels.stacked()):
        np.testing.assert_allclose(form.logits(ids), target.logits(ids), atol=1e-5)
        np.testing.assert_array_equal(form.params[target.unembedding], target.params[target.unembedding])


def test_the_layout_suits_the_rows_of_a_block(monkeypatch):
    stacked = make("untied")
    assert stacked.for_blocks(60) is stacked
    panels = stacked.in_panels(2)
    assert panels.for_blocks(1) is panels.for_blocks(16) is panels
    assert panels.for_blocks(17).layout_names == ("[in, out]",)
    monkeypatch.setattr(layouts, "SMALL", 16)  # bytes: its kernels are then large ones
    assert panels.for_blocks(8) is panels and panels.for_blocks(9).layout_names == ("[in, out]",)


def test_ids_that_fill_no_panels_leave_the_unembedding_as_it_is():
    target = make("qk norm, tied")
    assert target.in_panels(2).params["embedding"] is target.params["embedding"]


def test_bfloat16_stays_close_and_keeps_its_dtype():
    exact, half = make("untied"), make("untied", jnp.bfloat16)
    ids = random_ids(exact, 1, 30)
    assert half.states(ids).dtype == jnp.bfloat16 and half.logits(ids).dtype == jnp.float32
    p, q = (jax.nn.softmax(t.logits(ids)) for t in (exact, half))
    assert float(jnp.abs(p - q).max()) < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [(dict(kv_heads=4), "not a multiple"), (dict(head_dim=5), "odd"), (dict(layers=0), "at least 1")],
)
def test_impossible_numbers_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIGS["untied"], **changes)


@pytest.mark.parametrize("name", ["qk norm, tied", "one kv head, scaled"])
def test_residuals_are_of_every_layer_and_of_rows_in_the_place_of_others(name):
    target = make(name)
    ids = random_ids(target, 2, 12)
    stream = target.residuals(ids)
    assert stream.shape == (target.config.layers + 1, 2, 12, target.width)
    np.testing.assert_array_equal(stream[0], target.embed(ids))
    np.testing.assert_allclose(target._norm(stream[-1], target.params["final_norm"]), target.states(ids), atol=1e-4)
    other = random_ids(target, 2, 3, seed=9)
    at = jnp.asarray([[0, 5, 11], [3, 3, 8]])
    both = target.residuals(ids, target.embed(other), at)
    np.testing.assert_allclose(both[:, :, :12], stream, atol=1e-4)
    rows, columns = np.repeat(np.arange(2), 3), at.reshape(-1)
    replaced = ids[rows].at[np.arange(6), columns].set(other.reshape(-1))
    want = target.residuals(replaced)[:, np.arange(6), columns]
    np.testing.assert_allclose(both[:, :, 12:].reshape(want.shape), want, atol=2e-4)
    unrolled = target.unrolled().residuals(ids, target.embed(other), at)
    np.testing.assert_allclose(unrolled, both, atol=1e-4)
