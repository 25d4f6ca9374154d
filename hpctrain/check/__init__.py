"""Everything that can be known before a run, in one list.

`lines`: a check's answer and the list. `import_probe`: whether the program's imports work.
`forecast`: saves against the disk and the time limit, pure. `past`: what earlier runs of the
program tell of its saves. `gather` asks all of them, and what `submit` checks, and prints nothing.
`rehearsal` runs the program on a `stage` that leaves nothing behind; `comparison` holds two runs
against each other, pure.
"""
