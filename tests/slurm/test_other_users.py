"""A run on a real SLURM cluster beside a user without rights who tries what he can against it.

Owner and stranger are two accounts of this machine, neither of them root. One run is besieged from
before its job starts until it is done, through a preemption; the tests look at what came of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpctrain.core.base.process import PORTS, first_port, own_program
from hpctrain.ledger.run.layout import RunDir
from hpctrain.node.agent.environment import COMPILE_CACHE_NAME, COMPILE_CACHE_VARIABLE
from hpctrain.node.agent.preload import PORT as MEETING
from tests.support import processes
from tests.support.ledger_runs import Story, all_fields
from tests.support.other_user import listening, ports_of
from tests.support.patience import PATIENCE_S
from tests.support.recipe import TINY, assert_same_bits, consumed, full_state, make_run, train
from tests.support.scenario import RunHandle
from tests.support.users import User, open_command, run_as, start_as

pytestmark = [pytest.mark.slurm, pytest.mark.two_users, pytest.mark.timeout(600)]

OWNER, STRANGER = User.named("daemon"), User.named("bin")
STEPS = 60
SETTINGS = {
    **TINY,
    "train.dropout": 0.0,
    "train.steps": STEPS,
    "train.step_delay_s": 0.25,
    "checkpoint.interval_steps": 5,
}
SETS = [f"--set={key}={str(value).lower()}" for key, value in SETTINGS.items()]
TWO_BY_TWO = ("--nodes=2", "--ranks-per-node=2", "--partition=grace", "--time=10")
PLANTED = ("json", "signal", "torch", "sitecustomize", "usercustomize", "filelock", "hpctrain")
OPEN_TO_ALL = ("/tmp/", "/dev/shm/")  # noqa: S108 - where the stranger may lie in wait
HOLD = """
import fcntl, os, sys
held = []
for order in sys.stdin:
    for folder, _, files in os.walk(order.strip()):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(os.path.relpath(path, order.strip()))
            except OSError:
                pass
    print(*held, flush=True)
"""
LISTEN = """
import socket, sys
held = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
print("listening", flush=True)
sys.stdin.read()
"""
IN_THE_RUN = {
    "read the secret": "cat secret",
    "read spec.json": "cat spec.json",
    "read the jobs' scripts": "ls jobs",
    "read the code": "ls snapshot || ls jobs",
    "take the fence": "echo '{}' > attempt.json",
    "move the fence": "mv attempt.json attempt.old",
    "end the ledger": "echo '{}' >> events.jsonl",
    "empty the ledger": ": > events.jsonl",
    "ask it to stop": 'echo \'{"job_id": "JOB"}\' > stop-request.json',
    "leave a request": 'echo \'{"job_id": "JOB"}\' > stop-request.new',
    "ask for a profile": 'echo \'{"job_id": "JOB"}\' > profile-request.json',
    "lock the run": "flock -n run.lock true",
    "lock the ledger": "flock -n events.lock true",
    "add a checkpoint": "mkdir checkpoints/step-9999999999",
    "remove a checkpoint": "rm -r checkpoints/step-*",
    "write a rank's log": "echo x >> attempts/0001/rank-00000.log",
    "move the heartbeat": "mv attempts/0001/heartbeat.json attempts/0001/x",
    "change the data": "echo x >> data/tokens.bin",
    "open it": "chmod -R a+rwX .",
    "move it away": "mv ../r ../r-old",
    "remove it": "rm -rf ../r && ! test -e ../r",
    "put another in its place": "mkdir ../mine && mv -T ../mine ../r",
    "read what runs": "cat /proc/PID/environ",
    "read its memory": "head -c 1 /proc/PID/mem",
    "see its files": "ls -l /proc/PID/fd/1",
    "end a rank": "kill -KILL PID",
    "stop a rank": "kill -STOP PID",
    "ask a rank to leave": "kill -TERM PID || kill -USR1 PID || kill -USR2 PID",
}
AT_SLURM = {
    "requeue": "scontrol requeue JOB",
    "requeue and hold": "scontrol requeuehold JOB",
    "cancel": "scancel JOB",
    "signal": "scancel --signal=USR2 JOB",
    "shorten": "scontrol update jobid=JOB TimeLimit=1",
    "rename": "scontrol update jobid=JOB JobName=x",
    "suspend": "scontrol suspend JOB",
    "step": "timeout 20 srun --overlap --jobid=JOB id",
}
READERS = (
    ["status", "RUN"],
    ["status", "RUN", "--json"],
    ["logs", "RUN"],
    ["events", "RUN"],
    ["report", "RUN"],
    ["report", "RUN", "--text"],
    ["checkpoints", "list", "RUN"],
    ["checkpoints", "verify", "RUN", "--deep"],
)
WRITERS = (
    ["resume", "RUN"],
    ["resume", "RUN", "--foreign"],
    ["cancel", "RUN"],
    ["cancel", "RUN", "--save"],
    ["cancel", "RUN", "--foreign"],
    ["profile", "RUN", "--now"],
    ["checkpoints", "pin", "RUN", "5"],
    ["checkpoints", "rm", "RUN", "5"],
    ["checkpoints", "prune", "RUN", "--keep-last", "1"],
)
OF_A_FORGED_RUN = (
    *READERS,
    ["resume", "RUN"],
    ["cancel", "RUN"],
    ["cancel", "RUN", "--save"],
    ["profile", "RUN", "--now"],
)


@pytest.fixture(scope="module")
def cluster(slurm_cluster):
    """The cluster, whose nodes can run the owner's jobs too."""
    os.environ.pop(COMPILE_CACHE_VARIABLE, None)  # torch exports it where it compiles
    slurm_cluster.reset()
    with slurm_cluster.own_mounts(lambda _: open_command()):
        yield slurm_cluster
        slurm_cluster.leave()


@dataclass
class Siege:
    """One run, and what the stranger has come to."""

    run: RunHandle
    work: Path
    marks: Path
    first: int = 1
    """The attempt that trains first: on a busy machine the one before may not have started."""
    ports: list = field(default_factory=list)
    """What came of each port."""
    came_off: list = field(default_factory=list)
    """What should not have."""
    told: dict = field(default_factory=dict)
    """Command line to what it answered."""
    changed: list = field(default_factory=list)
    """Which of the commands changed something of the owner's."""
    first_pids: set = field(default_factory=set)
    job_before: dict = field(default_factory=dict)
    job_after: dict = field(default_factory=dict)
    held: list = field(default_factory=list)
    open_names: set = field(default_factory=set)

    def output(self):
        """What the agents have said."""
        return "".join(path.read_text() for path in sorted(self.run.dir.jobs.glob("*.out")))


def words_of(cluster, work):
    """Environment of both users' commands."""
    return {
        "SLURM_CONF": str(cluster.at.slurm_conf),
        "HPCTRAIN_RUNS": str(work / "runs"),
        "XDG_STATE_HOME": str(work / "state"),
        "TMPDIR": str(work.parent / "tmp"),
    }


def tree(root):
    """All that a folder holds, to be compared."""
    found = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        is_file = path.is_file() and not path.is_symlink()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
        found[str(path.relative_to(root))] = (about.st_mode, about.st_uid, content)
    return found


def plant(work, marks):
    """Modules of the stranger's where the owner will type submit; each tells that it was run."""
    for name in PLANTED:
        path = work / f"{name}.py"
        path.write_text(f"open('{marks}/{name}-' + str(__import__('os').getuid()), 'w').close()\n")
        os.chown(path, STRANGER.uid, STRANGER.gid)


def forge(work, marks, job_id, token):
    """Runs of the stranger's in the folder of all runs: what they say must not be done."""
    payload = work / "payload"
    payload.write_text(f"#!/bin/sh\nid -u >> {marks}/payload\n")
    payload.chmod(0o755)
    story = Story(work / "runs" / "zz", t=9e9, cluster="slurm")
    run = story.run
    script = run.script(token)
    story.add("submit_intent", token=token, script=str(script))
    story.add("submitted", token=token, job_id=job_id, cluster="slurm", nodes="2", by="submit")
    story.started(1, job_id, run_dir=str(run.root))
    spec = run.spec.read_text()
    run.spec.write_text(spec.replace('"python": ""', f'"python": "{payload}"'))
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\n{payload}\n")
    (run.attempt(1)).mkdir(parents=True)
    os.mkfifo(run.rank_log(1, 0))
    os.mkfifo(run.heartbeat(1))
    run.checkpoints.mkdir()
    (run.checkpoints / "step-0000000005").symlink_to(work / "runs" / "r" / "checkpoints")
    fifo = work / "runs" / "fifo"
    fifo.mkdir()
    for name in ("spec.json", "events.jsonl"):
        os.mkfifo(fifo / name)
    shut = work / "runs" / "shut"
    shut.mkdir(mode=0o700)
    os.chown(shut, STRANGER.uid, STRANGER.gid)
    for root in (run.root, fifo):
        for path in (root, *root.rglob("*")):
            os.chown(path, STRANGER.uid, STRANGER.gid, follow_symlinks=False)
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o055)
    return run


@contextlib.contextmanager
def squatting(job_id, temporary):
    """Names and ports that the job is known to want, taken before it comes."""
    block = [str(first_port(job_id, 0) + n) for n in range(PORTS)]
    for name in ("torchinductor_daemon", COMPILE_CACHE_NAME.format(uid=OWNER.uid)):
        run_as(STRANGER, ["mkdir", "-m", "0777", str(temporary / name)])
    with start_as(STRANGER, [sys.executable, "-c", LISTEN, *block]) as listener:
        assert listener.stdout.readline() == "listening\n"
        yield {int(port) for port in block}
        listener.kill()


def tries(siege, commands, **env):
    """Run each as the stranger in the run's directory; the names of those that came off."""
    pid = str(min(siege.first_pids))
    lines = [f"cd {siege.run.dir.root}"]
    for name, text in commands.items():
        command = text.replace("JOB", siege.run.job_id).replace("PID", pid)
        lines.append(f'( {command} ) >/dev/null 2>&1 && echo "{name}"')
    return run_as(STRANGER, ["sh", "-c", "\n".join([*lines, "true"])], **env).stdout.splitlines()


def ranks(run):
    """Processes of the ranks of the run's job."""
    return {
        pid
        for pid in run.slurm.pids_of_job(run.job_id)
        if any("/rank-" in path for path in processes.open_files(pid))
    }


@contextlib.contextmanager
def shared_folders(mode):
    """What all users see: where the owner types submit with its runs, the marks, /tmp."""
    base = Path(tempfile.mkdtemp(prefix="hpctrain-siege-"))
    base.chmod(0o755)
    work, marks = base / "work", base / "marks"
    for folder in (work, work / "runs", work / "state", marks, base / "tmp"):
        folder.mkdir()
        folder.chmod(mode)
    try:
        yield work, marks
    finally:
        shutil.rmtree(base)


def left_in_time(cluster, run):
    """The job ends soon after its program has; else what its agents said."""
    try:
        cluster.wait_job(run.job_id, ("COMPLETED",))
    except AssertionError as error:
        said = "".join(path.read_text() for path in sorted(run.dir.jobs.glob("*.out")))
        kinds = [(event.kind, event.t) for event in run.events()[-12:]]
        raise AssertionError(f"{error}\n{kinds}\n{said[-6000:]}") from None


@pytest.fixture(scope="module")
def siege(cluster):
    """The run, done, and all that was tried."""
    with shared_folders(0o1777) as (work, marks):
        yield besiege(cluster, work, marks)
        cluster.leave()


def submitted(cluster, work, env):
    """A run of the owner's."""
    told = own_program("hpctrain", "submit", "--cluster=slurm", "--name=r", "--json")
    open_hand = ["sh", "-c", 'umask 000; exec "$@"', "sh"]
    done = run_as(OWNER, [*open_hand, *told, *TWO_BY_TWO, *SETS], cwd=work, **env)
    found = json.loads(done.stdout)
    return RunHandle(cluster, work, RunDir(Path(found["run_dir"])), str(found["job_id"]))


def besiege(cluster, work, marks):
    env = words_of(cluster, work)
    plant(work, marks)
    with contextlib.ExitStack() as stack:
        config = cluster.run("scontrol", "show", "config", check=True).stdout
        next_id = config.split("NEXT_JOB_ID")[1].split()[1]
        squatted = stack.enter_context(squatting(next_id, work.parent / "tmp"))
        watcher = stack.enter_context(
            start_as(STRANGER, own_program("tests.support.other_user", str(OWNER.uid), next_id))
        )
        stack.callback(watcher.kill)
        limit = threading.Timer(PATIENCE_S, watcher.kill)  # then `hear` ends too
        limit.start()
        stack.callback(limit.cancel)
        siege = Siege(None, work, marks)

        def hear(kind):
            """Read on until the stranger has come to something of that kind."""
            for line in watcher.stdout:
                if not line.startswith("{"):  # torch's own words
                    continue
                siege.ports.append(json.loads(line))
                if siege.ports[-1]["is"] == kind:
                    return siege.ports[-1]
            raise AssertionError(f"the stranger has ended: {siege.ports}")

        hear("ready")
        with cluster.stopped_node("n2"):  # the first node waits for it in the preflight
            run = submitted(cluster, work, env)
            siege.run = run
            hear("meeting")
        hear("store")
        assert squatted.isdisjoint({one["port"] for one in siege.ports if "port" in one})
        holder = stack.enter_context(start_as(STRANGER, [sys.executable, "-c", HOLD]))
        stack.callback(holder.kill)

        first = siege.first = run.wait_event("saved").attempt
        siege.first_pids = ranks(run)
        siege.job_before = cluster.job(run.job_id)
        siege.open_names = open_names(cluster.pids_of_job(run.job_id), work, cluster.at.folder)
        _lock(siege, holder)
        _disturb_ranks(siege, watcher, hear)
        siege.came_off += tries(siege, IN_THE_RUN, **env)
        tries(siege, AT_SLURM, **env)
        siege.job_after = cluster.job(run.job_id)

        urgent = cluster.submit_urgent(4)
        cluster.wait_job(run.job_id, "PENDING")
        _ask_everything(siege, env)
        cluster.cancel(urgent)
        run.wait_event("restored", attempt=first + 1)
        _lock(siege, holder)
        run.wait_event("done")
        left_in_time(cluster, run)
        watcher.stdin.close()
        siege.ports += [json.loads(line) for line in watcher.stdout if line.startswith("{")]
    return siege


def open_names(pids, *but):
    """What processes have open where everybody can make names; what has none any more is left out.

    Args:
        pids: The processes.
        but: Folders that are not meant.
    """
    paths = {path for pid in pids for path in processes.open_files(pid)}
    return {
        path
        for path in paths
        if path.startswith(OPEN_TO_ALL)
        and not path.startswith(tuple(map(str, but)))
        and Path(path).exists()
        and not _is_in_a_new_private_folder(Path(path))
    }


def _is_in_a_new_private_folder(path):
    """A process's own: made under a name by chance, for its user alone."""
    folders = [
        one for one in (path, *path.parents) if re.match(rf"hpctrain-[a-z]+-{OWNER.uid}-", one.name)
    ]
    return bool(folders) and all(
        (about := folder.stat()).st_uid == OWNER.uid and about.st_mode & 0o777 == 0o700
        for folder in folders
    )


def _lock(siege, holder):
    holder.stdin.write(f"{siege.run.dir.root}\n")
    holder.stdin.flush()
    siege.held = holder.stdout.readline().split()


def _disturb_ranks(siege, watcher, hear):
    """Junk for what the ranks themselves listen on, which is torch's."""
    inodes = {
        path.removeprefix("socket:[").rstrip("]")
        for pid in siege.first_pids
        for path in processes.open_files(pid)
        if path.startswith("socket:")
    }
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text().splitlines()[1:]
    ]
    ports = [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes]
    assert ports, "ranks of gloo listen"
    watcher.stdin.write(" ".join(map(str, ports)) + "\n")
    watcher.stdin.flush()
    for _ in ports:
        hear("given")


def _ask_everything(siege, env):
    """All commands on the other's run, while nothing else changes it."""
    run = siege.run
    token = all_fields(run.events("submitted")[0])["token"]
    forged = forge(siege.work, siege.marks, run.job_id, token)
    before = tree(run.dir.root)

    def ask(user, words, root):
        told = own_program("hpctrain", *(str(root) if one == "RUN" else one for one in words))
        home = siege.work.parent / f"home-{user.uid}"
        home.mkdir(exist_ok=True)
        os.chown(home, user.uid, user.gid)
        done = run_as(user, told, cwd=home, check=False, **env)
        siege.told[user, root.name, " ".join(words)] = done
        if tree(run.dir.root) != before or cluster_says(run) != "PENDING":
            siege.changed.append((user, words))

    for words in (*READERS, *WRITERS):
        ask(STRANGER, words, run.dir.root)
    ask(STRANGER, ["cancel", "RUN"], forged.root)
    for words in OF_A_FORGED_RUN:
        ask(OWNER, words, forged.root)
        ask(OWNER, words, siege.work / "runs" / "fifo")
    ask(OWNER, ["status"], run.dir.root)
    ask(OWNER, ["status", "-"], run.dir.root)


def cluster_says(run):
    return run.slurm.job(run.job_id)["JobState"]


def test_the_run_loses_no_step_and_no_bit(siege, tmp_path):
    """What was tried reached the agents, and changed nothing."""
    quiet = make_run(tmp_path / "quiet", train__steps=STEPS, train__dropout=0.0)
    train(quiet, 4)

    begun = siege.first - 1  # n2 stood still for longer than SLURM lets a step's start take
    assert siege.output().count("failed on node n2: Job credential expired\n") == begun
    *failed, preempted, last = siege.run.ends()
    assert failed == [("crashed", "requeue")] * begun
    assert (preempted, last) == (siege.run.slurm.end_in_grace, ("completed", "stop"))
    assert siege.run.steps_lost() == [0]
    assert int(siege.run.slurm.job(siege.run.job_id)["Restarts"]) == 1 + begun
    assert_same_bits(full_state(quiet, STEPS), full_state(siege.run.dir, STEPS))
    assert consumed(siege.run.dir) == consumed(quiet)
    assert [all_fields(e)["bad"] for e in siege.run.events("preflight")] == [{}, {}]


def test_the_other_user_was_there(siege):
    """Else the rest says nothing."""
    stores = [one for one in siege.ports if one["is"] == "store" and "set" in one]
    (meeting, *_) = [one for one in siege.ports if one["is"] == "meeting"]
    assert len({one["port"] for one in stores}) == 2, "of both attempts"
    assert meeting["port"] - MEETING in {one["port"] for one in stores}
    assert not [answer for answer in meeting["answers"] if "proof" in answer]
    assert "written round/0/news/0 into their store" in siege.output()
    assert "events.jsonl" in siege.held
    assert not {"run.lock", "events.lock", "secret"} & set(siege.held)


def test_nothing_of_the_strangers_was_run(siege):
    assert list(siege.marks.iterdir()) == []
    said = siege.output()
    assert f"/{COMPILE_CACHE_NAME.format(uid=OWNER.uid)} is not this user's alone" in said
    assert f"kept in {siege.run.dir.root}/compiled" in said
    assert siege.open_names == set(), "names that somebody can have taken before"


def test_what_was_planted_would_have_told_of_it(siege):
    carelessly = [sys.executable, "-m", "json.tool"]
    subprocess.run(carelessly, cwd=siege.work, capture_output=True, check=False)
    marks = list(siege.marks.iterdir())
    for path in marks:
        path.unlink()
    assert marks


def test_the_other_user_changes_nothing_of_the_run(siege):
    assert siege.came_off == []
    changed = {
        name: (siege.job_before[name], siege.job_after.get(name))
        for name in ("JobState", "Restarts", "TimeLimit", "JobName", "Priority")
        if siege.job_before[name] != siege.job_after.get(name)
    }
    assert changed == {}


def test_no_command_is_hung_broken_or_changes_what_is_anothers(siege):
    assert siege.changed == []
    refused = siege.told[STRANGER, "zz", "cancel RUN"]
    assert refused.returncode == 5
    original = f"this is a copy of {siege.run.dir.root}, whose job {siege.run.job_id} is"
    assert original in refused.stderr, "it is not even asked of SLURM"
    for (user, name, words), done in siege.told.items():
        told = f"{user} {name} {words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stdout + done.stderr, told
        errors = [line for line in done.stderr.splitlines() if "error: " in line]
        damage_is_told = "verify" in words  # in its table
        assert len(errors) == (done.returncode != 0) or damage_is_told, told


SWAP = """
import ctypes, os
os.umask(0)
for name in ("x", "x/jobs", "x/attempts", "x/checkpoints"):
    os.mkdir(name)
for name in ("events.jsonl", "events.lock", "run.lock", "secret"):
    open("x/" + name, "w").close()
with open("x/spec.json", "w") as file:
    file.write("{}")
# Both names in one change: between two, an agent would make the directory of its run anew.
here, exchange = -100, 2
if ctypes.CDLL(None, use_errno=True).renameat2(here, b"x", here, b"r", exchange):
    raise OSError(ctypes.get_errno(), "renameat2")
os.rename("x", "moved")
"""


@pytest.mark.story(
    proved_by=("tests/engines/test_store_process.py", "tests/unit/run/test_ownership.py")
)
def test_a_run_whose_port_is_taken_comes_back_and_one_that_was_replaced_ends(cluster):
    """In a folder of runs that all can write, without a sticky bit; the moved one goes on."""
    with shared_folders(0o777) as (work, _):
        env = words_of(cluster, work)
        run = submitted(cluster, work, env)
        run.wait_event("saved", attempt=1)
        first = min(listening(OWNER.uid) & ports_of(run.job_id))
        block = [str(first + n) for n in range(1, PORTS)]  # of the next rounds
        with start_as(STRANGER, [sys.executable, "-c", LISTEN, *block]) as listener:
            assert listener.stdout.readline() == "listening\n"
            os.kill(min(ranks(run)), signal.SIGKILL)
            run.wait_event("restored", attempt=2)
            listener.kill()
        assert cluster.job(run.job_id)["Restarts"] == "1"
        run.wait_event("saved", attempt=2)

        run_as(STRANGER, [sys.executable, "-c", SWAP], cwd=work / "runs")
        cluster.wait_job(run.job_id, ("COMPLETED", "FAILED"))

        moved = RunHandle(cluster, work, RunDir(work / "runs" / "moved"), run.job_id)
        ended = "".join(path.read_text() for path in moved.dir.jobs.glob("*.out"))
        assert f"{run.dir.spec} belongs to" in ended
        resume = own_program("hpctrain", "resume", str(moved.dir.root), "--json")
        moved.job_id = json.loads(run_as(OWNER, resume, cwd=work, **env).stdout)["job_id"]
        moved.wait_done()
        assert all(lost <= 2 * SETTINGS["checkpoint.interval_steps"] for lost in moved.steps_lost())
        cluster.leave()
