"""The file of a benchmark's results: what they depend on in its first line, then a JSON object per line."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bytejax import checkpoints
from bytejax.errors import InputError

FORMAT = "bytejax-spec-bench"
Record = dict[str, Any]
Key = tuple[float, int | str, str]
FIELDS: dict[str, tuple[type, ...]] = {  # what the tables are made from
    "temperature": (int, float),
    "question_id": (int, str),
    "category": (str,),
    "drafter": (str,),
    "settings": (dict,),
    "tokens": (int,),
    "from_prompts": (int,),
    "target_forwards": (int,),
    "decode_seconds": (int, float),
    "accept_histogram": (list,),
    "autoregression": (dict,),
    "identical": (bool, type(None)),
    "differences": (list,),
}


def key(record: Record) -> Key:
    """What is measured once: (temperature, question, drafter)."""
    return record["temperature"], record["question_id"], record["drafter"]


@dataclasses.dataclass(frozen=True)
class File:
    """Results that are there, and a place for more.

    header: what every result depends on. found: those that were there when it was opened. size: bytes up to the last
        whole line.
    """

    path: Path
    header: Record
    found: list[Record]
    size: int

    @classmethod
    def open(cls, path: Path, header: Record, drafters: Mapping[str, Record]) -> "File":
        """Reads what a run before has left; a line that it did not finish counts for nothing.

        drafters: what their records must have, by name: "settings" and "files_sha256". Raises InputError for a file
        that is none of ours, and where the header or something of a drafter is another.
        """
        with checkpoints.file_errors(path):
            if not path.exists():
                return cls(path, header, [], 0)
            data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        rows = [_row(line, path, number) for number, line in enumerate(whole.splitlines(), 1)]
        is_header = lambda row: row.get("format") == FORMAT and isinstance(row.get("settings"), dict)
        ours = is_header(rows[0]) if rows else _line(header).startswith(data)
        if not ours:
            raise InputError(f"{path} is no file of benchmark results; give another out")
        if not rows:  # not even its first line was finished
            return cls(path, header, [], 0)
        changed = _changes(rows[0], header)
        for number, row in enumerate(rows[1:], 2):
            _check(row, f"{path}, line {number} is no result:")
            for name, wanted in drafters.get(row["drafter"], {}).items():
                if row.get(name) != wanted:
                    changed[f"drafters.{row['drafter']}.{name}"] = f"{row.get(name)} -> {wanted}"
        if changed:
            how = ", ".join(f"{name}: {change}" for name, change in changed.items())
            raise InputError(f"{path} was made with other settings ({how}); give another out, or remove it")
        return cls(path, header, rows[1:], len(whole))

    def start(self) -> None:
        """Makes the file ready for `append`."""
        with checkpoints.file_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.truncate(self.size)
                if self.size == 0:
                    file.write(_line(self.header))

    def append(self, records: Iterable[Record]) -> None:
        with checkpoints.file_errors(self.path), self.path.open("ab") as file:
            file.write(b"".join(map(_line, records)))


def _check(row: Record, where: str) -> None:
    """Raises InputError for a record that the tables cannot be made from."""
    if missing := FIELDS.keys() - row.keys():
        raise InputError(f"{where} it has no {', '.join(sorted(missing))}")
    for name, kinds in FIELDS.items():
        if type(row[name]) not in kinds:
            raise InputError(f"{where} {name} is {row[name]!r}")
    numbers = [*row["accept_histogram"], *(x for side in row["autoregression"].values() for x in _figures(side, where))]
    if not all(isinstance(x, int | float) for x in numbers):
        raise InputError(f"{where} accept_histogram or autoregression holds what is no number")


def _figures(side: Any, where: str) -> list[Any]:
    if not isinstance(side, dict) or not {"tokens", "decode_seconds"} <= side.keys():
        raise InputError(f"{where} autoregression is without tokens or decode_seconds")
    return [side["tokens"], side["decode_seconds"]]


def _changes(old: Record, new: Record) -> dict[str, str]:
    old, new = old.get("settings", {}), new["settings"]
    names = [name for name in (*new, *(old.keys() - new.keys())) if old.get(name) != new.get(name)]
    return {name: f"{old.get(name)} -> {new.get(name)}" for name in names}


def _row(line: bytes, path: Path, number: int) -> Record:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}, line {number} is not JSON ({e})") from None
    if not isinstance(row, dict):
        raise InputError(f"{path}, line {number} is not a JSON object")
    return row


def _line(record: Record) -> bytes:
    return json.dumps(record).encode() + b"\n"
