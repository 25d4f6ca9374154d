"""SLURM: its commands and their output, scripts, environment, requeueing."""
