"""Sites: a cluster's settings in one file. Reads files, knows no scheduler."""
