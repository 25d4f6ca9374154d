"""How a process becomes a rank of a run: ``run = hpctrain.init()``.

It may have been started by hpctrain, by torchrun, or by hand; without a run directory it trains all
the same. tests/engines/test_resume.py and test_own_loop.py hold the promises.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.checkpoint.tensors.save import SavePlace
from hpctrain.core.base.env import HPCTRAIN_ATTEMPT, HPCTRAIN_RUN_DIR
from hpctrain.core.base.files import follow_folder, read_text
from hpctrain.core.base.log import configure
from hpctrain.core.settings.schema import Settings
from hpctrain.core.settings.spec import parse_spec
from hpctrain.core.world import broadcast, on_rank_0
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import AttemptStarted
from hpctrain.ledger.run.fence import Attempt, identity, take_attempt
from hpctrain.ledger.run.layout import RunDir
from hpctrain.train.joining_ranks import join_world
from hpctrain.train.runtime.own_loop import resume_path
from hpctrain.train.runtime.run import Run
from hpctrain.train.runtime.stops import RankSignals

if TYPE_CHECKING:
    from hpctrain.core.world import World


def init(settings: Settings | None = None) -> Run:
    """Join the run that hpctrain started this process for.

    Collective: every rank calls it once, early.

    Outside hpctrain (plain ``python train.py``, or torchrun) the same program trains, without a run
    directory: nothing is saved, and a stop signal ends it after the step in hand.

    What we log goes to stderr, or through the program's own handlers where it has configured
    logging.

    Args:
        settings: For programs that bring their own; otherwise the run's spec.json counts.
    """
    configure(f"rank {os.environ.get('RANK', '0')}")
    root = os.environ.get(HPCTRAIN_RUN_DIR)
    run_dir = RunDir(Path(root)) if root else None
    signals = RankSignals()
    signals.start(interrupt=HPCTRAIN_ATTEMPT not in os.environ)
    world = join_world()
    spec = None
    if run_dir is not None:  # rank 0 reads it for all
        path = run_dir.spec
        text = on_rank_0(world, lambda: read_text(path) if path.exists() else None)
        spec = None if text is None else parse_spec(text, path)
    attempt = join_attempt(run_dir, world)
    if settings is None:
        settings = spec.settings if spec is not None else Settings()
    place = None
    if run_dir is not None and attempt is not None:
        place = SavePlace(run_dir, attempt, settings.checkpoint)
    run = Run(world, settings, place=place, signals=signals, spec=spec)
    run.resume_path = resume_path(place, world)
    return run


def join_attempt(run: RunDir | None, world: World) -> Attempt | None:
    """The attempt that the agent took; without an agent rank 0 takes one itself. Collective."""
    if HPCTRAIN_ATTEMPT in os.environ:
        return Attempt(**json.loads(os.environ[HPCTRAIN_ATTEMPT]))
    if run is None:
        return None
    follow_folder(run.root)
    taken = None
    if world.rank == 0:
        attempt = take_attempt(run, job_id=f"pid-{os.getpid()}", restarts=0)
        run.attempt(attempt.number).mkdir(parents=True, exist_ok=True)
        begun = AttemptStarted(
            **identity(run, attempt),
            by="start",
            nodes=(os.uname().nodename,),
            world_size=world.world_size,
            ranks_per_node=world.world_size,
        )
        ledger.append(run, begun, attempt=attempt.number)
        taken = asdict(attempt)
    return Attempt(**broadcast(world, taken))
