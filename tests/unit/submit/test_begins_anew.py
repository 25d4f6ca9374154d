"""A program that saves and does not go on by itself is told of, with the words to add."""

from __future__ import annotations

import re
import shlex

import pytest

from hpctrain.cli.main import pages
from hpctrain.launch.begins_anew import begins_anew

HEAD = """
import argparse, os, torch, utils
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("-r", "--resume", default="", type=str)
parser.add_argument("--out", "-o", default="checkpoints")
parser.add_argument("--auto", action="store_true")
parser.add_argument("--weights", default=None)
args = parser.parse_args()
model = torch.nn.Linear(2, 2)
"""
LOOP = """
for epoch in range(10):
    model(torch.ones(2)).sum().backward()
    torch.save({"epoch": epoch, "model": model.state_dict()}, %s)
"""
LOAD = "    torch.load(args.resume)\n"
SAVES = LOOP % '"checkpoints/last.pt"'


def note(body, *args, head=HEAD):
    found = begins_anew(head + body, args)
    return None if found is None else found.note("train.py")


def test_one_that_loads_nothing_is_told_what_comes_of_it():
    assert note(SAVES).startswith(
        "train.py saves its checkpoints (line 14) and loads none at its start: after a preemption "
        "it begins at its first step again"
    )


def test_the_advice_names_a_page_that_there_is():
    (topic,) = re.findall(r"`hpctrain help ([\w-]+)`", note(SAVES))

    assert topic in pages()
    assert "run.track" in note(SAVES)


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ("if args.resume:\n    torch.load(args.resume)\n", "--resume {checkpoint}"),
        (
            f"if args.resume:\n    if os.path.isfile(args.resume):\n    {LOAD}",
            "--resume {checkpoint}",
        ),
        ("if args.auto and args.resume:\n    torch.load('x')\n", "--resume {checkpoint}"),
        ("utils.load_model(args=args, model=model)\n", "--resume {checkpoint}"),
        ("if args.resume:\n    if os.path.exists('x'):\n    " + LOAD, "--resume {checkpoint}"),
        (f"def back():\n{LOAD}\nif args.resume:\n    back()\n", "--resume {checkpoint}"),
        (f"if args.weights:\n{LOAD}if args.resume:\n{LOAD}", "--resume {checkpoint}"),
    ],
)
def test_one_that_has_to_be_told_gets_the_words_for_it(load, words):
    told = note(load + SAVES)

    assert "resumes from one only with --resume, which is not given" in told
    line = shlex.split(told.partition("Add: ")[2])
    assert line == ["--checkpoint", "checkpoints/last.pt", f"--resume-args={words}"]


def test_a_flag_without_a_value_is_added_alone():
    head = HEAD.replace('"--resume", default="", type=str', '"--resume", action="store_true"')

    told = note("if args.resume:\n    torch.load('x')\n" + SAVES, head=head)

    assert told.endswith("--resume-args=--resume")


@pytest.mark.parametrize(
    "load",
    [
        # two options, neither given (makemore)
        "if args.resume or args.auto:\n    torch.load('x')\n",
        # a test that says nothing of the option inside one that does (torch's imagenet example)
        "args.gpu = None\nif args.resume:\n    if args.gpu is None:\n    " + LOAD,
        f"if args.resume != '':\n{LOAD}",
        f"if args.resume is not None and len(args.resume) > 0:\n{LOAD}",
        f"if not args.resume:\n    pass\nelse:\n{LOAD}",
        f"resume = args.resume\nif resume:\n{LOAD}",
        f"if os.path.isfile(args.resume):\n{LOAD}",
        f"if None not in [args.weights, args.resume]:\n{LOAD}",
        f"def back(resume):\n    if not resume:\n        return\n{LOAD}back(args.resume)\n",
        # what resumes, else weights to start from (ssd.pytorch)
        f"if args.resume:\n{LOAD}else:\n    torch.load('base.pt')\n",
        # a library's method with the name of the function that calls it (DeepSpeed's BERT)
        "def load_model(m):\n    m.net.load_model('x')\nif args.resume:\n    load_model(model)\n",
        # data, a copy of a model, published weights
        f"corpus = torch.load('c.pt')\nif args.resume:\n{LOAD}",
        f"ema.load_state_dict(model.state_dict())\nif args.resume:\n{LOAD}",
        f"model.load_state_dict_from_url(URL)\nif args.resume:\n{LOAD}",
        # a parameter that the loop sets anew where it saves (tacotron2)
        (
            "def train(resume):\n    if resume:\n        torch.load(resume)\n"
            "    for epoch in range(2):\n        resume = 'out'\ntrain(args.weights)\n"
            f"if args.resume:\n{LOAD}"
        ),
    ],
)
def test_a_load_that_the_command_line_leaves_out_is_none(load):
    told = note(load + SAVES)

    assert told is not None
    assert "only with --resume, which is not given" in told


@pytest.mark.parametrize(
    "load",
    [
        "torch.load('checkpoints/last.pt')\n",
        "def best():\n    return torch.load('checkpoints/last.pt')\nbest()\n",
    ],
)
def test_a_load_after_the_loop_is_none_at_the_start(load):
    assert "loads none at its start" in note(SAVES + load)
    assert note(load + SAVES) is None


def test_a_function_that_saves_is_followed_to_its_loop():
    body = (
        LOOP.replace("\n", "\n    ").replace("\n    for", "\ndef train():\n    for", 1) % "'x.pt'"
    )

    assert "loads none at its start" in note(f"{body}\ntrain()\ntorch.load('x.pt')\n")
    assert note(f"{body}\ntorch.load('x.pt')\ntrain()\n") is None


@pytest.mark.parametrize(
    "load",
    ["if args.weights:\n    torch.load(args.weights)\n", "if args.auto:\n    torch.load('x')\n"],
)
def test_an_option_that_may_be_something_else_is_named_and_not_advised(load):
    told = note(load + SAVES)

    assert "loads one only with --" in told
    assert "--resume-args" not in told


@pytest.mark.parametrize(
    ("where", "pattern"),
    [
        ('os.path.join(args.out, "last.pt")', "checkpoints/last.pt"),
        ('"out/%s-%03d.pt" % (args.out, epoch)', "out/*-*.pt"),
        ('"out/{}-{:d}.pt".format(name, epoch)', "out/*-*.pt"),
        ('f"{args.out}/epoch-{epoch}.pt"', "checkpoints/epoch-*.pt"),
        ('Path(args.out) / "last.ckpt"', "checkpoints/last.ckpt"),
        ("PLACE", "out/model.pt"),
        ("args.nobody_knows", "PATH"),
        ("os.path.join(folder(), name)", "PATH"),
    ],
)
def test_the_pattern_is_where_it_saves(where, pattern):
    load = 'PLACE = "out/model.pt"\nif args.resume:\n    torch.load(args.resume)\n'

    told = note(load + LOOP % where)

    assert shlex.split(told.partition("Add: ")[2])[1] == pattern
    assert ("(PATH: where it saves)" in told) is (pattern == "PATH")


@pytest.mark.parametrize(
    "out", [["--out", "/scratch/mine"], ["-o", "/scratch/mine"], ["-o=/scratch/mine"]]
)
def test_the_pattern_follows_the_command_line(out):
    load = "if args.resume:\n    torch.load(args.resume)\n"

    told = note(load + LOOP % 'os.path.join(args.out, "last.pt")', *out)

    assert "--checkpoint /scratch/mine/last.pt" in told


@pytest.mark.parametrize(
    "body",
    [
        "if os.path.exists('checkpoints/last.pt'):\n    torch.load('x')\n" + SAVES,
        "newest = sorted(Path('.').glob('*.pt'))\nif newest:\n    torch.load(newest[-1])\n" + SAVES,
        f"if args.resume or os.path.exists('x'):\n{LOAD}{SAVES}",
        "torch.load('checkpoints/last.pt')\n" + SAVES,
        "if not args.auto:\n    torch.load('x')\n" + SAVES,  # nerf-pytorch's --no_reload
        f"args.resume = newest()\nif args.resume:\n{LOAD}{SAVES}",
        f"parser.set_defaults(resume='x')\nif args.resume:\n{LOAD}{SAVES}",
        f"def back():\n{LOAD}if args.resume:\n    back()\nback()\n{SAVES}",
        f"{SAVES}for epoch in range(3):\n    pass\ndef main():\n{LOAD}",
        "utils.auto_load_model(args=args, model=model)\n" + SAVES,
        "utils.restart_from_checkpoint('x', model=model)\n" + SAVES,
        "trainer.train(resume_from_checkpoint=True)\n" + SAVES,
        "start = utils.maybe_resume(model, 'out')\n" + SAVES,
        "manager = utils.CheckpointManager('out')\nmanager.restore(model)\n" + SAVES,
        "checkpointer = utils.Checkpointer('out')\nstart = checkpointer.load()\n" + SAVES,
        f"for k in conf:\n    setattr(args, k, conf[k])\nif args.resume:\n{LOAD}{SAVES}",
        f"vars(args).update(conf)\nif args.resume:\n{LOAD}{SAVES}",
        f"args.__dict__.update(conf)\nif args.resume:\n{LOAD}{SAVES}",
        f"parser.set_defaults(**conf)\nif args.resume:\n{LOAD}{SAVES}",
        f"parser.add_argument('-c', is_config_file=True)\nif args.resume:\n{LOAD}{SAVES}",
        'torch.save(model.state_dict(), "result.pt")\n',
        "def main():\n    torch.save(model.state_dict(), 'result.pt')\nmain()\n",
        "import hpctrain\nrun = hpctrain.init()\n" + SAVES,
        "print('saves nothing')\n",
        SAVES + "if os.environ['HPCTRAIN_RESUME']:\n    pass\n",
        "this is no python",
        "x = " + "(" * 500 + ")" * 500,
    ],
)
def test_no_word_on_others(body):
    assert note(body) is None


@pytest.mark.parametrize(
    "body",
    [
        "huggingface_hub.snapshot_download('x')\n",
        "loader = StatefulDataLoader(data)\n",
        "for step in range(3):\n    utils.upload_checkpoint('x')\n",
        "def evaluate():\n    ema.restore()\nfor step in range(3):\n    evaluate()\n",
        "pairs.update(a=1)\nsetattr(args, 'seed', 1)\n",
    ],
)
def test_what_only_looks_like_a_load_is_none(body):
    assert note(body + f"if args.resume:\n{LOAD}" + SAVES) is not None


@pytest.mark.parametrize(
    "load",
    [
        "model.load_state_dict(torch.load(args.weights))\n",
        # mae's main_finetune
        (
            "if args.weights and not args.auto:\n    state = torch.load(args.weights)\n"
            "    model.load_state_dict(state['model'])\n"
        ),
    ],
)
def test_weights_to_start_from_are_no_resume(load):
    body = f"{load}if args.resume:\n{LOAD}{SAVES}"

    assert "only with --resume, which is not given" in note(body, "--weights", "base.pt")
    assert note(body, "--weights", "base.pt", "--resume", "last.pt") is None
    assert note(load + SAVES, "--weights", "last.pt") is None, "nothing else would resume"
    for own in ("out", "auto"):
        last = f"if args.{own}:\n    torch.load('last.pt')\n"
        assert note(last + body, "--weights", "base.pt", "--auto") is None
    told = f"parser.add_argument('--ckpt')\n{body.replace('weights', 'ckpt')}"
    assert note(told, "--ckpt", "last.pt") is None, "its name says that it resumes"


def test_a_file_of_options_counts_only_where_it_is_read():
    """timm's train.py, and its many copies."""
    parser = "parser.add_argument('-c', '--config', default='')\n"
    body = (
        f"{parser}if args.config:\n    parser.set_defaults(**conf)\nif args.resume:\n{LOAD}{SAVES}"
    )

    assert note(body) is not None
    assert note(body, "-c", "a.yaml") is None


def test_options_that_a_program_takes_by_exec_count_as_given():
    """nanoGPT's configurator: `--init_from=resume`, or a file."""
    body = f"begin = 'scratch'\nexec(open('c.py').read())\nif begin == 'resume':\n{LOAD}{SAVES}"

    assert note(body) is not None
    assert note(body, "--begin=resume") is None


@pytest.mark.parametrize(
    "args",
    [
        ["--resume", "last.pt"],
        ["--resume=last.pt"],
        ["--res", "last.pt"],
        ["-r", "last.pt"],
        ["-rlast.pt"],
    ],
)
def test_no_word_where_it_is_told(args):
    assert note("if args.resume:\n    torch.load(args.resume)\n" + SAVES, *args) is None
