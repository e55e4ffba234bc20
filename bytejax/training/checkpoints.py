"""Checkpoints: everything an exact resume needs, written with Orbax.

A checkpoint holds the state (parameters, optimiser, moving average, step) and a record: the position of the data
iterator, the config, the identity of corpus and target. Orbax renames a checkpoint into place when it is complete, so
that an interrupted write is never picked up.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from bytejax.errors import InputError
from bytejax.training import config as configs
from bytejax.training.step import State


class Checkpoints:
    """The checkpoints of one work directory, numbered by step; the last `keep` stay."""

    def __init__(self, workdir: Path, keep: int):
        self.directory = workdir.absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_names=("state", "record"))

    def save(self, state: State, record: dict[str, Any]) -> None:
        """Writes a checkpoint at the state's step, unless that step is there already."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
        self._manager.save(step, args=items, force=True)
        self._manager.wait_until_finished()

    def restore(self, like: State, record: dict[str, Any]) -> tuple[State, dict[str, Any]] | None:
        """The newest complete checkpoint and its record, or None where there is none.

        like: a state of the expected shapes and dtypes. record: this run's; a checkpoint whose config or inputs differ
        is refused with an InputError that names what differs.
        """
        step = self.latest
        if step is None:
            return None
        where = self.directory / str(step)
        try:
            saved = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record
        except (ValueError, OSError, KeyError) as e:
            raise InputError(f"{where} is not readable ({_first_line(e)}); remove it to use the one before") from None
        self._refuse_others(where, saved, record)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            state = self._manager.restore(step, args=items).state
        except (ValueError, OSError, KeyError) as e:
            raise InputError(f"{where} is not readable ({_first_line(e)}); remove it to use the one before") from None
        return state, saved

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def close(self) -> None:
        self._manager.close()

    def _refuse_others(self, where: Path, saved: dict[str, Any], ours: dict[str, Any]) -> None:
        problems = configs.differences(saved["config"], ours["config"])
        old, new = saved["inputs"], ours["inputs"]
        problems += [f"{k}: {old.get(k)} -> {new.get(k)}" for k in sorted(old | new) if old.get(k) != new.get(k)]
        if saved["dtypes"] != ours["dtypes"]:  # Orbax would cast without a word
            problems.append(f"dtypes: {saved['dtypes']} -> {ours['dtypes']}")
        if problems:
            raise InputError(f"{where} is of another run ({'; '.join(problems)}); use another workdir")


def dtypes(state: State) -> list[str]:
    """Dtypes that occur in a state, sorted."""
    return sorted({str(x.dtype) for x in jax.tree.leaves(state)})


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:200]
