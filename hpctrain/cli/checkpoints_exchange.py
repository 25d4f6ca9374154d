"""`hpctrain checkpoints export` and `import`: to and from what others read and wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import complete_run, json_option, own_runs_option
from hpctrain.cli.progress import progress
from hpctrain.core.base.files import follow_folder
from hpctrain.core.base.text import size
from hpctrain.core.settings.spec import load_spec
from hpctrain.core.terminal import echo_json, echo_note, echo_warning
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.ledger.run.find_run import find_run
from hpctrain.ledger.run.ownership import refuse_foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.checkpoint.exchange.contents import Contents, Tensor
    from hpctrain.checkpoint.exchange.export import Written
    from hpctrain.checkpoint.exchange.import_into import Imported
    from hpctrain.checkpoint.exchange.naming import NameRequest
    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.ledger.run.layout import RunDir

GB = 10**9
STEP = click.IntRange(min=0)
PLACE = click.Path(path_type=Path)
DTYPES = click.Choice(["keep", "bf16", "fp16", "fp32"])


@click.command(
    "export",
    epilog="""\b
Examples:
  hpctrain checkpoints export lm-3 4000 out/                  weights, as Hugging Face has them
  hpctrain checkpoints export lm-3 4000 out/ --dtype bf16
  hpctrain checkpoints export lm-3 4000 out/ --like hub/llama   for from_pretrained
  hpctrain checkpoints export lm-3 4000 all.pt --to torch --what all
""",
)
@click.argument("run", shell_complete=complete_run)
@click.argument("step", type=STEP)
@click.argument("dest", type=PLACE)
@click.option(
    "--to",
    "kind",
    type=click.Choice(["safetensors", "torch"]),
    default="safetensors",
    show_default=True,
    help="safetensors: DEST is a folder; torch: a file for torch.load(weights_only=True).",
)
@click.option(
    "--what",
    type=click.Choice(["model", "all"]),
    default="model",
    show_default=True,
    help="Only the weights, or everything.",
)
@click.option(
    "--max-shard-gb",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Largest safetensors file.",
)
@click.option(
    "--dtype",
    type=DTYPES,
    default="keep",
    show_default=True,
    help="Round floating weights to this.",
)
@click.option(
    "--strip-prefix", default="", metavar="TEXT", help="Prefix to remove from the weights' names."
)
@click.option(
    "--like",
    type=PLACE,
    metavar="FOLDER",
    help="A Hugging Face folder whose config and tokenizer to copy; default engine.pretrained "
    "if it exists.",
)
@json_option
@own_runs_option
def export_command(
    runs: Path,
    run: str,
    step: int,
    dest: Path,
    *,
    kind: str,
    what: str,
    max_shard_gb: float,
    dtype: str,
    strip_prefix: str,
    like: Path | None,
    as_json: bool,
) -> None:
    """Write a checkpoint for other programs, and check it.

    Nothing is overwritten. Each file is read back and compared with the checkpoint, tensor by
    tensor, before it gets its name. safetensors needs no torch.
    """
    from hpctrain.checkpoint.exchange import contents as source_contents
    from hpctrain.checkpoint.exchange import export
    from hpctrain.checkpoint.exchange.contents import TARGETS

    directory = find_run(run, runs=runs)
    path, manifest = source_contents.committed(directory, step)
    everything = what == "all"
    tensors = export.chosen(
        path, manifest, everything=everything, dtype=TARGETS.get(dtype), strip=strip_prefix
    )
    state = export.state_of(manifest) if everything else None
    place = Path.cwd() / dest.expanduser()
    is_folder = kind != "torch" and not everything
    tensors, extras = _like(directory, manifest, like, tensors, is_folder=is_folder)
    with progress("writing and reading back", 2 * _bytes(tensors)) as on_bytes:
        if kind == "torch":
            written = _to_torch(place, tensors, step, state, on_bytes)
        else:
            extras |= {"state": state, "on_bytes": on_bytes}
            written = _to_safetensors(place, tensors, max_shard_gb, extras)
    _print_written(written, path.name, as_json=as_json)


@click.command(
    "import",
    epilog="""\b
Examples:
  hpctrain submit --no-submit --name lm-4 ...           make the run first
  hpctrain checkpoints import hub/llama --run lm-4 --step 0
  hpctrain checkpoints import ds/global_step900 --run lm-4 --step 900
  hpctrain checkpoints import old.pt --run lm-4 --step 900 --rename module.=
  hpctrain resume lm-4                                  resumes from it
""",
)
@click.argument("source", type=PLACE)
@click.option("--run", required=True, help="The target run; it must not be running.")
@click.option("--step", required=True, type=STEP, help="Number of updates in it.")
@click.option(
    "--from",
    "kind",
    type=click.Choice(["dcp", "torch", "safetensors", "deepspeed", "hpctrain"]),
    help="Its format, if not detected.",
)
@click.option(
    "--what",
    type=click.Choice(["model", "all"]),
    default="all",
    show_default=True,
    help="Only the weights, or also the optimizer's state if present.",
)
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="OLD=NEW",
    help="A full name, or a prefix that ends in a dot; without model.",
)
@click.option("--prefix", metavar="TEXT", help="Prefix of the weights' names instead of model.")
@click.option(
    "--map",
    "table",
    type=PLACE,
    metavar="FILE",
    help="JSON of old to new names; null drops a tensor.",
)
@click.option(
    "--dtype",
    type=DTYPES,
    default="keep",
    show_default=True,
    help="Round the weights' floats to what the run trains in.",
)
@click.option("--weights", metavar="KEY", help="Key of the weights, if unusual.")
@json_option
@own_runs_option
def import_command(
    runs: Path,
    source: Path,
    *,
    run: str,
    step: int,
    kind: str | None,
    what: str,
    renames: tuple[str, ...],
    prefix: str | None,
    table: Path | None,
    weights: str | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Make a checkpoint of a run from another program's.

    Runs nothing in it: pickles are read for tensors and plain data only. The result is
    compared with the source, tensor by tensor, before it is committed.
    """
    from hpctrain.checkpoint.exchange import import_into, naming
    from hpctrain.checkpoint.exchange.contents import TARGETS
    from hpctrain.launch.live_job import refuse_alive

    directory = find_run(run, runs=runs)
    refuse_foreign(directory)
    follow_folder(directory.root)
    spec = load_spec(directory.spec)
    refuse_alive(directory, spec)
    import_into.refuse_taken(directory, step)
    request = naming.NameRequest(
        prefix, _pairs(renames), _table(table), weights, model_only=what == "model"
    )
    place = Path.cwd() / source.expanduser()
    if risk := import_into.risk(place, kind):  # before anything of it is read
        echo_note(risk)
    contents = import_into.read(place, kind)
    tensors, notes = naming.name_all(contents, request)
    tensors = naming.in_dtype(tensors, TARGETS.get(dtype))
    with progress("writing and reading back", 2 * _bytes(tensors)) as on_bytes:
        made = import_into.write(directory, spec.run_id, step, contents, tensors, on_bytes=on_bytes)
    notes = [*contents.notes, *notes, *_notes(contents, request, step, tensors)]
    _print_imported(made, directory, contents, notes, as_json=as_json)


def _to_torch(
    place: Path, tensors: Sequence[Tensor], step: int, state: Any, on_bytes: Callable[[int], None]
) -> Written:
    from hpctrain.checkpoint.exchange.import_into import needs_torch

    if place.is_dir():
        raise UsageError(f"{place} is a folder; --to torch takes the name of a file")
    with needs_torch("--to torch"):
        from hpctrain.checkpoint.exchange import to_torch
    return to_torch.write(place, tensors, step=step, state=state, on_bytes=on_bytes)


def _to_safetensors(
    place: Path,
    tensors: Sequence[Tensor],
    max_shard_gb: float,
    extras: dict[str, Any],
) -> Written:
    from hpctrain.checkpoint.exchange import safetensors

    if place.exists() and not place.is_dir():
        raise UsageError(f"{place} is a file; --to safetensors takes a folder")
    most = max(1, int(max_shard_gb * GB))
    return safetensors.write(place, tensors, **{"max_shard_bytes": most, **extras})


def _like(
    run: RunDir, manifest: Manifest, like: Path | None, tensors: list[Tensor], *, is_folder: bool
) -> tuple[list[Tensor], dict[str, Any]]:
    """The weights and the files beside them as the folder has them that they once came from."""
    from hpctrain.checkpoint.exchange import safetensors

    if like is not None and not is_folder:
        raise UsageError(f"--like {like} goes with --to safetensors and --what model")
    folder = Path.cwd() / like.expanduser() if like is not None else _begun_with(run)
    if is_folder and safetensors.BASE in manifest.extra:
        tensors, beside = safetensors.adapters(manifest.extra, tensors)
        most = _bytes(tensors) + 1
        return tensors, {"beside": beside, "stem": safetensors.ADAPTER, "max_shard_bytes": most}
    if folder is None or not is_folder:
        return tensors, {}
    tensors = safetensors.untied(folder, tensors)
    return tensors, {"beside": safetensors.beside(folder, tensors)}


def _begun_with(run: RunDir) -> Path | None:
    """The folder that the run's settings name, where it is still there."""
    try:
        named = load_spec(run.spec).settings.engine.pretrained
    except HpctrainError:  # its checkpoints can be exported all the same
        return None
    return Path(named) if named and (Path(named) / "config.json").is_file() else None


def _pairs(renames: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for text in renames:
        old, equals, new = text.partition("=")
        if not equals or not old:
            raise UsageError(f"--rename {text}: OLD=NEW is wanted, e.g. module.=")
        pairs.append((old, new))
    return pairs


def _table(path: Path | None) -> dict[str, str | None] | None:
    if path is None:
        return None
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--map {path} cannot be read: {error}") from error
    if not isinstance(table, dict) or not all(
        new is None or isinstance(new, str) for new in table.values()
    ):
        raise UsageError(f"--map {path} is not a JSON object of old names to new ones")
    return table


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _notes(
    contents: Contents, request: NameRequest, step: int, tensors: Sequence[Tensor]
) -> list[str]:
    from hpctrain.checkpoint.exchange.contents import OPTIM

    notes = []
    if contents.step not in {None, step}:
        notes.append(f"the source says that it is of step {contents.step}, not {step}")
    if not request.model_only and not any(one.name.startswith(OPTIM) for one in tensors):
        notes.append("no optimizer state was found: training starts with a new optimizer")
    return notes


def _print_written(written: Written, name: str, *, as_json: bool) -> None:
    if as_json:
        files = [{"path": str(path), "size_bytes": count} for path, count in written.files]
        echo_json(
            {
                "checkpoint": name,
                "files": files,
                "tensors": written.tensors,
                "tensor_bytes": written.nbytes,
                "verified": written.verified,
            }
        )
        return
    from hpctrain.core.drawing import echo_table

    echo_table([(str(path), size(count)) for path, count in written.files], right=(1,))
    click.echo(f"{written.verified} tensors of {name}, each read back and the same")


def _print_imported(
    made: Imported, run: RunDir, contents: Contents, notes: Sequence[str], *, as_json: bool
) -> None:
    if as_json:
        echo_json(
            {
                "run": run.name,
                "checkpoint": str(made.path),
                "from": contents.kind,
                "tensors": made.tensors,
                "tensor_bytes": made.nbytes,
                "verified": made.verified,
                "notes": list(notes),
            }
        )
        return
    for note in notes:
        echo_warning(note)
    click.echo(
        f"{made.path}: {made.tensors} tensors ({size(made.nbytes)}) from {contents.kind}, each "
        f"read back and the same\nnext         hpctrain resume {run.typed}"
    )
