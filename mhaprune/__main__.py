"""python -m mhaprune experiment=ablate"""

import sys

from mhaprune.lab.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
