"""Faults put into a save or a restore on purpose: `points` names the places, `faults` acts there.

Armed here, at the first import, so that a misspelt HPCTRAIN_FAULTS ends the process before it has
done anything. Without that variable only `points` is imported, and it does nothing.
"""

from __future__ import annotations

import os

from hpctrain.core.base.env import HPCTRAIN_FAULTS

if os.environ.get(HPCTRAIN_FAULTS):
    from hpctrain.core.testing import faults

    faults.arm(os.environ[HPCTRAIN_FAULTS], origin=HPCTRAIN_FAULTS)
