"""Our network as a `Subject`, with fast decoding.

Dimensions: B = batch, S = source, T = target, U = keys, D = d_model, H = heads of a block, K = head_dim, N = all heads,
V = vocabulary.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn

from mhaprune.attention.gates import GateConfig
from mhaprune.heads import BlockId, HeadGrid
from mhaprune.hooks.blocks import Block, Rows, Source, block_of, neighbours
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.decoding import Step, attention_step, decode_greedily
from mhaprune.lab.model.layers import EncoderDecoder
from mhaprune.lab.model.sites import NeuronSite, Site
from mhaprune.lab.tasks.sequences import EOS, PAD, AnswerOutcome, Examples, shift_right
from mhaprune.measure.outcomes import BATCH_SIZE, measure
from mhaprune.subject import Outcome
from mhaprune.subjects.gated_model import GatedModel


def neurons_of(path: str, names: tuple[int, ...]) -> Block:
    """Return the block of the neurons of the `FeedForward` at `path`."""
    columns = neighbours(len(names), len(names))
    made_by = (Source(Rows(f"{path}.1", columns), tuple(range(len(names)))),)
    return Block(path, f"{path}.4", columns, made_by, "neuron", attends=False, names=names)


class Seq2Seq(EncoderDecoder, GatedModel):
    """Our network as a `Subject`. For what its methods promise, see `subject.py`.

    `Seq2Seq(config, vocabulary_size, gate, grid)` has fresh weights. `gate` None means no learned gates; `grid` None
    means all heads of the config.
    """

    def __init__(
        self, config: Transformer, vocabulary_size: int, gate: GateConfig | None = None, grid: HeadGrid | None = None
    ) -> None:
        grid = config.grid if grid is None else grid
        super().__init__(config, vocabulary_size, gate, grid)
        self.names, self.whole = grid.blocks, grid

    @cached_property
    def blocks(self) -> tuple[Block, ...]:  # type: ignore[override]
        """The descriptions of the blocks of the network as it was built. They are made at the first use."""
        paths = {module: path for path, module in self.named_modules()}
        sublayers = self.attention_sublayers()

        def described(name: BlockId) -> Block:
            names = tuple(self.whole.heads[at].head for at in self.whole.positions(name))
            if name.site in list(NeuronSite):
                side = "encoder" if name.site == NeuronSite.ENCODER else "decoder"
                return neurons_of(f"{side}.{name.layer}.feed_forward", names)
            attention, path = sublayers[name].attention, paths[sublayers[name]]
            return block_of(attention, paths[attention], path, cross=name.site == Site.CROSS, names=names)

        return tuple(map(described, self.names))

    @property
    def module(self) -> nn.Module:
        return self

    def with_module(self, module: Self, blocks: Sequence[Block]) -> Self:
        module.blocks = tuple(blocks)
        for remembered in ("grid", "by_name"):
            module.__dict__.pop(remembered, None)
        return module

    def call(self, batch: Examples) -> Tensor:
        """Return the logits of each token of the target, (B, T, V), given the true tokens before it."""
        return self(batch.source, shift_right(batch.target))

    def judge(self, output: Tensor, batch: Examples) -> AnswerOutcome:
        return AnswerOutcome.of(output, batch.target)

    def real_outputs(self, output: Tensor, batch: Examples) -> Tensor:
        """Return the logits at all tokens of the targets, (tokens, V)."""
        return output[batch.target != PAD]

    def real(self, batch: Examples, path: str, length: int) -> Tensor:
        return (batch.source if path.startswith("encoder.") else batch.target) != PAD

    def queries(self, batch: Examples) -> dict[BlockId, Tensor]:
        return {name: self.real(batch, block.path, 0) for name, block in self.by_name.items()}

    def mapped(self, batch: Examples, block: BlockId, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        # At a position, the decoder reads BOS or the token before it: never the end of sequence, except on padding.
        source_BS, target_BT = (batch.source != PAD) & (batch.source != EOS), batch.target != PAD
        queries_BT = source_BS if block.site == Site.ENCODER_SELF else target_BT
        return queries_BT, target_BT if block.site == Site.DECODER_SELF else source_BS

    def unread(self) -> list[BlockId]:
        """Return the blocks of the encoder if no cross-attention has a head left; else none."""
        if any(layer.cross.attention.num_heads for layer in self.decoder):
            return []
        return [name for name in self.names if name.site in (Site.ENCODER_SELF, NeuronSite.ENCODER)]

    @torch.no_grad()
    def answered(self, data: Examples) -> Examples:
        """Return the sources with the greedy answers of the model as targets."""
        parts = data.source.split(BATCH_SIZE)
        answers_ET = torch.cat([self.decode_greedily(part, self.config.max_length, stop=True) for part in parts])
        answers_ET[answers_ET[:, 0] == PAD, 0] = EOS  # a poor model may answer padding; no answer is without a token
        return Examples(data.source, answers_ET)

    @torch.no_grad()
    def confidence(self, data: Examples, outcome: Outcome) -> Tensor:
        def probability(answers: Examples, of: Outcome) -> Tensor:
            return (-of.loss * (answers.target != PAD).sum(dim=1)).exp()

        found, wrong = probability(data, outcome), (outcome.quality == 0).nonzero()[:, 0]
        if len(wrong):  # only a wrong answer has to be written first: a right one is the target
            own = self.answered(data[wrong])
            found[wrong] = probability(own, measure(self, own))
        return found

    def predict(self, batch: Examples) -> Tensor:
        with torch.inference_mode():  # a tenth faster than no_grad: nothing at all is kept for autograd
            tokens_BT = self.decode_greedily(batch.source, batch.target.shape[1])
        return tokens_BT.clone()  # an ordinary tensor again

    def decodes_right(self, batch: Examples) -> Tensor:
        return (self.predict(batch) == batch.target).all(dim=1)

    @torch.no_grad()
    def decode_greedily(
        self, source_BS: Tensor, max_tokens: int, gates: Tensor | None = None, *, stop: bool = False
    ) -> Tensor:
        """Decode greedily under `gates` (N,), the same for all examples. Keys and values of earlier positions are kept,
        so that a token costs what the first one does."""
        with self.gated(len(source_BS), gates):
            memories: Sequence[tuple[Tensor, Tensor] | None] = [None] * len(self.decoder)
            bias = self.bias(source_BS)
            if not self.unread():
                memories = self.project_memory(self.encode(source_BS, bias))
            pieces = {} if gates is None else self.grid.split(gates)
            steps: list[Step] = []
            for layer, memory in zip(self.decoder, memories, strict=True):
                own, cross = (pieces.get(each.block) for each in (layer.self_attention, layer.cross))
                steps.append(attention_step(layer.self_attention, own, max_tokens))
                steps.append(attention_step(layer.cross, cross, max_tokens, memory, bias))
                steps.append(layer.feed_forward)

            def next_logits(tokens_BT: Tensor) -> Tensor:
                first = tokens_BT.shape[1] - 1
                x_BD = self.embed(self.target_embedding, tokens_BT[:, first:], first)[:, 0]
                for step in steps:
                    x_BD = step(x_BD)
                return self.output(self.decoder_norm(x_BD))

            return decode_greedily(next_logits, source_BS, max_tokens, stop=stop)

    def count_flops(self, batch: Examples) -> int:
        S, T, D = batch.source.shape[1], batch.target.shape[1], self.config.d_model
        lengths: dict[str, tuple[int, int]] = {Site.ENCODER_SELF: (S, S), Site.DECODER_SELF: (T, T), Site.CROSS: (T, S)}
        multiply_adds = T * D * self.output.out_features
        for block, units in (self.config.sizes | dict(zip(self.grid.blocks, self.grid.sizes, strict=True))).items():
            if block.site in list(NeuronSite):
                multiply_adds += 2 * D * units * (S if block.site == NeuronSite.ENCODER else T)
                continue
            queries, keys = lengths[block.site]
            multiply_adds += units * self.head_dim * (2 * D * (queries + keys) + 2 * queries * keys)
        return 2 * len(batch) * multiply_adds
