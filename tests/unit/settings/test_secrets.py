"""A secret that would be written into a run's files is told of, and not shown."""

from __future__ import annotations

import json

import pytest

from hpctrain.cli.main import main
from hpctrain.core.settings.schema import NotifySettings, Settings, SlurmSettings
from hpctrain.core.settings.spec import HIDDEN, hide, is_secret_name, secrets_of

VALUE = "s3cr3t-value"


def found(*, env=None, args=(), setup=(), command=""):
    settings = Settings(
        slurm=SlurmSettings(setup=list(setup)), notify=NotifySettings(command=command)
    )
    places = {name: f"flag --env {name}" for name in env or {}}
    return secrets_of(settings, env or {}, args, env_origins=places, origins={})


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "MY_SECRET",
        "OPENAI_KEY",
        "wandb_apikey",
        "GITHUB_TOKEN_2",
        "SECRET_KEY_BASE",
        "--api-key",
        "--hf_token",
        "--password",
    ],
)
def test_a_name_of_a_secret(name):
    assert is_secret_name(name, variable=not name.startswith("--"))


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "KEYBOARD",
        "MONKEY",
        "HF_TOKEN_PATH",
        "AWS_ACCESS_KEY_ID",
        "SECRETARY",
        "--tokenizer",
        "--text-key",
        "--num-tokens",
        "--sort_key",
        "",
    ],
)
def test_a_name_of_something_else(name):
    assert not is_secret_name(name, variable=not name.startswith("--"))


@pytest.mark.parametrize(
    "given",
    [
        {"env": {"WANDB_API_KEY": VALUE}},
        {"env": {"DATA": f"s3://user:{VALUE}@host/x"}},
        {"args": ["--api-key", VALUE]},
        {"args": [f"--hf-token={VALUE}", "x"]},
        {"args": [f"--data=s3://u:{VALUE}@host/x"]},
        {"args": [f"postgres://:{VALUE}@host"]},
        {"setup": [f"export HF_TOKEN={VALUE}"]},
        {"setup": ["module load x", f"HF_TOKEN='{VALUE}' huggingface-cli login"]},
        {"setup": [f"wandb login --api-key {VALUE}; true"]},
        {"setup": [f'git clone "https://u:{VALUE}@host/x']},  # an open quote
        {"command": f"curl --token {VALUE} https://host"},
        {"command": f"curl https://u:{VALUE}@host"},
    ],
)
def test_what_would_be_written_down_is_found(given):
    (one,) = found(**given)

    assert one.value.rstrip(";") == VALUE


@pytest.mark.parametrize(
    "given",
    [
        {"env": {"HF_TOKEN": "", "MAX_TOKEN": "512", "USE_API_KEY": "false"}},
        {"env": {"HF_TOKEN": "$HF_TOKEN", "API_KEY": "/home/ada/key"}},
        {"args": ["--max-token", "512", "--token", "--text-key", "content"]},
        {"args": ["https://host:8080/x", "s3://bucket/a:b@c"]},
        {"setup": ["export HF_TOKEN=$(cat ~/.token)", 'export API_KEY="$API_KEY"', "module x"]},
        {"command": "notify.py --to ada --key-file ~/.key"},
    ],
)
def test_what_is_none_is_not_told(given):
    assert found(**given) == []


def test_a_short_one_is_hidden_where_it_stands_alone():
    one = found(env={"A_TOKEN": "test"})

    assert hide("x=test tests/test.py contest 'test'", one) == (
        f"x={HIDDEN} tests/{HIDDEN}.py contest '{HIDDEN}'"
    )


def test_hiding_takes_the_longer_one_first_and_keeps_the_rest():
    one = found(env={"A_TOKEN": "abcd", "B_TOKEN": "abcdefgh"})
    value = {"a": ["x abcdefgh", {"b": "abcd"}], "n": 1, "abcd": None}

    assert hide(value, one) == {"a": [f"x {HIDDEN}", {"b": HIDDEN}], "n": 1, "abcd": None}


@pytest.mark.parametrize("cluster", ["slurm", "local"])
@pytest.mark.parametrize("as_json", [True, False])
def test_a_dry_run_tells_of_each_and_shows_none(tmp_path, monkeypatch, capsys, as_json, cluster):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hpctrain.toml").write_text(
        f'[slurm]\nsetup = ["export HF_TOKEN={VALUE}-1"]\n[env]\nX_TOKEN = "{VALUE}-2"\n'
        f"[notify]\ncommand = \"true --api-key '{VALUE}-3'\"\n"
    )
    words = ["submit", "--dry-run", "--cluster", cluster, "--runs", str(tmp_path / "runs")]
    words += ["--env", f"WANDB_API_KEY={VALUE}-4", *(["--json"] if as_json else [])]

    code = main([*words, "--", "train.py", "--password", f"{VALUE}-5"])

    out, err = capsys.readouterr()
    assert code == 0, err
    assert VALUE not in out + err
    notes = json.loads(out)["notes"] if as_json else err.splitlines()
    told = [note for note in notes if "looks like a secret" in note]
    names = ["HF_TOKEN", "X_TOKEN", "--api-key", "WANDB_API_KEY", "--password"]
    assert sorted(name for name in names for note in told if f"{name} looks" in note) == sorted(
        names
    )
    assert len(told) == len(names)


def test_a_submit_tells_of_it_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    words = ["submit", "--no-submit", "--cluster", "local", "--runs", str(tmp_path / "runs")]

    code = main([*words, "--env", f"WANDB_API_KEY={VALUE}", "train.py"])

    out, err = capsys.readouterr()
    assert code == 0
    assert "flag --env: WANDB_API_KEY looks like a secret" in err
    assert VALUE not in out + err


@pytest.mark.parametrize("as_json", [True, False])
def test_a_resume_tells_of_what_it_adds_and_shows_none(tmp_path, monkeypatch, capsys, as_json):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    (tmp_path / "train.py").write_text("")
    words = ["submit", "--no-submit", "--cluster", "local", "--name", "mine", "train.py"]
    assert main([words[0], "--env", f"WANDB_API_KEY={VALUE}-1", *words[1:]]) == 0
    capsys.readouterr()

    setup = f"slurm.setup=['export HF_TOKEN={VALUE}-2']"
    words = ["resume", "mine", "--dry-run", "--set", setup]
    words += ["--set", f"notify.command=true --api-key {VALUE}-3"]
    code = main([*words, *(["--json"] if as_json else [])])

    out, err = capsys.readouterr()
    assert code == 0, err
    assert VALUE not in out + err
    notes = json.loads(out)["notes"] if as_json else out.splitlines()
    told = [note for note in notes if "looks like a secret" in note]
    assert [name for name in ("HF_TOKEN", "--api-key") for one in told if f"{name} looks" in one]
    assert len(told) == 2, "what the submit has told of already is not told again"
    assert all("flag --set" in note for note in told)
