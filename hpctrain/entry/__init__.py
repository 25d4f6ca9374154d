"""The programs that a job starts on its nodes, before anything heavy is imported."""
