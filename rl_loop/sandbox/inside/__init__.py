"""What runs inside bubblewrap, on the standard library alone: its files are copied in, and nothing
else of rl_loop."""
