"""The doctor on a run that failed for real on the embedded cluster."""

from __future__ import annotations

import json

from tests.support.local_runs import await_end, hpctrain, start
from tests.support.quoted_logs import FOLDER


def test_a_rank_that_raises_is_named_with_its_line(tmp_path):
    program = str(FOLDER / "faults" / "program.py")

    run = start(tmp_path, "raises", 1, 2, "--", program, "exception")
    end = await_end(run)
    document = json.loads(hpctrain(tmp_path, "doctor", "raises", "--json"))

    assert end["reason"] == "user_error"
    assert (document["kind"], document["certainty"]) == ("code", "certain")
    assert document["evidence"][0]["rank"] == 1
    assert "program.py" in document["evidence"][0]["place"]
    assert "ValueError: the vocabulary has 50257 entries" in document["headline"]
