"""All signatures in the order in which they are tried, and the words that find lines. Pure.

A signature is looked for in a line only where its word stands in it, and a line is looked at only
where one of `COARSE` stands in it: searching for a few plain words is what makes a log of a
gigabyte a matter of seconds. Words that the ledger's causes know too
(`hpctrain.history.causes.told_in`) are not written here again: they are asked where an error's line
has no signature of its own. tests/unit/doctor/test_corpus.py holds the promises.
"""

from __future__ import annotations

from hpctrain.doctor.faults import Certainty, FaultKind
from hpctrain.doctor.sign import LogSign, Role
from hpctrain.doctor.signs_job import MEETING, OUTSIDE, TRAINING
from hpctrain.doctor.signs_machine import ACCELERATORS, MEMORY, STORAGE
from hpctrain.doctor.signs_ranks import DEATHS, LINKS, WAITS
from hpctrain.history.causes import EndCause

SIGNS: tuple[LogSign, ...] = (
    *ACCELERATORS,
    *MEMORY,
    *STORAGE,
    *MEETING,
    *TRAINING,
    *OUTSIDE,
    *WAITS,
    *LINKS,
    *DEATHS,
)
"""The first that fits a line counts."""

COARSE: tuple[bytes, ...] = tuple(
    word.encode()
    for word in (
        *("rror", "xception", "raceback", "memory", "WARN", "ismatch", "illed", "ailed"),
        *("imed out", "imeout", "ssert", "ELLED AT", "xitcode", "SIG", "onnect", "losed by"),
        *("Duplicate GPU", "verflow", "OVERFLOW", "KeyboardInterrupt", "truncated"),
        *("TERM_RUNLIMIT", "Xid", "off the bus", "egmentation", "interface found"),
        *("last completed", "oom-kill", "preamble", "bad_alloc", "topping training"),
        *("job killed", "atchdog", "handling of the above", "direct cause of", "file handle"),
        *(
            "NET/IB",
            "NET/Socket",
            "NCCL version",
            "failure on",
            "got signal",
            "left on device",
            "peer access",
        ),
        *("return code = -", "Unexpected result", "service not known", "name resolution"),
        *("machine only has", "(local_rank: ", "(core dumped)", "by GPU node-", "grad_norm': nan"),
        *("double free or corr", "(): invalid ", "exit code 13", "ncclInvalid", "Unable to load"),
        *("without SLURM handling", "`srun` command is"),
    )
)
"""One of these stands in every line that is worth a look."""

DEFAULT_OF_CAUSE: dict[EndCause, tuple[FaultKind, Role, Certainty]] = {
    EndCause.NCCL_ERROR: (FaultKind.TRANSPORT, Role.LINK, Certainty.POSSIBLE),
    EndCause.NAN: (FaultKind.NAN, Role.CAUSE, Certainty.LIKELY),
    EndCause.GPU_ERROR: (FaultKind.GPU_ERROR, Role.CAUSE, Certainty.LIKELY),
    EndCause.DATA_WORKER: (FaultKind.DATA_WORKER, Role.CAUSE, Certainty.LIKELY),
    EndCause.GPU_OOM: (FaultKind.GPU_OOM, Role.CAUSE, Certainty.CERTAIN),
    EndCause.HOST_OOM: (FaultKind.HOST_OOM, Role.CAUSE, Certainty.LIKELY),
    EndCause.STORAGE_FULL: (FaultKind.STORAGE_FULL, Role.CAUSE, Certainty.CERTAIN),
    EndCause.STORAGE_ERROR: (FaultKind.STORAGE_ERROR, Role.CAUSE, Certainty.CERTAIN),
}
"""What the ledger's words for an error line mean here, where no signature is finer."""
