"""Completion in a shell: the options that Hydra finds, without `_target_`, and also inside the brackets of a
list."""

import re
from collections.abc import Iterable
from typing import NamedTuple

LIST = re.compile(r"([\w/]+=)(\[(?:\w+,)*)(\w*)")
"""A list that is being typed: its key, the options that are complete, the beginning of the next one."""


class CommandLine(NamedTuple):
    """A command line up to the cursor."""

    before: str
    """All but the last word, with the space after it."""
    word: str

    @property
    def plugins(self) -> list[str]:
        """The values of `plugins=`."""
        return [word.partition("=")[2] for word in self.before.split() if word.startswith("plugins=")]

    def line(self) -> str:
        """The line that Hydra completes: it knows the options of a list by its key alone."""
        listing = LIST.fullmatch(self.word)
        return f"{self.before}{listing[1] if listing else self.word}"

    def offers(self, found: Iterable[str]) -> list[str]:
        """Of what Hydra finds that which can follow."""
        found = [each for each in found if not re.search(r"(^|\.)_\w+_=", each)]
        listing = LIST.fullmatch(self.word)
        if listing is None:
            return found
        key, chosen, begun = listing.groups()
        names = [each.removeprefix(key) for each in found]
        return [
            f"{key}{chosen}{name}" for name in names if name.startswith(begun) and name not in chosen[1:].split(",")
        ]


def typed(line: str) -> CommandLine:
    """The command line that a shell hands over in COMP_LINE."""
    before, space, word = line.rpartition(" ")
    return CommandLine(before + space, word)
