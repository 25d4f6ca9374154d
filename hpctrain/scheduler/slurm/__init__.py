"""SLURM: its commands and their output, scripts, requeueing."""
