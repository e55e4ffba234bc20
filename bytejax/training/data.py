"""From a stream of ids to batches, with Grain: cut, shuffle, repeat, batch, and a state that a checkpoint can hold.

A batch is {"ids": [B, T] int32, "labels": [B, T] int32}; the label of a position is the next id, or IGNORE
where that is bos: nothing can be said about which document comes next.
"""

from collections.abc import Iterator

import grain
import numpy as np

from bytejax.errors import InputError
from bytejax.training.corpus import BOS
from bytejax.training.losses import IGNORE

Batch = dict[str, np.ndarray]


def cut(stream: np.ndarray, start: int, length: int) -> Batch:
    """`length` ids from `start` on, the stream being a circle, with next-byte labels."""
    window = np.take(stream, np.arange(start, start + length + 1), mode="wrap").astype(np.int32)
    return {"ids": window[:-1], "labels": np.where(window[1:] == BOS, IGNORE, window[1:])}


def batches(stream: np.ndarray, length: int, batch: int, seed: int) -> grain.DatasetIterator:
    """Endless batches. Every epoch sees each id once, in another order and cut at another offset.

    The iterator's `get_state` and `set_state` continue with exactly the batch that would have come.
    """
    count = len(stream) // length
    if count < batch:
        raise InputError(
            f"the corpus has {len(stream)} bytes: too few for one batch of {batch} x {length}; "
            "lower data.batch or data.sequence_length"
        )

    def sequence(index: int, _) -> Batch:
        epoch, place = divmod(index, count)
        offset = np.random.default_rng([seed, epoch]).integers(length)
        return cut(stream, int(offset) + place * length, length)

    # Shuffling comes after the map so that the map's index still tells the epoch.
    sequences = grain.MapDataset.range(count).map_with_index(sequence).shuffle(seed=seed).repeat()
    return iter(sequences.batch(batch).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


def validation_batches(stream: np.ndarray, length: int, batch: int, count: int | None) -> Iterator[Batch]:
    """At most `count` batches spread evenly over the stream, None for all: each id is asked for once, in a fixed order.

    All batches have the same shape; rows that fill up the last one have no labels.
    """
    starts = np.arange(0, max(len(stream) - 1, 0), length)
    rows = [cut(stream, int(s), length) for s in starts]
    if rows:  # the last cut must not run on into the beginning
        rows[-1]["labels"][len(stream) - 1 - starts[-1] :] = IGNORE
    empty = {"ids": np.zeros(length, np.int32), "labels": np.full(length, IGNORE, np.int32)}
    groups = [rows[i : i + batch] for i in range(0, len(rows), batch)]
    if count is not None and count < len(groups):
        groups = [groups[int(i)] for i in np.linspace(0, len(groups) - 1, count).round()]
    for group in groups:
        group = group + [empty] * (batch - len(group))
        yield {k: np.stack([row[k] for row in group]) for k in empty}
