"""The programs that a job starts on its nodes; each stands before anything heavy is imported."""
