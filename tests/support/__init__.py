"""What several tests use: sizes of runs, made tables and models, and ways to run commands."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mhaprune"
