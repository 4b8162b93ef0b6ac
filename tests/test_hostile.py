"""Many forged folders of transformers: none is taken silently, none hangs, and none runs code."""

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import mhaprune
from support.guests import write_models

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


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guests")
    write_models(folder, "bert", "gpt2")
    return folder


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
