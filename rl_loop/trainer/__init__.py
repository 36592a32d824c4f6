"""The trainer's ranks as Ray actors."""
