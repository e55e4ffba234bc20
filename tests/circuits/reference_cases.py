"""Reader of the reference's fixtures: from its fold tables to our layout."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import safetensors.numpy

from bytejax.circuits import Circuit, Theta, make
from bytejax.circuits.btree import block_of
from bytejax.circuits.head import HeadConfig

FOLDER = Path(__file__).parents[1] / "fixtures" / "mtpc"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


@dataclasses.dataclass(frozen=True)
class Case:
    """One fixture: its circuit, its head in our layout, and the tensors of io.safetensors."""

    circuit: Circuit
    head: HeadConfig
    params: dict[str, np.ndarray]
    io: dict[str, np.ndarray]
    eos: int
    meta: dict

    def pack(self, leaves: np.ndarray, sums: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Fold-ordered leaves [n, r, ...] and sum tensors [F_k, out, r, ...] -> our leaves and sums [z, r, ...]."""
        packed = {"leaves": leaves[np.argsort(self.meta["fold_to_position"])]}
        if self.circuit.rank > 1:
            blocks = {self._block(row): sums[row["tensor"]][row["fold"]] for row in self.meta["sum_fold_table"]}
            packed["sums"] = np.concatenate([blocks[k] for k in range(self.circuit.blocks)])
        return packed

    def theta(self, prefix: str = "") -> Theta:
        """The stored parameters (`prefix` chooses variants) with their batch axes flattened and in front."""
        sums = [self.io[f"{prefix}sum.{k}"] for k in range(len(self.meta["sum_weights_shapes"]))]
        leaves = self.io[f"{prefix}categorical.0"]
        batch = leaves.ndim - 3

        def unfold(x):  # [F, batch..., a, b] -> [F, a, b, N]
            return np.moveaxis(x.reshape(x.shape[0], -1, *x.shape[-2:]), 1, -1)

        assert batch in (1, 2)
        packed = self.pack(unfold(leaves), [unfold(x) for x in sums])
        with np.errstate(divide="ignore"):
            log_sums = np.log(packed.get("sums", np.ones((1, 1, packed["leaves"].shape[-1]), np.float32)))
        return Theta(*(np.moveaxis(x, -1, 0) for x in (log_sums, packed["leaves"])))

    def _block(self, row: dict) -> int:
        if self.circuit.name == "hmm":
            transition = re.match(r"A_(\d+):", row["meaning"])
            return int(transition[1]) if transition else 0
        return block_of(self.circuit.window)[tuple(row["region"])] if self.circuit.name == "btree" else 0


def load(name: str) -> Case:
    meta = json.loads((FOLDER / name / "config.json").read_text())
    model, io = (safetensors.numpy.load_file(FOLDER / name / f"{part}.safetensors") for part in ("model", "io"))
    spec = meta["circuit"]
    rank = spec["n_component"]
    circuit = make("ff" if rank == 1 else spec["kind"], spec["n_token"], rank)
    config = HeadConfig(circuit, meta["mt_head"]["n_embd"], spec["vocab_size"], adapter_rank=None)
    case = Case(circuit, config, {}, io, meta["eos_id"], meta)
    case.params.update(case.pack(*head_tensors(model)))
    return case


def head_tensors(tensors: dict[str, np.ndarray], prefix: str = "") -> tuple[np.ndarray, list[np.ndarray]]:
    """Leaves and sums of a state dict under the reference's names (its gradients have a prefix)."""
    kind = prefix + "mt_head._{}_heads.{}.head.proj"
    sums = []
    while kind.format("sum_weights", len(sums)) in tensors:
        sums.append(tensors[kind.format("sum_weights", len(sums))])
    return tensors[kind.format("categorical_log_probs", 0)], sums
