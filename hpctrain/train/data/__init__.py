"""Which sample is seen when, by whom: elastic and exactly once. No torch; numpy to read tokens."""
