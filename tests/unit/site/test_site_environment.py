"""What a preset's network, groups and conditions become for one attempt, and who wins over it."""

from __future__ import annotations

import pytest

from hpctrain.cluster.site.environment import (
    FLIGHT_RECORDER,
    Environment,
    Value,
    Versions,
    derive,
    holds,
    is_shown,
    locked_names,
    overridden,
    paths_of,
    with_settings,
)
from hpctrain.cluster.site.load import load_site

NEW_TORCH = Versions(torch="2.13.0+cu130")

JUNIPER = """
[network]
socket_ifnames = ["hsn0", "hsn1"]
hcas = ["mlx5_0", "mlx5_3"]
[env]
unset = ["FI_PROVIDER"]
[env.common]
NCCL_CROSS_NIC = "1"
NCCL_DEBUG = "WARN"
[env.single_node]
NCCL_DEBUG = "INFO"
[env.multi_node]
NCCL_NET = "AWS Libfabric"
[env.when.ll128]
nccl = ">=2.27,<2.30"
set = { NCCL_PROTO = "^LL128" }
unset = ["NCCL_CROSS_NIC"]
"""


@pytest.fixture
def juniper(tmp_path):
    return preset(tmp_path, JUNIPER)


def preset(folder, text):
    path = folder / "juniper.toml"
    path.write_text(text)
    return load_site(str(path))


def values(environment):
    """Name to value of what the preset gave."""
    return {n: v.value for n, v in environment.values.items() if v.origin != FLIGHT_RECORDER}


def ask(site, nodes=2, versions=NEW_TORCH, run_dir="/runs/r/attempts/0001"):
    return derive(site, nodes=nodes, versions=versions, run_dir=run_dir)


def test_one_list_of_interfaces_is_written_for_nccl_and_for_gloo(juniper, tmp_path):
    found = ask(juniper).values

    where = f"site juniper ({tmp_path}/juniper.toml:3)"
    assert found["NCCL_SOCKET_IFNAME"] == Value("=hsn0,hsn1", where)
    assert found["GLOO_SOCKET_IFNAME"] == Value("hsn0,hsn1", where)
    assert found["NCCL_IB_HCA"].value == "=mlx5_0,mlx5_3"


def test_beginnings_of_adapters_are_handed_on_as_such(tmp_path):
    site = preset(tmp_path, "[network]\nhcas = ['ibp', 'mlx5']\nhca_mode = 'prefix'\n")

    assert values(ask(site)) == {"NCCL_IB_HCA": "ibp,mlx5"}


@pytest.mark.parametrize(
    ("nodes", "debug", "net"), [(1, "INFO", None), (2, "WARN", "AWS Libfabric")]
)
def test_one_node_and_several_have_a_group_each(juniper, nodes, debug, net):
    found = values(ask(juniper, nodes))

    assert (found["NCCL_DEBUG"], found.get("NCCL_NET")) == (debug, net)


@pytest.mark.parametrize(
    ("nccl", "applies"), [("2.26.5", False), ("2.27", True), ("2.29.9", True), ("2.30", False)]
)
def test_a_condition_on_versions_sets_and_takes_away(juniper, nccl, applies):
    found = ask(juniper, versions=Versions(nccl=nccl, torch="2.13"))

    assert ("NCCL_PROTO" in found.values) is applies
    assert ("NCCL_CROSS_NIC" in found.values) is not applies
    assert found.unset == ["FI_PROVIDER", *(["NCCL_CROSS_NIC"] if applies else [])]
    assert found.notes == []


@pytest.mark.parametrize(("nccl", "told"), [("", "not known"), ("git", '"git"')])
def test_a_version_that_is_not_known_meets_no_condition_and_is_told(juniper, nccl, told):
    found = ask(juniper, versions=Versions(nccl=nccl))

    assert "NCCL_PROTO" not in found.values
    (note,) = found.notes
    assert note.endswith(f"does not apply: nccl >=2.27,<2.30 is wanted, it is {told}")


def test_all_conditions_of_a_group_must_hold(tmp_path):
    site = preset(
        tmp_path,
        "[env.when.x]\nnodes = 'multi'\ngpu = '.*H100.*'\ntorch = '>=2.9'\nset = { A_B = '1' }\n",
    )

    def applies(nodes, gpu, torch):
        return "A_B" in ask(site, nodes, Versions(torch=torch, gpu=gpu)).values

    assert applies(2, "NVIDIA H100 80GB HBM3", "2.9.1")
    assert not applies(1, "NVIDIA H100 80GB HBM3", "2.9.1")
    assert not applies(2, "NVIDIA A100", "2.9.1")
    assert not applies(2, "NVIDIA H100 80GB HBM3", "2.8.0")
    assert not applies(2, "", "2.9.1")


@pytest.mark.parametrize(
    ("condition", "version", "expected"),
    [
        ("==2.9", "2.9.0+cu128", True),
        ("==2.9", "2.9.1", False),
        ("!=2.9", "2.9.1", True),
        (">2.9", "2.10", True),
        ("<=2.9", "2.10", False),
        (">= 2.21, <2.24", "2.21.5", True),
        (">=2.21,<2.24", "2.24", False),
    ],
)
def test_versions_are_compared_as_numbers(condition, version, expected):
    assert holds(condition, version) is expected


def test_what_a_module_sets_itself_is_left_to_it(tmp_path):
    site = preset(
        tmp_path,
        "[network]\nsocket_ifnames = ['hsn0']\n[env.common]\nNCCL_NET = 'OFI'\nFI_X = '1'\n"
        "[modules]\nprovides_env = ['NCCL_NET', 'NCCL_SOCKET_IFNAME']\n",
    )

    assert values(ask(site)) == {"GLOO_SOCKET_IFNAME": "hsn0", "FI_X": "1"}


def test_the_flight_recorder_is_on_without_any_site_and_dumps_into_the_attempt():
    found = ask(None)

    assert {name: value.value for name, value in found.values.items()} == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/r/attempts/0001/nccl-trace-rank-",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }
    assert {value.origin for value in found.values.values()} == {FLIGHT_RECORDER}
    assert "TORCH_FR_DUMP_TEMP_FILE" not in ask(None, run_dir="").values


@pytest.mark.parametrize("torch", ["2.5.1", ""])
def test_an_older_torch_gets_the_flight_recorders_old_names_too(torch):
    found = ask(None, versions=Versions(torch=torch)).values

    assert found["TORCH_NCCL_TRACE_BUFFER_SIZE"] == found["TORCH_FR_BUFFER_SIZE"]
    assert found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == found["TORCH_FR_DUMP_TEMP_FILE"]


def test_a_preset_that_speaks_of_the_flight_recorder_is_believed(tmp_path):
    site = preset(
        tmp_path,
        "[env]\nunset = ['TORCH_NCCL_DUMP_ON_TIMEOUT']\n"
        "[env.common]\nTORCH_NCCL_TRACE_BUFFER_SIZE = '0'\n",
    )

    found = ask(site).values

    assert found["TORCH_NCCL_TRACE_BUFFER_SIZE"].value == "0"
    assert "TORCH_FR_BUFFER_SIZE" not in found  # in torch the new name would win
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in found


def test_what_the_user_set_wins_with_a_note_for_each_that_differs(juniper, tmp_path):
    shell = {"NCCL_NET": "Socket", "NCCL_CROSS_NIC": "1", "HOME": "/home/me", "A_TOKEN": "s3cret"}

    where = f"site juniper ({tmp_path}/juniper.toml:13)"

    found = overridden(ask(juniper), shell, "your shell")

    assert found.values["NCCL_NET"] == Value("Socket", "your shell")
    assert found.values["NCCL_CROSS_NIC"].origin.startswith("site juniper")
    assert not {"HOME", "A_TOKEN"} & set(found.values)
    assert found.notes[1:] == [f"NCCL_NET is Socket by your shell, not AWS Libfabric ({where})"]


def test_what_a_preset_takes_away_is_taken_from_the_shell_and_not_from_settings(juniper):
    derived = ask(juniper)

    by_shell = overridden(derived, {"FI_PROVIDER": "efa"}, "your shell")
    by_flag = with_settings(derived, {"FI_PROVIDER": "efa"}, {"FI_PROVIDER": "flag --env"})

    assert by_shell.unset == ["FI_PROVIDER"]
    assert "FI_PROVIDER" not in by_shell.values
    assert "FI_PROVIDER of your shell is taken away" in by_shell.notes[-1]
    assert by_flag.unset == []
    assert by_flag.values["FI_PROVIDER"] == Value("efa", "flag --env")


def test_a_value_that_may_be_a_secret_is_in_no_note(tmp_path):
    site = preset(tmp_path, "[env.common]\nSITE_KEY = 'abc'\n")

    notes = overridden(ask(site), {"SITE_KEY": "s3cret"}, "your shell").notes
    notes += with_settings(ask(site), {"SITE_KEY": "s3cret"}, {}).notes

    assert len(notes) == 2
    assert not [note for note in notes if "s3cret" in note or "abc" in note]
    assert is_shown("NCCL_NET")
    assert not is_shown("WANDB_API_KEY")


@pytest.mark.parametrize("torch", ["2.13", "2.5"])
def test_the_flight_recorder_can_be_set_by_either_name(torch):
    derived = ask(None, versions=Versions(torch=torch))

    found = overridden(derived, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, "your shell")

    assert "TORCH_FR_BUFFER_SIZE" not in found.values


@pytest.mark.two_users  # a lock holds where the file is another user's
def test_a_locked_variable_keeps_the_sites_value(tmp_path):
    site = preset(tmp_path, JUNIPER + "[lock]\nkeys = ['env.multi_node', 'network.hcas']\n")
    locked = locked_names(site)
    assert locked >= {"NCCL_NET", "NCCL_IB_HCA"}
    assert not {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME"} & locked
    assert "NCCL_NET" not in locked_names(site, ["env.NCCL_NET"])

    found = overridden(ask(site), {"NCCL_NET": "Socket"}, "the job", locked=locked)

    assert found.values["NCCL_NET"].value == "AWS Libfabric"
    assert found.notes[-1].startswith("NCCL_NET stays AWS Libfabric: site juniper")


def test_every_place_that_has_a_say_in_a_variable_is_known(juniper):
    assert paths_of(juniper, "NCCL_DEBUG") == [
        ("env", "common", "NCCL_DEBUG"),
        ("env", "single_node", "NCCL_DEBUG"),
    ]
    assert paths_of(juniper, "NCCL_PROTO") == [("env", "when", "ll128", "set", "NCCL_PROTO")]
    assert paths_of(juniper, "NCCL_IB_HCA") == [("network", "hcas")]
    assert paths_of(juniper, "NCCL_ALGO") == []


def test_settings_come_into_the_environment_whole():
    found = with_settings(Environment(), {"MY_DATA": "/x"}, {"MY_DATA": "hpctrain.toml:3"})

    assert found == Environment({"MY_DATA": Value("/x", "hpctrain.toml:3")})
