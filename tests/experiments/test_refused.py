"""What an experiment is asked for and cannot do is refused before anything is trained, in one line."""

import pytest

from mhaprune.runs.run import build
from mhaprune.settings.options import ConfigError
from support.composing import compose

OF_24 = "left in every block only 18 of 24 may go"
REFUSED = {
    "ablate": [
        ("recovery=[refit,refit_between]", "recovery=[refit_between]: experiment=ablate recovers models that"),
        ("example=3 1", "example='3 1': experiment=ablate looks at no example, experiment=explain does"),
    ],
    "compare": [
        ("experiment.oracle=exact", "experiment.oracle=exact: 24 heads have 16777216 subsets, exact takes up to 16"),
        ("experiment.budgets=[24]", "experiment.budgets=[24]: none of them leaves a choice between heads"),
        ("gate=none", "scorer=gate: needs learned gates"),
        ("schedule=[greedy,rearrangement]", "schedule=[greedy,rearrangement]: must name at least one that uses scores"),
        ("schedule=[]", "schedule=[]: must name at least one that uses scores, for example one_shot"),
        ("schedule.greedy.keep_at_least=2", "left in every block only 12 of 24 may go"),
        ("schedule=iterative", "scorer=gate: needs learned gates, so gate=softmax and a schedule"),
        ("scorer=[random]", "scorer=['random']: must name at least one scorer beside a control"),
        ("recovery=refit", "recovery=[refit]: experiment=compare recovers nothing, experiment=prune does"),
    ],
    "explain": [
        ("example=3 x x", "example='3 x x': x is not in the vocabulary, allowed are 0 1 2"),
        ("example=''", "example='': is empty, allowed are 0 1 2"),
        (f"example={'1 ' * 70}", "has 70 symbols, model.max_length=64 allows 63 and the end of sequence"),
        ("task=inflection; example=walk", "example='walk': must be a lemma and one of noun0 (plural), verb0 (past)"),
        ("task=inflection; example=Walk verb3", "example='Walk verb3': W is not in the vocabulary"),
        ("scorer=[gate]", "scorer=[gate]: must name ablation, which says what heads are worth"),
    ],
    "interact": [
        ("scorer=[]", "scorer=[]: must name at least one scorer"),
        ("schedule=[one_shot,greedy]", "schedule=[one_shot,greedy]: must name exactly one"),
    ],
    "prune": [
        ("schedule=[]", "schedule=[]: must name at least one schedule"),
        ("scorer=[]", "scorer=[]: must name at least one scorer"),
        ("schedule=one_shot; schedule.one_shot.keep_at_least=1", OF_24),
        ("experiment.budgets=[30 heads]", "experiment.budgets=30 heads: the model has 24 heads, allowed are 0 to 24"),
        ("experiment.budgets=[3 seconds]", "experiment.budgets=3 seconds: a text must be a number and one of heads"),
        ("recovery=fine_tune_between; scorer=gate; schedule=one_shot", "scorer=gate: needs learned gates"),
    ],
    "speed": [
        ("experiment.d_models=[66]", "experiment.d_models=66: must be even and a multiple of 4, the heads of a block"),
        ("experiment.d_models=[15]; model.num_heads=1", "experiment.d_models=15: must be even"),
        ("experiment.d_models=[15]; model.head_dim=8", "experiment.d_models=15: must be even"),
        ("experiment.budgets=[25]", "experiment.budgets=25: the model has 24 heads, allowed are 0 to 24"),
        ("schedule.one_shot.keep_at_least=1", OF_24),
        ("schedule=[greedy,one_shot]", "schedule=[greedy,one_shot]: must name exactly one"),
        ("scorer=[]", "scorer=[]: must name at least one scorer"),
    ],
}
"""By experiment: settings with a semicolon between them, and what is said."""


@pytest.mark.parametrize(
    ("experiment", "settings", "message"),
    [(experiment, *case) for experiment, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_be_is_refused_before_training(experiment: str, settings: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(compose(f"experiment={experiment}", *settings.split("; ")))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
