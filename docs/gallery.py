"""The gallery: `python docs/gallery.py` makes every picture anew, `python docs/gallery.py heads speed` only these and
others of the same commands.

A picture is one figure of one command, which runs as `mhaprune.run`. The picture goes to docs/pictures/. Its caption
and the first sentence of the run go into docs/pictures/gallery.json. The page is made from that file. The report of
some commands is kept whole in docs/reports/.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

PICTURES = Path(__file__).resolve().parent / "pictures"
NOTES = PICTURES / "gallery.json"
LARGEST_SVG = 150_000
"""In bytes. A larger figure is kept as PNG."""


REPORTS = PICTURES.parent / "reports"


class Picture(NamedTuple):
    """A picture of the gallery, and the command that makes it."""

    name: str
    """The name of the file, without its ending, and of the place on the page."""
    title: str
    """The words under the small picture."""
    figure: str
    """The name of the figure in the run."""
    command: str
    """The arguments of scripts/run.py."""
    report: str = ""
    """The name under which the report of the command is kept whole; empty if it is not kept."""


REVERSE = 'experiment=explain task=reverse example="3 1 4 1 5 9"'
PRUNE = (
    "experiment=prune task=reverse schedule=one_shot 'scorer=[ablation]' 'recovery=[refit,fine_tune]'"
    " 'experiment.budgets=[12,15,18,20,21,22]'"
)
WORTH = (
    "experiment=prune schedule=one_shot 'scorer=[ablation]'"
    " 'recovery=[refit,fine_tune,from_scratch]' recovery.from_scratch.draws=1 'experiment.budgets=[12,18,20,21,22]'"
)
COMPARE = "experiment=compare 'scorer=[gate,gate_output,ablation,taylor,fisher,random]' 'schedule=[one_shot,greedy]'"
MINILM = (
    "experiment=ablate model=minilm model.score=64 model.choose=64 model.report=64"
    " 'scorer=[ablation,gate_output,random]' experiment.tolerance=0.05 'experiment.budgets=[0.125,0.25,0.375,0.5,0.75]'"
)
SMOLLM2 = (
    "plugins=[mhaprune_models] experiment=explain model=smollm2 objective=indirect_object model.score=128"
    " model.choose=2 model.report=128 'experiment.examples=[0,1,2,3,4]'"
)
LIST = (
    Picture("heads", "Which heads can be removed", "matter", "experiment=ablate", report="sort"),
    Picture("accuracy", "Accuracy, score by score", "accuracy", "experiment=ablate"),
    Picture("latency", "Speed-up, score by score", "latency", "experiment=ablate"),
    Picture("shift", "Fewer heads on other examples", "shift", "experiment=ablate"),
    Picture("agreement", "Do cheap scores agree with ablation?", "agreement", "experiment=ablate"),
    Picture("training", "A training, with the gate of every head", "training", "experiment=ablate"),
    Picture("minilm-heads", "The 72 heads of MiniLM", "matter", MINILM),
    Picture("minilm-accuracy", "MiniLM with fewer heads", "accuracy", MINILM),
    Picture("heads-of-inflection", "Heads that inflect English words", "matter", "experiment=ablate task=inflection"),
    Picture("attention", "What cross-attention looks at", "attention-0-cross", REVERSE, report="reverse"),
    Picture(
        "attention-sort",
        "Sorting looks by content",
        "attention-0-cross",
        'experiment=explain task=sort example="3 1 4 1 5 9"',
    ),
    Picture(
        "attention-inflection",
        "Inflecting looks at the same place",
        "attention-0-cross",
        'experiment=explain task=inflection example="w a l k verb3"',
    ),
    Picture("patterns", "Where every head looks", "patterns", REVERSE),
    Picture("recovery", "What a refit and training bring back", "recovery", PRUNE),
    Picture("worth", "Pruned, or small from the start", "worth", WORTH),
    Picture("regret", "Which score to trust", "regret", COMPARE),
    Picture("speed", "Speed-up at three widths", "speedup", "experiment=speed"),
    Picture("smollm2", "The 270 heads of a language model", "patterns", SMOLLM2, report="smollm2"),
)


def page() -> str:
    """Return the pictures that are there: a grid of small ones, then each with its command, sentence and caption."""
    notes = _notes()
    there = [picture for picture in LIST if picture.name in notes]
    cards = (
        f":::{{grid-item-card}} {each.title}\n:img-top: pictures/{notes[each.name]['file']}\n:link: {each.name}\n"
        f":link-type: ref\n:img-alt: {each.title}\n:::\n"
        for each in there
    )
    large = (
        f"({each.name})=\n## {each.title}\n\n```\n{line(each)}\n```\n\n> {notes[each.name]['sentence']}\n\n"
        f"[![{each.title}](pictures/{notes[each.name]['file']})](pictures/{notes[each.name]['file']})\n\n"
        f"*{notes[each.name]['caption']}*\n"
        for each in there
    )
    return "\n".join(["::::{grid} 1 2 3 3\n:gutter: 3\n", *cards, "::::\n", *large])


def line(picture: Picture) -> str:
    """Return the command as a person types it."""
    return f"python scripts/run.py {picture.command}"


def renew(names: Sequence[str] = ()) -> None:
    """Run the commands of these pictures, or of all, each command once, and keep what all pictures of it show and
    say."""
    import mhaprune

    if wrong := set(names) - {picture.name for picture in LIST}:
        raise SystemExit(f"error: {wrong.pop()}: no such picture, there are {', '.join(each.name for each in LIST)}")
    commands = {picture.command for picture in LIST if not names or picture.name in names}
    wanted = [picture for picture in LIST if picture.command in commands]
    for command, pictures in groupby(sorted(wanted, key=lambda each: each.command), key=lambda each: each.command):
        print(f"python scripts/run.py {command}", file=sys.stderr)
        found = mhaprune.run(*shlex.split(command))
        for picture in pictures:
            if picture.figure not in found.figures:
                raise SystemExit(f"error: {command}: has no figure {picture.figure}, only {', '.join(found.figures)}")
            keep(picture, found.figures[picture.figure], found.sentences[0])
            if picture.report:
                REPORTS.mkdir(exist_ok=True)
                (REPORTS / f"{picture.report}.html").write_text(
                    found.page({"command": line(picture)}), encoding="utf-8"
                )


def keep(picture: Picture, plot: Any, sentence: str) -> None:
    """Write the picture of a `Plot` and its words in the place of the old ones."""
    for old in PICTURES.glob(f"{picture.name}.*"):
        old.unlink()
    file, data = f"{picture.name}.svg", plot.svg
    if len(data) > LARGEST_SVG:
        file, data = f"{picture.name}.png", plot.png
    (PICTURES / file).write_bytes(data)
    notes = _notes() | {picture.name: {"file": file, "caption": plot.caption, "sentence": sentence}}
    NOTES.write_text(json.dumps(dict(sorted(notes.items())), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _notes() -> dict[str, dict[str, str]]:
    notes: dict[str, dict[str, str]] = json.loads(NOTES.read_text(encoding="utf-8")) if NOTES.exists() else {}
    return notes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the pictures to make, default: all")
    renew(parser.parse_args().names)
