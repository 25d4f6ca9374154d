"""The keys that DeepSpeed reads from its configuration, taken from the source of 0.19.8.

Beside them those that earlier versions read: a file may be for both. tests/unit/lint/
test_deepspeed_rules.py and tests/unit/plan/test_ds_config.py hold the tables against the version
that is installed.
"""

from __future__ import annotations

ZERO = "zero_optimization"

REMOVED_KEYS = frozenset(
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

TOP_KEYS = frozenset(
    {
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
)
"""Every key outside any section that is read."""

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

REMOVED_ZERO_KEYS = frozenset(
    {"mics_hierarchical_params_gather", "mics_shard_size", "zeropp_loco_param"}
)
"""Of zero_optimization, what earlier versions read and 0.19 refuses."""

OTHERS_KEYS = frozenset({"local_rank", "load_universal_checkpoint", "mesh_param"})
"""What other programs put into the same file."""
