"""A run's directory: where its files lie, whose it is, the fence between attempts, the ledger."""
