"""Everything that can be known before a run, in one list.

`gather` asks all checks, those of `submit` and the program's imports among them. `forecast` (pure)
has the list, and compares saves with the disk and the time limit.
`rehearsal` runs the program for a few steps; `comparison` (pure) compares two runs.
"""
