"""Generates text several bytes per forward pass: python decode.py [--prompt TEXT] [--compare], or --help"""

from bytejax.cli.decode import main

if __name__ == "__main__":
    raise SystemExit(main())
