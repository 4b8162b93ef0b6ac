"""Run an experiment: `python scripts/run.py experiment=ablate`; sweep with -m, see every setting with --cfg job."""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from mhaprune import command_line


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def run(settings: DictConfig) -> None:
    command_line.execute(settings)


if __name__ == "__main__":
    sys.exit(command_line.main(run))
