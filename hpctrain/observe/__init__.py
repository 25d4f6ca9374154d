"""A run as people see it: status, logs, report and profile."""
