"""Signatures of users and sites: found, checked by their own examples, and used before ours."""

from __future__ import annotations

import json
import os

import pytest

from hpctrain.advise.doctor.signature import faults_of, packaged, read
from hpctrain.cli.main import main
from hpctrain.errors import UsageError

OST = """\
[[signature]]
name = "ost-full"
fault = "storage_full"
role = "cause"
words = ["OST"]
pattern = 'OST(?P<path>\\d+) is full'
says_so = "system"
advice = ["write to another pool"]
matches = ["[812.4] Lustre: scratch-OST0017 is full"]
near_misses = ["[812.4] Lustre: scratch-OST0017 is 80 % full"]
"""
LOG = "step 1 loss: 2.0\nworker-3: [812.4] Lustre: scratch-OST0017 is full\n"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's folder of signatures."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "hpctrain" / "signatures"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "job.log"
    path.write_text(LOG)
    return path


def test_a_user_s_signature_names_what_ours_do_not(own, log, capsys):
    assert main(["doctor", "--log", str(log)]) == 1
    capsys.readouterr()

    (own / "ours.toml").write_text(OST)

    assert main(["doctor", "--log", str(log)]) == 0
    out = capsys.readouterr().out
    assert "certain (HT808, storage_full)" in out
    assert "write to another pool" in out


def test_a_site_s_signatures_are_read_where_its_preset_says(tmp_path, log, monkeypatch, capsys):
    (tmp_path / "signatures").mkdir()
    (tmp_path / "signatures" / "lustre.toml").write_text(OST)
    sites = tmp_path / "sites"
    sites.mkdir()
    (sites / "juniper.toml").write_text(
        'name = "juniper"\nschema = 1\nstability = "local"\n'
        '[doctor]\nsignatures = ["$JUNIPER/signatures"]\n'
    )
    monkeypatch.setenv("HPCTRAIN_SITE_PATH", str(sites))
    monkeypatch.setenv("HPCTRAIN_SITE", "juniper")
    monkeypatch.setenv("JUNIPER", str(tmp_path))

    assert main(["doctor", "--log", str(log)]) == 0
    assert "HT808" in capsys.readouterr().out

    monkeypatch.setenv("JUNIPER", "/absent")

    assert main(["doctor", "--log", str(log), "--json"]) == 1
    [note] = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith("the site's signatures were left out: /absent/signatures: there is no")


def test_where_no_preset_has_signatures_slurm_is_not_asked_which_site_this_is(log, monkeypatch):
    def asked(*_):
        raise AssertionError

    monkeypatch.setattr("hpctrain.advise.doctor.signature.look_around", asked)

    assert main(["doctor", "--log", str(log)]) == 1


def test_a_name_of_ours_replaces_it(own, log, capsys):
    log.write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    (own / "a.toml").write_text(
        OST.replace("ost-full", "cuda-oom").replace('["OST"]', '["CUDA out"]')
        .replace("OST(?P<path>\\d+) is full", "CUDA out of memory")
    )  # fmt: skip

    main(["doctor", "--log", str(log)])
    assert "HT808" in capsys.readouterr().out


def test_a_wrong_file_is_left_out_and_said(own, log, capsys):
    (own / "a.toml").write_text(OST.replace("role = ", "rule = "))
    log.write_text("torch.OutOfMemoryError: CUDA out of memory.\n")

    assert main(["doctor", "--log", str(log), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["code"] == "HT801"
    assert document["notes"] == [
        "a.toml was left out: `hpctrain doctor --check-signatures` says why"
    ]
    assert main(["doctor", "--check-signatures"]) == 2
    assert "no field is called rule" in capsys.readouterr().out


WRONG = [
    ('name = "ost-full"\n', "", "signature 1: name is missing"),
    ('role = "cause"', 'role = "reason"', 'role is "reason"; it takes one of cause, wait, link'),
    ('fault = "storage_full"', 'fault = "disk"', 'fault is "disk"; it takes one of gpu_oom'),
    ('fault = "storage_full"\n', "", "a fault belongs to every role but harmless"),
    ('["OST"]', '["17"]', "the word '17' stands in too many lines"),
    ('["OST"]', '"OST"', 'words is "OST"; it takes a list of texts'),
    ("is full'", "is (full'", "which is no regular expression"),
    ("says_so = ", "is_late = ", 'is_late is "system"; it takes true or false'),
    ("[[signature]]", "[signature]", "may hold [[signature]] tables alone"),
    ("[[signature]]", "[[signatures]]", "may hold [[signature]] tables alone, not signatures"),
    ("[[signature]]", "[[signature", "has no signatures that can be read"),
]


@pytest.mark.parametrize(("old", "new", "why"), WRONG)
def test_what_is_wrong_with_a_signature_is_one_line(tmp_path, old, new, *, why):
    path = tmp_path / "a.toml"
    path.write_text(OST.replace(old, new))

    with pytest.raises(UsageError) as caught:
        read(path)

    assert str(path) in str(caught.value)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('["OST"]', '["Lustre "]', "none of its words stands there"),
        ("OST(?P<path>", "OST-(?P<path>", "its pattern does not"),
        ("says_so", 'where = "start"\nsays_so', "it does not stand where it should (start)"),
        ("is full'", "is (?:80 % )?full'", "fits its near miss"),
        ("OST(?P<path>\\d+) is full", "(a|a)*OST(\\w+)* is full", "takes too long"),
    ],
)
def test_a_signature_is_held_against_its_examples(own, capsys, old, *, new, why):
    (own / "a.toml").write_text(OST.replace(old, new))

    assert main(["doctor", "--check-signatures"]) == 2
    out = capsys.readouterr().out
    assert out.startswith(f"wrong  {own / 'a.toml'}: ost-full")
    assert why in out


def test_right_ones_are_said_to_be_right(own, tmp_path, capsys):
    (own / "a.toml").write_text(OST)

    assert main(["doctor", "--check-signatures"]) == 0
    assert capsys.readouterr().out == f"ok     {own / 'a.toml'}: 1 signature\n"
    assert main(["doctor", "--check-signatures", str(own)]) == 0
    assert main(["doctor", "--check-signatures", str(tmp_path / "absent.toml")]) == 4
    (own / "a.toml").unlink()
    capsys.readouterr()
    assert main(["doctor", "--check-signatures"]) == 0
    assert "no signatures but hpctrain's own" in capsys.readouterr().out


def test_ours_pass_their_own_check():
    table = packaged()

    assert faults_of((*table.faults[::9], *table.harmless)) == []


def test_no_word_of_a_table_is_without_a_letter():
    """Digits are taken out before words are looked for; an empty one is found for ever."""
    assert all(any(not chr(code).isdigit() for code in word) for word in packaged().words)
    assert os.linesep.encode() not in packaged().words
