"""The keys of a DeepSpeed configuration, as deepspeed 0.19.8 reads them. Tables only.

DeepSpeed ignores a top-level key that it does not know, so that `zero_optimisation` trains without
ZeRO and says nothing; in sections it finds the mistake when the job has started.
tests/unit/test_ds_config.py compares these tables to what the installed DeepSpeed reads.
"""

from __future__ import annotations

ZERO = "zero_optimization"

REMOVED = frozenset(
    {
        "amp",
        "compression_training",
        "curriculum_learning",
        "eigenvalue",
        "elasticity",
        "graph_harvesting",
        "nebula",
        "progressive_layer_drop",
        "quantize_training",
        "sparse_attention",
        "sparse_gradients",
    }
)
"""Top-level keys that DeepSpeed itself refuses, since what they were for is gone."""

TOP = REMOVED | {
    "activation_checkpointing",
    "aio",
    "autotuning",
    "bf16",
    "bfloat16",
    "checkpoint",
    "comet",
    "comms_logger",
    "communication_data_type",
    "compile",
    "csv_monitor",
    "data_efficiency",
    "data_parallel_size",
    "data_types",
    "dataloader_drop_last",
    "datastates_ckpt",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "expert_parallel",
    "flops_profiler",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_allreduce_op",
    "gradient_clipping",
    "gradient_predivide_factor",
    "hybrid_engine",
    "log_level",
    "managed_gradient_accumulation",
    "memory_breakdown",
    "optimizer",
    "pipeline",
    "prescale_gradients",
    "scheduler",
    "seq_parallel_communication_data_type",
    "sequence_parallel_size",
    "steps_per_print",
    "tensor_parallel",
    "tensorboard",
    "timers",
    "torch_autocast",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism",
    "vocabulary_size",
    "wall_clock_breakdown",
    "wandb",
    "weight_quantization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    ZERO,
}
"""Every key outside any section."""

SECTIONS: dict[str, frozenset[str]] = {
    ZERO: frozenset(
        {
            "allgather_bucket_size",
            "allgather_partitions",
            "allgather_sequential",
            "compute_grad_norm",
            "contiguous_gradients",
            "cpu_offload",
            "cpu_offload_param",
            "cpu_offload_use_pin_memory",
            "elastic_checkpoint",
            "enable_sanity_checks",
            "gather_16bit_weights_on_model_save",
            "ignore_unused_parameters",
            "leaf_module",
            "legacy_stage1",
            "load_from_fp32_weights",
            "log_trace_cache_warnings",
            "max_live_parameters",
            "max_reuse_distance",
            "memory_efficient_linear",
            "model_persistence_threshold",
            "module_granularity_threshold",
            "offload_optimizer",
            "offload_param",
            "overlap_comm",
            "override_module_apply",
            "param_persistence_threshold",
            "parameter_alignment",
            "pipeline_loading_checkpoint",
            "prefetch_bucket_size",
            "reduce_bucket_size",
            "reduce_scatter",
            "round_robin_gradients",
            "save_muon_momentum_buffer_in_memory",
            "stage",
            "stage3_allgather_sequential",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold",
            "stage3_param_persistence_threshold",
            "stage3_prefetch_bucket_size",
            "stage3_use_all_reduce_for_fetch_params",
            "sub_group_size",
            "use_all_reduce_for_fetch_params",
            "use_multi_rank_bucket_allreduce",
            "zenflow",
            "zero_hpz_partition_size",
            "zero_quantized_gradients",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_weights",
        }
    ),
    f"{ZERO}.offload_optimizer": frozenset(
        {
            "buffer_count",
            "cpuadam_cores_perc",
            "device",
            "fast_init",
            "nvme_path",
            "pin_memory",
            "pipeline_read",
            "pipeline_write",
            "ratio",
            "super_offload",
        }
    ),
    f"{ZERO}.offload_param": frozenset(
        {"buffer_count", "buffer_size", "device", "max_in_cpu", "nvme_path", "pin_memory"}
    ),
    "bf16": frozenset(
        {
            "bf16_master_weights_and_grads",
            "bf16_optimizer_states",
            "check_grad_overflow",
            "enabled",
            "immediate_grad_update",
        }
    ),
    "fp16": frozenset(
        {
            "auto_cast",
            "consecutive_hysteresis",
            "enabled",
            "fp16_master_weights_and_grads",
            "hysteresis",
            "initial_scale_power",
            "loss_scale",
            "loss_scale_window",
            "min_loss_scale",
        }
    ),
    "aio": frozenset(
        {
            "block_size",
            "intra_op_parallelism",
            "overlap_events",
            "queue_depth",
            "single_submit",
            "use_gds",
        }
    ),
}
"""Keys of the sections that matter to training, by the section's path."""

REFUSED: dict[str, str] = {
    "bfloat16": 'it is the old name of "bf16"; write that',
    "compile": "set engine.compile",
    "data_efficiency": "hpctrain orders the samples",
    "data_parallel_size": "all ranks of a zero engine are data-parallel",
    "expert_parallel": "set engine.kind fsdp2 and engine.ep",
    "hybrid_engine": "hpctrain's engines train only",
    "managed_gradient_accumulation": "hpctrain says when gradients travel",
    "optimizer": "the program makes the optimizer and gives it to hpctrain",
    "pipeline": "set engine.kind fsdp2 and engine.pp",
    "scheduler": "the program sets the learning rate",
    "sequence_parallel_size": "all ranks of a zero engine are data-parallel",
    "tensor_parallel": "set engine.kind fsdp2 and engine.tp",
    "torch_autocast": "set engine.precision",
    "weight_quantization": "it is for inference",
    f"{ZERO}.cpu_offload": "set engine.offload",
    f"{ZERO}.cpu_offload_param": "set engine.offload",
    f"{ZERO}.cpu_offload_use_pin_memory": 'write "pin_memory" in "offload_optimizer"',
    f"{ZERO}.elastic_checkpoint": "hpctrain's checkpoints load at any number of ranks as it is",
    f"{ZERO}.offload_optimizer.super_offload": "a checkpoint could not reach its state",
    f"{ZERO}.round_robin_gradients": "DeepSpeed 0.19.8 tells wrongly which rank holds what then, "
    "and a checkpoint would be wrong",
    f"{ZERO}.zenflow": "a checkpoint could not reach its state",
    "bf16.bf16_master_weights_and_grads": "checkpoints hold fp32 weights",
    "bf16.bf16_optimizer_states": "checkpoints hold fp32 weights",
    "fp16.fp16_master_weights_and_grads": "checkpoints hold fp32 weights",
} | dict.fromkeys(REMOVED, "DeepSpeed has no such feature any more")
"""What hpctrain does not take, with what to know or do; `false` and "auto" are let pass."""

NO_EFFECT: dict[str, str] = {
    "activation_checkpointing": "set engine.activation_checkpointing",
    "aio": "hpctrain reads and writes the files of engine.offload nvme itself",
    "autotuning": "it belongs to DeepSpeed's own launcher",
    "checkpoint": "hpctrain writes the checkpoints: see [checkpoint]",
    "dataloader_drop_last": "hpctrain cuts the samples",
    "datastates_ckpt": "hpctrain writes the checkpoints: see [checkpoint]",
}
"""What is told and otherwise let pass."""

MUST_BE: dict[str, tuple[object, str]] = {
    "gradient_allreduce_op": ("mean", "it undoes the mean itself"),
    "zero_allow_untested_optimizer": (True, "the program makes the optimizer"),
    "zero_force_ds_cpu_optimizer": (False, "the program makes the optimizer"),
    f"{ZERO}.compute_grad_norm": (True, "a step's gradient norm is what it logs"),
    f"{ZERO}.offload_optimizer.ratio": (1.0, "a checkpoint could not reach state in two places"),
}
"""Values that hpctrain's engine rests on, and why."""
