"""A fault drill: faults planted in a run one after the other, and what came of each.

`catalogue` has the faults and the promise that each tests, `judging` decides from the ledger
whether it was kept (both pure), `hands` plant them, `course` leads from one to the next and cleans
up, `text` tells it. docs/check.md is the user's page.
"""
