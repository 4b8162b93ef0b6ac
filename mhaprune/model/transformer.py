"""The network as a `Subject`: how a trained network is observed, pruned and decoded.

It stands apart from `network.py` for one reason: the source of that file is hashed into the cache key of trained
models, and the source of this file is not. Editing this file retrains nothing. A method that training runs belongs
there, every other method belongs here.

Dimensions: B = batch, S = source, T = target, U = keys, D = d_model, H = heads of a block, K = head_dim, N = all heads,
V = vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from mhaprune.data import EOS, PAD, Examples, shift_right
from mhaprune.heads import Block, HeadMask, Site
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.model.attention import MultiHeadAttention
from mhaprune.model.decoding import Step, attention_step, decode_greedily
from mhaprune.model.layers import AttentionSublayer, Call, sinusoids
from mhaprune.model.network import EncoderDecoder
from mhaprune.model.relevance import with_relevance
from mhaprune.model.replay import find_maps, walk
from mhaprune.model.shared_prefixes import Branches, depth_first
from mhaprune.model.surgery import copied, remove_heads
from mhaprune.subject import AnswerOutcome, AttentionMap, Fallback, Gates, LastMap

TOKENS_AT_ONCE = 2048
"""Tokens in one step of a pass of many masks: enough to be worth a call, few enough for the processor's cache."""
WAITING_BYTES = 2**28
"""Limit for the states that such a pass keeps; masks that need more memory go in several passes."""


class Seq2Seq(EncoderDecoder):
    """The network as a `Subject`: see `subject.py` for what its methods promise.

    `Seq2Seq(config, vocabulary_size, gate, grid)` has fresh weights. `gate` None means no learned gates; `grid` None
    means all heads of the config.
    """

    @torch.no_grad()
    def evaluate_masks(self, batch: Examples, gates: Tensor, fallback: Fallback | None = None) -> AnswerOutcome:
        length = max(batch.source.shape[1], batch.target.shape[1])
        state_bytes = len(batch) * length * self.config.d_model * self.positions.element_size()
        parts = gates.split(max(1, WAITING_BYTES // state_bytes))
        outcomes = [self._evaluate_part(batch, gates_MN, fallback, len(batch) * length) for gates_MN in parts]
        return AnswerOutcome(*(torch.cat(values) for values in zip(*outcomes, strict=True)))

    def queries(self, batch: Examples) -> dict[Block, Tensor]:
        tokens: dict[str, Tensor] = dict.fromkeys(map(str, Site), batch.target) | {Site.ENCODER_SELF: batch.source}
        return {block: tokens[block.site] != PAD for block in self.grid.blocks}

    def outputs(self, batch: Examples, gates: Gates | None = None) -> Tensor:
        """The logits at all tokens of the targets, (tokens, V)."""
        return self.logits(batch, gates)[batch.target != PAD]

    def unread(self) -> list[Block]:
        """The blocks of the encoder if no cross-attention has a head left."""
        sizes = dict(zip(self.grid.blocks, self.grid.sizes, strict=True))
        if any(sizes[block] for block in sizes if block.site == Site.CROSS):
            return []
        return [block for block in sizes if block.site == Site.ENCODER_SELF]

    def head_outputs(self, batch: Examples) -> dict[Block, Tensor]:
        read = self._read(batch, lambda sublayer: sublayer.attention.out_proj)
        return {block: each.attention.split(read[block]) for block, each in self.attention_sublayers().items()}

    def attention_inputs(self, batch: Examples) -> dict[Block, tuple[Tensor, Tensor]]:
        """For every block with heads, what its queries (B, T, D) and its keys and values (B, U, D) are made from."""
        read, memory_BSD = self._read(batch, lambda sublayer: sublayer.norm), self.encode(batch.source)
        inputs = {b: sublayer.norm(read[b]) for b, sublayer in self.attention_sublayers().items() if b in read}
        return {b: (x, memory_BSD if b.site == Site.CROSS else x) for b, x in inputs.items()}

    def _read(self, batch: Examples, module_of: Callable[[AttentionSublayer], nn.Module]) -> dict[Block, Tensor]:
        """The input of a module of each block that calls it, in a pass with all gates open."""
        found: dict[Block, Tensor] = {}
        with ExitStack() as stack:
            for block, sublayer in self.attention_sublayers().items():
                hook = module_of(sublayer).register_forward_pre_hook(
                    lambda module, inputs, block=block: found.update({block: inputs[0]})
                )
                stack.callback(hook.remove)
            self.logits(batch)
        return found

    def attention_maps(self, batch: Examples) -> dict[Block, AttentionMap]:
        weights: dict[Block, Tensor] = {}
        self.run(batch.source, shift_right(batch.target), Call(weights=weights))
        # What the decoder reads at a position is BOS or the token before: never end of sequence, unless it is padding.
        source_BS, target_BT = (batch.source != PAD) & (batch.source != EOS), batch.target != PAD
        queries: dict[str, Tensor] = dict.fromkeys(map(str, Site), target_BT) | {Site.ENCODER_SELF: source_BS}
        keys: dict[str, Tensor] = dict.fromkeys(map(str, Site), source_BS) | {Site.DECODER_SELF: target_BT}
        shapes = {b: (len(batch), 0, queries[b.site].shape[1], keys[b.site].shape[1]) for b in self.grid.blocks}
        found = {b: weights.get(b, self.positions.new_zeros(shape)) for b, shape in shapes.items()}
        return {b: AttentionMap(weights_BHTU, queries[b.site], keys[b.site]) for b, weights_BHTU in found.items()}

    def output_weights(self) -> dict[Block, Tensor]:
        return {
            block: sublayer.attention.out_proj.weight.mT.unflatten(0, (-1, self.head_dim))
            for block, sublayer in self.attention_sublayers().items()
        }

    def value_weights(self) -> dict[Block, Tensor]:
        return {
            block: sublayer.attention.v_proj.weight.unflatten(0, (-1, self.head_dim))
            for block, sublayer in self.attention_sublayers().items()
        }

    def without(self, mask: HeadMask) -> Self:
        def fewer(module: nn.Module) -> nn.Module | None:
            return remove_heads(module, kept[module]) if isinstance(module, MultiHeadAttention) else None

        gone = [head in mask.removed for head in self.grid]
        kept = {
            sublayer.attention: [n for n, at in enumerate(self.grid.positions(block)) if not gone[at]]
            for block, sublayer in self.attention_sublayers().items()
        }
        smaller = copied(self, replace=fewer)
        smaller.grid = self.grid.without(mask.removed)
        return smaller

    def in_double(self) -> Self:
        double = copied(self, partial(Tensor.to, dtype=torch.float64, copy=True))
        # Converted, they would be as far from sines and cosines as before.
        positions = sinusoids(self.config.max_length, self.config.d_model, torch.float64)
        double.positions = positions.to(self.positions.device)
        return double

    @torch.no_grad()
    def answered(self, data: Examples) -> Examples:
        """The sources with the greedy answers of the model."""
        parts = data.source.split(BATCH_SIZE)
        answers_ET = torch.cat([self.decode_greedily(part, self.config.max_length, stop=True) for part in parts])
        answers_ET[answers_ET[:, 0] == PAD, 0] = EOS  # a poor model may answer padding; no answer is without a token
        return Examples(data.source, answers_ET)

    def last_maps(self, batches: Sequence[Examples]) -> Iterator[LastMap]:
        outs = {each.attention.out_proj: str(block) for block, each in self.attention_sublayers().items()}
        names = {path: outs[module] for path, module in self.named_modules() if module in outs}
        maps = find_maps(self, names, partial(self.logits, batches[0][:1]))
        for each, found in walk(self, maps, [partial(self.logits, batch) for batch in batches]):
            tokens = [batch.source if each.path.startswith("encoder.") else batch.target for batch in batches]
            passed = zip(tokens, found, strict=True)
            parts = [(inputs[ids != PAD], stream[ids != PAD]) for ids, (inputs, stream) in passed]
            last: Any = self.get_submodule(each.path)
            yield LastMap(names.get(each.path, each.path), each.path not in names, last.weight, last.bias, parts)

    def copied(self) -> Self:
        return copied(self)

    def relevance(self, batch: Examples, epsilon: float) -> Tensor:
        gates_BN = torch.ones(len(batch), len(self.grid), dtype=self.dtype, device=self.device, requires_grad=True)
        top_BT = with_relevance(self, epsilon).logits(batch, gates_BN).amax(dim=-1)
        top, no_heads = top_BT[batch.target != PAD].sum(), not len(self.grid)
        (relevance_BN,) = torch.autograd.grad(top, gates_BN, allow_unused=no_heads, materialize_grads=no_heads)
        return relevance_BN

    def predict(self, batch: Examples) -> Tensor:
        with torch.inference_mode():  # a tenth faster than no_grad: nothing at all is kept for autograd
            tokens_BT = self.decode_greedily(batch.source, batch.target.shape[1])
        return tokens_BT.clone()  # an ordinary tensor again

    def decodes_right(self, batch: Examples) -> Tensor:
        return (self.predict(batch) == batch.target).all(dim=1)

    @torch.no_grad()
    def decode_greedily(
        self,
        source_BS: Tensor,
        max_tokens: int,
        gates: Tensor | None = None,
        *,
        stop: bool = False,
        use_cache: bool = True,
    ) -> Tensor:
        """Decode greedily, see `decoding`, under `gates` (N,) for all examples. `use_cache` keeps the keys and
        values of the positions so far; without it the whole prefix is run again for every token, with the same
        result."""
        call, bias = self.call(gates), self.bias(source_BS)
        memories: Sequence[tuple[Tensor, Tensor] | None] = [None] * len(self.decoder)
        if any(layer.cross.attention.num_heads for layer in self.decoder):  # else nothing reads the encoder's output
            memories = self.project_memory(self.encode(source_BS, call, bias))
        layers = list(zip(self.decoder, memories, strict=True))
        steps: list[Step] = []
        for layer, memory in layers if use_cache else ():
            steps.append(self.attention_step(layer.self_attention, call, max_tokens))
            steps.append(self.attention_step(layer.cross, call, max_tokens, memory, bias))
            steps.append(layer.feed_forward)

        def next_logits(tokens_BT: Tensor) -> Tensor:
            if use_cache:
                first = tokens_BT.shape[1] - 1
                x_BD = self.embed(self.target_embedding, tokens_BT[:, first:], first)[:, 0]
                for step in steps:
                    x_BD = step(x_BD)
            else:
                x_BTD = self.embed(self.target_embedding, tokens_BT)
                for layer, memory in layers:
                    x_BTD = layer(x_BTD, memory, bias, call)
                x_BD = x_BTD[:, -1]
            return self.output(self.decoder_norm(x_BD))

        return decode_greedily(next_logits, source_BS, max_tokens, stop=stop)

    attention_step = staticmethod(attention_step)

    def count_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def count_flops(self, batch: Examples) -> int:
        S, T, D = batch.source.shape[1], batch.target.shape[1], self.config.d_model
        lengths: dict[str, tuple[int, int]] = {Site.ENCODER_SELF: (S, S), Site.DECODER_SELF: (T, T), Site.CROSS: (T, S)}
        multiply_adds = T * D * self.output.out_features
        for block, heads in zip(self.grid.blocks, self.grid.sizes, strict=True):
            queries, keys = lengths[block.site]
            width = heads * self.head_dim
            multiply_adds += width * (2 * D * (queries + keys) + 2 * queries * keys)
        feed_forward = 2 * D * self.config.dim_feedforward
        multiply_adds += feed_forward * (len(self.encoder) * S + len(self.decoder) * T)
        return 2 * len(batch) * multiply_adds

    def _evaluate_part(
        self, batch: Examples, gates_MN: Tensor, fallback: Fallback | None, tokens: int
    ) -> AnswerOutcome:
        outcomes = AnswerOutcome(*(self.positions.new_empty(len(gates_MN), len(batch)) for _ in AnswerOutcome._fields))
        root = Branches.root(self.embed(self.source_embedding, batch.source), len(gates_MN))
        steps = self._steps(batch, gates_MN, fallback or {})
        for end in depth_first(root, steps, max(1, TOKENS_AT_ONCE // tokens)):
            parts = AnswerOutcome.of(end.states, batch.target.expand(len(end.states), -1, -1))
            for values_MB, part_PB in zip(outcomes, parts, strict=True):
                values_MB[end.masks] = part_PB[end.rows]
        return outcomes

    def _steps(self, batch: Examples, gates_MN: Tensor, fallback: Fallback) -> list[Callable[[Branches], Branches]]:
        """`run` under many masks, step by step."""
        gates = {block: gates_MH.double().cpu().numpy() for block, gates_MH in self.grid.split(gates_MN).items()}
        bias = self.bias(batch.source)

        def attend(sublayer: AttentionSublayer, **how: Any) -> Callable[[Branches], Branches]:
            return lambda x: x.attend(sublayer, gates[sublayer.block], fallback.get(sublayer.block), **how)

        def apply(function: Callable[[Tensor], Tensor]) -> Callable[[Branches], Branches]:
            return lambda x: x.apply(function)

        def begin_to_decode(x: Branches) -> Branches:
            start = self.embed(self.target_embedding, shift_right(batch.target))
            return x.remember([layer.cross for layer in self.decoder], start)

        steps = []
        for encoder_layer in self.encoder:
            steps += [attend(encoder_layer.self_attention, bias=bias), apply(encoder_layer.feed_forward)]
        steps += [apply(self.encoder_norm), begin_to_decode]
        for layer in self.decoder:
            steps += [attend(layer.self_attention, is_causal=True), attend(layer.cross, bias=bias)]
            steps += [apply(layer.feed_forward)]
        return [*steps, apply(self.decoder_norm), apply(self.output)]
