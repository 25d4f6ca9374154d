"""Settings: what they are (schema), where they come from (merge), what a run was given (spec)."""
