"""What --fix changes is right, is whole, and is done once."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from hpctrain.advise.lint.check import EVERY_RULE, RuleChoice, check_text, fixed_text

HEAD = "import os\nimport torch\nimport torch.distributed as dist\n"
FIXES = [
    ("HT401", "s = torch.cuda.amp.GradScaler()", 's = torch.amp.GradScaler("cuda")'),
    (
        "HT401",
        "s = torch.cuda.amp.GradScaler(2.0**10, enabled=x)",
        's = torch.amp.GradScaler("cuda", 2.0**10, enabled=x)',
    ),
    (
        "HT401",
        (
            "from torch.cuda.amp import GradScaler, autocast\n"
            "s = GradScaler()\nwith autocast():\n    f()"
        ),
        (
            "from torch.amp import GradScaler, autocast\n"
            's = GradScaler("cuda")\nwith autocast("cuda"):\n    f()'
        ),
    ),
    (
        "HT402",
        "with torch.cuda.amp.autocast(on):\n    f()",
        'with torch.amp.autocast("cuda", enabled=on):\n    f()',
    ),
    (
        "HT402",
        "with torch.cuda.amp.autocast(\n    dtype=torch.bfloat16,\n):\n    f('ä')",
        "with torch.amp.autocast(\"cuda\", \n    dtype=torch.bfloat16,\n):\n    f('ä')",
    ),
    (
        "HT207",
        "ä = 'ö'; c = torch.autocast(dtype=torch.bfloat16)",
        "ä = 'ö'; c = torch.autocast(\"cuda\", dtype=torch.bfloat16)",
    ),
    (
        "HT403",
        (
            "import torch.distributed.checkpoint as dcp\n"
            "dcp.save_state_dict(state_dict=s, storage_writer=w)"
        ),
        "import torch.distributed.checkpoint as dcp\ndcp.save(state_dict=s, storage_writer=w)",
    ),
    (
        "HT407",
        "os.environ['NCCL_ASYNC_ERROR_HANDLING'] = '1'",
        "os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'] = '1'",
    ),
    ("HT409", "dist._all_gather_base(o, t)", "dist.all_gather_into_tensor(o, t)"),
]
LEFT = [
    ("HT401", "from torch.cuda.amp import GradScaler\nmake = GradScaler\ns = GradScaler()"),
    ("HT401", "from torch.cuda.amp import GradScaler as Scaler\ns = Scaler()"),
    ("HT401", "from torch.cuda.amp import GradScaler, custom_fwd\ns = GradScaler()"),
    ("HT401", "s = torch.cuda.amp.GradScaler(*options)"),
    ("HT403", "import torch.distributed.checkpoint as dcp\ndcp.save_state_dict(s, **options)"),
    ("HT402", "with torch.cuda.amp.autocast(True, torch.float16):\n    f()"),
    ("HT402", "from torch.cuda import amp\nwith amp.autocast():\n    f()"),
    ("HT402", 'with torch.cuda.amp.autocast(device_type="cuda"):\n    f()'),
    (
        "HT403",
        "import torch.distributed.checkpoint as dcp\ndcp.save_state_dict(s, w)",
    ),
]


@pytest.mark.parametrize(("code", "before", "after"), FIXES)
def test_what_is_certain_is_changed_once(code, before, after):
    text = fixed_text(HEAD + before, "program.py")

    assert text == HEAD + after
    ast.parse(text)
    assert code not in {one.rule.code for one in check_text(text, "program.py")}
    assert fixed_text(text, "program.py") == text


@pytest.mark.parametrize(("code", "text"), LEFT)
def test_what_is_not_certain_is_told_and_left(code, text):
    assert code in {one.rule.code for one in check_text(HEAD + text, "program.py")}
    assert fixed_text(HEAD + text, "program.py") == HEAD + text


def test_line_ends_of_windows_stay():
    text = HEAD.replace("\n", "\r\n") + "# ä\r\ns = torch.cuda.amp.GradScaler()\r\n"

    assert fixed_text(text, "program.py") == text.replace(
        "torch.cuda.amp.GradScaler()", 'torch.amp.GradScaler("cuda")'
    )


def test_only_chosen_rules_change_anything():
    text = HEAD + FIXES[0][1] + "\n" + FIXES[8][1] + "\n"

    changed = fixed_text(text, "program.py", RuleChoice(select=("HT409",)))

    assert changed == HEAD + FIXES[0][1] + "\n" + FIXES[8][2] + "\n"
    assert fixed_text(changed, "program.py", EVERY_RULE) != changed


REFUSED = "with torch.npu.amp.autocast():\n    pass\nwith torch.autocast():\n    pass\n"
"""A call that takes no device; and one whose change would bring a hint (HT202)."""


@pytest.mark.parametrize("text", [*(text for _, text, _ in FIXES), REFUSED])
def test_fix_promises_only_what_it_does(text):
    before = check_text(HEAD + text, "program.py")
    after = check_text(fixed_text(HEAD + text, "program.py"), "program.py")

    promised = Counter(one.rule.code for one in before if one.edits)
    gone = Counter(one.rule.code for one in before) - Counter(one.rule.code for one in after)
    assert promised <= gone
    assert bool(promised) == (text != REFUSED)
