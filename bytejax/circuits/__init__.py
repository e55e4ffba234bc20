"""Distributions over a window of bytes (MtPC, arXiv 2511.11346), and the head that parameterises them."""

from bytejax.circuits.base import Circuit, Theta
from bytejax.circuits.btree import BTree
from bytejax.circuits.cp import CP
from bytejax.circuits.ff import FF
from bytejax.circuits.hmm import HMM
from bytejax.errors import InputError

__all__ = ["BTree", "CP", "Circuit", "FF", "HMM", "Theta", "make"]

CIRCUITS = {circuit.name: circuit for circuit in (FF, CP, HMM, BTree)}


def make(name: str, window: int, rank: int = 1) -> Circuit:
    """The circuit called `name` ("ff", "cp", "hmm", "btree"). Raises InputError on an unknown name or a bad number."""
    if name not in CIRCUITS:
        raise InputError(f"unknown circuit {name!r}: choose one of {', '.join(CIRCUITS)}")
    if name != FF.name:
        return CIRCUITS[name](window, rank)
    if rank != 1:
        raise InputError(f"circuit ff has rank 1, got {rank!r}: leave the rank out, or choose cp for a mixture")
    return FF(window)
