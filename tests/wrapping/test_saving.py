"""Folders of models that are not, or not only, models of transformers."""

import copy
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mhaprune
from mhaprune.heads import HeadMask
from mhaprune.saving.folders import CHECKSUMS
from support.attention import WIDTH, Attention, Stack, X, square

VOCABULARY = 11


class Layers(nn.Module):
    """Attention of torch.nn in its own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(ids)).mean(dim=1))
        return logits


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"heads": 4}  # a plain dict, as many have it
        self.embed, self.attention = nn.Embedding(VOCABULARY, WIDTH), Stack(Attention, Attention, Attention)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.attention(self.embed(ids)).mean(dim=1)
        return out


@pytest.fixture
def bert() -> Any:
    transformers = pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY, **sizes)).eval()


def built(kind: type[nn.Module] = Layers, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind().eval()


IDS = torch.arange(12).reshape(3, 4) % VOCABULARY


def called(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        said: Tensor = model(**batch) if isinstance(batch, dict) else model(batch)
    return said


@pytest.mark.parametrize("kind", [Layers, Own])
def test_a_model_of_ones_own_comes_back_with_the_heads_it_has_left(kind: Any, tmp_path: Path) -> None:
    heads = mhaprune.wrap(built(kind), square, score=[IDS])
    first, *_, last = heads.grid.blocks
    lost = [head for head in heads.grid if head.block == first or (head.block == last and head.head == 1)]
    once = mhaprune.wrap(heads.prune(mask=[heads.grid.heads[0]]), square, score=[IDS])
    twice = once.prune(mask=lost[1:])
    mhaprune.save(twice, tmp_path / "small")
    fresh = built(kind, seed=1)
    before = copy.deepcopy(fresh.state_dict())
    again = mhaprune.load(tmp_path / "small", model=fresh)
    assert torch.equal(called(again, IDS), called(twice, IDS))
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())
    third = mhaprune.wrap(again, square, score=[IDS])
    assert list(third.grid) == [head for head in heads.grid if head not in lost]  # their names of old
    gated = heads.subject.in_double()
    mask = HeadMask(heads.grid).without(*lost, third.grid.heads[0])
    smaller = third.subject.in_double().without(HeadMask(third.grid).without(third.grid.heads[0]))
    with gated.gated(len(IDS), mask.gates().double()):
        torch.testing.assert_close(called(smaller.model, IDS), called(gated.model, IDS))


def test_no_file_is_in_memory_as_a_whole(tmp_path: Path) -> None:
    """As bytes of Python, which a model of many GB would need twice."""
    model: Any = built()
    model.embed = nn.Embedding(100_000, WIDTH)
    small = mhaprune.wrap(model, square, score=[IDS]).prune(mask={0: [1]})
    tracemalloc.start()
    try:
        mhaprune.save(small, tmp_path)
        mhaprune.load(tmp_path, model=model)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < (tmp_path / "weights.pt").stat().st_size / 4


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """The system refuses a file of more bytes, as a disk without room does."""
    small = mhaprune.wrap(built(), square, score=[IDS]).prune(mask={0: [1]})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/weights.pt'"):
            mhaprune.save(small, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    model = built()
    heads = mhaprune.wrap(model, square, score=[IDS])
    mhaprune.save(heads.prune(mask={0: [1, 2]}), folder := tmp_path / "small")

    def refused(message: str, **given: Any) -> None:
        with pytest.raises(ValueError, match=message) as error:
            mhaprune.load(folder, **given)
        assert "\n" not in str(error.value)

    refused(r"holds the weights of a Layers, give one: mhaprune.load\(path, model=Layers\(...\)\)")
    refused("does not fit the model=Own, must be the Layers before any removal, .*no attribute", model=built(Own))
    refused("does not fit the model=Layers", model=heads.prune(mask={0: [1, 2]}))
    for file in sorted({*folder.iterdir()} - {folder / "README.md"}):  # which people edit
        whole = file.read_bytes()
        for place in range(3, len(whole), max(1, len(whole) // 25)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            refused("damaged", model=model)
        file.write_bytes(whole)
    (folder / CHECKSUMS).unlink()  # as one does who changes a file on purpose
    (folder / "removal.json").write_text("{}")
    refused("removal.json is damaged", model=model)
    (tmp_path / "file").write_text("")
    for path in ("file", "file/within"):
        with pytest.raises(ValueError, match="cannot be written"):
            mhaprune.save(model, tmp_path / path)


def test_a_folder_holds_one_model(bert: Any, tmp_path: Path) -> None:
    small = mhaprune.wrap(built(), square, score=[IDS]).prune(mask={0: [1]})
    for model, kind in ((small, Layers), (bert, type(bert)), (small, Layers)):
        mhaprune.save(model, tmp_path / "model")
        given = {} if model is bert else {"model": built()}
        assert type(mhaprune.load(tmp_path / "model", **given)) is kind
    mhaprune.save(bert, tmp_path / "bert")
    with pytest.raises(ValueError, match="model=Layers: is for a folder with removal.json, .* has none"):
        mhaprune.load(tmp_path / "bert", model=built())


class Sentences(nn.Module):
    """A model around one of transformers, with a folder of its own form, as SentenceTransformer has it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList([inner])

    def forward(self, input_ids: Tensor) -> Tensor:
        said: Tensor = self.parts[0](input_ids).last_hidden_state.mean(dim=1)
        return said

    def save_pretrained(self, path: str) -> None:
        self.parts[0].save_pretrained(path)
        Path(path, "modules.json").write_text("[]")


class Adapted(Sentences):
    """A model around one of transformers, whose adapters can be merged, as peft has it."""

    def merge_and_unload(self) -> Any:
        return self.parts[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Sentences, Adapted])
@pytest.mark.parametrize("gone", [{0: [1], 1: [0, 3]}, {0: [0, 1, 2, 3]}])
def test_a_model_around_one_of_transformers(kind: Any, gone: Any, bert: Any, tmp_path: Path) -> None:
    batch = {"input_ids": IDS}
    small: Any = mhaprune.wrap(kind(bert), square, score=[batch]).prune(mask=gone)
    mhaprune.save(small, tmp_path / "small")
    inner: Any = mhaprune.load(tmp_path / "small")
    assert type(inner) is type(bert)
    assert torch.equal(called(kind(inner), batch), called(small, batch))
    assert (tmp_path / "small" / "modules.json").exists() == (kind is Sentences)


@pytest.mark.parametrize("left", [2, 3])
def test_equal_layers_are_written_plainly_if_the_config_allows_this_number(left: int, tmp_path: Path) -> None:
    """The config of Llama wants features that are divisible by the number of heads, 3 of 16 are not."""
    transformers = pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **sizes)
    batch = {"input_ids": IDS, "labels": IDS}
    heads = mhaprune.wrap(transformers.LlamaForCausalLM(config).eval(), mhaprune.losses.language_model, score=[batch])
    small: Any = heads.prune(mask={0: [*range(left, 4)], 1: [*range(4 - left)]})
    mhaprune.save(small, tmp_path / "llama")
    assert (tmp_path / "llama" / "modeling_mhaprune.py").exists() == (left == 3)
    again: Any = mhaprune.load(tmp_path / "llama")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, small(IDS).logits)


@pytest.mark.filterwarnings("ignore")
def test_a_class_of_ones_own_and_attention_of_torch_in_one_of_transformers(bert: Any, tmp_path: Path) -> None:
    import transformers

    class OwnBert(transformers.BertModel):  # type: ignore[misc]
        pass

    pixels = {"pixel_values": torch.rand(3, 3, 8, 8)}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    siglip = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(image_size=8, patch_size=4, **sizes)).eval()
    own = OwnBert(bert.config).eval()
    for model, batch in ((own, {"input_ids": IDS}), (siglip, pixels)):
        heads = mhaprune.wrap(model, mhaprune.losses.Drift(lambda out, _: out.pooler_output), score=[batch])
        small: Any = heads.prune(mask=[heads.grid.heads[1], str(heads.grid.heads[-1])])
        mhaprune.save(small, tmp_path / type(model).__name__)
        again: Any = mhaprune.load(tmp_path / type(model).__name__, model=type(model)(model.config))
        with torch.no_grad():
            assert torch.equal(again(**batch).pooler_output, small(**batch).pooler_output)


@pytest.mark.filterwarnings("ignore")
def test_a_ragged_folder_says_how_it_is_read_and_keeps_its_tokenizer(bert: Any, tmp_path: Path) -> None:
    import transformers

    tokens = {token: n for n, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two"])}
    tokenizer = transformers.BertTokenizer(vocab=tokens)
    mhaprune.save(
        mhaprune.wrap(bert, mhaprune.losses.drift, score=[{"input_ids": IDS}]).prune(mask={0: [1]}),
        tmp_path / "small",
        tokenizer,
    )
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        transformers.AutoModel.from_pretrained(tmp_path / "small")
    card = (tmp_path / "small/README.md").read_text()
    assert "`AutoModel.from_pretrained(folder, trust_remote_code=True)`" in card
    assert "\n- 1 of 8 heads: attention.self.0: 1\n" in card
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    assert read("one two")["input_ids"] == tokenizer("one two")["input_ids"]


class WithHead(Sentences):
    """It saves itself, and has weights outside of the model that it holds."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.parts_on_top = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 8, batch_first=True), 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        said: Tensor = self.parts_on_top(self.parts[0](input_ids).last_hidden_state)[:, 0]
        return said


@pytest.mark.filterwarnings("ignore")
def test_weights_around_a_model_of_transformers_are_kept(bert: Any, tmp_path: Path) -> None:
    batch = {"input_ids": IDS}
    heads = mhaprune.wrap(WithHead(bert).eval(), square, score=[batch])
    lost = [heads.grid.heads[0], heads.grid.heads[-1], heads.grid.heads[-4]]
    small: Any = heads.prune(mask=lost)
    mhaprune.save(small, tmp_path / "small")
    again = mhaprune.load(tmp_path / "small", model=WithHead(type(bert)(bert.config)))
    assert torch.equal(called(again, batch), called(small, batch))
    assert list(mhaprune.wrap(again, square, score=[batch]).grid) == [head for head in heads.grid if head not in lost]


def test_a_pruned_part_of_a_larger_model_keeps_its_names(tmp_path: Path) -> None:
    class Larger(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part, self.more = part, nn.Linear(3, 2)

        def forward(self, ids: Tensor) -> Tensor:
            said: Tensor = self.more(self.part(ids))
            return said

    small = Larger(mhaprune.wrap(built(), square, score=[IDS]).prune(mask={0: [0, 2]})).half()
    mhaprune.save(small, tmp_path / "small")
    again: Any = mhaprune.load(tmp_path / "small", model=Larger(built(seed=1)))
    assert again.more.weight.dtype == torch.float16
    heads = mhaprune.wrap(again.float(), square, score=[IDS])
    assert [head.head for head in heads.grid] == [1, 3, *range(4), *range(4)]


class Alone(Attention):
    """Attention that is the whole model, with a number for each head that is not among the saved weights."""

    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5, 1.0, 2.0, 4.0]), persistent=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.slopes[:, None, None] * torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def test_numbers_of_heads_that_are_not_saved_are_those_of_the_heads_that_are_left(tmp_path: Path) -> None:
    heads = mhaprune.wrap(built(Alone), square, score=[X])
    small: Any = heads.prune(mask=["attention.0.0", "attention.0.2"])
    mhaprune.save(small, tmp_path / "small")
    again: Any = mhaprune.load(tmp_path / "small", model=built(Alone, seed=1))
    assert again.slopes.tolist() == small.slopes.tolist() == [1.0, 4.0]
    assert torch.equal(called(again, X), called(small, X))


def test_a_card_says_what_was_removed_in_every_step_and_how_well_the_model_does(bert: Any, tmp_path: Path) -> None:
    batch, bert.pruned = {"input_ids": IDS}, False  # an attribute of the user's
    heads = mhaprune.wrap(bert, mhaprune.losses.drift, score=[batch], report=[batch])
    table = heads.evaluate([heads.grid.heads[0]])
    again = mhaprune.wrap(heads.prune(mask=[heads.grid.heads[0]], refit=True), mhaprune.losses.drift, score=[batch])
    small = again.prune(mask=[again.grid.heads[0], again.grid.heads[-1]])
    for _ in range(2):
        mhaprune.save(small, tmp_path / "small", table=table)
    card = (tmp_path / "small/README.md").read_text()
    first, second = (line for line in card.splitlines() if line.startswith("- "))
    assert first == "- 1 of 8 heads: attention.self.0: 0, then refitted"
    assert second == "- 2 of 7 heads: attention.self.0: 1, attention.self.1: 3"
    assert card.count(f"| {' | '.join(table)} |") == 1
    loaded = mhaprune.wrap(mhaprune.load(tmp_path / "small"), mhaprune.losses.drift, score=[batch])
    mhaprune.save(loaded.prune(mask=[loaded.grid.heads[0]]), tmp_path / "next")
    lines = (tmp_path / "next/README.md").read_text().splitlines()
    assert [line for line in lines if line[:2] == "- "] == [first, second, "- 1 of 5 heads: attention.self.0: 2"]
    (tmp_path / "small/README.md").write_text("mine")
    mhaprune.save(small, tmp_path / "small", table=table)
    assert (tmp_path / "small/README.md").read_text() == "mine"
    mhaprune.load(tmp_path / "small")
