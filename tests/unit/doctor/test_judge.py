"""Of several faults the first in time that explains the others is the verdict."""

from __future__ import annotations

from hpctrain.advise.doctor import judge as judging
from hpctrain.advise.doctor.faults import Certainty
from hpctrain.advise.doctor.judge import judge
from hpctrain.advise.doctor.scan import LogScanner
from hpctrain.advise.doctor.signature import FATAL, packaged

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 39.39 GiB of which 1.00 GiB is free. Of the allocated memory 37.00 GiB is "
    "allocated by PyTorch, and 500.00 MiB is reserved by PyTorch but unallocated."
)
TIMED_OUT = (
    "[rank{r}]:[E321 02:{m:02d}:08.4 ProcessGroupNCCL.cpp:607] [Rank {r}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum={n}, OpType={op}, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600060 milliseconds before timing out."
)
CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:2730"
TRACED = (
    'Traceback (most recent call last):\n  File "/home/u/train.py", line 24, in main\n    x()\n'
)

CRASHED = (
    "Fatal Python error: Segmentation fault", "",
    "Thread 0x00007f79769c1b80 (most recent call first):",
    '  File "/home/u/other.py", line 3 in wait', "",
    "Current thread 0x00007f7976ac2c80 (most recent call first):",
    '  File "/opt/lib/python3.11/site-packages/fast/attention.py", line 7 in forward',
    '  File "/home/u/train.py", line 24 in main',
    '  File "/home/u/train.py", line 31 in <module>', "",
    "Extension modules: torch._C (total: 1)",
)  # fmt: skip


def waited(rank, minute=7, number=1580, operation="ALLREDUCE"):
    return TIMED_OUT.format(r=rank, m=minute, n=number, op=operation)


def log(*lines, source="train.log", rank=None):
    scanner = LogScanner(source, rank)
    scanner.feed("".join(f"{line}\n" for line in lines).encode())
    return scanner.finish()


def test_a_ranks_memory_explains_the_others_time_outs_and_connections():
    diagnosis = judge([log(f"[rank3]: {OOM}", waited(0), waited(1), f"[rank2]: {CLOSED}")])

    assert (diagnosis.kind, diagnosis.certainty) == ("gpu_oom", Certainty.CERTAIN)
    assert diagnosis.evidence[0].rank == 3
    assert "asked for 2.0 GiB of 39.4 GiB" in diagnosis.headline
    follows = {follow.example.sign: follow.ranks for follow in diagnosis.follow_ons}
    assert follows == {"nccl-watchdog": (0, 1), "nccl-peer-closed": (2,)}


def test_what_a_rank_says_after_it_has_waited_in_vain_follows_from_that():
    diagnosis = judge([log(waited(0), waited(1), "[rank0]: MemoryError")])

    assert diagnosis.kind == "hang"
    assert diagnosis.certainty is Certainty.LIKELY


def test_what_a_rank_says_that_did_not_wait_explains_those_that_did():
    diagnosis = judge([log(waited(0), waited(1), f"[rank2]: {OOM}")])

    assert diagnosis.kind == "gpu_oom"


def test_who_did_not_report_is_named():
    diagnosis = judge([log(waited(0), waited(1), waited(3))])

    assert "ranks 0-1,3 waited in ALLREDUCE #1580 for 10m00s" in diagnosis.headline
    assert "rank 2 did not report" in diagnosis.headline


def test_ranks_in_different_collectives_have_gone_astray():
    diagnosis = judge([log(waited(0, number=12), waited(1, number=10, operation="BROADCAST"))])

    assert diagnosis.kind == "desync"
    assert diagnosis.certainty is Certainty.LIKELY


def test_collectives_of_far_numbers_are_taken_for_those_of_other_groups():
    diagnosis = judge([log(waited(0, number=12), waited(1, number=900, operation="BROADCAST"))])

    assert diagnosis.kind == "hang"


def test_the_kernel_s_word_comes_late_and_may_have_been_the_first():
    diagnosis = judge(
        [
            log(
                "[rank1]: RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. ",
                "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.",
            )
        ]
    )

    assert (diagnosis.kind, diagnosis.certainty) == ("host_oom", Certainty.CERTAIN)


def test_two_faults_without_an_order_in_time_are_not_called_certain():
    first = log(*TRACED.splitlines(), "ValueError: no such token", source="a.log")
    second = log("OSError: [Errno 28] No space left on device", source="b.log")

    diagnosis = judge([first, second])

    assert diagnosis.certainty is Certainty.LIKELY
    assert diagnosis.kind == "storage_full"
    assert [rival.kind for rival in diagnosis.rivals] == ["code"]


def test_of_several_logs_the_clocks_tell_which_came_first():
    early = log("[E321 02:01:00.0 x.cpp:1] CUDA error: uncorrectable ECC error", source="b.log")
    late = log("[E321 02:09:00.0 x.cpp:1] OSError: No space left on device", source="a.log")

    diagnosis = judge([late, early])

    assert (diagnosis.kind, diagnosis.certainty) == ("gpu_error", Certainty.LIKELY)


def test_clocks_of_two_kinds_put_nothing_in_order():
    container = log("[E321 02:01:00.0 x.cpp:1] CUDA error: uncorrectable ECC error", source="b.log")
    other = log("2024-03-21 10:00:00 OSError: No space left on device", source="a.log")

    diagnosis = judge([other, container])

    assert diagnosis.certainty is Certainty.LIKELY
    assert len(diagnosis.rivals) == 1


def test_an_error_that_training_survived_is_no_cause():
    steps = [f"step {n} loss: 0.{n}" for n in range(1, 9)]
    diagnosis = judge([log(*TRACED.splitlines(), "ValueError: bad sample, skipped", *steps)])

    assert diagnosis.kind == "unknown"
    assert diagnosis.certainty is Certainty.NOT_KNOWN


def test_an_error_that_was_handled_is_no_cause():
    lines = [
        *TRACED.splitlines(),
        "KeyError: 'cache'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        *TRACED.splitlines(),
        "ValueError: the tokenizer has no pad token",
    ]

    diagnosis = judge([log(*lines)])

    assert "ValueError: the tokenizer" in diagnosis.headline
    assert diagnosis.certainty is Certainty.CERTAIN


def test_numbers_that_are_none_explain_a_kernel_s_assertion():
    lines = [*(f"loss: {n}.5" for n in range(4)), "loss: nan", "loss: nan", "loss: nan"]
    assertion = "x.cu:12: f: block: [0,0,0], thread: [1,0,0] Assertion `input_val >= 0` failed."

    diagnosis = judge([log(*lines, assertion)])

    assert (diagnosis.kind, diagnosis.certainty) == ("nan", Certainty.LIKELY)


def test_a_time_limit_is_no_crash_of_the_ranks_that_it_ends():
    step = "slurmstepd: error: *** STEP 7.0 ON n1"
    limit = f"{step} CANCELLED AT 2025-01-10T15:27:25 DUE TO TIME LIMIT ***"

    diagnosis = judge([log(limit, "[rank: 0] Received SIGTERM: 15", f"[rank1]: {CLOSED}")])

    assert (diagnosis.kind, diagnosis.certainty) == ("walltime", Certainty.CERTAIN)


def test_interfaces_of_containers_are_named_where_connections_break():
    uses = "n1:1:2 [0] NCCL INFO NET/Socket : Using [0]bond0:10.0.0.1<0> [1]docker0:172.17.0.1<0>"

    diagnosis = judge([log(uses, "ncclSystemError: System call (socket, malloc) failed")])

    assert (diagnosis.kind, diagnosis.certainty) == ("interface", Certainty.LIKELY)
    assert "docker0" in diagnosis.headline
    assert judge([log(uses)]).kind == "unknown"
    assert judge([log(uses, "grad_norm: nan")]).kind == "nan"


def test_a_process_that_was_killed_explains_broken_connections():
    table = ["Root Cause (first observed failure):", "  rank      : 1 (local_rank: 1)"]
    died = "  exitcode  : -9 (pid: 20551)  (SIGKILL)"
    wrapper = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "

    diagnosis = judge([log(f"[rank0]: {CLOSED}", wrapper, *table, died)])

    assert (diagnosis.kind, diagnosis.certainty) == ("host_oom", Certainty.POSSIBLE)
    assert diagnosis.evidence[0].rank == 1


def test_nothing_found_is_said_so_with_what_was_read():
    diagnosis = judge([log("all is well", "done")])

    assert diagnosis.certainty is Certainty.NOT_KNOWN
    assert diagnosis.headline == "nothing in 2 lines of 1 log says why"


def test_what_was_ruled_out_is_told_with_its_reason():
    diagnosis = judge([log(f"[rank3]: {OOM}", waited(0))])

    ruled_out = diagnosis.ruled_out
    assert ruled_out["storage"] == "no sign of it in 2 lines"
    assert ruled_out["a hang"] == "line 2 (rank 0) follows from it"
    assert "GPU memory" not in ruled_out


def test_what_a_library_raises_is_no_more_than_likely_the_program_s_fault():
    inside = '  File "/x/site-packages/torch/cuda/__init__.py", line 63, in _check'

    diagnosis = judge([log(*TRACED.splitlines(), inside, "    y()", "AssertionError: no")])

    assert (diagnosis.kind, diagnosis.certainty) == ("code", Certainty.LIKELY)
    assert "train.py:24 in main" in diagnosis.headline


def test_a_later_line_of_an_error_s_message_may_say_what_is_wrong():
    lines = [
        *TRACED.splitlines(),
        "AssertionError: ",
        "The NVIDIA driver on your system is too old",
    ]

    diagnosis = judge([log(*lines)])

    assert (diagnosis.kind, diagnosis.certainty) == ("gpu_setup", Certainty.LIKELY)
    assert diagnosis.rivals == ()


def test_a_crash_in_native_code_is_where_the_thread_was_that_crashed():
    """As Python's faulthandler tells it, behind the crash and the newest frame first."""
    diagnosis = judge([log(*CRASHED, f"[rank2]: {CLOSED}")])

    assert diagnosis.kind == "native"
    assert diagnosis.headline.endswith(
        "Fatal Python error: Segmentation fault at /home/u/train.py:24 in main"
    )
    assert log(*CRASHED).sightings[0].line == 1


def test_a_crash_in_native_code_is_where_the_traceback_before_it_ends():
    """As the ledger tells a rank's."""
    diagnosis = judge([log(TRACED + "Fatal Python error: Bus error")])

    assert diagnosis.kind == "native"
    assert diagnosis.headline.endswith("Bus error at /home/u/train.py:24 in main")


def test_a_crash_without_frames_has_no_place_and_takes_none_that_comes_later():
    (crash, *_) = log(CRASHED[0], "", *["step"] * 100, *CRASHED[5:]).sightings

    assert crash.place == ""
    diagnosis = judge([log(CRASHED[0])])
    assert diagnosis.headline.endswith("Segmentation fault")


def test_an_abort_is_no_crash_where_something_has_said_why():
    diagnosis = judge([log(waited(0), waited(1), "Fatal Python error: Aborted", *CRASHED[1:])])

    assert diagnosis.kind == "hang"
    alone = judge([log("Fatal Python error: Aborted", *CRASHED[1:])])
    assert (alone.kind, alone.certainty) == ("native", "possible")


def test_an_error_before_a_traceback_on_the_same_line_is_read():
    taken = "RuntimeError: port: 12341, code: -98, message: address already in use"

    diagnosis = judge([log(f"{taken} Traceback (most recent call last):")])

    assert diagnosis.kind == "port_in_use"


def test_a_traceback_in_a_launcher_s_table_is_that_of_its_rank():
    diagnosis = judge([
        log(
            "  rank      : 3 (local_rank: 3)",
            "  exitcode  : 1 (pid: 340055)",
            "  traceback : Traceback (most recent call last):",
            '    File "/home/u/train.py", line 24, in main',
            "      x()",
            "  ValueError: no",
            "=====",
        )
    ])  # fmt: skip

    assert diagnosis.kind == "code"
    assert diagnosis.evidence[0].rank == 3
    assert diagnosis.evidence[0].is_late
    assert diagnosis.evidence[0].place == "/home/u/train.py:24 in main"


def test_an_error_out_of_torch_at_a_line_that_raises_nothing_is_no_more_than_likely():
    below = judge([log(*TRACED.splitlines(), "RuntimeError: no")])
    raised = judge([
        log(*TRACED.splitlines()[:2], "    raise RuntimeError('no')", "RuntimeError: no")
    ])  # fmt: skip

    assert (below.kind, below.certainty) == ("code", Certainty.LIKELY)
    assert (raised.kind, raised.certainty) == ("code", Certainty.CERTAIN)


def test_an_error_that_a_logger_calls_uncaught_is_read():
    diagnosis = judge([log("CRITICAL [root, rank=0] Uncaught ValueError: no")])

    assert (diagnosis.kind, diagnosis.certainty) == ("code", Certainty.LIKELY)


def test_an_error_below_a_function_that_reads_a_checkpoint_is_the_checkpoints():
    reading = '  File "/opt/lib/python3.11/site-packages/accelerate/x.py", line 3, in load_state'

    diagnosis = judge([log(*TRACED.splitlines(), reading, "    y()", "KeyError: 'step'")])

    assert (diagnosis.kind, diagnosis.certainty) == ("checkpoint", Certainty.LIKELY)


def test_a_connection_that_broke_explains_an_abort_without_a_word():
    for death in ("Aborted (core dumped)", "exitcode: -6"):
        assert judge([log(f"[rank1]: {CLOSED}", death)]).kind == "transport"


def test_numbers_that_are_none_after_an_assertion_do_not_explain_it():
    assertion = "x.cu:12: f: block: [0,0,0], thread: [1,0,0] Assertion `input_val >= 0` failed."
    losses = [*(f"loss: {n}.5" for n in range(4))]

    assert judge([log(*losses, assertion, "loss: nan", "loss: nan")]).kind == "gpu_assert"


def test_a_checkpoint_of_another_shape_is_not_called_damaged():
    sizes = "Size mismatch between saved torch.Size([4, 4]) and current: torch.Size([8, 4]) for w"

    assert len(judge([log(f"ValueError: {sizes}")]).do) == 1
    assert len(judge([log("RuntimeError: Missing key in checkpoint state_dict: w.")]).do) > 1


def test_one_loss_that_is_no_number_does_not_explain_an_assertion_on_the_device():
    diagnosis = judge([log("step 1 loss: nan", "CUDA error: device-side assert triggered")])

    assert diagnosis.kind == "gpu_assert"


def test_what_read_a_checkpoint_in_one_traceback_does_not_in_the_next():
    reading = '  File "/opt/lib/python3.11/site-packages/accelerate/x.py", line 3, in load_state'
    lines = [*TRACED.splitlines(), reading, "    y()", "KeyError: 'step'"]

    first, second = log(*lines, *TRACED.splitlines(), "ValueError: no").sightings

    assert (first.kind, second.kind) == ("checkpoint", "code")


def test_an_error_of_a_module_whose_name_begins_with_a_line_is_read():
    diagnosis = judge([log(*TRACED.splitlines(), "_pickle.PicklingError: Can't pickle this")])

    assert diagnosis.kind == "code"


def test_the_judgement_names_signatures_that_there_are():
    names = {signature.name for signature in packaged().faults}

    assert names >= {FATAL, judging._LEFT}


def test_tasks_that_srun_killed_for_another_one_are_no_sign_of_memory():
    lines = [
        "srun: error: node-a: task 5: Exited with exit code 1",
        "slurmstepd: error: *** STEP 43575862.0 ON node-a CANCELLED AT 2021-07-14T08:00:36 ***",
        "srun: error: node-a: tasks 3,7: Killed",
    ]

    diagnosis = judge([log(*lines)])
    alone = judge([log(lines[2])])

    assert (diagnosis.kind, diagnosis.certainty) == ("code", Certainty.POSSIBLE)
    assert "read what that task printed itself" in diagnosis.do[0]
    assert alone.kind == "host_oom"


def test_an_error_about_another_program_only_points_to_its_log():
    line = "RuntimeError: Step 1 exited with non-zero status 1"
    child = "torch.OutOfMemoryError: CUDA out of memory."

    alone, both = judge([log(*TRACED.splitlines(), line)]), judge([log(child, line)])

    assert (alone.kind, alone.certainty) == ("code", Certainty.POSSIBLE)
    assert "read what the process that it started printed itself" in alone.do[0]
    assert both.kind == "gpu_oom"


def test_a_state_saved_through_ddps_wrapper_gets_advice_of_its_own():
    diagnosis = judge(
        [
            log(
                *TRACED.splitlines(),
                "RuntimeError: Error(s) in loading state_dict for Sequential:",
                '\tMissing key(s) in state_dict: "0.weight". ',
                '\tUnexpected key(s) in state_dict: "module.0.weight". ',
            )
        ]
    )

    assert diagnosis.kind == "checkpoint"
    assert "save and load `model.module`" in diagnosis.do[0]
    assert not [step for step in diagnosis.do if "ZeRO" in step]


def test_a_name_that_a_download_did_not_find_is_no_fault_of_the_ranks_meeting():
    unknown = "socket.gaierror: [Errno -2] Name or service not known"
    offline = "OSError: We couldn't connect to 'https://huggingface.co' to load the files"
    chained = "The above exception was the direct cause of the following exception:"

    diagnosis = judge([log(TRACED.strip(), unknown, "", chained, "", TRACED.strip(), offline)])

    assert (diagnosis.kind, diagnosis.rivals) == ("download", ())
    assert judge([log(TRACED.strip(), unknown)]).kind == "rendezvous"


def test_the_first_error_of_a_group_of_exceptions_is_read():
    group = [
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "/home/u/train.py", line 10, in <module>',
        "  |     asyncio.run(main())",
        "  | ExceptionGroup: many (1 sub-exception)",
        "  +-+---------------- 1 ----------------",
        "    | Traceback (most recent call last):",
        '    |   File "/home/u/data.py", line 3, in fetch',
        '    |     raise ValueError("bad shape")',
        "    | ValueError: bad shape",
        "    +------------------------------------",
    ]

    diagnosis = judge([log(*group)])

    assert (diagnosis.kind, diagnosis.evidence[0].place) == ("code", "/home/u/data.py:3 in fetch")
