"""python -m mhaprune experiment=ablate"""

import sys

from mhaprune.api.to_lab import lab

if __name__ == "__main__":
    try:
        command_line = lab("cli.command_line")
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}")
    sys.exit(command_line.main())
