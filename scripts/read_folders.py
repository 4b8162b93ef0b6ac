"""Read saved models in a new process, and compare their outputs with those from before.

`python scripts/read_folders.py FOLDER` reads every model in FOLDER with `mhaprune.load`. With `--alone` transformers
reads them as the README.md in each folder says, and mhaprune cannot be imported. Beside the folder NAME stands NAME.pt
with a batch and the outputs. It prints JSON: for each name the largest difference relative to the largest output, or
an error. Used by families.py, so nothing here imports mhaprune before it must.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

ALONE = re.compile(r"`(\w+)\.from_pretrained\(folder, trust_remote_code=True\)` reads it")
"""The line in the README.md of a saved folder that names the class which reads it."""


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model with a dict by name, or with anything else as its one argument."""
    by_name = isinstance(batch, Mapping) and not hasattr(model, "encode")  # a SentenceTransformer takes the dict
    return model(**batch) if by_name else model(batch)


def numbers_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of real numbers in an output, however they are nested. Caches of keys and values are none."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping | list | tuple):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from numbers_in(part)


@torch.no_grad()
def outputs(model: nn.Module, batch: Any) -> Tensor:
    """Return all numbers that a model answers, as one row. Models that draw random numbers draw the same each time."""
    torch.manual_seed(0)
    return torch.cat([value.flatten() for value in numbers_in(call(model.eval(), batch))])


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest output; NaN for outputs that are not finite or all 0."""
    return float((found - expected).abs().max() / expected.abs().max())


def read_alone(folder: Path) -> nn.Module:
    """Read a folder as a user without mhaprune does: a plain one by its class, one with code as its README.md says."""
    import transformers

    readme = folder / "README.md"
    if readme.exists() and (named := ALONE.search(readme.read_text())):
        return getattr(transformers, named[1]).from_pretrained(folder, trust_remote_code=True)
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder)


def read(folder: Path) -> nn.Module:
    """Read a folder by `mhaprune.load`; one of a model of one's own needs its code, with other weights."""
    import mhaprune
    from other_models import OTHERS

    other = OTHERS.get(folder.name.partition("-")[0])
    return mhaprune.load(folder, model=other.make(seed=1) if (folder / "removal.json").exists() and other else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--alone", action="store_true", help="by transformers, without mhaprune")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, float | str] = {}
    if chosen.alone:
        sys.modules["mhaprune"] = None  # type: ignore[assignment]  # every import of it fails now
    for noted in tqdm(sorted(chosen.folder.glob("*.pt")), desc="read alone" if chosen.alone else "read"):
        folder, before = noted.with_suffix(""), torch.load(noted)
        if chosen.alone and not (folder / "config.json").exists():
            continue
        try:
            model = (read_alone if chosen.alone else read)(folder)
            found[folder.name] = difference(outputs(model, before["batch"]), before["outputs"])
        except Exception as error:  # it is what is asked for
            found[folder.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
