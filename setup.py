"""What pyproject.toml cannot say: the settings in conf/ travel inside the package, as mhaprune/conf."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["mhaprune*"]), "mhaprune.conf"],
    package_dir={"mhaprune.conf": "conf"},
    package_data={
        "mhaprune": ["py.typed", "lab/reporting/*.jinja", "lab/reporting/*.yaml"],
        "mhaprune.conf": ["*.yaml", "*/*.yaml"],
    },
)
