"""Trains a byte-level target or its heads: python train.py configs/train/demo_target.yaml [key=value ...]"""

from bytejax.cli.train import main

if __name__ == "__main__":
    raise SystemExit(main())
