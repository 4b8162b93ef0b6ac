"""The settings of the small transformer: its sizes, and what follows from them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from mhaprune.heads import BlockId, HeadGrid, HeadId
from mhaprune.lab.model.sites import NeuronSite, Site
from mhaprune.settings.ranges import Checked, Ge, Lt, Within


@dataclass(frozen=True)
class Transformer(Checked):
    """The sizes of an encoder-decoder transformer."""

    d_model: Annotated[int, Within(2, 2**16)] = 64
    """Width of embeddings and hidden states; even, and a multiple of `num_heads` unless `head_dim` is set."""
    num_heads: Annotated[int, Ge(1)] = 4
    """Heads in each attention block."""
    head_dim: Annotated[int | None, Ge(1)] = None
    """Width of one head. With None the heads share `d_model`, so that their number does not change the number of
    weights."""
    num_encoder_layers: Annotated[int, Within(0, 1000)] = 2
    """Encoder layers, each with one attention block; may be 0."""
    num_decoder_layers: Annotated[int, Within(1, 1000)] = 2
    """Decoder layers, each with two attention blocks: self-attention and cross-attention."""
    dim_feedforward: Annotated[int, Ge(1)] = 128
    """Hidden width of the feed-forward part of a layer."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Probability of dropping attention weights, hidden feed-forward values and sublayer outputs in training."""
    tie_output: bool = True
    """True if one matrix embeds the target and also predicts it (Press & Wolf 2017)."""
    max_length: Annotated[int, Ge(1)] = 64
    """Longest source or target in tokens, with the end of sequence."""
    units: tuple[Literal["head", "neuron"], ...] = ("head",)
    """What is scored and removed: attention heads, hidden neurons of the feed-forward parts, or both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model}: must be even, sines and cosines share it")
        if self.head_dim is None and self.d_model % self.num_heads:
            allowed = ", ".join(str(h) for h in range(1, self.d_model + 1) if self.d_model % h == 0)
            raise ValueError(f"num_heads={self.num_heads}: must divide d_model={self.d_model}, so one of {allowed}")
        if not self.units:
            raise ValueError("units=[]: must name head, neuron or both")

    @property
    def sizes(self) -> dict[BlockId, int]:
        """The number of units of every block of a whole network: heads of attention, neurons of a feed-forward part."""
        layers: dict[str, int] = {
            Site.ENCODER_SELF: self.num_encoder_layers,
            Site.DECODER_SELF: self.num_decoder_layers,
            Site.CROSS: self.num_decoder_layers,
            NeuronSite.ENCODER: self.num_encoder_layers,
            NeuronSite.DECODER: self.num_decoder_layers,
        }
        return {
            BlockId(site, layer): self.dim_feedforward if site in list(NeuronSite) else self.num_heads
            for site, count in layers.items()
            for layer in range(count)
        }

    @property
    def grid(self) -> HeadGrid:
        """The units of a whole network that are scored and removed."""
        kinds = {block: "neuron" if block.site in list(NeuronSite) else "head" for block in self.sizes}
        counted = {block: size for block, size in self.sizes.items() if kinds[block] in self.units}
        heads = (HeadId(*block, n) for block, count in counted.items() for n in range(count))
        return HeadGrid(tuple(counted), tuple(heads))

    def bytes_to_train(self, vocabulary_size: int) -> int:
        """Estimate the memory for weights, gradients and both moments of the optimiser, in float32."""
        layers = self.num_encoder_layers + 2 * self.num_decoder_layers
        feed_forwards = self.num_encoder_layers + self.num_decoder_layers
        weights = (
            4 * layers * self.d_model * self.num_heads * self.width_per_head
            + 2 * feed_forwards * self.d_model * self.dim_feedforward
        )
        weights += 3 * vocabulary_size * self.d_model
        return 16 * weights + 4 * self.max_length * self.d_model

    @property
    def width_per_head(self) -> int:
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim
