"""The sites of mhaprune's own encoder-decoder, and the names of blocks and heads in figures."""

from enum import StrEnum

from mhaprune.heads import BlockId, HeadId


class Site(StrEnum):
    """The three kinds of attention layer in mhaprune's own encoder-decoder. Other models have sites with other
    names."""

    ENCODER_SELF = "encoder_self"
    DECODER_SELF = "decoder_self"
    CROSS = "cross"


class NeuronSite(StrEnum):
    """The two kinds of feed-forward layer there, whose units are hidden neurons."""

    ENCODER = "encoder_neuron"
    DECODER = "decoder_neuron"


SITES: dict[str, str] = {
    Site.ENCODER_SELF: "encoder self-attention",
    Site.DECODER_SELF: "decoder self-attention",
    Site.CROSS: "cross-attention",
    NeuronSite.ENCODER: "encoder neurons",
    NeuronSite.DECODER: "decoder neurons",
}
"""The sites in order, with their names in figures."""


def block_label(site: str, layer: int) -> str:
    """Return the name of a block in figures, of any model.

    >>> block_label("cross", 0), block_label("model.layers", 3)
    ('cross-attention 0', 'model.layers 3')
    """
    return f"{SITES.get(site, site)} {layer}"


def head_label(head: HeadId) -> str:
    """Return the name of a head in figures: `cross-attention 0.3`."""
    return f"{block_label(*BlockId(head.site, head.layer))}.{head.head}"


def block_order(site: str, layer: int) -> tuple[int, str, int]:
    """Return the place of a block in the order of the model, as a key for sorting."""
    known = list(SITES)
    return (known.index(site) if site in known else len(known), site, layer)
