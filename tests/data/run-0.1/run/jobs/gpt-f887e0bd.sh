#!/bin/sh
# local cluster: @HERE@/hpctrain-0.1/.venv/bin/python -P -m hpctrain.entry.local_controller JOB_ID
