"""Where a run tells how it goes: `metrics.jsonl`, a progress bar on a terminal, plain lines elsewhere, and TensorBoard
where tensorboardX is installed."""

import importlib.util
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Log:
    """Appends JSON lines and keeps the screen up to date. Used as a context manager.

    first: the step that the run continues from; what an interrupted run recorded after it is dropped.
    """

    def __init__(self, path: Path, steps: int, first: int, console: Console | None = None):
        self._path, self._console = path, console or Console(file=sys.stderr)
        columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn()]
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console)
        self._task = self._bar.add_task("training", total=steps, completed=first, text="compiling")
        self._steps, self._first, self._began = steps, first, time.monotonic()
        self._board, self._lowest = None, {}

    def __enter__(self) -> "Log":
        before = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        kept = [line for line in before if line.endswith("\n") and json.loads(line)["step"] <= self._first]
        self._path.write_text("".join(kept))
        self._file = self._path.open("a")
        for record in map(json.loads, kept):
            if record["kind"] == "validation":
                self._improved(record)
        if importlib.util.find_spec("tensorboardX"):
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(self._path.parent / "tensorboard"), purge_step=self._first + 1)
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()
        self._file.close()
        if self._board:
            self._board.close()

    def step(self, metrics: Mapping[str, float], headline: str) -> None:
        """One training record, with step and bytes_per_second: written, and shown as a bar or a line."""
        self._write({"kind": "train"} | dict(metrics))
        done = int(metrics["step"])
        loss = sum(x for k, x in metrics.items() if k.startswith("loss/"))
        speed = metrics["bytes_per_second"] / 1e3
        text = f"loss {loss:.3f}  bits/byte {metrics[headline]:.3f}  {speed:.1f} kB/s"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, text=text)
        else:
            left = (time.monotonic() - self._began) / max(done - self._first, 1) * (self._steps - done)
            self.say(f"step {done}/{self._steps}  {text}  left {duration(left)}")

    def validation(self, metrics: Mapping[str, float], batches: int | None) -> list[str]:
        """One validation record, on so many batches, None for all there are.

        -> the members whose loss is lower than in any earlier record on as many batches.
        """
        record = {"kind": "validation", "batches": batches} | dict(metrics)
        self._write(record)
        shown = "  ".join(f"{k} {x:.3f}" for k, x in metrics.items() if k.endswith("bits_per_byte"))
        self.say(f"step {int(metrics['step'])}  held out: {shown}")
        return self._improved(record)

    def _improved(self, record: Mapping[str, object]) -> list[str]:
        better = []
        for key, loss in record.items():
            name, same = key.removeprefix("loss/"), (key, record.get("batches"))
            if name != key and math.isfinite(float(loss)) and float(loss) < self._lowest.get(same, math.inf):
                self._lowest[same] = float(loss)
                better.append(name)
        return better

    def say(self, text: str) -> None:
        """A line for people."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _write(self, record: Mapping[str, object]) -> None:
        finite = {k: (x if not isinstance(x, float) or math.isfinite(x) else str(x)) for k, x in record.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()
        for name, x in record.items():
            if self._board and name not in ("kind", "step", "batches"):
                self._board.add_scalar(f"{record['kind']}/{name}", x, int(record["step"]))


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"
