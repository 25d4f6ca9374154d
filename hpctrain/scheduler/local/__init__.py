"""The embedded cluster: a process plays SLURM on this machine."""
