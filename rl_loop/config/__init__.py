"""The typed configuration of a run. Reading one imports neither torch nor Ray, so a mistake is
reported at once.
"""
