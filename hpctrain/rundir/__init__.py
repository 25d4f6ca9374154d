"""The run directory: where things lie, who may write, which run is meant. No torch, no SLURM."""
