"""What `experiment=explain` is asked for and cannot show is refused before anything is trained."""

from __future__ import annotations

import pytest

from mhaprune.runs.run import build
from mhaprune.settings.options import ConfigError
from support.composing import compose
from support.sizes import LEARNT, TINY


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["example=3 9 x 9"], "example='3 9 x 9': 9, x are not in the vocabulary, allowed are 0 1 2 3 4 5"),
        (["example=9"], "example='9': 9 is not in the vocabulary, allowed are 0 1 2 3 4 5"),
        (["example=''"], "example='': is empty, allowed are 0 1 2 3 4 5"),
        (
            [f"example={'1' * 70}a".removesuffix("a").replace("1", "1 ")],
            "has 70 symbols, model.max_length=64 allows 63 and the end of sequence",
        ),
        (
            ["task=inflection", "example=walk"],
            "example='walk': must be a lemma and one of noun0 (plural), verb0 (past), verb1 (past",
        ),
        (["task=inflection", "example=Walk verb3"], "example='Walk verb3': W is not in the vocabulary"),
        (
            ["experiment.heads=[cross.7]"],
            "experiment.heads=cross.7: no such layer, the model has encoder_self.0, decoder_self.0, cross.0",
        ),
        (
            ["experiment.heads=[cross.0.5]"],
            "experiment.heads=cross.0.5: no such head, layer cross.0 has heads 0, 1",
        ),
        (["scorer=[]"], "scorer=[]: must name ablation, which says what heads are worth"),
        (["scorer=[gate]"], "scorer=[gate]: must name ablation, which says what heads are worth"),
        (["experiment.heads=[cross.0.1.2]"], "heads=cross.0.1.2: must read SITE.LAYER or SITE.LAYER.HEAD, for example"),
        (["experiment.examples=[-1]"], "experiment.examples[0]=-1: must be 0 or more"),
        (["experiment=anatomy", "experiment.head_dims=[0]"], "experiment.head_dims[0]=0: must be from 1 to 65536"),
        (
            ["experiment=ablate", "example=3 1"],
            "example='3 1': experiment=ablate looks at no example, experiment=explain does",
        ),
    ],
)
def test_bad_input_is_one_line_that_says_what_is_allowed(overrides: list[str], message: str) -> None:
    settings = LEARNT if "task=inflection" not in overrides else TINY
    with pytest.raises(ConfigError) as error:
        build(compose("experiment=explain", *settings, *overrides))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
