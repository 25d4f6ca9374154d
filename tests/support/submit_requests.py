"""A submit's request from what its flags are called."""

from __future__ import annotations

import inspect
from typing import Any

from hpctrain.launch.change import FLAGS, flags_of
from hpctrain.launch.prepare import SubmitRequest

_FLAGS = FLAGS.keys() | inspect.signature(flags_of).parameters


def request_of(**fields: Any) -> SubmitRequest:
    """Return a request; `nodes`, `time` and what else `flags_of` takes become flags."""
    given = {name: fields.pop(name) for name in _FLAGS & fields.keys()}
    return SubmitRequest(**fields, flags=flags_of(**given))
