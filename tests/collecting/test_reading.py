"""Tables that are read together are those that each file holds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_collect import make_run

from mhaprune.collecting import reading
from mhaprune.collecting.collect import collect
from mhaprune.collecting.reading import Slice, below_each_other, slices_of
from mhaprune.collecting.runs import FoundRun, find_runs
from mhaprune.experiments.ablate.study import Ablate
from mhaprune.settings.options import target
from mhaprune.storage.seals import Damaged, checksum
from mhaprune.storage.store import RunFolder

FILES = (
    b"a,b\n\n8,after a blank line\n",
    b"a,b\n1,x\n2,y\n",
    b'a,b\n3,"two\nlines, and a comma"\n',
    b"a,b\n",
    b"a,b\n4,\n5,z\n",
    b"b,a\nq,6\n",
    b'a,b\n7,"say ""no"""',
    b"c\n1.5\n",
)


def runs_of(tmp_path: Path, *files: bytes, sealed: bool = True) -> list[FoundRun]:
    """A done run for each of the files, which is its table `t`."""
    runs = []
    for i, data in enumerate(files):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "t.csv").write_bytes(data)
        status: dict[str, Any] = {"status": "done", "experiment": target(Ablate())}
        status["files"] = {"t.csv": checksum(data)} if sealed else ["t.csv"]
        runs.append(FoundRun(tmp_path / str(i), status))
    return runs


@pytest.mark.parametrize("sealed", [True, False])
def test_each_run_has_the_rows_of_its_own_file(tmp_path: Path, sealed: bool) -> None:
    found = slices_of(runs_of(tmp_path, *FILES, sealed=sealed))
    for slices, data in zip(found, FILES, strict=True):
        assert not isinstance(slices, Damaged)
        alone = pd.read_csv(io.BytesIO(data))
        pd.testing.assert_frame_equal(slices["t"].table, alone, check_dtype=len(alone) > 0)


def test_a_file_that_is_no_table_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    open_to_the_end = b'a,b\n1,"2\n'
    found = slices_of(runs_of(tmp_path, FILES[0], open_to_the_end, FILES[3]))
    assert [isinstance(slices, Damaged) for slices in found] == [False, True, False]
    assert str(found[1]).startswith("t.csv is no table (")


def test_numbers_and_texts_of_runs_that_nobody_vouches_for_do_not_mix(tmp_path: Path) -> None:
    """Else a text in one of them would make texts of the numbers of all others."""
    first, other = slices_of(runs_of(tmp_path, b"a\n1\n", b"a\nx\n", sealed=False))
    assert isinstance(first, dict)
    assert isinstance(other, dict)
    assert first["t"].table["a"].sum() == 1


def test_slices_stand_below_each_other_in_any_order() -> None:
    one, two = pd.DataFrame({"a": range(5)}), pd.DataFrame({"a": range(10, 13), "b": "x"})
    slices = [Slice(two, 1, 3), Slice(one, 3, 5), Slice(one, 0, 1), Slice(two, 0, 0)]
    expected = pd.concat([each.table for each in slices], ignore_index=True)
    pd.testing.assert_frame_equal(below_each_other(slices), expected, check_dtype=False)
    assert below_each_other([Slice(one, 0, 2), Slice(one, 2, 5)]).equals(one)


def test_many_runs_are_parsed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes longest is done once per table and kind of columns, and not once per run."""
    for seed in range(40):
        make_run(tmp_path / "runs" / str(seed), num_heads=2, seed=seed)
    parsed = []
    plain = reading._parsed
    monkeypatch.setattr(reading, "_parsed", lambda data: parsed.append(len(data)) or plain(data))
    collect([tmp_path / "runs"], tmp_path / "out")
    assert len(parsed) == 2
    assert len(pd.read_csv(tmp_path / "out" / "summary.csv")) == 40 * 2


def test_a_run_says_itself_what_it_found_if_it_is_as_it_was_written(tmp_path: Path) -> None:
    own = {"findings": ["As its report says."], "head_map": {"title": "its map", "rows": ["10", " 1"]}}
    make_run(tmp_path / "a", num_heads=2)
    with RunFolder(tmp_path / "b").recorded() as folder:
        tables = {path.stem: pd.read_csv(path) for path in (tmp_path / "a").glob("*.csv")}
        folder.note(kind="run", experiment=target(Ablate()), identity={"task": "sort", "num_heads": 4}, **own)
        for name, table in tables.items():
            folder.write_table(name, table)
    lines = collect([tmp_path], tmp_path / "out")
    assert lines[-2].startswith("num_heads=2: 9 of 24 heads can go")
    assert lines[-1] == "num_heads=4: As its report says."
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("<title>its map</title>") == 1
    [run] = find_runs([tmp_path / "b"])
    (tmp_path / "b" / "status.json").write_text(json.dumps(run.status | {"files": list(run.files)}))  # no checksums
    lines = collect([tmp_path], tmp_path / "out")
    assert lines[-1].startswith("num_heads=4: 9 of 24 heads can go")
    assert "its map" not in (tmp_path / "out" / "index.html").read_text()
