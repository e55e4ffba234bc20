"""The `train.py` command: a config file, `key=value` overrides, and an exit status that means something."""

import argparse
import sys
from collections.abc import Sequence

from bytejax.errors import InputError
from bytejax.training import config as configs
from bytejax.training import train

_EPILOG = "exit status: 0 done, 1 the loss became NaN or infinite, 2 wrong input, 130/143 interrupted with a checkpoint"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise InputError(f"{message}; usage: train.py CONFIG.yaml [key=value ...]")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one training config; see `docs/training.md`."""
    parser = _Parser(prog="train.py", description="Train a byte-level target or its heads.", epilog=_EPILOG)
    parser.add_argument("config", help="a YAML file, e.g. configs/train/demo_target.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. steps=100 optimizer.learning_rate=1e-3")
    try:
        args = parser.parse_args(argv)
        outcome = train.run(configs.load(args.config, args.overrides))
    except InputError as e:
        return _fail(str(e), 2)
    except train.DivergedError as e:
        return _fail(str(e), 1)
    return 0 if outcome.finished else 128 + outcome.stopped_by


def _fail(message: str, status: int) -> int:
    print(f"train.py: error: {message}", file=sys.stderr)
    return status
