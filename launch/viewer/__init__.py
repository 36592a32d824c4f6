"""``gptoss view``: a local web page that shows runs while they are running."""
