"""Read saved models in a new process, and compare their outputs with those from before.

`python research/read_folders.py FOLDER` reads every model in FOLDER with `mhaprune.load`. With `--alone` transformers
reads them as the README.md in each folder says, and mhaprune cannot be imported. Beside the folder NAME stands NAME.pt
with a batch and the outputs. It prints JSON: for each name the largest difference relative to the largest output, or
an error. families.py runs it.

Made docs/findings/families.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tiny_models import MODELS

ALONE = re.compile(r"^`(\w+)\.from_pretrained\(folder, trust_remote_code=True\)`$", re.MULTILINE)
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
    """Read a folder as a user without mhaprune does: one with code as its README.md says, any other by its class."""
    import transformers

    readme = folder / "README.md"
    if readme.exists() and (named := ALONE.search(readme.read_text())):
        return getattr(transformers, named[1]).from_pretrained(folder, trust_remote_code=True)
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder)


def read(folder: Path, name: str, kind: str) -> nn.Module:
    """Read a folder by `mhaprune.load`. What is no plain model of transformers is built anew, with other weights."""
    import mhaprune

    if not (folder / "removal.json").exists():
        return mhaprune.load(folder)
    return mhaprune.load(folder, model=MODELS[name].make(kind, seed=1))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--alone", action="store_true", help="by transformers, without mhaprune")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if find_spec("transformers") is not None:
        importlib.import_module("transformers").logging.disable_progress_bar()
    if chosen.alone:
        sys.modules["mhaprune"] = None  # type: ignore[assignment]  # every import of it fails now
    found: dict[str, float | str] = {}
    for file in tqdm(sorted(chosen.folder.glob("*.pt")), desc="read alone" if chosen.alone else "read"):
        folder, before = file.with_suffix(""), torch.load(file)
        try:
            if (folder / "modules.json").exists():
                from sentence_transformers import SentenceTransformer

                model: nn.Module = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
            elif not chosen.alone:
                model = read(folder, before["name"], before["kind"])
            elif (folder / "config.json").exists():
                model = read_alone(folder)
            else:  # its own code is needed, and mhaprune
                continue
            found[folder.name] = difference(outputs(model, before["batch"]), before["outputs"])
        except Exception as error:  # it is what is asked for
            found[folder.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
