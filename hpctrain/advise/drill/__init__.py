"""Fault drills: inject faults into a run one by one, and judge each by a promise.

`promises` lists the faults and judges (pure), `injectors` inject them, `schedule` runs them in
order, cleans up and shows the results. docs/check.md is the user's page.
"""
