"""A linter for the environment of NCCL, libfabric, torch and gloo."""
