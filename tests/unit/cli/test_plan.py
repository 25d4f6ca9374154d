from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from hpctrain.cli.main import main
from tests.support.plan_cases import MODELS

ASKED = ["--nodes", "2", "--gpus-per-node", "8", "--gpu", "h100-sxm", "--net-gbs", "50"]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS["llama-7B"]))
    return str(path)


def test_the_simplest_that_fits_is_shown_last_and_why_the_others_do_not(config, capsys):
    assert main(["plan", config, *ASKED]) == 0

    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if "✗" in line or "✓" in line]
    assert "DDP x16" in rows[1]
    assert "GB over 84.9 GB; most is moments" in rows[1]
    assert "✓ chosen: the simplest that fits" in rows[-1]
    assert any(line.startswith("budget") for line in lines) is False


def test_a_plan_says_whose_memory_it_is_and_shows_a_range_of_times(config, capsys):
    assert main(["plan", config, *ASKED, "--steps", "1000"]) == 0

    text = capsys.readouterr().out
    assert "GB/GPU is what hpctrain's engines hold" in text
    assert re.search(r"step      [\d.]+ m?s \([\d.]+ m?s to [\d.]+ m?s\): products", text)
    assert re.search(r"GPU-h \(\d+ to \d+\)", text)
    assert re.search(r"published runs took 0\.\d+ to \d[.\d]* times their plan", text)


def test_where_nothing_fits_the_command_names_what_does(config, capsys):
    one = ["--gpu", "h100-sxm", "--seq", "4096"]
    assert main(["plan", config, *one]) == 3

    said = capsys.readouterr()
    assert "What fits: 2 GPUs (--nodes 2 --global-batch 2): " in said.err
    assert "one GPU, recompute, bf16: " in said.err
    assert "~ fits, " in said.out
    assert "LoRA 16, one GPU" in said.out


def test_other_engines_rows_are_compared_and_cannot_be_taken(config, capsys):
    assert main(["plan", config, *ASKED, "--compare", "--json"]) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}

    theirs = rows["fsdp2+recompute+bf16"]
    assert theirs["memory_fits"]
    assert not theirs["fits"]
    assert theirs["other_engine"].startswith("weights, gradients, moments and loss in bf16")
    assert rows["fsdp2"]["other_engine"] is None
    assert main(["plan", config, *ASKED, "--strategy", "fsdp2+recompute+bf16"]) == 2
    assert "another engine's: weights" in capsys.readouterr().err


def test_compare_shows_every_strategy_and_json_has_them_all(config, capsys):
    assert main(["plan", config, *ASKED, "--compare"]) == 0
    text = capsys.readouterr().out
    assert main(["plan", config, *ASKED, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)

    assert all(row["title"] in text for row in plan["rows"])
    assert plan["chosen"] in {row["strategy"] for row in plan["rows"] if row["fits"]}
    assert plan["model"]["params"] == 6_738_415_616
    for row in plan["rows"]:
        assert row["parts"] is None or row["peak_bytes"] == pytest.approx(
            sum(row["parts"].values())
        )


def test_memory_is_explained_with_formulas_and_sources(config, capsys):
    assert main(["plan", config, *ASKED, "--explain", "memory"]) == 0

    text = capsys.readouterr().out
    assert "4 B x 6,738,415,616 parameters / 16" in text
    assert "from: " in text
    assert "an allowance, no measurement" in text


def test_ways_that_train_less_are_compared_and_not_shown_else(config, capsys):
    assert main(["plan", config, *ASKED, "--gpu-mem", "24"]) == 0
    assert "LoRA" not in capsys.readouterr().out
    assert main(["plan", config, *ASKED, "--compare"]) == 0
    text = capsys.readouterr().out
    assert "trains adapters alone: ask for it with --lora 16" in text
    assert main(["plan", config, *ASKED, "--lora", "8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["chosen"] == "lora-ddp"
    assert {row["lora_rank"] for row in plan["rows"]} == {8}
    theirs = [row for row in plan["rows"] if not row["trained_by_hpctrain"]]
    assert "lora-ddp+recompute+bf16" in [row["strategy"] for row in theirs]
    assert {row["other_engine"] is None for row in theirs} == {False}
    assert plan["checkpoint"]["bytes"] == 12 * 32 * 8 * (4 * 2 * 4096 + 3 * (4096 + 11_008))


def test_a_pipelines_bubble_and_its_passes_are_told(config, capsys):
    command = ["plan", config, *ASKED, "--global-batch", "128", "--strategy", "pp2"]
    assert main(command) == 0
    assert "bubble    11% of a step" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert (rows["pp2"]["pp"], rows["pp2"]["passes"]) == (2, 8)
    assert rows["pp2"]["bubble"] == pytest.approx(1 / 9)
    assert rows["fsdp2"]["bubble"] == 0


def test_a_node_whose_memory_is_known_to_be_too_small_offloads_nothing(config, tmp_path, capsys):
    site = tmp_path / "mine.toml"
    site.write_text(
        'description = "x"\nstability = "local"\n'
        '[partitions.gpu]\ngpus_per_node = 8\ngpu = "H100 SXM 80 GB"\nmem_gib = 48\n'
    )
    command = ["plan", config, "--site", str(site), "--nodes", "2", "--json"]
    key = "fsdp2+recompute+offload"
    for more, fits in (([], False), (["--node-mem", "60"], True)):
        assert main([*command, *more]) == 0
        rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
        assert rows[key]["fits"] is fits
        assert rows[key]["host_bytes_per_node"] == 8 * 6_738_415_616
        assert rows[key]["step_s"] is None
    assert main([*command, "--host-gbs", "25", "--net-gbs", "25", "--strategy", key]) == 0
    plan = json.loads(capsys.readouterr().out)
    (row,) = [row for row in plan["rows"] if row["strategy"] == key]
    assert row["step_s"] > row["host_traffic_bytes"] / 25e9 > 0
    assert "its size is not known" not in " ".join(plan["notes"])


def test_what_rests_on_a_host_of_unknown_size_is_said(config, capsys):
    assert main(["plan", config, *ASKED, "--gpu-mem", "8"]) == 0

    said = capsys.readouterr()
    assert "FSDP2 x16, recompute, offload" in said.out
    assert "TP 8 x FSDP2 2, recompute" in said.out, "those that come before it, all of them"
    assert "each node's own memory has to hold 54 GB of state" in said.out + said.err


def test_the_budget_is_told_in_gpu_hours_and_jobs(config, capsys):
    more = ["--steps", "100000", "--time", "1-00:00:00", "--save-gbs", "5"]
    assert main(["plan", config, *ASKED, *more, "--json"]) == 0

    plan = json.loads(capsys.readouterr().out)
    assert plan["budget"]["gpu_hours"] == pytest.approx(16 * plan["budget"]["hours"])
    assert plan["budget"]["jobs"] == -(-plan["budget"]["hours"] // 24)
    assert plan["checkpoint"]["bytes"] == 12 * 6_738_415_616


def test_time_on_unknown_hardware_is_said_to_be_unknown(config, capsys):
    assert main(["plan", config, "--gpu-mem", "200", "--gpus-per-node", "4", "--steps", "9"]) == 0

    text = capsys.readouterr().out
    assert "step      not known: the peak of GPU" in text
    assert "budget    not known" in text


def test_numbers_do_instead_of_a_file(capsys):
    sizes = ["--params", "7B", "--layers", "32", "--hidden", "4096", "--heads", "32"]
    sizes += ["--vocab", "32000"]
    assert main(["plan", *sizes, "--gpu", "h200", "--gpus-per-node", "8", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["model"]["params"] / 7e9 == pytest.approx(
        1, abs=0.01
    )


def test_a_sites_partition_says_which_gpus_and_how_long(config, tmp_path, capsys):
    site = tmp_path / "mine.toml"
    site.write_text(
        'description = "x"\nstability = "local"\n'
        "[network]\nrate_gbps = 200\nnics_per_node = 4\n"
        '[partitions.gpu]\ngpus_per_node = 4\ngpu = "H100 SXM 80 GB"\nmax_time = "12:00:00"\n'
        "[partitions.cpu]\ncpus_per_node = 64\n"
    )
    command = ["plan", config, "--site", str(site), "--nodes", "4", "--steps", "100000", "--json"]
    assert main(command) == 0

    plan = json.loads(capsys.readouterr().out)
    assert (plan["gpus_per_node"], plan["gpu"]["name"]) == (4, "H100 SXM 80 GB")
    assert plan["budget"]["jobs"] == -(-plan["budget"]["hours"] // 12)
    assert main([*command, "--partition", "fast"]) == 2
    assert "--partition fast: site" in capsys.readouterr().err


def test_files_are_written_into_a_folder(config, tmp_path, capsys):
    folder = tmp_path / "out" / "plan"
    assert main(["plan", config, *ASKED, "-o", str(folder)]) == 0

    assert {path.name for path in folder.iterdir()} == {"plan.json", "hpctrain.toml"}
    assert f"wrote {folder}: plan.json hpctrain.toml" in capsys.readouterr().out
    plan = json.loads((folder / "plan.json").read_text())
    (row,) = [row for row in plan["rows"] if row["strategy"] == plan["chosen"]]
    assert row["peak_bytes"] == sum(row["parts"].values())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["gone.json", *ASKED], 4, "gone.json: there is no such file"),
        ([*ASKED], 2, "numbers: --layers, --hidden, --heads, --vocab are missing"),
        (["CONFIG"], 2, "which GPU is not known here: give --gpu NAME"),
        (["CONFIG", "--gpu", "warp9"], 2, "warp9, a GPU whose memory is not known here"),
        (["CONFIG", "--gpu", "A100"], 2, "which fits a100-sxm-40gb"),
        (["CONFIG", *ASKED, "--global-batch", "17"], 2, "nearest: 16 or 32, or 1 data-parallel"),
        (["CONFIG", *ASKED, "--global-batch", "48", "--micro-batch", "5"], 2, "nearest: 3"),
        (["CONFIG", *ASKED, "--layers", "3"], 2, "--layers goes without MODEL"),
        (["CONFIG", *ASKED, "--strategy", "x"], 2, "--strategy x: there is none here"),
        (["CONFIG", *ASKED, "--lora", "0"], 2, "0 is not in the range"),
        (["CONFIG", *ASKED, "--time", "soon"], 2, "--time 'soon' is no time limit"),
        (["CONFIG", "--gpu-mem", "1"], 3, "hpctrain's engines fits 1 GB on 1 GPU; the nearest is"),
        (["CONFIG", *ASKED, "--site", "nowhere"], 4, "nowhere"),
    ],
)
def test_what_is_wrong_is_one_line_and_an_exit_code(config, capsys, words, code, message):
    assert main(["plan", *(config if word == "CONFIG" else word for word in words)]) == code

    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1 or code == 3


def test_the_command_line_does_not_import_torch(config):
    code = (
        "import sys\nfrom hpctrain.cli.main import main\n"
        "main(sys.argv[1:])\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", config, *ASKED],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Error" not in done.stderr
    assert done.returncode == 0


def test_measured_peaks_take_the_formulas_place(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS["gpt2-124M"] | {"n_layer": 2}))
    command = ["plan", str(path), "--gpu-mem", "80", "--seq", "256", "--measure", "--json"]
    assert main(command) == 0

    rows = json.loads(capsys.readouterr().out)["rows"]
    rows = [row for row in rows if row["peak_bytes"] and not row["other_engine"]]
    assert [row["strategy"] for row in rows] == ["single", "single+selective", "single+recompute"]
    for row in rows:
        assert row["measured_bytes"] == pytest.approx(row["peak_bytes"], rel=0.05)
        assert "measured" in row["why"]
