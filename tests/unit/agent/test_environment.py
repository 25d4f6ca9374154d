"""What an agent puts into its ranks' environment for an attempt, and what it writes down of it."""

from __future__ import annotations

import json
import os
import tempfile

import pytest

from hpctrain.cluster.site.environment import Versions
from hpctrain.cluster.site.load import load_site
from hpctrain.core.base.records import JobContext
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from hpctrain.node.agent import environment as agent
from hpctrain.node.agent.environment import compile_cache
from tests.support.ledger_runs import all_fields

PRESET = """
[network]
socket_ifnames = ["hsn0"]
[env]
unset = ["FI_PROVIDER"]
[env.common]
NCCL_DEBUG = "WARN"
NCCL_CROSS_NIC = "1"
SITE_KEY = "abc"
OMP_NUM_THREADS = "7"
[env.single_node]
NCCL_NET = "Socket"
[env.multi_node]
NCCL_NET = "IB"
[env.when.new]
nccl = ">=2.27"
set = { NCCL_PROTO = "^LL128" }
"""


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    return RunDir(root)


@pytest.fixture(autouse=True)
def job(monkeypatch):
    """The job's own environment: small, and put back afterwards."""
    for name in list(os.environ):
        if name.startswith(("NCCL_", "TORCH", "GLOO_", "FI_", "OMP_", "HPCTRAIN_", "SITE_")):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    yield monkeypatch
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def versions(monkeypatch):
    """torch is not asked here; tests/slurm and tests/e2e do that."""
    monkeypatch.setattr(agent, "versions_here", lambda: Versions(nccl="2.28.3", torch="2.13.0"))


def make(run, tmp_path, *, text=PRESET, nodes=("n1", "n2"), rank=0, unlocked=(), **env):
    site = None
    if text:
        (tmp_path / "juniper.toml").write_text(text)
        site = load_site(str(tmp_path / "juniper.toml"))
    spec = Spec(
        "r", "id", 0.0, "slurm", "juniper", Entry("recipe"),
        env=env, env_origins=dict.fromkeys(env, "flag --env"),
        preset=site.as_plain() if site else None, unlocked=list(unlocked),
    )  # fmt: skip
    context = JobContext("7", 0, rank, list(nodes), "n1", 20000, "tok")
    return agent.RankEnvironment(run, spec, context)


def written(run, number=1):
    return json.loads((run.attempt(number) / "environment.json").read_text())


def test_the_preset_then_settings_then_the_job_itself(run, tmp_path, job):
    job.setenv("NCCL_CROSS_NIC", "2")
    job.setenv("FI_PROVIDER", "efa")
    made = make(run, tmp_path, NCCL_CROSS_NIC="0", NCCL_DEBUG="INFO", MY_DATA="/x")

    made.before_imports()
    assert (os.environ["NCCL_NET"], "NCCL_PROTO" in os.environ) == ("IB", False)
    made.for_attempt(1)

    assert os.environ["NCCL_CROSS_NIC"] == "2"  # the job
    assert os.environ["NCCL_DEBUG"] == "INFO"  # --env
    assert os.environ["MY_DATA"] == "/x"
    assert os.environ["NCCL_PROTO"] == "^LL128"  # the preset
    assert os.environ["GLOO_SOCKET_IFNAME"] == "hsn0"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "FI_PROVIDER" not in os.environ


def test_one_event_and_one_file_tell_what_was_overridden(run, tmp_path, job):
    job.setenv("NCCL_CROSS_NIC", "2")
    job.setenv("FI_PROVIDER", "efa")
    job.setenv("SITE_KEY", "s3cret")
    made = make(run, tmp_path, NCCL_DEBUG="INFO", WANDB_API_KEY="t0ken")

    made.before_imports()
    made.for_attempt(1)

    (event,) = ledger.read(run)
    assert (event.kind, event.attempt, all_fields(event)["nodes"]) == ("environment", 1, 2)
    assert all_fields(event)["versions"]["nccl"] == "2.28.3"
    assert all_fields(event)["unset"] == ["FI_PROVIDER"]
    won = {one["name"]: one for one in all_fields(event)["overridden"]}
    assert set(won) == {"NCCL_CROSS_NIC", "NCCL_DEBUG", "SITE_KEY"}
    where = f"site juniper ({tmp_path}/juniper.toml:8)"
    assert won["NCCL_CROSS_NIC"] == {
        "name": "NCCL_CROSS_NIC", "by": agent.THE_JOB, "instead_of": where, "value": "2",
    }  # fmt: skip
    assert (won["NCCL_DEBUG"]["by"], "value" in won["SITE_KEY"]) == ("flag --env", False)
    values = written(run)["values"]
    assert values["NCCL_NET"]["value"] == "IB"
    assert values["WANDB_API_KEY"] == {"origin": "flag --env"}
    text = run.events.read_text() + json.dumps(written(run))
    assert not [word for word in ("s3cret", "t0ken", "abc") if word in text]


def test_each_attempt_has_a_place_for_its_own_dumps(run, tmp_path):
    made = make(run, tmp_path, text="")
    made.before_imports()

    for number in (1, 2):
        made.for_attempt(number)
        dump = os.environ["TORCH_FR_DUMP_TEMP_FILE"]
        assert dump == f"{run.attempt(number)}/nccl-trace-rank-"

    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert written(run, 2)["overridden"] == []


def test_fewer_nodes_after_a_requeue_get_the_other_group(run, tmp_path):
    make(run, tmp_path, nodes=["n1"]).for_attempt(2)

    assert os.environ["NCCL_NET"] == "Socket"
    assert written(run, 2)["nodes"] == 1


def test_what_no_longer_applies_is_taken_back(run, tmp_path, job, monkeypatch):
    job.setenv("NCCL_PROTO", "Simple")
    made = make(run, tmp_path, text="[env.when.x]\nnccl = '>=2.27'\nunset = ['NCCL_PROTO']\n")
    made.for_attempt(1)
    assert "NCCL_PROTO" not in os.environ

    monkeypatch.setattr(agent, "versions_here", lambda: Versions(nccl="2.26"))
    made.for_attempt(2)

    assert os.environ["NCCL_PROTO"] == "Simple"


def test_only_node_0_writes(run, tmp_path):
    make(run, tmp_path, rank=1).for_attempt(1)

    assert os.environ["NCCL_NET"] == "IB"
    assert list(run.root.iterdir()) == []


def test_a_follower_is_told_whom_it_runs_after(run, tmp_path, job):
    job.setenv("HPCTRAIN_AFTER", "/runs/of-the-shell-that-submitted")
    made = make(run, tmp_path)
    made.before_imports()
    assert "HPCTRAIN_AFTER" not in os.environ

    made._spec.after = ["/runs/a", "/runs/b"]
    made.before_imports()

    assert os.environ["HPCTRAIN_AFTER"] == "/runs/a:/runs/b"


@pytest.mark.parametrize(
    ("unlocked", "expected"),
    [
        pytest.param((), "IB", marks=pytest.mark.two_users),  # a lock must be another user's
        (("env.NCCL_NET",), "Socket"),
    ],
)
def test_a_locked_variable_holds_against_the_jobs_environment(
    run, tmp_path, job, unlocked, expected
):
    job.setenv("NCCL_NET", "Socket")
    text = PRESET + "[lock]\nkeys = ['env.multi_node.NCCL_NET']\n"

    make(run, tmp_path, text=text, unlocked=unlocked).for_attempt(1)

    assert os.environ["NCCL_NET"] == expected
    assert written(run)["notes"] != []


def test_a_gpus_name_is_read_without_touching_cuda(tmp_path):
    assert agent.gpu_name(tmp_path / "none") == ""
    (tmp_path / "0000:18:00.0").mkdir()
    (tmp_path / "0000:18:00.0" / "information").write_text(
        "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\n"
    )

    assert agent.gpu_name(tmp_path) == "NVIDIA H100 80GB HBM3"


def test_what_torch_compiles_is_kept_where_the_user_says_or_in_a_folder_of_his_own(
    run, tmp_path, job
):
    job.setattr(tempfile, "tempdir", str(tmp_path))
    make(run, tmp_path, text="").before_imports()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(compile_cache(run))

    job.delenv("TORCHINDUCTOR_CACHE_DIR")
    make(run, tmp_path, text="", TORCHINDUCTOR_CACHE_DIR="/mine").before_imports()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"

    job.setenv("TORCHINDUCTOR_CACHE_DIR", "/shells")
    make(run, tmp_path, text="").before_imports()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/shells"
