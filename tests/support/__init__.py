"""What the tests stand on: a real SLURM cluster in a temporary folder."""
