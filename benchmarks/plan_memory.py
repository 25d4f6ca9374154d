"""What `hpctrain plan` says of memory against the exact peak, and what others say of the same.

Each case is a step of a real architecture as hpctrain's engines spread it, under torch's
FakeTensorMode: every storage is counted, none is made. Beside our formulas: `accelerate
estimate-memory`, DeepSpeed's estimators of ZeRO-2 and ZeRO-3, and the rule of 18 bytes for each
parameter, divided by the ranks where the state is sharded. All four without allocators.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from hpctrain.advise.strategy.facts import of_config
from tests.support import plan_cases

if TYPE_CHECKING:
    from hpctrain.advise.strategy.facts import ModelFacts
    from tests.support.plan_cases import Case

CLOSE, NEAR = 0.05, 0.10
RULE = 18
MIB = 1 << 20


def main() -> None:
    """Every case; a table in Markdown, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="some of them")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    cases = plan_cases.QUICK if given.quick else plan_cases.ALL
    rows = [
        row_of(case, peak)
        for case, peak in zip(cases, plan_cases.measured(cases, 3600), strict=True)
    ]
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print(_table(rows))
    print(_summary(rows))


def row_of(case: Case, peak: int) -> dict[str, Any]:
    """Predictions for a case, bytes, by who made them."""
    name, step = case
    facts = of_config(plan_cases.MODELS[name], name)
    said = {"hpctrain": plan_cases.predicted(case).nbytes, **others(facts, step)}
    return {"case": plan_cases.title(case), "peak": peak, **said}


def others(facts: ModelFacts, step: dict[str, Any]) -> dict[str, int | None]:
    """What is said elsewhere. None where a tool has no such case."""
    from accelerate.commands.estimate import estimate_training_usage

    if any(step.get(way) for way in ("offload", "pp", "ep", "lora")):
        return dict.fromkeys(WHO[1:])  # none of them knows these
    ranks = step.get("ranks", 1)
    sharded = step["kind"] not in {"single", "ddp"}
    precision = "bfloat16" if step.get("bf16", True) else "float32"
    usage = estimate_training_usage(4 * facts.params, precision)
    shards = ranks // step.get("copies", 1) if sharded else 1
    return {
        "accelerate": max(usage.values()) if not sharded else None,
        "deepspeed": _deepspeed(facts, step, ranks) if sharded else None,
        "rule": RULE * facts.params // shards,
    }


def _deepspeed(facts: ModelFacts, step: dict[str, Any], ranks: int) -> int | None:
    """Of the stage that shards alike: 2 where weights stay, else 3; none for copies of shards."""
    if step.get("copies", 1) > 1:
        return None
    stage = 3 if step.get("reshard", True) else 2
    if step["kind"].startswith("zero"):
        stage = 3 if step["kind"] == "zero3" else 2  # it has one of both for stages 1 and 2
    largest = max(facts.block_params, facts.vocab * facts.hidden)
    code = (
        "import sys, io, contextlib\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    from deepspeed.runtime.zero import stage3, stage_1_and_2\n"
        "z3 = stage3.estimate_zero3_model_states_mem_needs\n"
        "z2 = stage_1_and_2.estimate_zero2_model_states_mem_needs\n"
        f"gpu = z3({facts.params}, {largest}, {ranks}, 1, False, False)[1] if {stage} == 3 else "
        f"z2({facts.params}, {ranks}, 1, False)[1]\n"
        "print(gpu)\n"
    )
    key = (stage, facts.params, ranks)
    if key not in _SAID:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        _SAID[key] = int(done.stdout.split()[-1])
    return _SAID[key]


_SAID: dict[tuple[int, int, int], int] = {}
WHO = ("hpctrain", "accelerate", "deepspeed", "rule")


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| case | exact peak, MiB | hpctrain plan | accelerate | DeepSpeed | 18 B/param |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        errors = [
            "" if row[who] is None else f"{100 * (row[who] / row['peak'] - 1):+.1f} %"
            for who in WHO
        ]
        lines.append(f"| {row['case']} | {row['peak'] / MIB:,.0f} | {' | '.join(errors)} |")
    return "\n".join(lines)


def _summary(rows: list[dict[str, Any]]) -> str:
    lines = []
    for who in WHO:
        errors = [abs(row[who] / row["peak"] - 1) for row in rows if row[who] is not None]
        close, near = (sum(e <= most for e in errors) for most in (CLOSE, NEAR))
        lines.append(
            f"{who}: {len(errors)} cases, {close} within 5 %, {near} within 10 %, worst "
            f"{100 * max(errors):.1f} %"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
