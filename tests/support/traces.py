"""Traces as Kineto writes them, cut down to what can be checked by hand."""

from __future__ import annotations

# One step of 1000 us on an H100, in the words and categories of a Kineto trace of a CUDA run: the
# host's thread 4100, compute on stream 7, NCCL on stream 20, copies on stream 24.
GPU = """
{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
 "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
 "traceEvents": [
 {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}},
 {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#100", "pid": 4100, "tid": 4100,
  "ts": 10000.0, "dur": 1000.0, "args": {"External id": 1}},
 {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#100", "pid": 0, "tid": 7,
  "ts": 10100.0, "dur": 700.0, "args": {"External id": 1}},
 {"ph": "X", "cat": "user_annotation", "name": "hpctrain.data", "pid": 4100, "tid": 4100,
  "ts": 10000.0, "dur": 120.0, "args": {"External id": 2}},
 {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 4100, "tid": 4100,
  "ts": 10130.0, "dur": 600.0, "args": {"External id": 3}},
 {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "pid": 0, "tid": 24,
  "ts": 10090.0, "dur": 40.0, "args": {"device": 0, "stream": 24, "bytes": 1048576}},
 {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4100, "tid": 4100,
  "ts": 10135.0, "dur": 5.0, "args": {"correlation": 9}},
 {"ph": "X", "cat": "kernel", "name": "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "pid": 0,
  "tid": 7, "ts": 10150.0, "dur": 300.0, "args": {"device": 0, "stream": 7, "correlation": 9}},
 {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", "pid": 0,
  "tid": 20, "ts": 10400.0, "dur": 350.0,
  "args": {"device": 0, "stream": 20, "Collective name": "allreduce"}},
 {"ph": "X", "cat": "kernel", "name": "void at::native::multi_tensor_apply_kernel<...>", "pid": 0,
  "tid": 7, "ts": 10750.0, "dur": 50.0, "args": {"device": 0, "stream": 7}},
 {"ph": "X", "cat": "cuda_runtime", "name": "cudaMalloc", "pid": 4100, "tid": 4100,
  "ts": 10800.0, "dur": 60.0, "args": {"correlation": 10}},
 {"ph": "X", "cat": "user_annotation", "name": "hpctrain.save", "pid": 4100, "tid": 4100,
  "ts": 10900.0, "dur": 100.0, "args": {"External id": 4}}
 ]}
"""

# A step of 100 us on a CPU: rank 0 of two with gloo, which works on a thread of its own.
CPU = """
{"traceEvents": [
 {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#5", "tid": 1, "ts": 0, "dur": 100},
 {"ph": "X", "cat": "user_annotation", "name": "enumerate(DataLoader)#_Iter.__next__", "tid": 1,
  "ts": 0, "dur": 20},
 {"ph": "X", "cat": "cpu_op", "name": "aten::stack", "tid": 1, "ts": 5, "dur": 10},
 {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "tid": 1, "ts": 20, "dur": 20},
 {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "tid": 2, "ts": 30, "dur": 30},
 {"ph": "X", "cat": "cpu_op", "name": "autograd::engine::evaluate_function: Wait", "tid": 1,
  "ts": 60, "dur": 30},
 {"ph": "X", "cat": "cpu_op", "name": "_c10d_functional::wait_tensor", "tid": 1, "ts": 62,
  "dur": 26}
 ]}
"""
