"""The schedulers that there are: SLURM and the embedded cluster; `base` says which one is meant."""
