#!/bin/sh
# local cluster: @HERE@/hpctrain/.venv/bin/python -P -m hpctrain.entry.local_controller JOB_ID
