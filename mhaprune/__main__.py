"""python -m mhaprune experiment=ablate"""

import sys

from mhaprune.front.command_line import main

if __name__ == "__main__":
    sys.exit(main())
