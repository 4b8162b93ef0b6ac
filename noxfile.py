"""The tests as on other processors, and with the lowest versions that pyproject.toml allows.

`nox` runs both, `nox -s lowest` one of them. `nox -s processors -- $(cat .ci/numbers)` runs the files that compare
numbers, which .ci/run runs too.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import nox
from packaging.requirements import Requirement

PROJECT = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
PROCESSORS: list[dict[str, str]] = [
    {},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"MKL_CBWR": "COMPATIBLE"},
    {"OMP_NUM_THREADS": "1"},
    {"OMP_NUM_THREADS": "2"},
]
"""The variables with which torch computes as on other processors."""
nox.options.reuse_existing_virtualenvs = True


def lower_bounds(texts: list[str]) -> Iterator[str]:
    """Yield every requirement in its lowest version, those of the extras of mhaprune too."""
    for requirement in map(Requirement, texts):
        if requirement.name == PROJECT["name"]:
            for extra in requirement.extras:
                yield from lower_bounds(PROJECT["optional-dependencies"][extra])
        else:
            [lowest] = [bound.version for bound in requirement.specifier if bound.operator in (">=", "==")]
            yield f"{requirement.name}=={lowest}"


@nox.session
def processors(session: nox.Session) -> None:
    """Run the tests as on other processors, and with other numbers of threads."""
    session.install("-e", ".[test]")
    for settings in PROCESSORS:
        session.log(" ".join(f"{name}={value}" for name, value in settings.items()) or "this processor")
        session.run("python", "-m", "pytest", *session.posargs, env=settings)


@nox.session
def lowest(session: nox.Session) -> None:
    """Run the tests with the lowest versions."""
    session.install("-e", ".[test]", *lower_bounds([*PROJECT["dependencies"], f"{PROJECT['name']}[test]"]))
    session.run("python", "-m", "pytest", *session.posargs)
