"""A discrete-event simulation of SLURM's main and backfill schedulers, for tests and benchmarks.

Time is simulated, in seconds. Nodes are alike and only counted. `profile` has the free nodes over
time, `controller` the schedulers, `workload` the other users' jobs, and `training` a run that is
cut into jobs.
"""
