"""``python -m hf_accum_fix``: the command line."""

from __future__ import annotations

import sys

from hf_accum_fix.cli import main

if __name__ == "__main__":
    sys.exit(main())
