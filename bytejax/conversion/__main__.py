"""`python -m bytejax.conversion`: see `bytejax.cli.convert`."""

import sys

from bytejax.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
