"""The shape of a run's next job, number of nodes and time limit: candidates, forecast, choice."""
