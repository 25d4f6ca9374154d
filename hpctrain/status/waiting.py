"""What a scheduler's reason for letting a job wait means, and what one can do about it. Pure.

The names are those of SLURM's job reason codes, as `scontrol show job` prints them.
"""

from __future__ import annotations

_REASONS: tuple[tuple[str, str], ...] = (
    ("Resources", "it is next, as soon as enough nodes are free; fewer nodes start sooner"),
    ("Priority", "other jobs come first; fewer nodes or a shorter time may slip in between"),
    (
        "BeginTime",
        "it may not start before its time; SLURM holds a requeued job back for two minutes or so",
    ),
    ("DependencyNeverSatisfied", "what it waits for has failed, so it never starts; cancel it"),
    ("Dependency", "it waits for another job to end"),
    ("JobHeldAdmin", "an administrator holds it; ask them"),
    ("JobHeldUser", "it is held; `scontrol release JOBID` lets it go"),
    ("launch_failed_requeued_held", "it failed to launch and is held; `scontrol release JOBID`"),
    ("JobHoldMaxRequeue", "it was requeued too often and is held; `scontrol release JOBID`"),
    (
        "ReqNodeNotAvail",
        "nodes that it needs are down, drained or reserved, perhaps for a maintenance to come",
    ),
    ("ReservationDeleted", "the reservation that it asks for is gone; submit without it"),
    ("Reservation", "it waits for its reservation to begin"),
    ("Nodes_required_for_job_are", "nodes that it needs are down, drained or reserved"),
    ("NodeDown", "a node that it needs is down"),
    ("BadConstraints", "no node can ever fit what it asks for; look at `sinfo` and submit anew"),
    ("PartitionNodeLimit", "it asks for more nodes than its partition gives; resume with fewer"),
    ("PartitionTimeLimit", "it asks for more time than its partition gives; resume with less"),
    ("PartitionDown", "its partition takes no jobs now"),
    ("PartitionInactive", "its partition starts no jobs now"),
    ("InvalidAccount", "its account is not valid; resume with another `--account`"),
    ("InvalidQOS", "its QOS is not valid; resume with another"),
    ("Licenses", "it waits for a licence"),
    ("Cleaning", "its last start is still being cleaned up"),
    ("Prolog", "its nodes are being prepared"),
    ("QOSMaxJobsPerUserLimit", "you run as many jobs as your QOS allows; it waits for one to end"),
    ("QOSJobLimit", "as many jobs run as the QOS allows"),
    ("AssocMaxJobsLimit", "you run as many jobs as your account allows; it waits for one to end"),
    ("AssocGrpCPUMinutesLimit", "your account has used up its compute time; ask for more"),
    ("AssocGrpGRESMinutes", "your account has used up its GPU time; ask for more"),
    ("AssocGrpBillingMinutes", "your account has used up its budget; ask for more"),
    ("QOSMax", "it, or your jobs together, ask for more than the QOS gives one user"),
    ("QOSGrp", "everybody in this QOS together has reached its limit"),
    ("QOSMin", "it asks for less than the QOS wants at least"),
    ("AssocGrp", "your account's jobs together have reached its limit"),
    ("AssocMax", "it, or your jobs together, ask for more than your account gives one user"),
)
"""Beginning of a reason to its words; the first that fits counts."""


def explained(reason: str) -> str:
    """A reason in words; nothing for one that is not known.

    Args:
        reason: As the scheduler prints it, e.g. "ReqNodeNotAvail, UnavailableNodes:n[1-3]".
    """
    name = reason.strip().replace(" ", "_")
    return next((words for start, words in _REASONS if name.startswith(start)), "")
