"""What an agent imports before it forks its ranks, and for which ranks."""

from __future__ import annotations

import gc
from dataclasses import replace
from importlib.util import find_spec

import pytest

from hpctrain.core.settings.schema import replaced
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.node.agent import preload


def spec_of(kind, start_method="fork"):
    spec = Spec("r", "id", 0.0, "local", "local", Entry(kind))
    return replace(spec, settings=replaced(spec.settings, {"run.start_method": start_method}))


@pytest.fixture
def imported(monkeypatch):
    """Names in their order, each with whether Python collected garbage meanwhile."""
    calls = []
    monkeypatch.setattr(preload, "import_module", lambda name: calls.append((name, gc.isenabled())))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(("frozen", gc.isenabled())))
    return calls


@pytest.mark.parametrize("kind", ["recipe", "script", "module"])
def test_forked_ranks_of_python_share_what_they_need(kind, imported):
    preload.preload(spec_of(kind))

    names = [name for name, _ in imported]
    assert names == [*preload.OF_AGENTS, *preload.OF_RANKS, "frozen"]
    assert "torch._dynamo" in names


@pytest.mark.parametrize("of", [("program", "fork"), ("script", "spawn")])
def test_nobody_imports_for_ranks_that_do_not_share_it(of, imported):
    preload.preload(spec_of(*of))

    assert [name for name, _ in imported] == [*preload.OF_AGENTS, "frozen"]


def test_garbage_is_not_looked_for_until_all_is_imported(imported):
    preload.preload(spec_of("script"))

    assert [collects for _, collects in imported] == [False] * (len(imported) - 1) + [True]


def test_a_failed_import_leaves_the_garbage_collection_on(monkeypatch):
    def fail(name):
        raise ImportError(name)

    monkeypatch.setattr(preload, "import_module", fail)

    with pytest.raises(ImportError):
        preload.preload(spec_of("script"))

    assert gc.isenabled()


def test_our_own_modules_are_there():
    ours = [name for name in (*preload.OF_AGENTS, *preload.OF_RANKS) if name.startswith("hpctrain")]

    assert [name for name in ours if find_spec(name) is None] == []
