"""Engines: how a model is parallelised and its state is named; one format on disk for all."""
