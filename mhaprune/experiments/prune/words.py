"""Sentences of `experiment=prune`, and its map of heads."""

from collections.abc import Iterator
from math import nan
from typing import Any

import pandas as pd

from mhaprune.experiments.can_go import sure_count, what_can_go, what_is_sure
from mhaprune.reporting.head_map import Verdict
from mhaprune.reporting.headline import Number
from mhaprune.reporting.sentences import as_fast, share
from mhaprune.tables import (
    CHOOSE_QUALITY,
    HEAD,
    NOTHING,
    QUALITY,
    Tables,
    block_order,
    by_block,
    head_names,
    quality_name,
)


def _headline(tables: Tables) -> str:
    """The fewest heads of any way, and what is left."""
    best, quality = _best(tables["smallest"]), quality_name(tables)
    total, dense = int(best["heads_total"]), best["dense_quality"]
    if best["heads_removed"] == 0:
        return (
            f"None of {total} heads can go within {best['tolerance']:g} of the dense model's {share(dense)} {quality},"
            " however they are chosen and whatever is done afterwards."
        )
    kept = int(best["heads_kept"])
    return (
        f"{kept} of {total} heads {'is' if kept == 1 else 'are'} enough{_surely(best)}: {share(best[QUALITY])}"
        f" {quality} is left on the report split ({share(dense)} with all)."
    )


def _control(best: Any) -> str:
    """The control of that size."""
    line = (
        "The best shape of that size, trained from scratch for as many steps in all, reaches"
        f" {share(best['control_quality'])}"
    )
    if best["control_draws"] > 1:
        least, most = share(best["control_least"]), share(best["control_most"])
        line += f" ({least} to {most}, {int(best['control_draws'])} of them)"
    return f"{line}."


def say(tables: Tables) -> Iterator[str]:
    """Say how few heads are enough, which they are, what each recovery needs, and what went wrong."""
    yield _headline(tables)
    smallest, noted = tables["smallest"], tables["recovery"].query("note != ''")
    best = _best(smallest)
    if best["heads_removed"]:
        yield f"They were chosen by {_way(best)}{_trained(best)}."
        if best["control_draws"]:
            yield _control(best)
        yield as_fast(best, tables)
    if 0 < best["heads_kept"] < best["heads_total"]:
        yield f"They are (site.layer: heads, counted from 0) {by_block(head_names(best['kept']))}."
    parts = []
    for _, rows in smallest.groupby("recovery", sort=False):
        row = fewest_heads(rows)
        parts.append(f"{int(row['heads_kept'])} {_after(row)} ({share(row[QUALITY])}, {_way(row)})")
    yield (
        f"The fewest heads within {best['tolerance']:g} of {quality_name(tables)} on the choose split, and what is left"
        f" on the report split: {', '.join(parts)}."
    )
    if best["heads_removed"] and _surely(best):
        yield what_is_sure(best["tolerance"], quality_name(tables))
    for (name, note), rows in noted.groupby(["recovery", "note"], sort=False):
        yield f"{name} failed for {len(rows)} of the models ({note})."


def head_map(tables: Tables) -> Verdict:
    """The heads of the smallest model that is good enough."""
    smallest = tables["smallest"]
    best = fewest_heads(smallest[~smallest["control"]])
    stays = dict.fromkeys(head_names(best["removed"]), False) | dict.fromkeys(head_names(best["kept"]), True)
    order = sorted(stays, key=lambda name: (*block_order(name.site, name.layer), name.head))
    heads = pd.DataFrame(order, columns=HEAD).assign(score=nan, name="", stays=[stays[name] for name in order])
    title = f"{int(best['heads_kept'])} of {len(heads)} heads are enough: {share(best[QUALITY])} {quality_name(tables)}"
    if best["recovery"] != NOTHING and not (isinstance(best["note"], str) and best["note"]):
        title += f" after {best['recovery']}"
    return Verdict(heads, "", title, "Dashed tiles are heads that were removed together; blue ones stay.")


def headline(tables: Tables) -> list[Number]:
    """Return how many heads can be removed after each recovery, and what that brings. Controls are left out."""
    own = tables["smallest"][~tables["smallest"]["control"]]
    return [
        number
        for name, rows in own.groupby("recovery", sort=False)
        for number in what_can_go(fewest_heads(rows), "" if name == NOTHING else str(name), tables)
    ]


def fewest_heads(smallest: pd.DataFrame) -> pd.Series:
    """The smallest model. Ties go to the best on the choose split."""
    order = smallest.sort_values(["heads_kept", CHOOSE_QUALITY], ascending=[True, False], kind="stable")
    return order.iloc[0]


def _best(smallest: pd.DataFrame) -> Any:
    """The smallest model that is no control. Ties go to the best on the choose split."""
    return fewest_heads(smallest[~smallest["control"]])


def _surely(row: Any) -> str:
    """Say how many are enough at 95 % confidence; nothing for a control, and in an older table."""
    sure = sure_count(row)
    return "" if sure is None else f" ({int(row['heads_total']) - sure} surely)"


def _way(row: Any) -> str:
    return str(row["schedule"]) + (f" with {row['scorer']}" if row["scorer"] != row["schedule"] else "")


def _after(row: Any) -> str:
    if row["recovery"] == NOTHING:
        return "with nothing done afterwards"
    return f"{row['recovery']}" if row["control"] else f"after {row['recovery']}"


def _trained(row: Any) -> str:
    if row["recovery"] == NOTHING:
        return ""
    steps = int(row["steps"])
    return (
        f" and trained for {steps} steps more ({row['recovery']})" if steps else f" and recovered by {row['recovery']}"
    )
