"""What users may import from `hpctrain`: names and signatures do not change unseen."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import hpctrain
from hpctrain import errors

TOP = Path(__file__).parents[2]
SHOWN = [
    TOP / "README.md",
    *sorted((TOP / "docs").glob("**/*.md")),
    *(TOP / "examples").glob("*.py"),
]
"""Where users see what to import."""
MODULES = {"dcp": "hpctrain.checkpoint.tensors.dcp", "errors": "hpctrain.errors"}
MODULES["faults"] = "hpctrain.core.testing.faults"
MODULES["frameworks"] = "hpctrain.frameworks"
MODULES["submitit"] = "hpctrain.submitit"
MADE_BY_US = {"AttemptView", "CancelledJob", "Checkpoint", "StartedJob", "Status"}
MADE_BY_US |= {"Engine", "Loader", "MicrobatchSamples", "Run", "StepBatch", "TrackedRun", "World"}
MADE_BY_US |= {"Evaluation", "StreamLoader"}
"""Users are given these; how they are made is no promise."""
OURS = {"Mixture.sample_order"} | {
    f"Engine.{name}"
    for name in (
        "accumulate",
        "apply",
        "at_step",
        "random_rank",
        "state",
        "total",
        "update",
    )
}
"""What the run calls, and no program."""
PUBLIC = """\
AttemptView
AttemptView.number: int
AttemptView.job_id: str
AttemptView.nodes: tuple[str, ...]
AttemptView.world_size: int
AttemptView.by: str
AttemptView.started: float
AttemptView.ended: float | None
AttemptView.reason: EndReason | None
AttemptView.next: Next | None
AttemptView.detail: str
AttemptView.stop_cause: str | None
AttemptView.from_checkpoint: str | None
AttemptView.read_from: str
AttemptView.first_step: int | None
AttemptView.last_step: int | None
AttemptView.last_saved_step: int | None
AttemptView.steps_lost: int | None
AttemptView.skipped: tuple[Skipped, ...]
AttemptView.failure: Failure | None
AttemptView.cause: EndCause | None
AttemptView.allocated: float | None
AttemptView.queued_s: float | None
AttemptView.ready_s: float | None
AttemptView.heard: float | None
AttemptView.released: float | None
AttemptView.awaited: RanksAwaited | None
AttemptView.restart_pause_s: float | None
AttemptView.hang: HangSuspected | HangFound | None
AttemptView.straggler: StragglerFound | None
CancelledJob
CancelledJob.run: str
CancelledJob.dir: Path
CancelledJob.job_id: str | None
CancelledJob.saves: bool
Checkpoint
Checkpoint.name: str
Checkpoint.step: int | None
Checkpoint.t: float | None
Checkpoint.size_bytes: int | None
CheckpointError(HpctrainError)
Engine
Engine.kind
Engine.mesh
Engine.model
Engine.optimizer
Engine.passes
Engine.precision
Engine.loss_scale
Engine.begun
Engine.seed
Engine.base
Engine.guard
Engine.left_out
Engine.decides_alone
Engine.data_rank
Engine.data_ranks
Engine.is_first_reader
Engine.forward_backward(self, microbatches: 'Sequence[Microbatch]', loss: 'Loss') -> 'float'
Engine.evaluate(self, microbatches: 'Sequence[Microbatch]', loss: 'Loss') -> 'float'
Engine.evaluating(self) -> 'Iterator[None]'
Engine.step(self) -> 'float'
Engine.microbatch(self, *, last: 'bool') -> 'Iterator[None]'
Engine.backward(self, loss: 'torch.Tensor') -> 'None'
Evaluation
Evaluation.step
Evaluation.checkpoint
Evaluation.load(self, model: 'nn.Module | Engine') -> 'None'
Evaluation.report(self, metrics: 'Mapping[str, float] | None' = None, /, **more: 'float') -> 'None'
GlobalBatches(order: 'SampleOrder', global_batch: 'int', rank: 'int', world_size: 'int', micro_batch: 'int', *, consumed: 'int' = 0, passes: 'MicrobatchRules' = MicrobatchRules(equal=False, at_least=1, multiple_of=1, leaves=False)) -> 'None'
GlobalBatches.taken
GlobalBatches.next_step(self) -> 'StepBatch'
GlobalBatches.leave_out(self, holes: 'Iterable[tuple[int, int]]') -> 'None'
GlobalBatches.state_dict(self) -> 'dict[str, Any]'
GlobalBatches.load_state_dict(self, state: 'Mapping[str, Any]') -> 'None'
HpctrainError(Exception)
Loader
Loader.dataset
Loader.consumed
Loader.taken
Loader.epoch
Loader.weight
Loader.close(self) -> 'None'
Loader.leave_out(self, holes: 'Iterable[tuple[int, int]]') -> 'None'
Loader.state_dict(self) -> 'dict[str, Any]'
Loader.load_state_dict(self, state: 'Mapping[str, Any]') -> 'None'
LoaderOptions
LoaderOptions.workers: int
LoaderOptions.start_method: str | None
LoaderOptions.prefetch: int
LoaderOptions.collate_fn: Callable[[list[Any]], Any] | None
LoaderOptions.pin_memory: bool
LoaderOptions.worker_init_fn: Callable[[int], None] | None
LoaderOptions.timeout: float
Microbatch(inputs: 'torch.Tensor', targets: 'Any', leaf: 'int | None' = None) -> None
MicrobatchRules(equal: 'bool' = False, at_least: 'int' = 1, multiple_of: 'int' = 1, leaves: 'bool' = False) -> None
MicrobatchRules.count(self, needed: 'int') -> 'int'
MicrobatchSamples
MicrobatchSamples.indices: list[int]
MicrobatchSamples.weights: list[float]
MicrobatchSamples.leaf: int | None
Mixture(datasets: 'Sequence[Any]', weights: 'Sequence[float]') -> 'None'
Mixture.datasets
Mixture.weights
ModelPlan(tensor_parallel: 'Mapping[str, Any] | None' = None, stage_order: 'Sequence[str] | None' = None, shape: 'ModelShape | None' = None, loss_parallel: 'bool' = False) -> None
ModelShape(layers: 'int', dim: 'int', heads: 'int', hidden: 'int', seq_len: 'int', experts: 'int' = 0, kv_heads: 'int' = 0, vocab: 'int' = 0, source: 'str' = '', refused: 'Mapping[str, str] | None' = None) -> None
PackedDocuments(path: 'str | Path', seq_len: 'int', *, end_token: 'int | None' = None, dtype: 'str | None' = None, column: 'str' = 'input_ids') -> 'None'
PackedDocuments.seq_len
Run
Run.world
Run.settings
Run.step
Run.dir
Run.resume_path
Run.parallelize(self, model: 'nn.Module | Callable[[], nn.Module]', optimizer: 'Optimizer | Callable[[nn.Module], Optimizer]', *, plan: 'ModelPlan | None' = None, pretrained: 'str | Path | None' = None) -> 'Engine'
Run.track(self, *, model: 'nn.Module | None' = None, optimizer: 'Optimizer | None' = None, data: 'Any' = None, allow: 'Sequence[str]' = (), **others: 'program_state.Stateful | program_state.Generator') -> 'None'
Run.loader(self, dataset: 'Any', *, global_batch: 'int', micro_batch: 'int | None' = None, seed: 'int | None' = None, shuffle: 'bool' = True, drop_last: 'bool' = False, name: 'str' = 'data', **options: 'Unpack[LoaderOptions]') -> 'Loader'
Run.stream_loader(self, dataset: 'Any', *, global_batch: 'int', micro_batch: 'int | None' = None, drop_last: 'bool' = False, readers: 'int | None' = None, replay: 'bool' = False, name: 'str' = 'data', **options: 'Unpack[LoaderOptions]') -> 'StreamLoader'
Run.steps(self, total: 'int') -> 'Iterator[int]'
Run.at(self, step: 'int', *, total: 'float | None' = None, **values: 'float') -> 'None'
Run.should_stop(self) -> 'bool'
Run.leave(self) -> 'NoReturn'
Run.timed(self, what: 'str') -> 'AbstractContextManager[None]'
Run.section(self, name: 'str', *, limit_s: 'float | None' = None) -> 'AbstractContextManager[object]'
Run.log(self, **values: 'float') -> 'None'
Run.guard(self, loss: 'float', norm: 'float') -> 'bool'
Run.save(self) -> 'None'
Run.sealed(self, step: 'int', path: 'str | Path') -> 'None'
SampleOrder(size: 'int', seed: 'int') -> 'None'
SampleOrder.index(self, position: 'int') -> 'int'
SampleOrder.indices(self, first: 'int', last: 'int') -> 'list[int]'
SampleOrder.take(self, positions: 'Sequence[int]') -> 'list[int]'
StartedJob
StartedJob.run: str
StartedJob.dir: Path
StartedJob.job_id: str | None
StartedJob.step: int | None
StartedJob.checkpoint: str | None
StartedJob.notes: tuple[str, ...]
StartedJob.following: tuple[str, ...]
Status
Status.run: str
Status.dir: Path
Status.state: str
Status.over: bool
Status.words: str
Status.step: int | None
Status.total_steps: int | None
Status.loss: float | None
Status.step_s: float | None
Status.last_seen: float | None
Status.cluster: str
Status.job_id: str | None
Status.why: str | None
Status.exit_code: int | None
Status.cluster_problem: str | None
Status.attempts: tuple[AttemptView, ...]
Status.steps_lost: int | None
Status.checkpoint: Checkpoint | None
Status.failure: str | None
Status.failure_log: Path | None
Status.facts: Mapping[str, Any]
StepBatch
StepBatch.first: int
StepBatch.last: int
StepBatch.pieces: list[MicrobatchSamples]
StepBatch.consumed
Stopped(SystemExit)
StreamLoader
StreamLoader.consumed
StreamLoader.epoch
StreamLoader.taken
StreamLoader.readers
StreamLoader.weight
StreamLoader.close(self) -> 'None'
StreamLoader.state_dict(self) -> 'dict[str, Any]'
StreamLoader.load_state_dict(self, state: 'Mapping[str, Any]') -> 'None'
TokenFile(path: 'Path') -> 'None'
TokenFile.len_sequences(self, seq_len: 'int') -> 'int'
TokenFile.sequence(self, i: 'int', seq_len: 'int') -> 'npt.NDArray[np.int64]'
TokenFile.batch(self, indices: 'Sequence[int]', seq_len: 'int') -> 'npt.NDArray[np.int64]'
TokenFile.verify(self) -> 'None'
TokenSequences(path: 'str | Path', seq_len: 'int', *, dtype: 'str | None' = None, column: 'str' = 'input_ids') -> 'None'
TokenSequences.stream
TokenSequences.seq_len
TrackedRun
TrackedRun.run_id: str
TrackedRun.name: str
TrackedRun.dir: Path
TrackedRun.attempt: int
TrackedRun.resumed_step: int
TrackedRun.project: str
TrackedRun.config: dict[str, Any]
Tracker
Tracker.log(self, step: 'int', values: 'Mapping[str, float]', t: 'float') -> 'None'
Tracker.flush(self) -> 'None'
Tracker.close(self) -> 'None'
UsageError(HpctrainError)
World
World.rank: int
World.local_rank: int
World.world_size: int
World.device: torch.device
World.control: Exchange | None
World.ranks_per_node: int
World.is_distributed
broadcast(world: 'World', value: 'Any') -> 'Any'
cancel(run: 'str', *, save: 'bool' = False, foreign: 'bool' = False, runs: 'str | Path | None' = None) -> 'CancelledJob'
cross_entropy(logits: 'Tensor', targets: 'Tensor', *, ignore_index: 'int' = -100) -> 'Tensor'
cu_seqlens(document_ids: 'torch.Tensor') -> 'tuple[torch.Tensor, int]'
cut_step(positions: 'range', rank: 'int', world_size: 'int', micro_batch: 'int', *, index: 'Callable[[int], int]', passes: 'MicrobatchRules' = MicrobatchRules(equal=False, at_least=1, multiple_of=1, leaves=False)) -> 'StepBatch'
evaluation() -> 'Evaluation'
init(settings: 'Settings | None' = None) -> 'Run'
resume(run: 'str' = '-', *, nodes: 'int | str | None' = None, gpus_per_node: 'int | None' = None, ranks_per_node: 'int | None' = None, time: 'int | str | None' = None, prefer: 'str | None' = None, max_node_hours: 'float | None' = None, partition: 'str | None' = None, account: 'str | None' = None, qos: 'str | None' = None, engine: 'str | None' = None, mesh: 'Mapping[str, int | str] | None' = None, settings: 'Mapping[str, Any] | None' = None, from_step: 'int | None' = None, program: 'Sequence[str]' = (), new_code: 'bool' = False, allow_locked: 'bool' = False, foreign: 'bool' = False, runs: 'str | Path | None' = None) -> 'StartedJob'
status(run: 'str' = '-', *, runs: 'str | Path | None' = None) -> 'Status'
submit(command: 'Sequence[str | os.PathLike[str]]' = (), *, name: 'str | None' = None, nodes: 'int | str | None' = None, gpus_per_node: 'int | None' = None, ranks_per_node: 'int | None' = None, time: 'int | str | None' = None, prefer: 'str | None' = None, max_node_hours: 'float | None' = None, partition: 'str | None' = None, account: 'str | None' = None, qos: 'str | None' = None, engine: 'str | None' = None, mesh: 'Mapping[str, int | str] | None' = None, site: 'str | None' = None, cluster: 'str | None' = None, container: 'str | None' = None, config: 'str | os.PathLike[str] | None' = None, settings: 'Mapping[str, Any] | None' = None, env: 'Mapping[str, str] | None' = None, snapshot: 'bool | None' = None, checkpoint: 'str | Sequence[str]' = (), resume_args: 'str | None' = None, resume_if: 'str | None' = None, begin: 'str' = '', without: 'Sequence[str]' = (), after: 'str | Sequence[str]' = (), then: 'str | Sequence[str]' = (), allow_locked: 'bool' = False, runs: 'str | Path | None' = None, start: 'bool' = True) -> 'StartedJob'
write_tokens(path: 'Path', chunks: 'Iterable[bytes]', *, dtype: 'str', vocabulary: 'int', source: 'Mapping[str, Any]') -> 'TokenFile'
"""


def described(name, thing):
    """One line for what is called, one for each public member of a class."""
    if not inspect.isclass(thing):
        return [f"{name}{inspect.signature(thing)}"]
    if issubclass(thing, BaseException):
        return [f"{name}({thing.__base__.__name__})"]
    if typing.is_typeddict(thing):
        kinds = {key: kind.__forward_arg__ for key, kind in thing.__annotations__.items()}
        return [name, *(f"{name}.{key}: {kind}" for key, kind in kinds.items())]
    protocol = getattr(thing, "_is_protocol", False)
    fixed = name in MADE_BY_US or protocol
    lines = [name if fixed else f"{name}{inspect.signature(thing)}"]
    if fixed and dataclasses.is_dataclass(thing):
        lines += [f"{name}.{field.name}: {field.type}" for field in dataclasses.fields(thing)]
    told = (inspect.getdoc(thing) or "").partition("Attributes:\n")[2]
    if not dataclasses.is_dataclass(thing):
        lines += [f"{name}.{field}" for field in re.findall(r"^    (\w+): ", told, re.MULTILINE)]
    for member, value in vars(thing).items():
        if member.startswith("_") or f"{name}.{member}" in OURS:
            continue
        if inspect.isfunction(value):
            lines.append(f"{name}.{member}{inspect.signature(value)}")
        elif hasattr(value, "__get__") and not inspect.ismemberdescriptor(value):
            lines.append(f"{name}.{member}")
    return lines


def test_names_and_signatures_are_those_that_users_were_promised():
    names = [name for name in hpctrain.__all__ if name not in {*MODULES, "__version__", "Settings"}]

    lines = [line for name in sorted(names) for line in described(name, getattr(hpctrain, name))]

    assert "\n".join(lines) + "\n" == PUBLIC


def test_modules_that_users_import_are_reached_through_the_package():
    for name, home in MODULES.items():
        assert getattr(hpctrain, name) is importlib.import_module(home)


def test_all_that_is_exported_is_there_and_offered_by_dir():
    assert sorted(hpctrain.__all__) == list(hpctrain.__all__)
    assert set(hpctrain.__all__) <= set(dir(hpctrain))
    assert all(getattr(hpctrain, name) is not None for name in hpctrain.__all__)


def test_names_for_editors_and_names_at_run_time_are_the_same():
    """The first come from imports for type checking, the second from a table."""
    text = Path(hpctrain.__file__).read_text()
    block = text.split("if TYPE_CHECKING:\n")[1].split("\n\n")[0]
    seen = {}
    for home, names in re.findall(r"from (\S+) import (\([^)]*\)|.*)", block):
        for name in re.findall(r"\w+", names):
            seen[name] = home

    assert {f"{home}.{name}" if name in MODULES else home for name, home in seen.items()} == set(
        hpctrain._HOMES.values()
    )
    assert seen.keys() == hpctrain._HOMES.keys()
    assert set(hpctrain.__all__) == {*hpctrain._HOMES, "__version__"}


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hpctrain' has no attribute 'Engines'"):
        _ = hpctrain.Engines


def test_the_import_is_cheap():
    code = (
        "import sys, hpctrain\n"
        "print(*[name for name in ('torch', 'numpy', 'click', 'hpctrain.train.runtime')"
        " if name in sys.modules])\n"
        "hpctrain.SampleOrder, hpctrain.GlobalBatches, hpctrain.errors\n"
        "print('torch' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "\nFalse\n"


def test_errors_are_all_of_one_tree():
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]

    assert len(classes) > 15
    assert all(issubclass(kind, hpctrain.HpctrainError) for kind in classes)


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_what_users_are_shown_imports_from_the_package_alone(path):
    text = path.read_text()
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))

    assert re.findall(r"^\s*(?:from|import) hpctrain\..*", text, re.MULTILINE) == []
