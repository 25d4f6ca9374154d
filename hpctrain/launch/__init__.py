"""From a request to a run directory and a job: checks, then files, then the scheduler."""
