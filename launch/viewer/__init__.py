"""``gptoss view``: a local page on which runs are looked at while they go on."""
