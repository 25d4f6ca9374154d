"""The embedded cluster: processes of this machine in the place of SLURM and its nodes."""
