"""What profiles say: the ranks' traces read back, time divided, a verdict. No torch."""
