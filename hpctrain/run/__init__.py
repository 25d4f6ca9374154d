"""A run's directory: where all of it lies, the fence, the ledger's events."""
