"""Training as a command does it: a settings file or a table in, a folder with everything about the run out."""
