"""Why a run or any training job died, from its ledger and its logs, with how sure that is."""
