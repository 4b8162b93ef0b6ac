"""Hundreds of damaged, forged and planted files: none is taken silently, none hangs, and none runs code."""

import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mhaprune
from mhaprune.lab.cli.command_line import main
from mhaprune.lab.runs.collecting import collect
from mhaprune.lab.sources.texts import read_rows
from mhaprune.storage.cache import Cache
from mhaprune.storage.seals import sealed
from support.commands import run_here
from support.damage import flipped
from support.guests import write_models
from support.sizes import TINY, TINY_SEQUENCES

pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore")]
SECONDS = 20
"""A call that takes longer hangs."""
SILENT, HUNG, RAW, CODE, REFUSED = "silent", "hung", "raw", "code run", "refused"
RAN = Path("/tmp") / f"mhaprune-ran-{os.getpid()}"
"""A file that code in a file would make."""


class Hung(BaseException):
    """A call that does not end."""


class Harmful:
    """Runs code where it is read without care."""

    def __reduce__(self) -> Any:
        return Path.touch, (RAN,)


@contextmanager
def limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(act: Callable[[], object], same: Callable[[Any], bool] = lambda found: False) -> str:
    """Return how an attempt ended. Its result must be what was there before the damage, by `same`."""
    RAN.unlink(missing_ok=True)
    try:
        with limited():
            found = act()
    except Hung:
        return HUNG
    except ValueError as error:
        return CODE if RAN.exists() else REFUSED if "\n" not in str(error) else RAW
    except Exception:
        return CODE if RAN.exists() else RAW
    return CODE if RAN.exists() else "same" if same(found) else SILENT


def check(counts: Counter[str], least: int) -> None:
    print(dict(counts))
    assert counts.total() >= least
    assert [counts[each] for each in (SILENT, HUNG, CODE, RAW)] == [0, 0, 0, 0], counts


def flip_300(files: Sequence[Path], load: Callable[[], Any], same: Callable[[Any], bool] = lambda found: False) -> None:
    """Flip a bit of one of the files, which then becomes what it was, 300 times."""
    draw, counts = random.Random(0), Counter[str]()
    for _ in range(300):
        path = draw.choice(files)
        whole = path.read_bytes()
        path.write_bytes(flipped(whole, draw))
        counts[outcome(load, same)] += 1
        path.write_bytes(whole)
    check(counts, 300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its model, beside its cache."""
    folder = tmp_path_factory.mktemp("trained")
    places = [f"hydra.run.dir={folder / 'run'}", f"cache={folder / 'cache'}"]
    done = run_here(main, "experiment=train", *TINY, *TINY_SEQUENCES, *places)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of transformers; `pruned` is one that `mhaprune.save` wrote."""
    folder = tmp_path_factory.mktemp("guests")
    write_models(folder, "bert", "gpt2")
    batch = {"input_ids": torch.tensor([[2, 5, 6, 3]]), "labels": torch.tensor([1])}
    heads = mhaprune.wrap(mhaprune.load(folder / "bert"), mhaprune.losses.classification, score=[batch])
    small = heads.subject.without(mhaprune.HeadMask(heads.grid).without(heads.grid.heads[0]))
    mhaprune.save(small.model, folder / "pruned")
    return folder


def test_300_flips_in_a_cache_file(tmp_path: Path) -> None:
    """It is made anew each time."""
    content = {"weights": torch.arange(300.0)}

    def get() -> tuple[list[int], Any]:
        made: list[int] = []

        def make(state: Any, save: Any) -> dict[str, Any]:
            made.append(1)
            return content

        return made, Cache(tmp_path).get("trained", {"a": 1}, make)

    def same(got: Any) -> bool:
        return got[0] == [1] and torch.equal(got[1]["weights"], content["weights"])

    get()
    flip_300(list(tmp_path.glob("*.pt")), get, same)


def test_links_and_pipes_in_every_place(trained: Path, tmp_path: Path) -> None:
    """A file behind a link stays as it was, and is not made where there was none."""
    places = (".lock", "run.log", ".hydra", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml")
    places += ("status.json", "accuracy.csv", "figures", "report.html", "environment.json", "model.pt")
    counts, cache = Counter[str](), trained / "cache"
    [lock] = (path.name for path in cache.glob("trained-*.lock"))
    attempts = [("run", name) for name in places] + [("cache", lock), ("cache", lock.replace(".lock", ".pt"))]
    attempts += [("out", name) for name in (".lock", "status.json", "runs.csv", "report.html", "index.html", "figures")]
    for i, (where, name) in enumerate(attempts):
        for kind in ("link", "dangling", "folder", "pipe"):
            home = tmp_path / f"{i}-{kind}"
            path, precious = home / where / name, home / "precious"
            path.parent.mkdir(parents=True)
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "folder":
                precious.mkdir()
                path.symlink_to(precious)
            else:
                precious.write_text("mine") if kind == "link" else None
                path.symlink_to(precious)

            def act(home: Path = home, where: str = where) -> None:
                if where == "out":
                    collect([trained / "run"], home / "out")
                    return
                used = home / "cache" if where == "cache" else cache
                settings = [*TINY, *TINY_SEQUENCES, f"hydra.run.dir={home / 'run'}", f"cache={used}"]
                done = run_here(main, "experiment=train", *settings)
                if done.returncode:
                    raise ValueError(done.stderr.splitlines()[-1])

            def untouched(_: object, kind: str = kind, precious: Path = precious) -> bool:
                if kind == "folder":
                    return not list(precious.iterdir())
                return precious.read_text() == "mine" if kind == "link" else not precious.exists()

            result = outcome(act, untouched)
            counts[SILENT if kind != "pipe" and not untouched(None) else result] += 1
    check(counts, 60)


def test_300_flips_in_a_model_file(trained: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(trained / "run" / "model.pt", tmp_path))
    flip_300([path], lambda: mhaprune.load(path))


def test_300_flips_in_a_saved_folder(guests: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(guests / "pruned", tmp_path / "pruned"))
    before = mhaprune.load(folder).state_dict()

    def same(found: Any) -> bool:
        """A flip in the list of checksums itself may be in a blank."""
        return all(torch.equal(value, before[name]) for name, value in found.state_dict().items())

    flip_300(sorted(path for path in folder.iterdir() if path.is_file()), lambda: mhaprune.load(folder), same)


def forged_configs(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One value that cannot be under each key that decides the shapes of the weights."""
    shapes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "n_embd", "n_layer", "n_head")
    for key in (*shapes, "intermediate_size", "max_position_embeddings", "n_positions"):
        if key in config:
            for value in ("x", -1, 10**12, [1, 1], {"a": 1}, 2**31, 3.5):
                yield config | {key: value}
    for key, values in {
        "architectures": (5, ["load_tool"], ["PreTrainedModel"], ["Nosuch"], [[]], {"a": 1}),
        "model_type": ("zzz", 5, None, ["bert"], "gpt_neox"),
        "auto_map": (5, {"AutoConfig": 5}),
        "mhaprune": (5, {}, {"version": 1}, {"version": 1, "shapes": {"x": [1]}, "attributes": {}, "heads": {}}),
        "quantization_config": (5, {"quant_method": "gptq"}),
    }.items():
        for value in values:
            yield config | {key: value}


def test_forged_folders(guests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No config of them is that of the weights. Loaded is only one that changes nothing, and gives the same answers."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    counts, batch = Counter[str](), torch.tensor([[2, 5, 6, 3]])
    for name in ("bert", "gpt2"):
        folder = Path(shutil.copytree(guests / name, tmp_path / name))
        config = json.loads((folder / "config.json").read_text())
        with torch.no_grad():
            before = mhaprune.load(folder)(input_ids=batch).logits

        def same(found: Any, before: Any = before) -> bool:
            with torch.no_grad():
                return torch.equal(found(input_ids=batch).logits, before)

        for forged in forged_configs(config):
            (folder / "config.json").write_text(json.dumps(forged))
            counts[outcome(lambda folder=folder: mhaprune.load(folder), same)] += 1
        for text in ("[1]", "[" * 100_000, "{", "", "\0", "null", '"x"'):
            (folder / "config.json").write_text(text)
            counts[outcome(lambda folder=folder: mhaprune.load(folder))] += 1
        code = f"from pathlib import Path\nPath({str(RAN)!r}).touch()\nclass C: pass\nM = C\n"
        (folder / "modeling_x.py").write_text(code)
        for kind in ("zzz", config["model_type"]):
            named = {"AutoConfig": "modeling_x.C", "AutoModel": "modeling_x.M", "AutoModelForCausalLM": "modeling_x.M"}
            forged = config | {"model_type": kind, "auto_map": named, "architectures": ["M"]}
            (folder / "config.json").write_text(json.dumps(forged))
            counts[outcome(lambda folder=folder: mhaprune.load(folder))] += 1
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").unlink()
        torch.save({"x": Harmful()}, folder / "pytorch_model.bin")
        counts[outcome(lambda folder=folder: mhaprune.load(folder))] += 1
        os.mkfifo(folder / "model.safetensors")
        counts[outcome(lambda folder=folder: mhaprune.load(folder))] += 1
    check(counts, 120)


def test_forged_model_files(trained: Path, tmp_path: Path) -> None:
    content = torch.load(trained / "run" / "model.pt", weights_only=True)
    settings, counts = content["settings"], Counter[str]()
    forged: list[dict[str, Any]] = [{key: value} for key in content for value in (None, 5, [5], {5: 5}, Harmful())]
    for part in ("task", "model", "gate", "training"):
        forged += [{"settings": settings | {part: value}} for value in (5, {"_target_": "os.system"}, {}, [])]
    for key in settings["model"]:
        forged += [{"settings": settings | {"model": settings["model"] | {key: value}}} for value in ("x", 2**31, -1)]
    source, prefix = torch.tensor([[3, 4, 5]]), torch.tensor([[1, 3]])
    before = mhaprune.load(trained / "run" / "model.pt")(source, prefix)
    for changes in forged:
        (tmp_path / "m.pt").write_bytes(sealed(content | changes))
        load = partial(mhaprune.load, tmp_path / "m.pt")
        counts[outcome(load, lambda found: torch.equal(found(source, prefix), before))] += 1
    check(counts, 60)


NOT_CSV = (
    *(b'text\n"a\n', b"text\na,b\n", b"text,label\na\n", b"label\n0\n", b"text\n", b"\n", b""),
    *(b"text\n" + b"a" * 200_000, b"text\n\xff\xfe", b"text\n  \n", b"\0", b'text\n"a"b\n'),
    *(f"text,{name},{name}\na,0,1\n".encode() for name in ("label", "target", "text")),
)
NOT_TEXT = (b"", b"\n\n", b" \t ", b"\xff\xfea", b"\x0b\x0c", "\u2028\u0085".encode(), b"\xef\xbb\xbf")
NOT_JSON = (b"[", b"{", b"5", b"null", b'"a"', b"[" * 100_000, b'{"a":' * 1000 + b"1" + b"}" * 1000, b"\xff", b"\0")
NOT_TEXTS = ("null", "[]", "{}", "true", "NaN", "Infinity", '""', '"  "', '"\\ud800"', '["a", "b"]')
NOT_ROWS = (b"", b"\n", b'{"text": "a", "text": "b"}', b'{"text": "a"} {"text": "b"}', b"{}")
LATER = (
    *(text.encode() for value in NOT_TEXTS for text in (f'{{"text": {value}}}', f'{{"text": "b", "label": {value}}}')),
    *NOT_JSON,
)
"""What is wrong in the second line only."""
TEXTS: tuple[tuple[str, bytes], ...] = (
    *((".csv", text) for text in NOT_CSV),
    *((".txt", text) for text in NOT_TEXT),
    *((".jsonl", text) for text in (*NOT_ROWS, *(b'{"text": "a"}\n' + text for text in LATER))),
    *((name, b"a") for name in (".pdf", "", ".TXT", ".csv.gz")),
)


def test_60_files_of_texts(tmp_path: Path) -> None:
    counts, taken = Counter[str](), []
    for i, (kind, data) in enumerate(TEXTS):
        path = tmp_path / f"{i}{kind}"
        path.write_bytes(data)
        needed = ["label"] if b"label" in data else []
        result = outcome(lambda path=path, needed=needed: read_rows(str(path), *needed))
        counts[result] += 1
        taken += [data[:60]] if result == SILENT else []
    for kind in (".txt", ".csv", ".jsonl"):
        os.mkfifo(tmp_path / f"pipe{kind}")
        counts[outcome(lambda kind=kind: read_rows(str(tmp_path / f"pipe{kind}")))] += 1
    assert not taken
    check(counts, 60)
