"""Advice before and after a run: faults in programs and logs, and what a run will need."""
