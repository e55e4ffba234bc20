"""The `train.py` command: a config file, `key=value` overrides, and an exit status that means something."""

import sys
from collections.abc import Sequence

from bytejax.cli import common
from bytejax.training import config as configs
from bytejax.training import train

_EPILOG = "exit status: 0 done, 1 the loss became NaN or infinite, 2 wrong input, 130/143 interrupted with a checkpoint"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one training config; see `docs/training.md`. -> exit status."""
    return common.run(lambda: _train(argv))


def _train(argv: Sequence[str] | None) -> int:
    description = "Train a byte-level target or its heads."
    parser = common.Parser(prog="train.py", description=description, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("config", help="a YAML file, e.g. configs/train/demo_target.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. steps=100 optimizer.learning_rate=1e-3")
    args = parser.parse_args(argv)
    try:
        outcome = train.run(configs.load(args.config, args.overrides))
    except train.DivergedError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0 if outcome.finished else 128 + outcome.stopped_by
