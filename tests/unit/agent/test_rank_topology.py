"""Cores, NUMA nodes and GPUs are read from /sys and /proc as real machines have them."""

from __future__ import annotations

import pytest

from hpctrain.node.agent.cpus import machine, numbers_of_gpus


def put(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


@pytest.fixture
def root(tmp_path):
    """Two sockets of four cores with two threads each."""
    system = "sys/devices/system"
    for cpu in range(16):
        put(
            tmp_path,
            f"{system}/cpu/cpu{cpu}/topology/thread_siblings_list",
            f"{cpu % 8},{cpu % 8 + 8}",
        )
    put(tmp_path, f"{system}/node/node0/cpulist", "0-3,8-11")
    put(tmp_path, f"{system}/node/node1/cpulist", "4-7,12-15")
    put(tmp_path, f"{system}/node/possible", "0-1")
    return tmp_path


def nvidia(root, address, cpus=None, numa=None):
    (root / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
    device = f"sys/bus/pci/devices/{address.lower()}"
    if cpus is not None:
        put(root, f"{device}/local_cpulist", cpus)
    if numa is not None:
        put(root, f"{device}/numa_node", str(numa))


def amd(root, number, address_number, numa, simds=440):
    node = f"sys/class/kfd/kfd/topology/nodes/{number}"
    text = f"cpu_cores_count 0\nsimd_count {simds}\nlocation_id {address_number}\ndomain 0"
    put(root, f"{node}/properties", text)
    bus = address_number >> 8
    put(root, f"sys/bus/pci/devices/0000:{bus:02x}:00.0/local_cpulist", numa)


def near(root, **environ):
    return [sorted(one) for one in machine(environ, root).near]


LEFT, RIGHT = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]


def test_cores_and_numa_nodes_are_read(root):
    found = machine({}, root)

    assert [sorted(core) for core in found.cores] == [[n, n + 8] for n in range(8)]
    assert [sorted(node) for node in found.numa] == [LEFT, RIGHT]
    assert found.near == []


def test_nvidias_gpus_are_in_the_order_of_their_addresses(root):
    nvidia(root, "0000:C1:00.0", cpus="4-7,12-15")
    nvidia(root, "0000:01:00.0", numa=0)

    assert near(root) == [LEFT, RIGHT]
    assert near(root, SLURM_JOB_GPUS="1", CUDA_VISIBLE_DEVICES="0") == [RIGHT]
    assert near(root, CUDA_VISIBLE_DEVICES="1,0") == [RIGHT, LEFT]


def test_amds_gpus_are_in_the_order_of_the_driver(root):
    amd(root, 0, 0, "0-15", simds=0)  # the CPUs
    amd(root, 10, 0xD600, "0-3,8-11")
    amd(root, 4, 0xC100, "4-7,12-15")

    assert near(root) == [RIGHT, LEFT]
    assert near(root, ROCR_VISIBLE_DEVICES="1") == [LEFT]


@pytest.mark.parametrize(
    "environ",
    [
        {"CUDA_VISIBLE_DEVICES": "GPU-8f2c,GPU-11aa"},
        {"CUDA_VISIBLE_DEVICES": "MIG-77"},
        {"SLURM_JOB_GPUS": "0,7"},
    ],
)
def test_gpus_that_cannot_be_told_apart_bind_nobody(root, environ):
    nvidia(root, "0000:01:00.0", numa=0)
    nvidia(root, "0000:C1:00.0", numa=1)

    assert near(root, **environ) == []


def test_a_gpu_whose_place_nobody_tells_binds_nobody(root):
    nvidia(root, "0000:01:00.0", numa=0)
    nvidia(root, "0000:C1:00.0", numa=-1)

    assert near(root) == []
    assert near(root, CUDA_VISIBLE_DEVICES="0") == [LEFT]


def test_a_machine_without_such_files_is_read_as_one_that_tells_nothing(tmp_path):
    put(tmp_path, "sys/devices/system/node/node0/cpulist", "zero to three")

    found = machine({}, tmp_path)

    assert (found.cores, found.numa, found.near) == ([], [], [])


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, [2, 3]),
        ({"SLURM_JOB_GPUS": "gpu:a100", "ROCR_VISIBLE_DEVICES": "5"}, [5]),
    ],
)
def test_the_machines_own_numbers_come_first(environ, expected):
    assert numbers_of_gpus(environ) == expected
