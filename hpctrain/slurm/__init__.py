"""The only room that speaks to SLURM or submitit.

The rest of hpctrain knows `records.Cluster` (login node), `records.JobControl` and
`records.JobContext` (inside the job). Nothing here imports torch, and submitit only where a job is
really submitted or started.
"""
