"""Ask all checks before a run. Nothing is submitted and nothing stays.

`submit.prepare` refuses at its first mistake; the program is checked all the same where it is
found. Imports are tried in a process of their own: an import may take a minute, print, or exit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.advise.check import forecast
from hpctrain.advise.check.forecast import (
    FAIL,
    NOT_KNOWN,
    NOTE,
    OK,
    CheckLine,
    CheckList,
    past_saves,
)
from hpctrain.advise.lint.render import lint_program
from hpctrain.cluster.preflight import report as nodes_report
from hpctrain.cluster.preflight.bounded import Unanswered, bounded
from hpctrain.cluster.scheduler.base import get_cluster
from hpctrain.cluster.site.schema import Site
from hpctrain.core.base import clock
from hpctrain.core.base.text import count
from hpctrain.core.settings.check import node_range, time_s
from hpctrain.core.settings.schema import Settings
from hpctrain.errors import ClusterError, HpctrainError
from hpctrain.launch.checks import ranks_python
from hpctrain.launch.preflight import TIMEOUT_S, check_login
from hpctrain.launch.prepare import Prepared, SubmitRequest, prepare
from hpctrain.launch.program import (
    PYTHON_KINDS,
    ProgramImports,
    WantedImport,
    imports_of,
    own_folders,
    read_program,
)
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hpctrain.core.settings.spec import Entry, Spec

    Say = Callable[[str], None]


_STATUS = {
    nodes_report.OK: OK,
    nodes_report.WARN: NOTE,
    nodes_report.FAIL: FAIL,
    nodes_report.UNKNOWN: NOT_KNOWN,
}
_TOKEN = "check"  # noqa: S105 - stands where a submission's own token stands


def check_all(request: SubmitRequest, say: Say) -> CheckList:
    """Ask everything that needs no run.

    Args:
        request: What would be submitted.
        say: Told what is looked at.
    """
    checks = CheckList(name=" ".join(request.command) or "the shipped recipe")
    say("settings, site and scheduler")
    try:
        prepared = prepare(request)
    except HpctrainError as error:
        checks.refusal = error.exit_code
        which = "scheduler" if isinstance(error, ClusterError) else "submit"
        checks.lines.append(CheckLine(which, FAIL, str(error)))
        with suppress(HpctrainError):  # then that is what submit has refused
            if request.command:
                entry = read_program(request.command, request.cwd, request.environ).entry
                _program(entry, Settings(), checks, request, say)
        message = "what comes after the failed check was not looked at"
        checks.lines.append(CheckLine("the rest", NOT_KNOWN, message, "fix that, and check again"))
        return checks
    spec = prepared.spec
    site = None if spec.preset is None else Site.from_plain(spec.preset)
    checks.lines += _submit_lines(prepared)
    checks.lines += [
        CheckLine(one.check, _STATUS[one.status], one.message, one.hint)
        for one in check_login(spec, site, prepared.runs)
    ]
    checks.lines += _scheduler_lines(prepared, request)
    imports = _program(spec.entry, spec.settings, checks, request, say)
    checks.lines += _import_lines(spec, imports, site, request.environ, say)
    is_recipe = spec.entry.kind == "recipe"
    checks.calls_hpctrain = (
        True if is_recipe else None if imports is None else imports.knows_hpctrain
    )
    checks.lines += _forecasts(prepared, site, calls_hpctrain=checks.calls_hpctrain)
    return checks


def _submit_lines(prepared: Prepared) -> Iterator[CheckLine]:
    """That submit would take it, and its notes; lint has lines of its own here."""
    spec = prepared.spec
    slurm = spec.settings.slurm
    shape = f"nodes {slurm.nodes}, ranks per node {slurm.ranks()}"
    site = f", site {spec.site}" if spec.site else ""
    yield CheckLine("submit", OK, f"would make run {spec.name} on {spec.cluster} ({shape}{site})")
    for note in prepared.notes:
        yield CheckLine("submit", NOTE, note)


def _scheduler_lines(prepared: Prepared, request: SubmitRequest) -> list[CheckLine]:
    """What the scheduler says of the batch script."""
    spec = prepared.spec
    cluster = get_cluster(spec.cluster)
    if cluster.on_this_machine:
        return [CheckLine("scheduler", OK, "the local cluster: processes of this machine")]
    if why := cluster.missing(request.environ):
        return [CheckLine("scheduler", NOT_KNOWN, f"nobody to ask: {why}")]
    with tempfile.TemporaryDirectory(prefix="hpctrain-check-") as folder:
        script = Path(folder) / "job.sh"
        try:
            script.write_text(cluster.render(spec, RunDir(prepared.runs / spec.name), _TOKEN))
            results = cluster.check_script(script)
        except HpctrainError as error:
            return [CheckLine("scheduler", FAIL, str(error))]
    partition = spec.settings.slurm.partition or "the default partition"
    return [
        CheckLine("scheduler", _STATUS[one.status], f"{partition}: {one.message}", one.hint)
        for one in results
    ] or [CheckLine("scheduler", NOT_KNOWN, f"{spec.cluster} cannot be asked beforehand")]


def _program(
    entry: Entry, settings: Settings, checks: CheckList, request: SubmitRequest, say: Say
) -> ProgramImports | None:
    """Lint the program, and read what it imports; None where it is no Python file."""
    if entry.kind == "recipe":
        checks.lines.append(CheckLine("lint", OK, "the shipped recipe"))
        return ProgramImports([WantedImport("torch", (), "", 0, is_sure=True)])
    if entry.kind not in PYTHON_KINDS or not entry.path:
        message = f"{entry.path or entry.module} is no Python file of this machine"
        checks.lines.append(CheckLine("lint", NOT_KNOWN, message))
        return None
    say("lint")
    name, findings, anew, unread = lint_program(entry, settings, request.cwd)
    hints = sum(one.rule.level == "info" for one in findings)
    for finding in findings:
        rule, place = finding.rule, (finding.path, finding.line)
        if rule.level != "info":
            status = FAIL if rule.level == "error" else NOTE
            message = f"{finding.path}:{finding.line} {rule.code} {finding.message}"
            checks.lines.append(CheckLine("lint", status, message, rule.remedy, *place))
    if unread:
        checks.lines.append(CheckLine("lint", NOT_KNOWN, f"{name} {unread}", path=name))
    elif hints == len(findings):
        more = f"; {count(hints, 'hint')} (hpctrain lint {name} --level info)" if hints else ""
        message = f"nothing found in {name}{more}"
        checks.lines.append(CheckLine("lint", OK, message, path=name))
    if anew is not None:
        place = (name, anew.save.lineno)
        checks.lines.append(CheckLine("resume", NOTE, anew.note(name), "", *place))
    return imports_of(Path(entry.path), own_folders(entry))


def _import_lines(
    spec: Spec,
    imports: ProgramImports | None,
    site: Site | None,
    environ: Mapping[str, str],
    say: Say,
) -> list[CheckLine]:
    """Whether the program's imports work on the Python that will run it."""
    name, entry = "imports", spec.entry
    cluster = get_cluster(spec.cluster)
    if imports is None:
        return [CheckLine(name, NOT_KNOWN, "only a Python program can be asked")]
    if ranks_python(spec.settings, cluster, spec.python) != spec.python:
        message = f"the ranks' Python is that of {spec.settings.container.image}, not started here"
        return [CheckLine(name, NOT_KNOWN, message)]
    once: dict[tuple[str, tuple[str, ...]], WantedImport] = {}
    for each in sorted(imports.others, key=lambda one: not one.is_sure):
        once.setdefault((each.module, each.names), each)
    wanted = list(once.values())
    say(f"{count(len(wanted), 'import')} on {spec.python}")
    began = clock.monotonic()
    answer = try_imports(
        spec.python,
        wanted,
        cwd=Path(entry.cwd),
        folders=[str(one) for one in own_folders(entry)],
        environ={**environ, **spec.env},
    )
    brought = bool(spec.settings.slurm.setup or cluster.setup_lines(site))
    lines = [_failed_import(one, why, brought=brought, spec=spec) for one, why in answer.failed]
    absent = "the program's own folder has no module"
    lines += [
        _import_line(one, f"{absent} {one.module}", "", entry, fails=one.is_sure)
        for one in imports.missing
    ]
    if answer.trouble:
        lines.append(CheckLine(name, NOT_KNOWN, f"{spec.python}: {answer.trouble}"))
    elif not lines:
        cut = "" if imports.is_whole else "; the program has more files than were read"
        took = clock.monotonic() - began
        verb = "works" if len(wanted) == 1 else "work"
        message = f"{count(len(wanted), 'import')} of it {verb} with {spec.python}{cut}"
        lines.append(CheckLine(name, OK, message, seconds=took))
    return lines


def _failed_import(wanted: WantedImport, why: str, *, brought: bool, spec: Spec) -> CheckLine:
    top = wanted.module.partition(".")[0]
    hint = f"install {top} where {spec.python} finds it"
    if brought:
        hint = "unless the job's modules or setup bring it"
    elif not wanted.is_sure:
        hint = f"{hint}, unless that part of the program is never used"
    what = f"import {wanted.module}: {why} (with {spec.python})"
    return _import_line(wanted, what, hint, spec.entry, fails=wanted.is_sure and not brought)


def _import_line(
    wanted: WantedImport, what: str, hint: str, entry: Entry, *, fails: bool
) -> CheckLine:
    """What is said of an import, with its place as seen from the program's working directory."""
    cwd, path = Path(entry.cwd), wanted.path
    shown = os.path.relpath(path, cwd) if Path(path).is_relative_to(cwd) else path
    place = f"{shown}:{wanted.line}" if path else "the recipe"
    status = FAIL if fails else NOTE
    return CheckLine("imports", status, f"{place}: {what}", hint, shown, wanted.line)


def _forecasts(
    prepared: Prepared, site: Site | None, *, calls_hpctrain: bool | None
) -> Iterator[CheckLine]:
    """Lead time, interval and disk."""
    spec = prepared.spec
    settings = spec.settings
    nodes = node_range(settings.slurm.nodes)[0]
    is_recipe = spec.entry.kind == "recipe"
    notice_s, notice_from = get_cluster(spec.cluster).notice(settings, site) or (None, "")
    job = forecast.ForecastFacts(
        limit_s=time_s(settings.slurm.time),
        nodes=nodes,
        margin_s=settings.run.stop_margin_s,
        lead_s=settings.slurm.signal_lead_s,
        calls_hpctrain=calls_hpctrain,
        notice_s=notice_s,
        notice_from=notice_from,
        steps=settings.train.steps if is_recipe else None,
    )
    past = past_saves(spec, prepared.runs, nodes * settings.slurm.ranks())
    yield from forecast.check_lead(job, past)
    yield forecast.check_interval(settings.checkpoint, job, past)
    yield forecast.check_room_for(settings.checkpoint, job, past, _free(prepared.runs))


def _free(folder: Path) -> int | None:
    """Bytes free where the runs will lie; None where nobody says."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return int(bounded(lambda: shutil.disk_usage(place).free, TIMEOUT_S))
    except (Unanswered, OSError):
        return None


PATIENCE_S = 180.0
"""torch with all that a large program has beside it, from a file system that is asked first."""
_PROBE = """
import importlib, json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
order = json.loads(sys.stdin.read())
sys.path[0:1] = order["folders"]
def tell(number, why):
    print(json.dumps([number, why]), file=out, flush=True)
for number, (module, names) in enumerate(order["wanted"]):
    tell(number, None)
    why = ""
    try:
        found = importlib.import_module(module)
        for name in names:
            if not hasattr(found, name):
                try:
                    importlib.import_module(module + "." + name)
                except ModuleNotFoundError as error:
                    if error.name != module + "." + name:
                        raise
                    why = "has no " + name
                    version = getattr(sys.modules.get(module.partition(".")[0]), "__version__", "")
                    why += " (version %s)" % version if version else ""
                    break
    except BaseException as error:
        text = " ".join(str(error).split()) or type(error).__name__
        why = text if isinstance(error, ImportError) else type(error).__name__ + ": " + text
    tell(number, why)
"""


@dataclass(frozen=True)
class ProbeAnswer:
    """What became of the imports."""

    failed: list[tuple[WantedImport, str]]  # each import that does not work, with why
    tried: int  # how many were tried to their end
    trouble: str = ""  # why there is no answer for the others; "" where there is one for all


def try_imports(
    python: str,
    wanted: Sequence[WantedImport],
    *,
    cwd: Path,
    folders: Sequence[str],
    environ: Mapping[str, str],
    patience_s: float = PATIENCE_S,
) -> ProbeAnswer:
    """Import modules, one after the other.

    Args:
        python: The interpreter.
        wanted: What to import; one of each module and names is enough.
        cwd: Where the program will run.
        folders: In front of what the interpreter searches.
        environ: Of the program.
        patience_s: For all of them.
    """
    order = {"folders": list(folders), "wanted": [(one.module, one.names) for one in wanted]}
    trouble, output = "", ""
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience_s,
            cwd=cwd,
            env=dict(environ),
            check=False,
        )
        output, code = done.stdout, done.returncode
        last = next(iter(reversed(done.stderr.split("\n")[:-1])), "")
        trouble = f"it ended with exit code {code}" if code else ""
        trouble += f": {last.strip()}" if code and last.strip() else ""
        if code < 0:
            trouble = f"it ended by {signal.Signals(-code).name}"
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        output = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        trouble = f"it had not ended after {patience_s:g} s"
    except OSError as error:
        return ProbeAnswer([], 0, f"{python} cannot be started: {error.strerror}")
    return _answer(wanted, output, trouble)


def _answer(wanted: Sequence[WantedImport], output: str, trouble: str) -> ProbeAnswer:
    answers: dict[int, str | None] = {}
    for line in output.splitlines():
        try:
            number, why = json.loads(line)
        except ValueError:  # a line that was cut off by the interpreter's end
            continue
        answers[number] = why
    failed = [(wanted[number], why) for number, why in answers.items() if why]
    tried = sum(why is not None for why in answers.values())
    current = next((number for number, why in answers.items() if why is None), None)
    if trouble and current is not None:
        if trouble.startswith("it ended"):
            why = trouble.replace("it ended", "its import ends the interpreter", 1)
            return ProbeAnswer([*failed, (wanted[current], why)], tried)
        trouble = f"import {wanted[current].module}: {trouble}"
    return ProbeAnswer(failed, tried, trouble)
