"""Takes the place of SGLang in the environment of a server process."""
