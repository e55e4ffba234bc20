"""Corpora and batches: which bytes, held out from which, with which labels, in which order."""

import json

import numpy as np
import pytest

from bytejax.errors import InputError
from bytejax.training import corpus, data
from bytejax.training.corpus import BOS, EOS
from bytejax.training.losses import IGNORE


@pytest.fixture(scope="module")
def stdlib():
    return corpus.stdlib()


def test_stdlib_is_the_same_every_time(stdlib):
    again = corpus.stdlib()
    assert again.info == stdlib.info
    np.testing.assert_array_equal(again.train, stdlib.train)
    assert list(stdlib.train_names) == sorted(stdlib.train_names)


def test_stdlib_holds_out_whole_modules(stdlib):
    assert not set(stdlib.train_names) & set(stdlib.held_out_names)
    assert {"textwrap.py", "json/decoder.py"} <= set(stdlib.held_out_names)
    assert 0.02 < len(stdlib.held_out) / len(stdlib.train) < 0.04
    documents = stdlib.train.astype("<u2").tobytes()
    for name in ("textwrap.py", "json/decoder.py"):
        start = int(np.flatnonzero(stdlib.held_out == BOS)[stdlib.held_out_names.index(name)])
        assert stdlib.held_out[start + 1 : start + 400].astype("<u2").tobytes() not in documents


def test_stdlib_has_neither_tests_nor_other_packages(stdlib):
    parts = {part for name in stdlib.train_names for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    assert not any("_sysconfigdata" in name for name in stdlib.train_names)
    assert {"argparse.py", "collections"} <= parts


def test_streams_are_documents_between_bos_and_eos(tmp_path):
    for name, content in {"a.txt": b"one", "b.bin": b"\xff\x00", "c.txt": b"held"}.items():
        (tmp_path / name).write_bytes(content)
    texts = corpus.files([str(tmp_path / "*")], [str(tmp_path / "c.*")])
    assert texts.train.tolist() == [BOS, *b"one", EOS, BOS, 255, 0, EOS]
    assert texts.held_out.tolist() == [BOS, *b"held", EOS]
    assert (texts.info["train_bytes"], texts.info["held_out_bytes"]) == (5, 4)


def test_globs_without_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="nothing-here.* matches no file"):
        corpus.files([str(tmp_path / "nothing-here*")], [])
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(InputError, match="held out"):
        corpus.files([str(tmp_path / "a")], [str(tmp_path / "*")])


def test_labels_are_the_next_ids_and_never_bos():
    stream = np.array([BOS, 1, 2, EOS, BOS, 3, EOS], np.uint16)
    got = data.cut(stream, 0, 7)
    assert got["ids"].tolist() == stream.tolist()
    assert got["labels"].tolist() == [1, 2, EOS, IGNORE, 3, EOS, IGNORE]


def test_an_epoch_sees_everything_once_and_the_next_is_cut_elsewhere():
    stream = np.arange(120, dtype=np.uint16)
    it = data.batches(stream, 8, 3, seed=5)
    epochs = [np.concatenate([next(it)["ids"] for _ in range(5)]) for _ in range(2)]
    for rows in epochs:
        assert sorted(rows.ravel()) == list(range(120))
    starts = [sorted(rows[:, 0] % 8) for rows in epochs]
    assert len(set(starts[0])) == len(set(starts[1])) == 1
    assert starts[0] != starts[1]
    assert not np.array_equal(np.argsort(epochs[0][:, 0]), np.arange(15))


def test_an_iterator_continues_from_its_saved_state():
    stream = np.arange(200, dtype=np.uint16)
    one, other = data.batches(stream, 8, 3, 0), data.batches(stream, 8, 3, 0)
    for _ in range(11):  # into the second epoch
        next(one)
    other.set_state(json.loads(json.dumps(one.get_state())))
    for _ in range(3):
        a, b = next(one), next(other)
        np.testing.assert_array_equal(a["ids"], b["ids"])
        np.testing.assert_array_equal(a["labels"], b["labels"])


def test_a_corpus_too_small_for_one_batch_is_refused():
    with pytest.raises(InputError, match="too few for one batch of 4 x 8"):
        data.batches(np.zeros(20, np.uint16), 8, 4, 0)


@pytest.mark.parametrize("length", [7, 8, 50])
def test_validation_asks_for_every_id_once(length):
    stream = np.arange(50, dtype=np.uint16)
    labels = np.concatenate([b["labels"].ravel() for b in data.validation_batches(stream, length, 2, None)])
    assert sorted(labels[labels != IGNORE]) == list(range(1, 50))


def test_validation_batches_are_spread_and_alike():
    stream = np.arange(160, dtype=np.uint16)
    chosen = list(data.validation_batches(stream, 8, 2, 3))
    assert [int(b["ids"][0, 0]) for b in chosen] == [0, 64, 144]
    assert {b["ids"].shape for b in chosen} == {(2, 8)}
    assert list(data.validation_batches(stream[:0], 8, 2, None)) == []
