"""`python -m recom_jax`: see `recom_jax.cli`."""

import sys

from recom_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
