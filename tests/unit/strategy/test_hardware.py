from __future__ import annotations

import pytest

from hpctrain.advise.strategy.hardware import GPUS, find_gpu, gpu_of
from hpctrain.errors import UsageError
from hpctrain.ledger.history.progress import peak_flops


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100-sxm", "h100-sxm"),
        ("H100 SXM 80 GB", "h100-sxm"),
        ("A100 PCIe 40 GB", "a100-pcie-40gb"),
        ("H100 PCIe 80 GB", "h100-pcie"),
        ("V100 32 GB", "v100-32gb"),
        ("MI250X", "mi250x"),
        ("A100 SXM 80 GB", "a100-sxm-80gb"),
    ],
)
def test_names_are_understood_as_presets_write_them(name, key):
    gpu = gpu_of(name, None, "--gpu")

    assert gpu == GPUS[key]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("A100", "--gpu says A100, which fits a100-sxm-40gb, a100-sxm-80gb, a100-pcie-40gb"),
        ("H100", "which fits h100-sxm, h100-pcie, h100-nvl"),
        ("GH200", "which fits gh200-96gb, gh200-144gb"),
        ("Quadro RTX 5000", "a GPU whose memory is not known here"),
        ("warp9", "a GPU whose memory is not known here"),
        (None, "which GPU is not known here: give --gpu NAME, --gpu-mem GB"),
    ],
)  # fmt: skip
def test_memory_is_asked_for_and_never_guessed(name, message):
    with pytest.raises(UsageError) as caught:
        gpu_of(name, None, "--gpu")
    assert message in str(caught.value)


def test_memory_that_is_given_wins_and_what_all_that_fit_agree_on_stays_known():
    known, unknown = gpu_of("A100", 39.5, "--gpu"), gpu_of("warp9", 96, "--gpu")

    assert (known.memory, known.bf16) == (39_500_000_000, True)
    assert (known.flops, known.link) == (GPUS["a100-sxm-40gb"].flops, None)
    assert gpu_of("A100 40 GB", None, "--gpu").link is None, "PCIe and SXM have others"
    assert gpu_of("warp9", 96, "--gpu").family == ""
    assert (unknown.memory, unknown.flops, unknown.link) == (96_000_000_000, None, None)


@pytest.mark.parametrize("gb", [0, -3, 1e9])
def test_a_memory_that_no_gpu_has_is_refused(gb):
    with pytest.raises(UsageError, match=r"--gpu-mem .* is no size in GB"):
        gpu_of(None, gb, "--gpu")


def test_every_gpu_has_a_peak_that_the_project_knows():
    assert {key for key, gpu in GPUS.items() if gpu.flops is None} == set()
    assert peak_flops("warp9") is None


def test_a_name_fits_what_has_all_of_its_words():
    assert find_gpu("A100 80 GB") == ["a100-sxm-80gb", "a100-pcie-80gb"]
    assert find_gpu("NVIDIA H100 80GB HBM3") == find_gpu("H100 80 GB")
    assert find_gpu("NVIDIA H100 80GB HBM3")
    assert find_gpu("") == []


@pytest.mark.parametrize(
    ("name", "gb"),
    [("h100-sxm", 103), ("H100 SXM 80 GB", 64), ("h200", 150), ("a100-sxm-40gb", 64)],
)
def test_another_memory_keeps_the_speed_of_the_gpu(name, gb):
    given, of_sheet = gpu_of(name, gb, "--gpu"), gpu_of(name, None, "--gpu")

    assert given.memory == gb * 10**9
    assert (given.flops, given.link, given.bf16) == (of_sheet.flops, of_sheet.link, True)
    assert given.family == of_sheet.family == name.lower().replace(" ", "-").partition("-")[0]


def test_the_memories_that_published_runs_have_are_in_the_table():
    assert {gpu.sold_gb for gpu in GPUS.values()} >= {40, 80, 94, 96, 141, 192}
    assert gpu_of("H100 SXM 94 GB", None, "--gpu").flops == GPUS["h100-sxm"].flops


@pytest.mark.parametrize(
    ("key", "gib"),
    [("h100-sxm", 79.1), ("a100-sxm-40gb", 39.2), ("h200", 139.7), ("l4", 22.0), ("l40s", 44.3)],
)
def test_a_gpu_has_the_memory_that_torch_reports(key, gib):
    """Cards of 24 and 48 GB have less than 10^9 bytes a GB, larger ones more."""
    assert GPUS[key].memory == round(gib * 2**30)
    assert GPUS[key].shown == f"{round(gib * 2**30 / 1e9, 1):g} GB"


def test_a_gpu_without_such_a_number_has_its_data_sheets():
    assert GPUS["mi300x"].memory == 192 * 10**9
