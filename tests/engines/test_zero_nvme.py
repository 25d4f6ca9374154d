"""State of ZeRO-3 on a disk: failures are raised, leftovers removed, memory is not taken.

That it trains and is saved and loaded as any other state is tests/engines/test_zero.py's.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from hpctrain.engines.zero.nvme import CHUNK_BYTES, NvmeFiles, gaps, take_folder
from tests.support import zero

# ---- nobody pays for it who does not use it


def _imports(folder, offload):
    """Whether training and saving bring the module in, of an engine that is imported anew."""
    own = "hpctrain.engines.zero"
    for name in [name for name in sys.modules if name.startswith(own)]:
        del sys.modules[name]
    engine = zero.build("zero3", offload=offload, disk=folder, ds_config=zero.SUB_GROUPS)
    zero.steps(engine, 0, 2)
    zero.save(engine, folder / offload, 2)
    return f"{own}.nvme" in sys.modules


@pytest.mark.parametrize("offload", ["no", "cpu", "nvme"])
def test_a_run_without_a_disk_never_imports_it(tmp_path, offload):
    assert zero.launch(_imports, 1, folder=tmp_path, offload=offload) == [offload == "nvme"]


# ---- files


@pytest.mark.parametrize("skip", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("count", [7, 4096, CHUNK_BYTES // 4 + 1025])
def test_what_is_written_is_read_whatever_its_length_and_place_in_memory(tmp_path, count, skip):
    files = NvmeFiles()
    row = files.new_cpu_locked_tensor(count + 1, torch.empty(0, dtype=torch.float32))
    row.copy_(torch.arange(count + 1, dtype=torch.float32))
    written = row.narrow(0, skip, count).clone()
    for name in ("a", "b"):
        files.async_pwrite(row.narrow(0, skip, count), str(tmp_path / name), 0)
    assert files.wait() == 2
    row.zero_()

    files.async_pread(row.narrow(0, skip, count), str(tmp_path / "b"), 0)

    assert files.wait() == 1
    assert row.narrow(0, skip, count).equal(written)
    assert torch.from_file(str(tmp_path / "a"), size=count).equal(written)


def test_memory_of_its_own_is_told_from_other_memory():
    files = NvmeFiles()
    row = files.new_cpu_locked_tensor(10, torch.empty(0, dtype=torch.float32))

    assert files.is_pinned(row.narrow(0, 3, 2))
    assert not files.is_pinned(torch.zeros(10))


def test_a_full_disk_and_a_file_cut_short_are_errors_and_not_leftovers_in_memory(tmp_path):
    files = NvmeFiles()
    row = files.new_cpu_locked_tensor(8192, torch.empty(0, dtype=torch.float32))
    files.async_pwrite(row, "/dev/full", 0)
    with pytest.raises(OSError, match="/dev/full") as full:
        files.wait()
    assert full.value.errno == errno.ENOSPC

    short = tmp_path / "short"
    short.write_bytes(bytes(row.nbytes - 1000))
    files.async_pread(row, str(short), 0)
    with pytest.raises(OSError, match=r"ends too early.*short"):
        files.wait()


def test_gaps_are_what_no_range_covers():
    assert gaps([], 5) == [(0, 5)]
    assert gaps([(3, 2), (0, 1)], 9) == [(1, 2), (5, 4)]
    assert gaps([(0, 4), (4, 5)], 9) == []


# ---- the folder


def _hold(base, pipe, *, leave):
    folder = take_folder(base)
    (folder / "row").write_bytes(b"x")
    pipe.send(str(folder))
    if not leave:
        signal.pause()


def _holder(base, *, leave):
    """A process that has a folder, and the folder."""
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_hold, args=(base, its), kwargs={"leave": leave}, daemon=True
    )
    process.start()
    return process, Path(mine.recv())


def test_a_folder_goes_with_its_process_or_with_whoever_comes_next(tmp_path):
    process, left = _holder(str(tmp_path), leave=True)
    process.join()
    assert not left.exists()
    killed, killed_folder = _holder(str(tmp_path), leave=False)
    alive, alive_folder = _holder(str(tmp_path), leave=False)
    killed.kill()
    killed.join()
    assert (killed_folder / "row").exists()

    mine = take_folder(str(tmp_path))

    try:
        assert {*tmp_path.iterdir()} == {mine, alive_folder}
        assert (alive_folder / "row").exists()
    finally:
        alive.kill()
        alive.join()


def test_a_folder_that_another_rank_sweeps_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    made, make = [], tempfile.mkdtemp

    def swept_once(**where):
        made.append(Path(make(**where)))
        if len(made) == 1:
            made[0].rmdir()
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", swept_once)

    assert take_folder(str(tmp_path)) == made[1]


def test_variables_in_the_path_are_the_nodes_own(tmp_path, monkeypatch):
    monkeypatch.setenv("NODE_DISK", str(tmp_path))

    assert take_folder("$NODE_DISK/state").parent == tmp_path / "state"


# ---- memory

ROW = 1 << 20


def _memory_bytes():
    """This process's own memory; pages of files are the kernel's to take back."""
    return int(re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())[1]) << 10


def _state_in_files(folder):
    from hpctrain.checkpoint.tensors.boxes import Flat, bytes_of
    from hpctrain.engines.engine import Microbatch
    from hpctrain.engines.parallelize import parallelize
    from hpctrain.settings.schema import EngineSettings
    from hpctrain.world import join_world

    world = join_world()
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)])
    config = f'{{"zero_optimization": {{"sub_group_size": {ROW // 2}}}}}'
    settings = EngineSettings(kind="zero3", offload="nvme", nvme_path=str(folder), ds_config=config)
    engine = parallelize(model, torch.optim.AdamW(model.parameters()), settings, world)
    inputs = torch.ones(1, 1024)
    engine.forward_backward([Microbatch(inputs, None)], lambda out, _: out.square().mean())
    engine.step()
    files = folder.rglob(f"rank{world.rank}/*_gradient_*")
    gradients = [torch.from_file(str(path), size=path.stat().st_size // 4) for path in files]
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed before would be used, unseen
    before = _memory_bytes()
    state = engine.state()
    parts = [bytes_of(value.local) for value in state.shared.values() if isinstance(value, Flat)]
    used = [_memory_bytes() - before]
    for memory in parts:
        memory[:] = bytes(memory)  # as a save reads, and a restore writes
        used.append(_memory_bytes() - before)
    parts[0][:4] = bytes(4)
    again = [
        bytes_of(value.local) for value in engine.state().shared.values() if isinstance(value, Flat)
    ]
    return {
        "bytes": sum(map(len, parts)),
        "used": max(used),
        "gradients": [sum(one.numel() for one in gradients), all(one.any() for one in gradients)],
        "written": bytes(again[0][:4]) == bytes(4),
    }


def test_state_in_files_takes_no_memory_to_be_told_read_and_written(tmp_path):
    """Rows are as long as DeepSpeed itself puts into files, 1 MiB."""
    for found in zero.launch(_state_in_files, 2, folder=tmp_path):
        assert found["bytes"] == 8 * ROW // 2 * 12
        assert found["used"] < found["bytes"] / 8
        assert found["gradients"] == [8 * ROW // 2, True]
        assert found["written"]
