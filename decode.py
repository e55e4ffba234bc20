"""Generates text several bytes per forward pass: python decode.py [--prompt TEXT] [--compare], or --help"""

import signal

if __name__ == "__main__":
    interrupted = signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once and quietly while JAX is imported
    from bytejax.cli import common
    from bytejax.cli.decode import main

    signal.signal(signal.SIGINT, interrupted)
    common.leave(main())
