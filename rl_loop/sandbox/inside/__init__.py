"""Code that runs inside bubblewrap. It is copied in and uses only the standard library."""
