"""Output of a run: its directory, metrics, and exports of metrics."""
