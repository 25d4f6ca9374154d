"""TensorBoard's own readers show each step once, whatever the attempts went through."""

from __future__ import annotations

import logging
import subprocess

import grpc
import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.context import RequestContext
from tensorboard.data.grpc_provider import GrpcDataProvider, make_stub
from tensorboard.data.server_ingester import get_server_binary

from hpctrain.ledger.run.results import masked_crc, write_curves
from hpctrain.train.runtime.trackers import EventFile, file_name
from tests.support import patience
from tests.support.ledger_runs import Story

SAMPLES = {"scalars": 10_000, "tensors": 100}
HOUR_S = 3600.0


def write(folder, attempt, first, last, *, clock=0.0, name=""):
    """What an attempt that does these steps leaves behind; its values are its number."""
    path = folder / (name or file_name(attempt))
    file = EventFile(path, purge_step=first if first > 1 else 0)
    for step in range(first, last + 1):
        t = 1_763_700_000.0 + clock + step
        file.log(step, {"loss": float(attempt), "lr": 0.5}, t)
    file.close()
    return path


def killed_twice(folder):
    write(folder, 1, 1, 20)
    write(folder, 2, 11, 25)
    write(folder, 3, 6, 30)
    return {1: range(1, 6), 3: range(6, 31)}


def from_the_start_again(folder):
    write(folder, 1, 1, 20)
    write(folder, 2, 1, 30)
    return {2: range(1, 31)}


def on_a_node_whose_clock_is_behind(folder):
    write(folder, 1, 1, 20)
    write(folder, 2, 11, 30, clock=-HOUR_S)
    return {1: range(1, 11), 2: range(11, 31)}


def after_a_torn_file(folder):
    path = write(folder, 1, 1, 20)
    path.write_bytes(path.read_bytes()[:-7])
    write(folder, 2, 11, 30)
    return {1: range(1, 11), 2: range(11, 31)}


def after_files_of_an_older_hpctrain(folder):
    write(folder, 1, 1, 20, name="events.out.tfevents.1999999999.n1.17.0")
    write(folder, 2, 11, 30)
    return {1: range(1, 11), 2: range(11, 31)}


def of_twelve_attempts(folder):
    for attempt in range(1, 13):
        write(folder, attempt, 5 * attempt - 4, 5 * attempt + 3)
    attempts = {n: range(5 * n - 4, 5 * n + 1) for n in range(1, 12)}
    return attempts | {12: range(56, 64)}


STORIES = [
    killed_twice,
    from_the_start_again,
    on_a_node_whose_clock_is_behind,
    after_a_torn_file,
    after_files_of_an_older_hpctrain,
    of_twelve_attempts,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All stories side by side, each a run of its own."""
    top = tmp_path_factory.mktemp("logdir")
    for story in STORIES:
        story(top / story.__name__)
    evaluated(top / "evaluated")
    return top


def evaluated(folder):
    """Attempts that go back behind what was evaluated, the newest of which came first."""
    story = Story(folder.parent.parent / "runs" / "evaluated")
    story.run.tensorboard.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    story.run.tensorboard.symlink_to(folder)
    write(folder, 1, 1, 20)
    for step, loss in ((20, 2.0), (10, 2.5), (30, 1.5)):
        story.add("evaluated", step=step, run="x", metrics={"loss": loss, "top": 0.5})
        write_curves(story.run)
    write(folder, 2, 11, 30)


@pytest.fixture(scope="module", params=["python", "data server"])
def provider(request, folder):
    """TensorBoard's two ways of reading; on Linux it takes the second where it can."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    if request.param == "python":
        multiplexer = EventMultiplexer(size_guidance=SAMPLES)
        multiplexer.AddRunsFromDirectory(str(folder))
        multiplexer.Reload()
        yield MultiplexerDataProvider(multiplexer, str(folder))
        return
    port_file = folder.parent / "port"
    options = ["--reload=once", "--samples-per-plugin=scalars=all", "--port=0"]
    words = [get_server_binary().path, f"--logdir={folder}", f"--port-file={port_file}", *options]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as server:
        try:
            port = _await(lambda: port_file.exists() and port_file.read_text().strip())
            with grpc.insecure_channel(f"localhost:{port}") as channel:
                provider = GrpcDataProvider(f"localhost:{port}", make_stub(channel))
                _await(lambda: len(_scalars(provider, "loss")) == len(STORIES) + 1)
                yield provider
        finally:
            server.kill()


def _await(reached):
    return patience.until(reached)


def _scalars(provider, tag):
    runs = provider.read_scalars(
        RequestContext(), experiment_id="", plugin_name="scalars", downsample=10_000
    )
    return {
        run: [(p.step, p.value) for p in tags[tag]] for run, tags in runs.items() if tag in tags
    }


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_each_step_is_shown_once(story, provider, tmp_path):
    expected = [(step, n) for n, steps in sorted(story(tmp_path).items()) for step in steps]

    assert _scalars(provider, "loss")[story.__name__] == expected
    assert [step for step, _ in _scalars(provider, "lr")[story.__name__]] == [
        step for step, _ in expected
    ]


def test_evaluations_are_a_curve_beside_the_attempts_whatever_these_begin_again(provider):
    _await(lambda: _scalars(provider, "eval/loss"))

    assert _scalars(provider, "eval/loss") == {"evaluated/eval": [(10, 2.5), (20, 2.0), (30, 1.5)]}
    assert [step for step, _ in _scalars(provider, "eval/top")["evaluated/eval"]] == [10, 20, 30]
    assert _scalars(provider, "loss")["evaluated"][-1] == (30, 2.0)


def test_names_sort_by_attempt_and_after_those_that_begin_with_a_time():
    names = ["events.out.tfevents.9999999999.n1.1.0", *map(file_name, (1, 2, 9, 10, 100))]

    assert sorted(names) == names


def test_checksums_are_tensorboards():
    for content in (b"", b"a", bytes(range(256)) * 3):
        assert masked_crc(content) == masked_crc32c(content).to_bytes(4, "little")


def test_nothing_waits_in_a_buffer_that_a_forked_child_would_write_again(tmp_path):
    file = EventFile(tmp_path / file_name(1), purge_step=0)
    file.log(1, {"loss": 1.0}, 0.0)
    before = (tmp_path / file_name(1)).stat().st_size

    file.flush()

    assert 0 < before <= 96, "the head alone, which `hpctrain tensorboard` counts as no scalar"
    assert (tmp_path / file_name(1)).stat().st_size > before
    file.close()
