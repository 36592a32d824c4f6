"""Code of the fork server and of process 1 of each sandbox. It uses only the standard library."""
