"""The tables of the findings: `python docs/tables.py` writes each CSV of docs/findings/tables/ into its page.

A page shows a table between `<!-- table: tables/PAGE.csv -->` and `<!-- end -->`. Numbers are changed in the CSV only.
"""

import csv
import re
from pathlib import Path

FINDINGS = Path(__file__).resolve().parent / "findings"
MARKED = re.compile(r"(?<=<!-- table: )(tables/[\w-]+\.csv)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def markdown(path: Path) -> str:
    """Return the table of a CSV file in Markdown. Its first row holds the headers."""
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    if wrong := [row for row in rows if len(row) != len(header)]:
        raise ValueError(f"{path.name}: {wrong[0]}: has {len(wrong[0])} cells, the header has {len(header)}")
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]]) + "\n"


def filled(text: str, folder: Path = FINDINGS) -> str:
    """Return the text of a page in `folder`, with every marked table as its CSV has it."""
    return MARKED.sub(lambda found: f"{found[1]}{found[2]}\n{markdown(folder / found[1])}\n", text)


if __name__ == "__main__":
    for page in sorted(FINDINGS.glob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
