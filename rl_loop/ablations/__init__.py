"""Fault injection, for experiments that measure the effect of faults."""
