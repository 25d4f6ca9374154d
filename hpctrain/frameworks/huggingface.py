"""Hugging Face Trainer as a part of a run: `callbacks=[huggingface.HuggingFaceCallback(run)]`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.frameworks import meet, need, seal

need("transformers", since="5.23", below="6")
from transformers import TrainerCallback  # noqa: E402 - refused in a line before its own errors
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from hpctrain.train.runtime.run import Run

NO_METRICS = ("epoch", "num_input_tokens_seen", "total_flos", "step", "total")
"""Names in a log that are no values of a step, or arguments of `Run.at`."""


class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc] # transformers is skipped by mypy
    """Tells the run where the Trainer is, seals its checkpoints, saves and leaves at a stop.

    A checkpoint at a stop is saved whatever `save_strategy` says; the evaluation that the step
    would have brought is left out. ``trainer.train(resume_from_checkpoint=run.resume_path)``
    resumes from it. Tokens are reported if `include_num_input_tokens_seen` is set.
    """

    def __init__(self, run: Run) -> None:
        """Collective, as `hpctrain.init` is: every rank has one.

        Args:
            run: What `hpctrain.init` gave.
        """
        self._run = run
        self._is_stopping = False
        self._has_begun = False
        self._tokens, self._flops = 0, 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, _: TrainerControl, **__: Any
    ) -> None:
        """Say where this start continues."""
        meet(self._run, "the Trainer", args.world_size, "on CPUs set use_cpu=True")
        self._has_begun = True
        self._tokens, self._flops = state.num_input_tokens_seen, state.total_flos
        self._run.at(state.global_step, total=state.max_steps if state.max_steps > 0 else None)

    def on_step_end(
        self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: Any
    ) -> None:
        """Count the update, and ask whether to stop."""
        tokens, self._tokens = (
            state.num_input_tokens_seen - self._tokens,
            state.num_input_tokens_seen,
        )
        self._run.at(state.global_step, **({"tokens": tokens} if tokens else {}))
        if self._run.should_stop():
            self._is_stopping = control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_log(
        self,
        _: TrainingArguments,
        state: TrainerState,
        __: TrainerControl,
        logs: dict[str, Any] | None = None,
        **___: Any,
    ) -> None:
        """Tell what the Trainer logs."""
        if not self._has_begun:
            return
        values = {
            name: float(value)
            for name, value in (logs or {}).items()
            if isinstance(value, int | float) and name not in NO_METRICS
        }
        flops, self._flops = state.total_flos - self._flops, state.total_flos
        self._run.at(state.global_step, **values, **({"flops": flops} if flops else {}))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, _: TrainerControl, **__: Any
    ) -> None:
        """Seal what was saved."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        seal(self._run, state.global_step, folder)
        if self._is_stopping:  # else the Trainer would load it, and delete what it has just saved
            state.best_model_checkpoint = None

    def on_epoch_end(
        self, _: TrainingArguments, __: TrainerState, control: TrainerControl, **___: Any
    ) -> None:
        """A stop in the middle of an epoch is not its end."""
        if self._is_stopping:
            control.should_evaluate = control.should_save = control.should_log = False

    def on_train_end(
        self, _: TrainingArguments, __: TrainerState, ___: TrainerControl, **____: Any
    ) -> None:
        """Leave where a stop was agreed; the script's own end, its evaluation, is for the last."""
        if self._is_stopping:
            self._run.leave()
