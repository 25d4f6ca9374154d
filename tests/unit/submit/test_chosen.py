"""What nobody has given is chosen at submit; a resume chooses it anew, of runs made before too."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.core.settings.schema import Settings
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import NotFound
from hpctrain.launch.change import ResumeRequest, change_spec

OLD = Path(__file__).parents[2] / "data" / "specs"
"""Of an earlier month: settings that came since are not in them."""
SITE = "site juniper (/home/user/work/sites/juniper.toml"


def resumed(name, **flags):
    request = ResumeRequest({f"slurm.{key}": (f"--{key}", value) for key, value in flags.items()})
    spec, notes = change_spec(load_spec(OLD / f"{name}.json"), request)
    return spec.settings.slurm, spec.origins, notes


@pytest.mark.parametrize("name", ["chosen", "lowered"])
def test_an_old_run_is_resumed_as_it_was(name):
    before = load_spec(OLD / f"{name}.json")

    after, _ = change_spec(before, ResumeRequest({}))

    assert after.settings == before.settings
    # settings that its version did not have are as by default
    assert after.origins == dict.fromkeys(after.origins, "default") | before.origins


def test_what_was_chosen_for_an_old_run_is_chosen_anew_for_another_shape():
    slurm, origins, notes = resumed("chosen", nodes="65")

    assert (slurm.partition, slurm.qos, slurm.cpus_per_rank) == ("spare", "normal", 0)
    assert origins["slurm.partition"] == f"chosen from the limits of {SITE}:9)"
    assert origins["slurm.cpus_per_rank"] == "default"
    assert notes[0].startswith("partition spare is taken")


def test_what_was_lowered_for_an_old_run_is_as_by_default_where_it_fits():
    slurm, origins, _ = resumed("lowered", partition="batch")

    plain = Settings().slurm
    assert (slurm.time, slurm.signal_lead_s) == (plain.time, plain.signal_lead_s)
    assert (origins["slurm.time"], origins["slurm.signal_lead_s"]) == ("default", "default")
    assert slurm.cpus_per_rank == 7


def test_what_the_user_gave_an_old_run_stays():
    slurm, origins, _ = resumed("lowered", nodes="2")

    assert (slurm.partition, slurm.time, slurm.signal_lead_s) == ("minutes", "0:02:00", 40)
    assert origins["slurm.partition"] == "flag --partition"
    assert origins["slurm.time"] == f"default, lowered to the limit of {SITE}:9)"
    assert load_spec(OLD / "lowered.json").settings.train.steps == 7


def test_a_new_spec_says_what_was_chosen_and_its_origins_are_only_shown(tmp_path):
    old = load_spec(OLD / "chosen.json")
    spec, _ = change_spec(old, ResumeRequest({}))
    spec.origins["slurm.partition"] = "whatever is shown"
    spec.dump(tmp_path / "spec.json")

    written = load_spec(tmp_path / "spec.json")
    below, origins = written.given()

    assert written == spec
    assert sorted(written.chosen) == ["slurm.cpus_per_rank", "slurm.partition", "slurm.qos"]
    assert (below.slurm.partition, below.slurm.qos, below.slurm.cpus_per_rank) == ("", "", 0)
    assert (origins["slurm.partition"], origins["slurm.time"]) == ("default", "flag --time")
    again, _ = change_spec(written, ResumeRequest({"slurm.nodes": ("--nodes", "65")}))
    assert again.settings.slurm.partition == "spare"
    assert sorted(again.chosen) == ["slurm.partition", "slurm.qos"]


def test_a_spec_of_0_1_is_refused_with_the_version_that_reads_it(tmp_path):
    (tmp_path / "spec.json").write_text('{"format": 2}')

    with pytest.raises(NotFound) as caught:
        load_spec(tmp_path / "spec.json")
    assert str(caught.value) == (
        f"{tmp_path}/spec.json has format 2, this hpctrain reads format 3 alone; hpctrain 0.1.0 "
        "shows and resumes this run"
    )
