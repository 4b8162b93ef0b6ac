"""Run an experiment: `python scripts/run.py experiment=ablate`; sweep with -m, see every setting with --cfg job."""

from __future__ import annotations

import sys

from mhaprune.lab.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
