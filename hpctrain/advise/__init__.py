"""Advice before and after a run: what a program and its logs are found to do wrong, and what a run will need."""
