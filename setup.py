"""What pyproject.toml cannot say: the settings in conf/ travel inside the package, as mhaprune/conf, and the plug-ins
of examples/ beside it. In a clone, which is installed as it stands, both stay where they are."""

import sys
from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = [] if "editable_wheel" in sys.argv else sorted(Path("examples").glob("*/mhaprune_*/"))

setup(
    packages=[*find_packages(include=["mhaprune*"]), "mhaprune.conf", *(folder.name for folder in FOLDERS)],
    package_dir={"mhaprune.conf": "conf", **{folder.name: folder.as_posix() for folder in FOLDERS}},
    package_data={
        "mhaprune": ["py.typed", "lab/reporting/*.jinja", "lab/reporting/*.yaml"],
        "mhaprune.conf": ["*.yaml", "*/*.yaml"],
        **{folder.name: ["conf/*/*.yaml"] for folder in FOLDERS},
    },
)
