"""What a run did, as one page: reads a run's directory, draws and advises. Never imports torch."""
