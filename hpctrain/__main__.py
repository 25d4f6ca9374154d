"""`python -m hpctrain` is the `hpctrain` command."""

from __future__ import annotations

import sys

from hpctrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
