"""Releases of torch and DeepSpeed that cannot train are refused at submit, without an import."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.cluster.scheduler.slurm.script import module_lines
from hpctrain.cluster.site.schema import Modules
from hpctrain.core.settings.schema import EngineSettings, Settings, replaced
from hpctrain.errors import UsageError
from hpctrain.launch import checks
from hpctrain.launch.checks import check_versions
from hpctrain.ledger.plan.mesh import DEEPSPEED, TORCH, refusal, untried


@pytest.mark.parametrize(
    ("found", "engine", "says"),
    [
        ({"torch": "2.7.1+cu128"}, {}, "torch 2.7.1+cu128 is too old: the engines need 2.8 or"),
        ({"torch": "1.13"}, {}, "torch 1.13 is too old"),
        ({"torch": "2.8.0"}, {}, None),
        ({"torch": "2.8.0a0+5228986c39.nv25.06"}, {}, None),
        ({"torch": "2.14.1"}, {}, None),
        ({"torch": ""}, {}, None),
        ({"torch": "from source"}, {}, None),
        ({}, {"kind": "zero3", "ep": "2"}, None),
        ({"torch": "2.11.0"}, {"ep": "2"}, "engine.ep 2 needs torch 2.12 or newer"),
        ({"torch": "2.11.0"}, {"ep": "1-4"}, "engine.ep 1-4 needs torch 2.12 or newer"),
        ({"torch": "2.11.0"}, {"ep": "1"}, None),
        ({"torch": "2.12.0"}, {"ep": "2"}, None),
        (
            {"torch": "2.8.0"},
            {"pp": "2"},
            "engine.pp 2 needs torch 2.9 or newer, and this is torch",
        ),
        ({"torch": "2.9.0"}, {"pp": "2"}, None),
        ({"deepspeed": "0.19.7"}, {"kind": "zero1"}, "engine.kind zero1 needs DeepSpeed 0.19.8 or"),
        ({"deepspeed": "0.19.7"}, {"kind": "ddp"}, None),
        ({"deepspeed": "0.19.10"}, {"kind": "zero1"}, None),
    ],
)
def test_what_is_too_old_for_an_engine_is_refused_in_one_line(found, engine, says):
    why = refusal(found, EngineSettings(**engine))

    assert (why is None) == (says is None)
    if says is not None:
        assert why.startswith(says)
        assert "\n" not in why


def test_what_is_newer_than_any_that_was_run_is_said():
    found = {"torch": "2.15.0", "deepspeed": "0.20.0"}

    (torch,) = untried(found, EngineSettings())
    assert torch.startswith(
        "torch 2.15.0 is newer than 2.14, the newest that hpctrain was run with"
    )
    assert len(untried(found, EngineSettings(kind="zero2"))) == 2
    assert not untried(
        {"torch": "2.14.3", "deepspeed": "0.19.8.post1"}, EngineSettings(kind="zero2")
    )


def posed(monkeypatch, **found):
    monkeypatch.setattr(checks, "installed_version", lambda name: found.get(name, ""))


def test_submit_refuses_what_is_installed_here(monkeypatch):
    posed(monkeypatch, torch="2.6.0")

    with pytest.raises(UsageError, match=r"^torch 2\.6\.0 is too old"):
        check_versions(Settings())


def test_a_job_that_loads_modules_may_bring_another_torch(monkeypatch):
    posed(monkeypatch, torch="2.6.0")
    site = SimpleNamespace(modules=Modules(load=("pytorch/2.13",)), where=lambda *_: "here")
    own = replaced(Settings(), {"slurm.setup": ["source env.sh"]})

    for said in (check_versions(Settings(), module_lines(site)), check_versions(own)):
        assert len(said) == 1
        assert said[0].startswith("torch 2.6.0 is too old")
        assert said[0].endswith("(unless the job's modules or slurm.setup bring another)")


def test_nothing_is_said_of_another_interpreter_or_of_what_is_not_here(monkeypatch):
    posed(monkeypatch, torch="2.6.0")
    assert check_versions(Settings(), python="/elsewhere/bin/python") == []
    posed(monkeypatch)
    assert check_versions(Settings()) == []


def test_the_bounds_are_those_that_the_package_asks_for():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]

    assert f"torch>={TORCH}" in project["dependencies"]
    assert project["optional-dependencies"]["deepspeed"] == [f"deepspeed>={DEEPSPEED}"]
    assert f"torch {TORCH} or newer" in Path("README.md").read_text()


@pytest.mark.parametrize("package", ["torch", "deepspeed", "numpy", "no-such-package"])
def test_a_version_is_the_one_that_pythons_own_means_tell(package):
    try:
        told = metadata.version(package)
    except metadata.PackageNotFoundError:
        told = ""

    assert checks.installed_version(package) == told


def test_the_place_that_python_looks_at_first_counts(tmp_path, monkeypatch):
    for place, name in [("a", "torch-2.9.0+git-py3.egg-info"), ("b", "torch-2.8.0.dist-info")]:
        (tmp_path / place / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "none"), str(tmp_path / "a"), *sys.path])
    first = checks.installed_version("torch")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "b"), str(tmp_path / "a")])

    assert (first, checks.installed_version("torch")) == ("2.9.0+git", "2.8.0")
    assert not checks.installed_version("tor")


def test_asking_brings_no_parsers_of_email():
    code = "import sys, hpctrain.launch.checks; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert {"importlib.metadata", "email"} & {*done.stdout.split()} == set()
