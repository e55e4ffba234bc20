"""Trains a byte-level target or its heads: python train.py configs/train/demo_target.yaml [key=value ...]"""

import signal

if __name__ == "__main__":
    interrupted = signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once and quietly while JAX is imported
    from bytejax.cli import common
    from bytejax.cli.train import main

    signal.signal(signal.SIGINT, interrupted)
    common.leave(main())
