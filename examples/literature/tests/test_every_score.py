"""What must hold for every scorer of mhaprune, for those of the package."""

import pytest

from literature import OPTIONS
from mhaprune.scorers.base import Scorer
from scorers.test_every_scorer import *  # noqa: F403


@pytest.fixture(params=sorted(OPTIONS["scorer"]))
def scorer(request: pytest.FixtureRequest) -> Scorer:
    found: Scorer = OPTIONS["scorer"][request.param]
    return found
