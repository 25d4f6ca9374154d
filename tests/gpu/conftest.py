"""Fixtures of the tests on a GPU; on a machine without one they rehearse on the CPU.

`make gpu` runs these tests where a GPU is, `make gpu-dry` and `make check` rehearse them. A test
asks for `device`, and puts what needs CUDA itself behind `note.on_gpu("what")`. Nothing else may
depend on the device, so a rehearsal finds a wrong import, argument or fixture.
"""

from __future__ import annotations

import gc
import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.recording import NEEDS_CUDA, NUMBER, ON_CUDA
from tests.support.ports import free_port
from tests.support.resumed import end_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.core.world import World


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker("gpu")
            item.add_marker(
                pytest.mark.filterwarnings("default")
            )  # of a torch that CI does not have


@dataclass
class Notes:
    """What a test notes for the results.

    Attributes:
        is_cuda: Whether the test runs on a GPU.
        noted: Name and value of everything.
    """

    is_cuda: bool
    noted: list[tuple[str, Any]]
    missed: list[str] = field(default_factory=list)

    def on_gpu(self, what: str) -> bool:
        """Return whether CUDA is here; elsewhere note what is left out."""
        if not self.is_cuda:
            self.noted.append((NEEDS_CUDA, what))
        return self.is_cuda

    def at_most(self, what: str, value: float, goal: float | None = None, unit: str = "") -> None:
        """Note a number; above its goal it fails the test at its end. A CPU's fails nothing."""
        is_reached = None if goal is None or not self.is_cuda else value <= goal
        self._number(what, value, "" if goal is None else f"<= {goal:g}", unit, is_reached)

    def at_least(self, what: str, value: float, goal: float, unit: str = "") -> None:
        """Note a number; below its goal it fails the test at its end. A CPU's fails nothing."""
        is_reached = value >= goal if self.is_cuda else None
        self._number(what, value, f">= {goal:g}", unit, is_reached)

    def _number(self, what: str, value: float, goal: str, unit: str, reached: bool | None) -> None:
        row = {"what": what, "value": value, "goal": goal, "unit": unit, "reached": reached}
        self.noted.append((NUMBER, row))
        if reached is False:
            self.missed.append(f"{what}: {value:.4g} {unit}, goal {goal}")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU for a rehearsal."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # What deterministic algorithms ask for; cuBLAS reads it when it begins.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def is_cuda(device) -> bool:
    return device.type == "cuda"


@pytest.fixture
def note(request, is_cuda) -> Notes:
    """Where a test notes what it measured and what it left out."""
    return Notes(is_cuda, request.node.user_properties)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, so that no disk decides how long a test takes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hpctrain-gpu-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def local_jobs(tmp_path_factory) -> Iterator[None]:
    """A folder of the module's own for jobs of the local cluster, also for the test's process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path_factory.mktemp("local")))
        yield


@pytest.fixture(autouse=True)
def _own_device(request, is_cuda) -> None:
    """Each test says where it ran, and begins with the GPU's memory free."""
    if is_cuda:
        request.node.user_properties.append((ON_CUDA, True))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """After the test's last line: no number may have missed its goal."""
    result = yield
    notes: Any = pyfuncitem.funcargs.get("note")
    assert not (notes and notes.missed), "; ".join(notes.missed)
    return result


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """End the threads of runs that a test had in this process; a rank's end with its process."""
    yield
    from hpctrain.train.runtime.run import Run

    for run in [thing for thing in gc.get_objects() if type(thing) is Run]:
        end_threads(run)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """This process as the one rank of a group: NCCL with gloo beside it, or gloo."""
    from hpctrain.train.joining_ranks import join_world

    gc.freeze()  # else each run looks through all that torch has made for what it cannot save
    with torchrun_environment():
        yield join_world()
        dist.destroy_process_group()
    gc.unfreeze()


@contextmanager
def torchrun_environment() -> Iterator[None]:
    """The variables that torchrun sets for one rank."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK"):
            patch.setenv(name, "0")
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, "1")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(free_port()))
        yield
    for name in [name for name in os.environ if name.startswith("HPCTRAIN_")]:
        del os.environ[name]
